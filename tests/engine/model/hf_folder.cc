#include "tests/engine/model/hf_folder.h"

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>

#include "engine/model/safetensors_folder.h"
#include "engine/model/safetensors_writer.h"
#include "kernels/dtype.h"

namespace meshfill {
namespace {

void AbortUnless(const absl::Status& status) {
  if (status.ok()) return;
  std::cerr << status << "\n";
  std::abort();
}

}  // namespace

std::vector<float> HfTensor::Floats() const {
  std::vector<float> floats(bytes.size() / ElementTypeBytes(type));
  for (size_t i = 0; i < floats.size(); ++i) {
    uint16_t half = 0;
    if (type == ElementType::kF8E4M3) {
      floats[i] = Fp8ToFloat(static_cast<uint8_t>(bytes[i]));
    } else if (type == ElementType::kF32) {
      std::memcpy(&floats[i], &bytes[4 * i], 4);
    } else {
      std::memcpy(&half, &bytes[2 * i], 2);
      floats[i] = type == ElementType::kBf16 ? BFloat16{half}.ToFloat() : HalfToFloat(half);
    }
  }
  return floats;
}

HfFolder HfFolder::Read(const std::string& path) {
  HfFolder folder;
  std::ifstream(path + "/config.json") >> folder.config;
  const auto weights = SafetensorsFolder::Open(path);
  AbortUnless(weights.status());
  for (const auto& [name, entry] : weights->entries()) {
    const auto& [type, shape, bytes] = entry.tensor;
    folder.tensors[name] = {type, shape, {bytes.begin(), bytes.end()}};
  }
  return folder;
}

void HfFolder::Write(const std::string& path) const {
  std::ofstream(path + "/config.json") << config;
  std::vector<TensorSpec> specs;
  for (const auto& [name, tensor] : tensors) specs.push_back({name, tensor.type, tensor.shape});
  auto writer = SafetensorsWriter::Create(path + "/model.safetensors", specs);
  AbortUnless(writer.status());
  for (const auto& [name, tensor] : tensors) AbortUnless(writer->Append(tensor.bytes));
  AbortUnless(writer->Finish());
}

}  // namespace meshfill
