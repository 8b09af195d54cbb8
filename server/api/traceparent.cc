#include "server/api/traceparent.h"

#include <algorithm>

namespace meshfill {
namespace {

constexpr char kMetadata[] = "traceparent";
constexpr absl::string_view kShape = "vv-tttttttttttttttttttttttttttttttt-pppppppppppppppp-ff";
constexpr absl::string_view kZeros = "00000000000000000000000000000000";
constexpr size_t kTraceAt = 3, kTraceDigits = 32;
constexpr size_t kParentAt = 36, kParentDigits = 16;

bool IsDigit(char digit) { return (digit >= '0' && digit <= '9') || (digit >= 'a' && digit <= 'f'); }

}  // namespace

std::string ParseTraceparent(absl::string_view value) {
  const absl::string_view known = value.substr(0, kShape.size());
  const bool shaped =
      std::equal(known.begin(), known.end(), kShape.begin(), kShape.end(),
                 [](char got, char shape) { return shape == '-' ? got == '-' : IsDigit(got); });
  if (!shaped) return "";
  const absl::string_view version = known.substr(0, 2);
  const absl::string_view more = value.substr(known.size());
  if (version == "ff" || (!more.empty() && (version == "00" || more.front() != '-'))) return "";
  if (known.substr(kTraceAt, kTraceDigits) == kZeros) return "";
  if (known.substr(kParentAt, kParentDigits) == kZeros.substr(0, kParentDigits)) return "";
  return std::string(known);
}

std::string TraceparentOf(const grpc::ServerContextBase& context) {
  const auto [first, last] = context.client_metadata().equal_range(kMetadata);
  if (first == last || std::next(first) != last) return "";
  return ParseTraceparent({first->second.data(), first->second.size()});
}

}  // namespace meshfill
