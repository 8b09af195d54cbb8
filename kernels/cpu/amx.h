// Intel's AMX: tiles of 16 rows by 64 bytes, which a process asks the kernel for.
#ifndef MESHFILL_KERNELS_CPU_AMX_H_
#define MESHFILL_KERNELS_CPU_AMX_H_

#include <cstdint>

namespace meshfill {

// What ldtilecfg reads, palette 1: each of the eight tiles is whole. A constant: GCC does not know that the
// instruction reads more than its first bytes.
struct alignas(64) WholeTiles {
  uint8_t palette_and_reserved[16] = {1};
  uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(WholeTiles) == 64);
inline constexpr WholeTiles kWholeTiles;

// Whether the processor multiplies bf16 tiles and the kernel (Linux 5.16) lets this process do so. Asks once,
// for all threads.
bool MayUseTiles();

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CPU_AMX_H_
