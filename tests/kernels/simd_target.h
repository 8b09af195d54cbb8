// Runs a test's kernels on one instruction set of those that Highway has compiled and the machine has.
#ifndef MESHFILL_TESTS_KERNELS_SIMD_TARGET_H_
#define MESHFILL_TESTS_KERNELS_SIMD_TARGET_H_

#include <hwy/highway.h>

#include <cstdint>
#include <vector>

namespace meshfill {

inline std::vector<int64_t> SimdTargets() { return hwy::SupportedAndGeneratedTargets(); }

// `target` is one of SimdTargets(); the machine's best serves again when this goes.
class ScopedSimdTarget {
 public:
  explicit ScopedSimdTarget(int64_t target) { hwy::GetChosenTarget().Update(target); }
  ~ScopedSimdTarget() { hwy::GetChosenTarget().Update(hwy::SupportedTargets()); }
  ScopedSimdTarget(const ScopedSimdTarget&) = delete;
  ScopedSimdTarget& operator=(const ScopedSimdTarget&) = delete;
};

}  // namespace meshfill

#endif  // MESHFILL_TESTS_KERNELS_SIMD_TARGET_H_
