// What somebody may have meant: the known name that is nearest to a misspelt one.
#ifndef MESHFILL_SERVER_CONFIG_CLOSEST_NAME_H_
#define MESHFILL_SERVER_CONFIG_CLOSEST_NAME_H_

#include <span>
#include <string>

#include "absl/strings/string_view.h"

namespace meshfill {

// "did you mean embedded? ", for the middle of an error; empty where no name of `known` is near to `name`: at
// most two letters apart, or a third of its letters, and always fewer than half of them. Leading dashes do
// not count as letters.
std::string DidYouMean(absl::string_view name, std::span<const std::string> known);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_CONFIG_CLOSEST_NAME_H_
