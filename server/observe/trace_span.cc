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

size_t BytesOf(const TraceSpan& span) {
  size_t bytes = sizeof(span) + span.trace_id.size() + span.id.size() + span.parent_id.size() +
                 span.name.size() + span.error.size();
  for (const auto& attribute : span.attributes) {
    const auto* const text = std::get_if<std::string>(&attribute.second);
    bytes += sizeof(attribute) + attribute.first.size() + (text == nullptr ? 0 : text->size());
  }
  return bytes;
}

std::string NewTraceId() { return NewDigits() + NewDigits(); }
std::string NewSpanId() { return NewDigits(); }

}  // namespace meshfill
