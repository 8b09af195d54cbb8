#include "server/cli/tensor_output.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/model/safetensors_writer.h"
#include "kernels/return_if_error.h"

namespace meshfill {

absl::Status WriteLogits(const std::string& path, std::span<const float> logits) {
  const TensorSpec spec = {"logits", ElementType::kF32, {static_cast<int64_t>(logits.size())}};
  ASSIGN_OR_RETURN(SafetensorsWriter writer, SafetensorsWriter::Create(path, {&spec, 1}));
  RETURN_IF_ERROR(writer.Append(std::as_bytes(logits)));
  return writer.Finish();
}

absl::Status WriteKv(const std::string& path, const KvShape& shape, int64_t tokens, const ReadKvLayer& read) {
  std::vector<TensorSpec> specs;
  for (int layer = 0; layer < shape.layers; ++layer) {
    for (const char* name : {".k", ".v"}) {
      specs.push_back({absl::StrCat("layers.", layer, name),
                       ElementTypeOf(shape.dtype),
                       {tokens, shape.kv_heads, shape.head_dim}});
    }
  }
  ASSIGN_OR_RETURN(SafetensorsWriter writer, SafetensorsWriter::Create(path, specs));
  std::vector<std::byte> kv(shape.LayerBytes(tokens));
  const std::span<std::byte> k = std::span(kv).first(kv.size() / 2);
  const std::span<std::byte> v = std::span(kv).subspan(kv.size() / 2);
  for (int layer = 0; layer < shape.layers; ++layer) {
    RETURN_IF_ERROR(read(layer, k, v));
    RETURN_IF_ERROR(writer.Append(kv));
  }
  return writer.Finish();
}

}  // namespace meshfill
