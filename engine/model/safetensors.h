// A file of tensors in the safetensors format, mapped by a reader that trusts nothing.
//
//     8 bytes    header length H, little endian, at most 100 MB
//     H bytes    JSON: {"name": {"dtype": "BF16", "shape": [4, 8], "data_offsets": [begin, end]}, …,
//                       "__metadata__": {"key": "value", …}}
//     the rest   the tensors, row-major, little endian, side by side without holes
//
// What a reader hands out has been checked: every tensor lies within the file, has exactly the bytes of its
// dtype and shape, and shares none with another. Data need not be aligned to its dtype.
#ifndef MESHFILL_ENGINE_MODEL_SAFETENSORS_H_
#define MESHFILL_ENGINE_MODEL_SAFETENSORS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/model/file_reader.h"
#include "kernels/dtype.h"

namespace meshfill {

enum class ElementType {
  kBool,
  kU8,
  kI8,
  kF8E4M3,
  kF8E5M2,
  kI16,
  kU16,
  kF16,
  kBf16,
  kI32,
  kU32,
  kF32,
  kI64,
  kU64,
  kF64
};
const char* ElementTypeName(ElementType type);  // as the format spells it: "BF16"
int64_t ElementTypeBytes(ElementType type);
ElementType ElementTypeOf(DType dtype);

std::string ShapeString(std::span<const int64_t> shape);  // "[4, 8]"

// A tensor in a mapped file; valid as long as the file object.
struct TensorView {
  ElementType type;
  std::vector<int64_t> shape;        // each ≥ 0; empty: a scalar
  std::span<const std::byte> bytes;  // row-major
};

// One file, mapped read-only. Immutable; any thread may read.
class SafetensorsFile {
 public:
  // NOT_FOUND: no such file. INVALID_ARGUMENT: the file breaks the format; names the file, the tensor, what
  // to do.
  static absl::StatusOr<std::shared_ptr<const SafetensorsFile>> Open(const std::string& path);
  ~SafetensorsFile();
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  const std::string& path() const { return path_; }
  const std::map<std::string, TensorView, std::less<>>& tensors() const { return tensors_; }
  const TensorView* Find(std::string_view name) const;  // null: not in this file

  // FileReader's, of bytes of its tensors.
  absl::Status Read(std::span<const std::byte> bytes, PageCache cache, void* to) const {
    return reader_.Read(bytes, cache, to);
  }

 private:
  SafetensorsFile(std::string path, int descriptor, const std::byte* data, size_t size_bytes)
      : path_(std::move(path)),
        data_(data),
        size_bytes_(size_bytes),
        reader_(path_, descriptor, {data, size_bytes}) {}
  absl::Status ReadHeader();

  std::string path_;
  const std::byte* data_;  // the mapping, [size_bytes_]
  size_t size_bytes_;
  const FileReader reader_;
  std::map<std::string, TensorView, std::less<>> tensors_;
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_MODEL_SAFETENSORS_H_
