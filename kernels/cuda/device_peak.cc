#include <string_view>

#include "kernels/cuda/device_info.h"

namespace meshfill {
namespace {

// Dense bf16 without sparsity, from NVIDIA's data sheets. The first that the name contains counts.
constexpr struct {
  std::string_view name;
  double flops;
} kPeaks[] = {
    {"H100 PCIe", 756e12}, {"H100 NVL", 835e12}, {"H100", 989e12},  {"H200 NVL", 835e12}, {"H200", 989e12},
    {"H800 PCIe", 756e12}, {"H800", 989e12},     {"GH200", 989e12}, {"B200", 2250e12},    {"A100", 312e12},
    {"A800", 312e12},      {"A40", 149.7e12},    {"A30", 165e12},   {"A10", 125e12},      {"L40S", 362e12},
    {"L40", 181e12},       {"L4", 121e12},
};

}  // namespace

double CudaPeakFlops(const std::string& name) {
  for (const auto& peak : kPeaks) {
    if (name.find(peak.name) != std::string::npos) return peak.flops;
  }
  return 0;
}

}  // namespace meshfill
