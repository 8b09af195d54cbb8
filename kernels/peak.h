// The CPU's peak, measured by a short register loop: what MFU is measured against.
#ifndef MESHFILL_KERNELS_PEAK_H_
#define MESHFILL_KERNELS_PEAK_H_

#include <string_view>

#include "kernels/dtype.h"

namespace meshfill {

// FLOP/s of `threads` threads at once that do nothing but the widest multiply-add of the dtype on this
// machine (tdpbf16ps, dpbf16ps or FMA) on registers. The best of a few runs, `seconds` in all.
double MeasurePeakFlops(DType dtype, int threads, double seconds);

// The same for one of SupportedAttentionTargets(), with its widest multiply-add: "portable" multiplies and
// adds four floats, "avx2" and "avx512" have FMA, "avx512_bf16" has dpbf16ps for bf16 besides, "amx_bf16"
// tdpbf16ps.
struct RegisterLoopSpeed {
  double best;     // FLOP/s of the best run
  double average;  // FLOP/s over all runs: what other processes left of it meanwhile
};
RegisterLoopSpeed MeasureRegisterLoop(std::string_view target, DType dtype, int threads, double seconds);

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_PEAK_H_
