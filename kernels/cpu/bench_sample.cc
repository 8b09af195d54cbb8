#include "kernels/cpu/bench_sample.h"

#include <algorithm>
#include <cstring>

namespace meshfill {

std::vector<char> RandomTensor(int64_t elements, DType dtype, std::mt19937& random) {
  std::normal_distribution<float> normal;
  const size_t bytes = DTypeBytes(dtype);
  std::vector<char> tensor(elements * bytes);
  for (int64_t i = 0; i < elements; ++i) {
    const float value = normal(random);
    const BFloat16 rounded = BFloat16::FromFloat(value);
    std::memcpy(tensor.data() + i * bytes, dtype == DType::kF32 ? static_cast<const void*>(&value) : &rounded,
                bytes);
  }
  return tensor;
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

}  // namespace meshfill
