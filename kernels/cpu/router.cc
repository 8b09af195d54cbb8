#include "kernels/cpu/router.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

namespace meshfill {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

// What choosing one token's experts needs, used again for the next.
struct Choice {
  explicit Choice(const RouterRule& rule)
      : scores(rule.experts),
        values(rule.experts),
        order(std::max(rule.experts, rule.groups)),
        groups(rule.groups) {}
  std::vector<float> scores;
  std::vector<float> values;  // values by which experts are chosen
  std::vector<int> order;
  std::vector<float> groups;
};

void ScoreExperts(const float* logits, RouterScore score, std::vector<float>& scores) {
  if (score == RouterScore::kSigmoid) {
    std::transform(logits, logits + scores.size(), scores.begin(),
                   [](float logit) { return 1 / (1 + std::exp(-logit)); });
    return;
  }
  const float largest = *std::max_element(logits, logits + scores.size());
  float sum = 0;
  for (size_t e = 0; e < scores.size(); ++e) sum += scores[e] = std::exp(logits[e] - largest);
  for (float& value : scores) value /= sum;
}

// The numbers of the `count` largest values, in any order; ties go to the lower number, NaN is never larger.
void Largest(const std::vector<float>& values, int count, std::vector<int>& order) {
  for (size_t i = 0; i < values.size(); ++i) order[i] = static_cast<int>(i);
  const auto last = order.begin() + static_cast<int64_t>(values.size());
  std::nth_element(order.begin(), order.begin() + (count - 1), last, [&](int a, int b) {
    const float x = std::isnan(values[a]) ? kNever : values[a],
                y = std::isnan(values[b]) ? kNever : values[b];
    return x != y ? x > y : a < b;
  });
}

// Leaves the experts of the used groups in the choice.
void KeepUsedGroups(const RouterRule& rule, Choice& choice) {
  const int of_group = rule.experts / rule.groups;
  for (int group = 0; group < rule.groups; ++group) {
    float best = kNever, second = kNever;
    for (int e = group * of_group; e < (group + 1) * of_group; ++e) {
      second = std::max(second, std::min(best, choice.values[e]));
      best = std::max(best, choice.values[e]);
    }
    choice.groups[group] = best + second;
  }
  Largest(choice.groups, rule.used_groups, choice.order);
  for (auto group = choice.order.begin() + rule.used_groups; group != choice.order.begin() + rule.groups;
       ++group) {
    std::fill_n(choice.values.begin() + *group * of_group, of_group, kNever);
  }
}

}  // namespace

void ChooseExperts(const RouteArgs& args, int64_t begin, int64_t end) {
  const RouterRule& rule = args.rule;
  Choice choice(rule);
  for (int64_t token = begin; token < end; ++token) {
    const float* logits = args.logits + token * rule.experts;
    ScoreExperts(logits, rule.score, choice.scores);
    for (int e = 0; e < rule.experts; ++e) {
      choice.values[e] = choice.scores[e] + (args.correction == nullptr ? 0.0f : args.correction[e]);
    }
    if (rule.groups > 1) KeepUsedGroups(rule, choice);
    Largest(choice.values, rule.used, choice.order);
    std::sort(choice.order.begin(), choice.order.begin() + rule.used);
    float sum = 0;
    for (int i = 0; i < rule.used; ++i) sum += choice.scores[choice.order[i]];
    const float scale = rule.normalised ? rule.scale / sum : rule.scale;
    for (int i = 0; i < rule.used; ++i) {
      args.rows.row[token * rule.used + i] = choice.order[i];
      args.rows.weight[token * rule.used + i] = choice.scores[choice.order[i]] * scale;
    }
  }
}

void SortRowsByExpert(const RouteArgs& args) {
  const auto& [begin, token, row, weight] = args.rows;
  const int64_t rows = args.tokens * args.rule.used;
  std::fill_n(begin, args.rule.experts + 1, 0);
  for (int64_t i = 0; i < rows; ++i) ++begin[row[i] + 1];
  if (args.tokens_per_expert != nullptr) {
    for (int e = 0; e < args.rule.experts; ++e) args.tokens_per_expert[e] += begin[e + 1];
  }
  for (int e = 0; e < args.rule.experts; ++e) begin[e + 1] += begin[e];
  std::vector<int32_t> next(begin, begin + args.rule.experts);
  for (int64_t i = 0; i < rows; ++i) {
    row[i] = next[row[i]]++;
    token[row[i]] = static_cast<int32_t>(i / args.rule.used);
  }
}

}  // namespace meshfill
