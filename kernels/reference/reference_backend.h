// What every operation of a Backend means: plain loops, in float with double sums; slow, for tests.
#ifndef MESHFILL_KERNELS_REFERENCE_REFERENCE_BACKEND_H_
#define MESHFILL_KERNELS_REFERENCE_REFERENCE_BACKEND_H_

#include <memory>

#include "kernels/backend.h"

namespace meshfill {

std::unique_ptr<Backend> MakeReferenceBackend(DType dtype);

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_REFERENCE_REFERENCE_BACKEND_H_
