// What stands between the two products of an MLP.
#ifndef MESHFILL_KERNELS_ACTIVATION_H_
#define MESHFILL_KERNELS_ACTIVATION_H_

#include <cstdint>

namespace meshfill {

enum class Gating {
  kSwiGlu,  // silu(gate) · up
  // gelu(gate) · up, in its tanh form: gelu(g) = g/2 · (1 + tanh(√(2/π)·(g + 0.044715·g³)))
  kGeGlu,
  // gpt-oss's: g · sigmoid(alpha · g) · (u + 1), with g = min(gate, limit), u = up within ±limit
  kClampedSwiGlu,
};

struct GatedActivation {
  Gating gating = Gating::kSwiGlu;
  float alpha = 0;  // of kClampedSwiGlu alone
  float limit = 0;
};

// y = activation(x), computed in f32, rounded once.
struct ActivateArgs {
  GatedActivation activation;
  // Compute dtype: [tokens, 2, width], gates before ups; kClampedSwiGlu: [tokens, width, 2], each gate beside
  // its up.
  const void* x;
  int64_t tokens;
  int64_t width;
  void* y;  // [tokens, width], compute dtype
};

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_ACTIVATION_H_
