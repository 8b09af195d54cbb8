// The live FetchKv streams of a process, over one source of K and V.
//
// One thread waits for what the source says has changed and for the next lease to lapse. It wakes the
// streams, so that a rank that has finished a layer only leaves word of it. It looks at the streams once a
// second, too, for readers whose waits have deadlines. Thread-safe.
#ifndef MESHFILL_SERVER_API_KV_STREAMS_H_
#define MESHFILL_SERVER_API_KV_STREAMS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>

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
    bool waits_for_lease = false;  // a reader may stand still for longer, as long as its lease lives
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
  void Remove(KvFetchStream* stream);  // destroys it, now or once its OnChange returns

 private:
  void Watch();

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
  // Shared: the thread may be in OnChange while gRPC lets go of a stream.
  std::map<KvFetchStream*, std::shared_ptr<KvFetchStream>> streams_ ABSL_GUARDED_BY(mu_);
  std::thread watcher_;  // last: it uses all of the above
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_API_KV_STREAMS_H_
