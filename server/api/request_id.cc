#include "server/api/request_id.h"

#include <atomic>
#include <cstdint>
#include <random>

#include "absl/strings/str_format.h"

namespace meshfill {

std::string NewRequestId() {
  static const uint64_t process = [] {
    std::random_device random;
    return (uint64_t{random()} << 32) | random();
  }();
  static std::atomic<uint64_t> count{0};
  return absl::StrFormat("mf-%016x-%d", process, ++count);
}

}  // namespace meshfill
