// CRC-32C (Castagnoli), as iSCSI and RFC 3720 have it: the checksum of parts of K and V on their way.
#ifndef MESHFILL_ENGINE_KV_CRC32C_H_
#define MESHFILL_ENGINE_KV_CRC32C_H_

#include <cstdint>
#include <string_view>

namespace meshfill {

// Checksum of some bytes, whose checksum is `before`, and then `bytes`: Crc32c("ab") = Crc32c("b",
// Crc32c("a")).
uint32_t Crc32c(std::string_view bytes, uint32_t before = 0);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_KV_CRC32C_H_
