// What tests of programs simulate.
#ifndef MESHFILL_TESTS_ENGINE_SIM_TABLE_JOB_H_
#define MESHFILL_TESTS_ENGINE_SIM_TABLE_JOB_H_

#include <cstdint>

#include "engine/sim/attention_job.h"
#include "engine/sim/cluster.h"

namespace meshfill::sim {

inline constexpr Cluster kCluster{.gpus_per_node = 8,
                                  .same_node = {.latency_seconds = 1e-6, .bytes_per_second = 1e11},
                                  .between_nodes = {.latency_seconds = 1e-5, .bytes_per_second = 1e10},
                                  .node_bytes_per_second = 2e10,
                                  .attention_flops_per_second = 1e14};

// As Table 2 counts: one byte a number, no LSE, so that Nd is tokens · heads · head_dim bytes.
inline AttentionJob TableJob(int n, int kv_heads = 64) {
  return {.tokens = 64 * n,
          .q_heads = 64,
          .kv_heads = kv_heads,
          .head_dim = 16,
          .wire = {.element = 1, .partial = 1, .gradient = 1, .lse = 0}};
}

inline int64_t Nd(const AttentionJob& job) { return job.tokens * job.q_heads * job.head_dim; }

}  // namespace meshfill::sim

#endif  // MESHFILL_TESTS_ENGINE_SIM_TABLE_JOB_H_
