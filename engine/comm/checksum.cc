#include "engine/comm/checksum.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace meshfill {

uint64_t Checksum(const void* data, size_t size_bytes) { return XXH3_64bits(data, size_bytes); }

}  // namespace meshfill
