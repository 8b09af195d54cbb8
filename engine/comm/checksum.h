// The checksum of a message's payload: finds what a wire, a NIC or a memory flipped. No protection against
// forgery.
#ifndef MESHFILL_ENGINE_COMM_CHECKSUM_H_
#define MESHFILL_ENGINE_COMM_CHECKSUM_H_

#include <cstddef>
#include <cstdint>

namespace meshfill {

// XXH3 (64 bits) of `size_bytes` bytes; `data` may be null where there are none. Runs at the speed of memory.
uint64_t Checksum(const void* data, size_t size_bytes);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_COMM_CHECKSUM_H_
