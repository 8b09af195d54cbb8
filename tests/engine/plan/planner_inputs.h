// What tests of the planner share: a small model, and a pool whose links are slow.
#ifndef MESHFILL_TESTS_ENGINE_PLAN_PLANNER_INPUTS_H_
#define MESHFILL_TESTS_ENGINE_PLAN_PLANNER_INPUTS_H_

#include <string>

#include "engine/plan/planner.h"

namespace meshfill {

inline ModelShape Llama(int q_heads, int kv_heads, DType dtype) {
  return {.layers = 4,
          .hidden = 512,
          .intermediate = 1024,
          .q_heads = q_heads,
          .kv_heads = kv_heads,
          .head_dim = 64,
          .vocab = 1000,
          .context_tokens = 1 << 20,
          .dtype = dtype};
}

// A link so slow that bytes decide.
inline constexpr PoolSpeed kSlowLink = {.gemm_flops_per_second = 1e12,
                                        .attention_flops_per_second = 1e15,
                                        .merge_bytes_per_second = 1e15,
                                        .link_bytes_per_second = 1e9,
                                        .link_latency_seconds = 1e-6};

inline bool Mentions(const absl::Status& status, const std::string& what) {
  return status.message().find(what) != std::string::npos;
}

}  // namespace meshfill

#endif  // MESHFILL_TESTS_ENGINE_PLAN_PLANNER_INPUTS_H_
