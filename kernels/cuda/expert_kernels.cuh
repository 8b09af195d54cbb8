// The router and the sum of an MLP of experts (kernels/experts.h), written against a Machine: the device
// (expert_ops.cu), or an emulated CTA (tests).
//
// Rows are sorted by counting, in three kernels and no memory but ExpertRows:
//
//     choose   row[i] = expert              i = token · used + place, a token's experts by rising number
//     sort     token[begin[e] + k] = i      the k-th i whose row[i] is e: by rising token
//     place    r = 0, 1, …: row[token[r]] = r, token[r] /= used
//
// Nothing depends on which CTA comes first: the same logits give the same rows.
#ifndef MESHFILL_KERNELS_CUDA_EXPERT_KERNELS_CUH_
#define MESHFILL_KERNELS_CUDA_EXPERT_KERNELS_CUH_

#include <cmath>
#include <cstdint>

#include "kernels/cuda/layer_kernels.cuh"
#include "kernels/experts.h"

namespace meshfill {

template <class Machine>
struct ExpertKernels {
  using Layer = LayerKernels<Machine>;

  static constexpr int kMostGroups = 64 * 32;  // a bit of a lane each
  static constexpr uint32_t kSortSharedBytes = kLayerWarps * 2 * sizeof(uint32_t);

  // A warp a token. It keeps no scores: each round computes them anew from logits in the cache, so that there
  // may be any number of experts.
  static MESHFILL_DEVICE void Choose(const RouteArgs& args) {
    const RouterRule& rule = args.rule;
    for (int64_t token = Layer::FirstWarpRow(); token < args.tokens; token += Layer::WarpRowStride()) {
      const TokenScores scores = ScoresOf(args, token);
      const uint64_t used_groups = rule.groups > 1 ? UsedGroups(scores) : 0;
      const auto value_of = [&](int expert) { return Value(scores, expert, used_groups); };
      const Pick last = LastOfBest(rule.used, rule.experts, value_of);
      const auto chosen_from = [&](int first) {  // whether this lane's expert is
        const int expert = first + static_cast<int>(Layer::Lane());
        const Pick pick{value_of(Smaller(expert, rule.experts - 1)), expert};
        return expert < rule.experts && !Before(last, pick);
      };
      float sum = 0;
      for (int first = 0; first < rule.experts; first += 32) {
        if (chosen_from(first)) sum += Score(scores, first + static_cast<int>(Layer::Lane()));
      }
      const float scale = rule.normalised ? rule.scale / Layer::WarpSum(sum) : rule.scale;
      int64_t at = token * rule.used;
      for (int first = 0; first < rule.experts; first += 32) {
        const bool chosen = chosen_from(first);
        const uint32_t all = Machine::Ballot(chosen);
        if (chosen) {
          const int expert = first + static_cast<int>(Layer::Lane());
          const int64_t i = at + CountBelow(all);
          args.rows.row[i] = expert;
          args.rows.weight[i] = Score(scores, expert) * scale;
        }
        at += Machine::PopCount(all);
      }
    }
  }

  // A CTA an expert, which reads the experts of all rows twice: to count, and to write; each of its warps has
  // a stretch of them. `shared`: address of kSortSharedBytes.
  static MESHFILL_DEVICE void Sort(const RouteArgs& args, uint32_t shared) {
    const auto rows = static_cast<int32_t>(args.tokens * args.rule.used);
    const int32_t stretch = (rows + int32_t{kLayerWarps} * 32 - 1) / (int32_t{kLayerWarps} * 32) * 32;
    const uint32_t warp = Machine::Thread() / 32;
    const auto lane = static_cast<int32_t>(Layer::Lane());
    const int32_t begin = Smaller(static_cast<int32_t>(warp) * stretch, rows);
    const int32_t end = Smaller(begin + stretch, rows);
    const int32_t* const expert_of = args.rows.row;
    for (auto expert = static_cast<int32_t>(Machine::Block()); expert < args.rule.experts;
         expert += static_cast<int32_t>(Machine::Blocks())) {
      uint32_t own = 0, lower = 0;  // rows of this expert; rows of the experts before
      for (int32_t i = begin + lane; i < end; i += 32) {
        own += expert_of[i] == expert ? 1 : 0;
        lower += expert_of[i] < expert ? 1 : 0;
      }
      own = WarpSum(own), lower = WarpSum(lower);
      if (lane == 0) {
        Machine::StoreShared(shared + 8 * warp, own);
        Machine::StoreShared(shared + 8 * warp + 4, lower);
      }
      Machine::SyncThreads();
      // Rows of the experts before; rows of this one: in the warps before, and in all.
      uint32_t first = 0, before = 0, all_own = 0;
      for (uint32_t other = 0; other < kLayerWarps; ++other) {
        const uint32_t others_own = Machine::LoadShared(shared + 8 * other);
        if (other < warp) before += others_own;
        all_own += others_own;
        first += Machine::LoadShared(shared + 8 * other + 4);
      }
      Machine::SyncThreads();  // all have read, before the next expert's are written
      if (Machine::Thread() == 0) {
        args.rows.begin[expert] = static_cast<int32_t>(first);
        if (expert == args.rule.experts - 1) args.rows.begin[expert + 1] = rows;
        if (args.tokens_per_expert != nullptr)
          args.tokens_per_expert[expert] += static_cast<int32_t>(all_own);
      }
      int32_t* to = args.rows.token + first + before;
      for (int32_t from = begin; from < end; from += 32) {
        const int32_t i = from + lane;
        const bool is_own = i < end && expert_of[i] == expert;
        const uint32_t all = Machine::Ballot(is_own);
        if (is_own) to[CountBelow(all)] = i;
        to += Machine::PopCount(all);
      }
    }
  }

  static MESHFILL_DEVICE void Place(const RouteArgs& args) {
    const int64_t rows = args.tokens * args.rule.used;
    for (int64_t r = Layer::FirstThreadRow(); r < rows; r += Layer::ThreadRowStride()) {
      const int32_t i = args.rows.token[r];
      args.rows.row[i] = static_cast<int32_t>(r);
      args.rows.token[r] = i / args.rule.used;
    }
  }

  // A CTA a token.
  template <int kVector>
  static MESHFILL_DEVICE void AddExperts(const AddExpertsArgs& args) {
    const BFloat16* y = static_cast<const BFloat16*>(args.y);
    for (int64_t token = Machine::Block(); token < args.tokens; token += Machine::Blocks()) {
      const int32_t* const rows = args.rows.row + token * args.used;
      const float* const weights = args.rows.weight + token * args.used;
      float* const x = args.x + token * args.width;
      for (int64_t i = Machine::Thread() * kVector; i < args.width; i += kLayerThreads * kVector) {
        float sums[kVector];
        LoadVector(x + i, sums);
        for (int expert = 0; expert < args.used; ++expert) {
          float values[kVector];
          LoadVector(y + rows[expert] * args.width + i, values);
          for (int e = 0; e < kVector; ++e) sums[e] += weights[expert] * values[e];
        }
        StoreVector(sums, x + i);
      }
    }
  }

 private:
  // In the order of choice: the larger value first, of equal ones the lower number.
  struct Pick {
    float value;
    int number;
  };
  static MESHFILL_DEVICE bool Before(const Pick& a, const Pick& b) {
    return a.value > b.value || (a.value == b.value && a.number < b.number);
  }

  // What one token's scores follow from.
  struct TokenScores {
    const RouteArgs& args;
    const float* logits;
    float largest;  // the token's largest logit
    float sum;      // Σ exp(logit − largest) over the experts
  };

  static MESHFILL_DEVICE int Smaller(int a, int b) { return a < b ? a : b; }

  static MESHFILL_DEVICE uint32_t CountBelow(uint32_t lanes) {
    return Machine::PopCount(lanes & ((1u << Layer::Lane()) - 1));
  }

  static MESHFILL_DEVICE uint32_t WarpSum(uint32_t value) {
    for (uint32_t mask = 16; mask > 0; mask /= 2) value += Machine::Shuffle(value, Layer::Lane() ^ mask);
    return value;
  }

  static MESHFILL_DEVICE TokenScores ScoresOf(const RouteArgs& args, int64_t token) {
    const int experts = args.rule.experts;
    TokenScores scores{.args = args, .logits = args.logits + token * experts, .largest = -INFINITY, .sum = 0};
    if (args.rule.score != RouterScore::kSoftmax) return scores;
    const auto lane = static_cast<int>(Layer::Lane());
    for (int e = lane; e < experts; e += 32) scores.largest = fmaxf(scores.largest, scores.logits[e]);
    for (int mask = 16; mask > 0; mask /= 2) {
      scores.largest = fmaxf(scores.largest, Machine::ShuffleXor(scores.largest, mask));
    }
    for (int e = lane; e < experts; e += 32) scores.sum += expf(scores.logits[e] - scores.largest);
    scores.sum = Layer::WarpSum(scores.sum);
    return scores;
  }

  static MESHFILL_DEVICE float Score(const TokenScores& scores, int expert) {
    const float logit = scores.logits[expert];
    return scores.args.rule.score == RouterScore::kSoftmax ? expf(logit - scores.largest) / scores.sum
                                                           : 1 / (1 + expf(-logit));
  }

  // The value by which experts are chosen; NaN is never larger.
  static MESHFILL_DEVICE float Value(const TokenScores& scores, int expert) {
    const float* const correction = scores.args.correction;
    const float value = Score(scores, expert) + (correction == nullptr ? 0 : correction[expert]);
    return value == value ? value : -INFINITY;
  }
  // The expert's Value, or −∞ where its group is not used. All lanes of the warp call it.
  static MESHFILL_DEVICE float Value(const TokenScores& scores, int expert, uint64_t used_groups) {
    const RouterRule& rule = scores.args.rule;
    if (rule.groups == 1) return Value(scores, expert);
    const int group = expert / (rule.experts / rule.groups);
    const uint64_t of_lane = Machine::Shuffle(used_groups, static_cast<uint32_t>(group) % 32);
    return (of_lane >> (group / 32) & 1) != 0 ? Value(scores, expert) : -INFINITY;
  }

  static MESHFILL_DEVICE float GroupValue(const TokenScores& scores, int group) {
    const int of_group = scores.args.rule.experts / scores.args.rule.groups;
    float best = -INFINITY, second = -INFINITY;
    for (int e = group * of_group; e < (group + 1) * of_group; ++e) {
      const float value = Value(scores, e);
      second = fmaxf(second, fminf(best, value));
      best = fmaxf(best, value);
    }
    return best + second;
  }

  // Bit i of lane l: whether group 32·i + l is used.
  static MESHFILL_DEVICE uint64_t UsedGroups(const TokenScores& scores) {
    const RouterRule& rule = scores.args.rule;
    const auto value_of = [&](int group) { return GroupValue(scores, group); };
    const Pick last = LastOfBest(rule.used_groups, rule.groups, value_of);
    uint64_t used = 0;
    for (int i = 0, group = static_cast<int>(Layer::Lane()); group < rule.groups; ++i, group += 32) {
      if (!Before(last, {value_of(group), group})) used |= uint64_t{1} << i;
    }
    return used;
  }

  // The `wanted`-th in the order of choice, of numbers 0 … count − 1. All lanes call value_of together.
  template <class ValueOf>
  static MESHFILL_DEVICE Pick LastOfBest(int wanted, int count, const ValueOf& value_of) {
    Pick last{INFINITY, -1};
    for (int round = 0; round < wanted; ++round) {
      Pick best{-INFINITY, count};
      for (int first = 0; first < count; first += 32) {
        const int number = first + static_cast<int>(Layer::Lane());
        const Pick pick{value_of(Smaller(number, count - 1)), number};
        if (number < count && Before(last, pick) && Before(pick, best)) best = pick;
      }
      for (uint32_t mask = 16; mask > 0; mask /= 2) {
        const uint32_t lane = Layer::Lane() ^ mask;
        const Pick other{Machine::Shuffle(best.value, lane), Machine::Shuffle(best.number, lane)};
        if (Before(other, best)) best = other;
      }
      last = best;
    }
    return last;
  }
};

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CUDA_EXPERT_KERNELS_CUH_
