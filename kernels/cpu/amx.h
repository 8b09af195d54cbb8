// Intel's AMX: tiles of 16 rows by 64 bytes, which a process asks the kernel for.
#ifndef MESHFILL_KERNELS_CPU_AMX_H_
#define MESHFILL_KERNELS_CPU_AMX_H_

namespace meshfill {

// Whether the processor multiplies bf16 tiles and the kernel (Linux 5.16) lets this process do so. Asks once,
// for all threads.
bool MayUseTiles();

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CPU_AMX_H_
