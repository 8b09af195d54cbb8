#include "server/config/closest_name.h"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace meshfill {
namespace {

// Levenshtein's: insertions, deletions and replacements from one word to the other.
size_t EditDistance(absl::string_view from, absl::string_view to) {
  std::vector<size_t> row(to.size() + 1);
  std::iota(row.begin(), row.end(), 0);
  for (size_t i = 0; i < from.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i + 1);
    for (size_t j = 0; j < to.size(); ++j) {
      const size_t replaced = diagonal + (from[i] == to[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, diagonal + 1});
    }
  }
  return row.back();
}

}  // namespace

std::string DidYouMean(absl::string_view name, std::span<const std::string> known) {
  const auto closest = std::min_element(known.begin(), known.end(), [&](const auto& left, const auto& right) {
    return EditDistance(name, left) < EditDistance(name, right);
  });
  if (closest == known.end()) return "";
  const size_t letters = name.size() - std::min(name.find_first_not_of('-'), name.size());
  const size_t distance = EditDistance(name, *closest);
  if (distance > std::max<size_t>(2, letters / 3) || 2 * distance >= letters) return "";
  return absl::StrCat("did you mean ", *closest, "? ");
}

}  // namespace meshfill
