#include "engine/kv/crc32c.h"

#include <isa-l/crc.h>

#include <algorithm>
#include <cstddef>

namespace meshfill {

// ISA-L leaves the inversions before and after to its caller, and takes an int's worth of bytes.
uint32_t Crc32c(std::string_view bytes, uint32_t before) {
  constexpr size_t kMostBytes = 1 << 30;
  uint32_t crc = ~before;
  while (!bytes.empty()) {
    const size_t count = std::min(bytes.size(), kMostBytes);
    // It reads only, whatever its type says.
    auto* const data = reinterpret_cast<unsigned char*>(const_cast<char*>(bytes.data()));
    crc = crc32_iscsi(data, static_cast<int>(count), crc);
    bytes.remove_prefix(count);
  }
  return ~crc;
}

}  // namespace meshfill
