#include "server/pool/model_id.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "engine/model/model_config.h"
#include "engine/model/model_tensors.h"
#include "engine/model/safetensors_folder.h"
#include "engine/model/strict_json.h"
#include "kernels/return_if_error.h"
#include "kernels/word_hash.h"

namespace meshfill {
namespace {

constexpr size_t kSamples = 64;  // samples of a tensor, spread evenly
constexpr size_t kSampleBytes = 64;

void AddBytes(std::span<const std::byte> bytes, WordHash& hash) {
  hash.Add(bytes.size());
  for (size_t begin = 0; begin < bytes.size(); begin += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, bytes.data() + begin, std::min(sizeof(word), bytes.size() - begin));
    hash.Add(word);
  }
}

void AddText(std::string_view text, WordHash& hash) { AddBytes(std::as_bytes(std::span(text)), hash); }

uint64_t WeightsHash(const SafetensorsFolder& folder) {
  WordHash hash;
  for (const auto& [name, entry] : folder.entries()) {
    const TensorView& tensor = entry.tensor;
    AddText(name, hash);
    AddText(ElementTypeName(tensor.type), hash);
    for (int64_t length : tensor.shape) hash.Add(static_cast<uint64_t>(length));
    const size_t size = tensor.bytes.size();
    const size_t stride = std::max(kSampleBytes, size / kSamples);
    for (size_t begin = 0; begin < size; begin += stride) {
      AddBytes(tensor.bytes.subspan(begin, std::min(kSampleBytes, size - begin)), hash);
    }
  }
  return hash.Finish();
}

}  // namespace

absl::StatusOr<IdentifiedModel> IdentifyModel(const std::string& folder, std::optional<DType> dtype) {
  const std::string path = folder + "/config.json";
  ASSIGN_OR_RETURN(const std::string text, ReadJsonText(path));
  IdentifiedModel model;
  WordHash hash;
  AddText(text, hash);
  model.id.set_config_hash(hash.Finish());
  std::filesystem::path clean = std::filesystem::path(folder).lexically_normal();
  if (clean.filename().empty()) clean = clean.parent_path();  // it ends in a slash
  model.id.set_name(clean.filename().string());

  // As Model::Load finds them, so that all processes of a pool tell the same dtype.
  const auto tensors = ModelTensors::Find(folder, /*check_values=*/false);
  if (!tensors.ok() && !absl::IsNotFound(tensors.status())) return tensors.status();
  if (tensors.ok()) {
    model.id.set_weights_hash(std::max<uint64_t>(1, WeightsHash((*tensors)->folder())));
    model.shape = (*tensors)->config().shape;
    model.shape.dtype = AutoDType((*tensors)->all_f32());
  } else {
    ASSIGN_OR_RETURN(const ModelConfig config, ModelConfig::Parse(text, path));
    model.shape = config.shape;
    model.shape.dtype = AutoDType(config.shape.dtype == DType::kF32);
  }
  if (dtype.has_value()) model.shape.dtype = *dtype;
  model.id.set_dtype(model.shape.dtype == DType::kF32 ? "f32" : "bf16");
  return model;
}

}  // namespace meshfill
