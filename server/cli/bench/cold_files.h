// A model's weights as a disk gives them: files that are not in the system's page cache, and how long reading
// them takes.
#ifndef MESHFILL_SERVER_CLI_BENCH_COLD_FILES_H_
#define MESHFILL_SERVER_CLI_BENCH_COLD_FILES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace meshfill {

class ColdFiles {
 public:
  // The files of a model's folder. Errors: those of SafetensorsFolder::Open.
  static absl::StatusOr<ColdFiles> Of(const std::string& folder);

  int64_t bytes() const { return bytes_; }

  // Takes the files out of the page cache. FAILED_PRECONDITION where more than a hundredth stays: on a file
  // system without a disk, or while a process has the pages mapped.
  absl::Status Drop() const;

  // Drops them, and reads each from the first byte to the last; seconds of the reading. They are in the page
  // cache then.
  absl::StatusOr<double> Read() const;

 private:
  ColdFiles() = default;

  std::vector<std::string> paths_;
  int64_t bytes_ = 0;
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_CLI_BENCH_COLD_FILES_H_
