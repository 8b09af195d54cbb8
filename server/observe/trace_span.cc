#include "server/observe/trace_span.h"

#include <random>

#include "absl/strings/str_format.h"

namespace meshfill {
namespace {

// Never 0, which is no id.
std::string NewDigits() {
  std::random_device random;
  uint64_t number = 0;
  while (number == 0) number = (uint64_t{random()} << 32) | random();
  return absl::StrFormat("%016x", number);
}

}  // namespace

std::string NewTraceId() { return NewDigits() + NewDigits(); }
std::string NewSpanId() { return NewDigits(); }

}  // namespace meshfill
