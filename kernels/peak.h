// The CPU's peak, measured by a short register loop: what MFU is measured against (DESIGN §1).
#ifndef MESHFILL_KERNELS_PEAK_H_
#define MESHFILL_KERNELS_PEAK_H_

#include "kernels/dtype.h"

namespace meshfill {

// FLOP/s of `threads` threads at once that do nothing but the widest multiply-add of the dtype on this machine
// (dpbf16ps or FMA) on registers. The best of a few runs, `seconds` in all.
double MeasurePeakFlops(DType dtype, int threads, double seconds);

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_PEAK_H_
