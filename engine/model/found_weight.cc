#include "engine/model/found_weight.h"

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/return_if_error.h"

namespace meshfill {

absl::Status CopyElements(const FoundWeight& weight, const BeforeRead& before_read, void* to) {
  ASSIGN_OR_RETURN(const PageCache cache, before_read());
  return weight.entry->file->Read(weight.entry->tensor.bytes, cache, to);
}

absl::StatusOr<std::vector<float>> ToFloats(const FoundWeight& weight, const BeforeRead& before_read) {
  if (weight.entry == nullptr) return std::vector<float>();
  std::vector<std::byte> bytes(weight.entry->tensor.bytes.size());
  RETURN_IF_ERROR(CopyElements(weight, before_read, bytes.data()));
  std::vector<float> floats(bytes.size() / DTypeBytes(weight.dtype));
  for (size_t i = 0; i < floats.size(); ++i) {
    const std::byte* element = bytes.data() + i * DTypeBytes(weight.dtype);
    uint16_t half;
    switch (weight.dtype) {
      case DType::kF32:
        std::memcpy(&floats[i], element, sizeof(float));
        break;
      case DType::kBf16:
        std::memcpy(&half, element, sizeof(half));
        floats[i] = BFloat16{half}.ToFloat();
        break;
      case DType::kF16:
        std::memcpy(&half, element, sizeof(half));
        floats[i] = HalfToFloat(half);
        break;
      case DType::kF8E4M3:
      case DType::kF4E2M1:
        break;  // no vector and no scale has these
    }
  }
  return floats;
}

}  // namespace meshfill
