// An MLP of experts: for each token, a router chooses some of many small MLPs and says what each one counts.
//
// All tokens of a slice go through their experts at once: their rows are sorted by expert, so that each
// expert's are one product. No token is dropped, however many choose the same expert.
//
//     tokens   0      1      2           used = 2
//     experts  {1,3}  {0,3}  {1,3}
//     rows     0      1  2   3  4  5      sorted by expert, then by token
//     expert   0      1  1   3  3  3      begin = {0, 1, 3, 3, 6}: expert 2 has none
//     token    1      0  2   0  1  2
#ifndef MESHFILL_KERNELS_EXPERTS_H_
#define MESHFILL_KERNELS_EXPERTS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "kernels/activation.h"
#include "kernels/buffer.h"
#include "kernels/device.h"

namespace meshfill {

enum class RouterScore {
  kSoftmax,  // a softmax over all experts' logits
  kSigmoid,  // a sigmoid of each expert's own logit
};

// How a router chooses. A choice goes by score plus correction, ties to the lower number; a chosen expert's
// weight is its score without the correction.
struct RouterRule {
  RouterScore score = RouterScore::kSoftmax;
  int experts = 0;
  int used = 0;  // 1 to the experts of the used groups
  // Experts come in groups of as many each. Those groups are used whose two best experts have the largest
  // sums, and their experts alone may be chosen.
  int groups = 1;  // divides the experts; above 1: at least two experts in each
  int used_groups = 1;
  bool normalised = false;  // the weights of a token are divided by their sum
  float scale = 1;          // factor on the weights of a token, after that
  bool operator==(const RouterRule&) const = default;
};

// Where the rows of `tokens` tokens lie once they are sorted by expert, in one piece of the device's memory.
struct ExpertRows {
  int32_t* begin;  // [experts + 1]: expert e has the rows from begin[e] to begin[e + 1]
  int32_t* token;  // [tokens · used], by row
  int32_t* row;    // [tokens, used], by rising expert
  float* weight;   // [tokens, used], in the order of `row`
};

// Bytes of an ExpertRows; 0 without experts.
constexpr int64_t ExpertRowsBytes(int experts, int used, int64_t tokens) {
  return experts == 0 ? 0 : 4 * (experts + 1 + 3 * tokens * used);
}

inline ExpertRows ExpertRowsIn(void* memory, int experts, int used, int64_t tokens) {
  auto* const begin = static_cast<int32_t*>(memory);
  int32_t* const token = begin + experts + 1;
  int32_t* const row = token + tokens * used;
  return {
      .begin = begin, .token = token, .row = row, .weight = reinterpret_cast<float*>(row + tokens * used)};
}

struct RouteArgs {
  const float* logits;                // [tokens, experts]
  const float* correction = nullptr;  // [experts] or null
  int64_t tokens;
  RouterRule rule;
  ExpertRows rows;                       // written
  int32_t* tokens_per_expert = nullptr;  // [experts], or null: how many tokens went to each is added
};

// For each row, with the weights and biases of its expert:
//     y[row] = down · activation(gate_up · x[token of row] + bias) + bias
// Each product and the activation are rounded to the compute dtype.
struct ExpertMlpArgs {
  // By expert, all of one shape, with biases or without.
  std::span<const std::unique_ptr<PackedWeight>> gate_up;  // [2·width, hidden]
  std::span<const std::unique_ptr<PackedWeight>> down;     // [hidden, width]
  ExpertRows rows;
  int64_t row_count;  // tokens · used
  GatedActivation activation;
  const void* x;  // [tokens, hidden], compute dtype
  void* narrow;   // [row_count, width], compute dtype: scratch
  void* y;        // [row_count, hidden], compute dtype; before, scratch of [row_count, 2·width]
};

// One of an MLP's two products, where a device computes them one after the other: y[row] = W x[row] + bias.
struct ExpertGemmArgs {
  std::span<const std::unique_ptr<PackedWeight>>
      weights;  // by expert, all of one shape, with biases or without
  ExpertRows rows;
  int64_t row_count;  // tokens · used
  bool by_token;      // x has a row for each token, which those of its experts read; else for each row
  const void* x;      // [tokens or row_count, in_features], compute dtype
  void* y;            // [row_count, out_features], compute dtype
};

inline ExpertGemmArgs GateUpProductOf(const ExpertMlpArgs& mlp) {
  return {.weights = mlp.gate_up,
          .rows = mlp.rows,
          .row_count = mlp.row_count,
          .by_token = true,
          .x = mlp.x,
          .y = mlp.y};
}

inline ActivateArgs ActivationOf(const ExpertMlpArgs& mlp) {
  return {.activation = mlp.activation,
          .x = mlp.y,
          .tokens = mlp.row_count,
          .width = mlp.down.front()->in_features(),
          .y = mlp.narrow};
}

inline ExpertGemmArgs DownProductOf(const ExpertMlpArgs& mlp) {
  return {.weights = mlp.down,
          .rows = mlp.rows,
          .row_count = mlp.row_count,
          .by_token = false,
          .x = mlp.narrow,
          .y = mlp.y};
}

// x[t] += Σ weight · y[row] over the token's experts, in f32 and by rising expert.
struct AddExpertsArgs {
  const void* y;  // [tokens · used, width], compute dtype
  ExpertRows rows;
  int64_t tokens;
  int used;
  int64_t width;
  float* x;  // [tokens, width]
};

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_EXPERTS_H_
