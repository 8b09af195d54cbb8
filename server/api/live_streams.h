// The live Prefill streams of a front-end: ends uploads that stand still, and knows when the last stream is
// gone.
//
// One thread watches all streams. Thread-safe; a stream may call in while it holds its own lock, since
// nothing is called back under the lock of this class.
#ifndef MESHFILL_SERVER_API_LIVE_STREAMS_H_
#define MESHFILL_SERVER_API_LIVE_STREAMS_H_

#include <map>
#include <memory>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "kernels/mutex.h"

namespace meshfill {

class LiveStreams {
 public:
  class Stream {
   public:
    virtual ~Stream() = default;
    // No message came for the upload timeout. May be called once more after UploadDone or a late message.
    virtual void OnUploadIdle() = 0;
    // Ends the stream if it is live and of this request and tenant. Whether it was.
    virtual bool CancelRequest(const std::string& request_id, const std::string& tenant) = 0;
  };

  explicit LiveStreams(absl::Duration upload_timeout);
  ~LiveStreams();  // no stream is live any more

  absl::Duration upload_timeout() const { return upload_timeout_; }

  void Add(std::shared_ptr<Stream> stream);  // its upload's clock starts
  void OnMessage(Stream* stream);            // the clock starts again
  void UploadDone(Stream* stream);           // the clock stops
  void Remove(Stream* stream);

  // Ends the stream of a request, wherever it is. False: no stream is of this request and tenant.
  bool CancelRequest(const std::string& request_id, const std::string& tenant);

  // False where streams are still live at the deadline.
  bool WaitUntilNone(absl::Time deadline);

 private:
  struct Entry {
    std::shared_ptr<Stream> stream;  // shared: the watcher may be in OnUploadIdle while the stream ends
    absl::Time idle_at;
  };

  void Watch();
  absl::Time EarliestIdle() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const absl::Duration upload_timeout_;
  Mutex mu_;
  CondVar changed_;
  std::map<Stream*, Entry> streams_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread watcher_;
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_API_LIVE_STREAMS_H_
