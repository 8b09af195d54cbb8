// What every operation of a Stream means: plain loops, in float with double sums; slow, for tests.
#ifndef MESHFILL_KERNELS_REFERENCE_REFERENCE_DEVICE_H_
#define MESHFILL_KERNELS_REFERENCE_REFERENCE_DEVICE_H_

#include <memory>

#include "kernels/device.h"

namespace meshfill {

std::unique_ptr<Device> MakeReferenceDevice(DType dtype, const Grain& grain = {});

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_REFERENCE_REFERENCE_DEVICE_H_
