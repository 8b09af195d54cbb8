// A file of weights: the header's length, the header, the data.
#include <algorithm>
#include <utility>
#include <vector>

#include "engine/model/safetensors.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/memory_file.h"

namespace meshfill {
namespace {

std::string File(std::string_view header, size_t data_bytes) {
  std::string file(8, '\0');
  for (int i = 0; i < 8; ++i) file[i] = static_cast<char>(uint64_t{header.size()} >> (8 * i));
  return file.append(header).append(data_bytes, 'x');
}

// As a reader of the weights would.
void Check(const SafetensorsFile& file) {
  std::vector<std::pair<const std::byte*, const std::byte*>> ranges;
  int sum = 0;
  for (const auto& [name, tensor] : file.tensors()) {
    unsigned __int128 bytes = static_cast<unsigned>(ElementTypeBytes(tensor.type));
    for (const int64_t length : tensor.shape) {
      FUZZ_CHECK(length >= 0);
      bytes *= static_cast<uint64_t>(length);
    }
    FUZZ_CHECK(bytes == tensor.bytes.size());
    for (const std::byte byte : tensor.bytes) sum += static_cast<int>(byte);
    if (!tensor.bytes.empty()) ranges.emplace_back(&tensor.bytes.front(), &tensor.bytes.back() + 1);
    FUZZ_CHECK(file.Find(name) == &tensor);
  }
  FUZZ_CHECK(sum >= 0);
  std::sort(ranges.begin(), ranges.end());
  for (size_t i = 1; i < ranges.size(); ++i) FUZZ_CHECK(ranges[i - 1].second <= ranges[i].first);
}

}  // namespace

const int kFuzzRounds = 50'000;

std::vector<std::string> FuzzSeeds() {
  return {
      File("{}", 0),
      File(R"({"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}})", 24),
      File(R"({"__metadata__":{"format":"pt"},"a":{"dtype":"BF16","shape":[4],"data_offsets":[0,8]},)"
           R"("b":{"dtype":"F16","shape":[],"data_offsets":[8,10]},)"
           R"("c":{"dtype":"U8","shape":[0,7],"data_offsets":[10,10]}})",
           10),
      File(R"({"a":{"dtype":"F8_E4M3","shape":[9223372036854775807,3],"data_offsets":[0,8]}})", 8),
      File(R"({"a":{"dtype":"I64","shape":[1],"data_offsets":[8,16]},)"
           R"("b":{"dtype":"F64","shape":[1],"data_offsets":[0,8]}}      )",
           16),
  };
}

}  // namespace meshfill

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace meshfill;
  const MemoryFile bytes({reinterpret_cast<const char*>(data), size});
  const auto file = SafetensorsFile::Open(bytes.path());
  if (file.ok()) {
    Check(**file);
  } else {
    FUZZ_CHECK(absl::IsInvalidArgument(file.status()));
  }
  return 0;
}
