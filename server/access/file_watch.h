// Notices that files have changed: written anew, or put in another's place, as Kubernetes does with secrets.
#ifndef MESHFILL_SERVER_ACCESS_FILE_WATCH_H_
#define MESHFILL_SERVER_ACCESS_FILE_WATCH_H_

#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "kernels/mutex.h"

namespace meshfill {

class FileWatch {
 public:
  static constexpr absl::Duration kPeriod = absl::Milliseconds(500);

  // Changes count from now on. Empty paths are no files.
  explicit FileWatch(std::vector<std::string> paths);
  ~FileWatch();  // waits for `changed` to return

  // Call once. It calls `changed` from a thread of its own, after the files have stood still for kPeriod
  // since a change: a certificate and its key come one after the other. Without a file there is no thread.
  void Start(std::function<void()> changed);
  FileWatch(const FileWatch&) = delete;
  FileWatch& operator=(const FileWatch&) = delete;

 private:
  using Stamps = std::vector<std::vector<int64_t>>;  // each file's stamps; empty: the file is not there

  Stamps Look() const;
  void Watch();

  const std::vector<std::string> paths_;
  Stamps known_;  // the thread's, once it has begun
  std::function<void()> changed_;
  Mutex mu_;
  CondVar wake_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_ACCESS_FILE_WATCH_H_
