// Short prompts that share one pass: the tokens of several go through the weights together, so that these are
// read once for all of them. Attention is each prompt's own.
//
// A prompt of a pass is computed whole by one rank; a rank has as many as its room holds:
//
//     rank 0    prompt 0 (300 tokens) | prompt 3 (80)
//     rank 1    prompt 1 (200)        | prompt 2 (180)
//
// Who decides that prompts share a pass and who runs it deal them alike, by Pack.
#ifndef MESHFILL_ENGINE_PLAN_PACK_H_
#define MESHFILL_ENGINE_PLAN_PACK_H_

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <vector>

#include "engine/model/model_shape.h"
#include "engine/plan/plan.h"
#include "engine/plan/rank_speed.h"
#include "engine/plan/speed_correction.h"

namespace meshfill {

// What a prompt brings to a pass, in predicted seconds.
struct PackShare {
  int64_t tokens = 0;        // that it computes, behind what is cached; 0: it runs in a pass of its own
  int64_t bytes = 0;         // of memory that it adds on its rank, without what a pass takes once
  double least_seconds = 0;  // the pass takes at least so long: weights stream past
  double pass_seconds = 0;   // what a pass takes once, whoever is in it
  double added_seconds = 0;  // what the prompt adds to that on its rank
  bool operator==(const PackShare&) const = default;
};

// Of a prompt whose plan for one rank is `plan`, made with `speed` and corrected by `factors`. A pass takes
// `pass_bytes` of a rank once.
PackShare PackShareOf(const ModelShape& model, const PoolSpeed& speed, const PartFactors& factors,
                      const Plan& plan, int64_t pass_bytes);

// What one pass holds.
struct PackRoom {
  int ranks = 0;                                             // 0: no prompts share one
  int64_t rank_tokens = 0;                                   // on each rank
  int64_t rank_bytes = std::numeric_limits<int64_t>::max();  // on each rank
  bool operator==(const PackRoom&) const = default;
};

// The most tokens of several prompts on a rank: `most`, or half of that, and so on, as `fits` has it. 0:
// none.
int64_t LargestPackTokens(int64_t most, const std::function<bool(int64_t tokens)>& fits);

// One pass, as prompts come to it.
class Pack {
 public:
  explicit Pack(const PackRoom& room);

  // The rank that the prompt goes to: of those with room for it the one that has fewest tokens, the first of
  // several. nullopt: there is none, or the prompt shares no pass; nothing changes then.
  std::optional<int> Add(const PackShare& share);
  // Until the pass, and each prompt in it, ends.
  double seconds() const;

 private:
  struct Rank {
    int64_t tokens = 0;
    int64_t bytes = 0;
    double added_seconds = 0;
  };
  const PackRoom room_;
  std::vector<Rank> ranks_;
  double least_seconds_ = 0;
  double pass_seconds_ = 0;
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_PLAN_PACK_H_
