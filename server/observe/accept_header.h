// What an HTTP client would rather have, by its Accept header or Accept-Encoding (RFC 9110, 12.4.2).
#ifndef MESHFILL_SERVER_OBSERVE_ACCEPT_HEADER_H_
#define MESHFILL_SERVER_OBSERVE_ACCEPT_HEADER_H_

#include <optional>
#include <vector>

#include "absl/strings/string_view.h"

namespace meshfill {

// One of the header's elements, "gzip;q=0.5" or "text/plain;version=0.0.4;q=0.2".
struct AcceptedElement {
  absl::string_view name;                     // "gzip"
  std::vector<absl::string_view> parameters;  // "version=0.0.4", without the weight
  double weight = 1;                          // 0: not accepted, and where the header states no number

  bool Is(absl::string_view other) const;  // the same name, in whatever case
  // The value of a parameter, without quotes; none where it is not there.
  std::optional<absl::string_view> Parameter(absl::string_view key) const;
};

// In the header's order. The views are of `header`.
std::vector<AcceptedElement> ParseAccept(absl::string_view header);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_OBSERVE_ACCEPT_HEADER_H_
