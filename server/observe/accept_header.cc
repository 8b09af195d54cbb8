#include "server/observe/accept_header.h"

#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace meshfill {
namespace {

// "q=0.5" is a weight of 0.5.
double Weight(absl::string_view number) {
  double weight = 0;
  return absl::SimpleAtod(number, &weight) ? weight : 0;
}

}  // namespace

bool AcceptedElement::Is(absl::string_view other) const { return absl::EqualsIgnoreCase(name, other); }

std::optional<absl::string_view> AcceptedElement::Parameter(absl::string_view key) const {
  for (const absl::string_view parameter : parameters) {
    const std::pair<absl::string_view, absl::string_view> parts =
        absl::StrSplit(parameter, absl::MaxSplits('=', 1));
    if (!absl::EqualsIgnoreCase(parts.first, key)) continue;
    absl::string_view value = parts.second;
    if (absl::ConsumePrefix(&value, "\"")) absl::ConsumeSuffix(&value, "\"");
    return value;
  }
  return std::nullopt;
}

std::vector<AcceptedElement> ParseAccept(absl::string_view header) {
  std::vector<AcceptedElement> elements;
  for (const absl::string_view text : absl::StrSplit(header, ',')) {
    AcceptedElement element;
    bool first = true;
    for (absl::string_view part : absl::StrSplit(text, ';')) {
      part = absl::StripAsciiWhitespace(part);
      if (std::exchange(first, false)) {
        element.name = part;
      } else if (absl::ConsumePrefix(&part, "q=") || absl::ConsumePrefix(&part, "Q=")) {
        element.weight = Weight(part);
      } else {
        element.parameters.push_back(part);
      }
    }
    elements.push_back(std::move(element));
  }
  return elements;
}

}  // namespace meshfill
