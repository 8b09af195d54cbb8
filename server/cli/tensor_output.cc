#include "server/cli/tensor_output.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/model/safetensors_writer.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

// Writes the tensors of `specs`, whose bytes are `data`, one for one.
absl::Status WriteTensors(const std::string& path, std::span<const TensorSpec> specs,
                          std::span<const std::span<const std::byte>> data) {
  ASSIGN_OR_RETURN(SafetensorsWriter writer, SafetensorsWriter::Create(path, specs));
  for (const std::span<const std::byte> bytes : data) {
    RETURN_IF_ERROR(writer.Append(bytes));
  }
  return writer.Finish();
}

}  // namespace

absl::Status WriteLogits(const std::string& path, std::span<const float> logits) {
  const TensorSpec spec = {"logits", ElementType::kF32, {static_cast<int64_t>(logits.size())}};
  const std::span<const std::byte> data = std::as_bytes(logits);
  return WriteTensors(path, {&spec, 1}, {&data, 1});
}

absl::Status WriteKv(const std::string& path, const KvCache& kv) {
  std::vector<TensorSpec> specs;
  std::vector<std::span<const std::byte>> data;
  for (size_t layer = 0; layer < kv.layers.size(); ++layer) {
    const std::vector<int64_t> shape = {kv.tokens, kv.kv_heads, kv.head_dim};
    specs.push_back({absl::StrCat("layers.", layer, ".k"), ElementTypeOf(kv.dtype), shape});
    specs.push_back({absl::StrCat("layers.", layer, ".v"), ElementTypeOf(kv.dtype), shape});
    data.emplace_back(kv.layers[layer].k);
    data.emplace_back(kv.layers[layer].v);
  }
  return WriteTensors(path, specs, data);
}

}  // namespace meshfill
