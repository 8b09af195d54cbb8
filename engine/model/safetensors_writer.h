// Writes a safetensors file (engine/model/safetensors.h) from front to back, so no tensor has to be in memory
// whole.
#ifndef MESHFILL_ENGINE_MODEL_SAFETENSORS_WRITER_H_
#define MESHFILL_ENGINE_MODEL_SAFETENSORS_WRITER_H_

#include <cstddef>
#include <cstdint>
#include <fstream>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/model/safetensors.h"

namespace meshfill {

struct TensorSpec {
  std::string name;
  ElementType type;
  std::vector<int64_t> shape;
  int64_t size_bytes() const;
};

class SafetensorsWriter {
 public:
  // Writes the header. `tensors`: all of the file's, in the order of their data, names distinct.
  static absl::StatusOr<SafetensorsWriter> Create(const std::string& path,
                                                  std::span<const TensorSpec> tensors);

  absl::Status Append(std::span<const std::byte> bytes);  // the next bytes of the data
  absl::Status Finish();                                  // all data is there: flushes and closes

 private:
  SafetensorsWriter(std::string path, std::ofstream file, int64_t missing_bytes)
      : path_(std::move(path)), file_(std::move(file)), missing_bytes_(missing_bytes) {}
  absl::Status WriteError() const;

  std::string path_;
  std::ofstream file_;
  int64_t missing_bytes_;
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_MODEL_SAFETENSORS_WRITER_H_
