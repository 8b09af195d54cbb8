#include "engine/plan/pass_parts.h"

#include <algorithm>

#include "engine/plan/cost_model.h"

namespace meshfill {
namespace {

constexpr double kAlike = 0.75;  // least part of the longest rank's work that another of its length has

}  // namespace

PartSeconds PassParts(const ModelShape& model, const PoolSpeed& speed, std::span<const PartSeconds> prompts) {
  PartSeconds pass;
  for (const PartSeconds& prompt : prompts) pass += prompt;
  if (prompts.empty()) return pass;
  pass.products -= static_cast<double>(prompts.size() - 1) * PassSeconds(model, speed);
  pass.fixed = prompts.front().fixed;
  return pass;
}

bool TellsOfSpeed(std::span<const PartSeconds> ranks, bool share_cores) {
  if (!share_cores) return true;
  const auto work = [](const PartSeconds& parts) { return parts.products + parts.attention; };
  const auto [least, longest] = std::minmax_element(
      ranks.begin(), ranks.end(),
      [&](const PartSeconds& left, const PartSeconds& right) { return work(left) < work(right); });
  return work(*least) >= kAlike * work(*longest);
}

}  // namespace meshfill
