// The live FetchKv streams of a process, over one source of K and V.
//
// One thread waits for what the source says has changed and for the next lease to lapse. It wakes the
// streams, so that a rank that has finished a layer only leaves word of it. It looks at the streams once a
// second, too, for readers whose waits have deadlines. Where the parts that wait for their readers take too
// much memory, the one that has waited longest is dropped. Thread-safe.
#ifndef MESHFILL_SERVER_API_KV_STREAMS_H_
#define MESHFILL_SERVER_API_KV_STREAMS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "grpcpp/server_context.h"
#include "kernels/mutex.h"
#include "meshfill/v1/prefill.pb.h"
#include "server/api/kv_fetch_stream.h"
#include "server/api/kv_leases.h"

namespace meshfill {

class KvStreams {
 public:
  // Hears what there is to count. Must return quickly; outlives the streams.
  class Listener {
   public:
    virtual ~Listener() = default;
    virtual void OnKvChanged(const KvStore::Counts& counts) = 0;
    virtual void OnKvFetched(int64_t bytes) = 0;
    virtual void OnFetchRefused(absl::StatusCode code) = 0;  // nothing was written
  };

  struct Limits {
    int64_t max_message_bytes = 4 << 20;
    absl::Duration read_timeout = absl::Seconds(30);  // for a part, which is as large as a message at most
    bool waits_for_lease = false;      // a reader may stand still for longer, as long as its lease lives
    int64_t unread_bytes = INT64_MAX;  // bound on the parts of all streams but the newest
    // How long a part waits at least before it is dropped: where many read at once, each takes its turn on
    // the link.
    absl::Duration least_wait = absl::Seconds(1);
  };

  // The source and the listener, which may be null, outlive this.
  KvStreams(KvSource& source, const Limits& limits, Listener* listener);
  ~KvStreams();  // no stream is live any more
  KvStreams(const KvStreams&) = delete;
  KvStreams& operator=(const KvStreams&) = delete;

  // Serves a FetchKv call of `tenant`.
  KvFetchReactor* Fetch(grpc::CallbackServerContext* context, std::string tenant, v1::FetchKvRequest request);

  // False where a lease is live at the deadline, or the newest change is not counted yet.
  bool WaitUntilNoLease(absl::Time deadline);
  void WaitUntilNoStream();

  // Streams call these.
  KvSource& source() { return source_; }
  const Limits& limits() const { return limits_; }
  void OnFetched(int64_t bytes);
  void OnRefused(absl::StatusCode code);
  void OnWriteBegin(KvFetchStream* stream, absl::Time now, int64_t bytes);
  void OnWriteEnd(KvFetchStream* stream);
  void Remove(KvFetchStream* stream);  // destroys it, now or once its OnChange returns

 private:
  struct Entry {
    // Shared: the thread may be calling it while gRPC lets go of the stream.
    std::shared_ptr<KvFetchStream> stream;
    absl::Time write_begin;
    int64_t unread_bytes = 0;  // of the part that is being written; 0: none is, or it is dropped
  };

  void Watch();
  // Its part, if there is one, does not count any more.
  void TakeUnread(Entry& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Lets the parts that have waited longest be dropped, until the others fit the bound.
  void BoundUnread(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  KvSource& source_;
  const Limits limits_;
  Listener* const listener_;

  Mutex mu_;
  CondVar wake_;     // wakes the thread
  CondVar settled_;  // the thread has done its round, or a stream has gone
  bool changed_ ABSL_GUARDED_BY(mu_) = true;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  int64_t leases_ ABSL_GUARDED_BY(mu_) = 0;    // leases at the last count
  bool counted_ ABSL_GUARDED_BY(mu_) = false;  // no change came after the count began
  std::map<KvFetchStream*, Entry> streams_ ABSL_GUARDED_BY(mu_);
  // Streams with unread bytes, who waits longest first.
  std::set<std::pair<absl::Time, KvFetchStream*>> unread_ ABSL_GUARDED_BY(mu_);
  int64_t unread_bytes_ ABSL_GUARDED_BY(mu_) = 0;        // of all streams
  std::vector<Entry> crowded_out_ ABSL_GUARDED_BY(mu_);  // that the thread is to tell
  std::thread watcher_;                                  // last: it uses all of the above
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_API_KV_STREAMS_H_
