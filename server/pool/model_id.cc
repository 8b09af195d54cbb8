#include "server/pool/model_id.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "engine/model/model_config.h"
#include "engine/model/model_tensors.h"
#include "engine/model/strict_json.h"
#include "kernels/return_if_error.h"
#include "kernels/word_hash.h"

namespace meshfill {
namespace {

void AddBytes(std::span<const std::byte> bytes, WordHash& hash) {
  hash.Add(bytes.size());
  for (size_t begin = 0; begin < bytes.size(); begin += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, bytes.data() + begin, std::min(sizeof(word), bytes.size() - begin));
    hash.Add(word);
  }
}

void AddText(std::string_view text, WordHash& hash) { AddBytes(std::as_bytes(std::span(text)), hash); }

}  // namespace

std::vector<WeightSample> WeightSamples(const SafetensorsFolder& folder) {
  constexpr size_t kSamples = 1024, kSampleBytes = 4096;  // 4 MiB
  size_t total = 0;
  for (const auto& [name, entry] : folder.entries()) total += entry.tensor.bytes.size();
  const size_t stride = std::max(kSampleBytes, (total + kSamples - 1) / kSamples);
  std::vector<WeightSample> samples;
  size_t begin = 0;
  for (const auto& [name, entry] : folder.entries()) {
    const size_t end = begin + entry.tensor.bytes.size();
    for (size_t at = begin / stride * stride; at < end; at += stride) {
      const size_t from = std::max(at, begin), until = std::min(at + kSampleBytes, end);
      if (from < until) samples.push_back({&entry, entry.tensor.bytes.subspan(from - begin, until - from)});
    }
    begin = end;
  }
  return samples;
}

absl::StatusOr<uint64_t> WeightsHash(const SafetensorsFolder& folder) {
  WordHash hash;
  for (const auto& [name, entry] : folder.entries()) {
    AddText(name, hash);
    AddText(ElementTypeName(entry.tensor.type), hash);
    for (int64_t length : entry.tensor.shape) hash.Add(static_cast<uint64_t>(length));
  }
  std::vector<std::byte> read;
  for (const WeightSample& sample : WeightSamples(folder)) {
    read.resize(sample.bytes.size());
    RETURN_IF_ERROR(sample.entry->file->Read(sample.bytes, PageCache::kFill, read.data()));
    AddBytes(read, hash);
  }
  return std::max<uint64_t>(1, hash.Finish());
}

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
    ASSIGN_OR_RETURN(const uint64_t weights_hash, WeightsHash((*tensors)->folder()));
    model.id.set_weights_hash(weights_hash);
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
