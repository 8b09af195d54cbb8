// The live Prefill streams of a front-end: ends uploads that stand still or are too slow, and results that
// nobody reads; knows when the last stream is gone.
//
// One thread watches all streams. Thread-safe; a stream may call in while it holds its own lock, since
// nothing is called back under the lock of this class.
#ifndef MESHFILL_SERVER_API_LIVE_STREAMS_H_
#define MESHFILL_SERVER_API_LIVE_STREAMS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "kernels/mutex.h"

namespace meshfill {

class LiveStreams {
 public:
  class Stream {
   public:
    virtual ~Stream() = default;
    // No message came for the upload timeout, or the upload is behind the slowest pace. Called once at most,
    // perhaps while UploadDone or a late message comes in.
    virtual void OnUploadOverdue() = 0;
    // The server drains. It waits for no stream that has not even sent its header.
    virtual void OnDrain() = 0;
    // The server stops, and waits for no upload.
    virtual void OnUploadStopped() = 0;
    // Its result was not read in time, or others need the memory.
    virtual void OnResultUnread() = 0;
    // Whether the stream is live and of this request and tenant; null: of any.
    virtual bool IsOf(const std::string& request_id, const std::string* tenant) const = 0;
    // Ends the stream if it is. Whether it was.
    virtual bool CancelRequest(const std::string& request_id, const std::string* tenant) = 0;
  };

  struct Limits {
    absl::Duration upload_timeout = absl::Seconds(30);  // between two messages, and behind the pace
    double upload_tokens_per_second = 0;                // the slowest pace; 0: any
    absl::Duration result_timeout = absl::Seconds(30);
    absl::Duration drain_result_timeout = absl::Seconds(3);  // in a drain, where it is shorter
    int64_t unread_bytes = INT64_MAX;                        // bound on all results but the newest
  };

  explicit LiveStreams(const Limits& limits);
  ~LiveStreams();  // no stream is live any more

  const Limits& limits() const { return limits_; }

  void Add(std::shared_ptr<Stream> stream);               // its upload's clock starts
  void OnMessage(Stream* stream, int64_t tokens_so_far);  // the clock starts again
  void UploadDone(Stream* stream);                        // the clock stops
  void Ended(Stream* stream, int64_t unread_bytes);       // its answer waits to be read
  void Remove(Stream* stream);

  // From now on a client has to read its answer within drain_result_timeout. Each stream is told, also one
  // that is added later.
  void StartDrain();

  // Ends what is still uploading.
  void StopUploads();

  // Ends the stream of a request, wherever it is; tenant null: whoever's it is. NOT_FOUND: no stream is of
  // this request and tenant. INVALID_ARGUMENT: no tenant is given, and several streams are of this request:
  // none ends.
  absl::Status CancelRequest(const std::string& request_id, const std::string* tenant);

  // False where streams are still live at the deadline.
  bool WaitUntilNone(absl::Time deadline);

 private:
  struct Entry {
    std::shared_ptr<Stream> stream;  // shared: the watcher may be calling it while the stream ends
    absl::Time begin;
    absl::Time overdue_at;                        // its upload
    absl::Time read_by = absl::InfiniteFuture();  // its answer
    int64_t unread_bytes = 0;
    bool knows_of_drain = false;
  };

  void Watch();
  std::vector<std::shared_ptr<Stream>> Streams();  // to call without the lock
  absl::Time NextLook() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Lets the results that have waited longest be dropped, until the others fit the bound.
  void BoundUnread() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const Limits limits_;
  Mutex mu_;
  CondVar changed_;
  std::map<Stream*, Entry> streams_ ABSL_GUARDED_BY(mu_);
  int64_t unread_bytes_ ABSL_GUARDED_BY(mu_) = 0;  // bytes of the results that are not to be dropped yet
  bool draining_ ABSL_GUARDED_BY(mu_) = false;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread watcher_;
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_API_LIVE_STREAMS_H_
