// The attention block on the CPU, chosen at run time for the instructions that the machine has.
#ifndef MESHFILL_KERNELS_CPU_ATTENTION_H_
#define MESHFILL_KERNELS_CPU_ATTENTION_H_

#include <string>
#include <vector>

#include "kernels/cpu/thread_pool.h"
#include "kernels/stream.h"

namespace meshfill {

// Instruction sets that have a kernel of their own, widest first: "amx_bf16", "avx512_bf16", "avx512",
// "avx2", "portable". The first two differ from avx512 for bf16 inputs only.
std::vector<std::string> SupportedAttentionTargets();  // targets that this machine can run

// Stream::AttentionBlock for `dtype` inputs, f32 or bf16. `target` is one of SupportedAttentionTargets();
// args.scale is positive. CANCELLED when `stop` (may be null) is raised: every thread looks at it before each
// block of at most 256 keys, so within a few milliseconds. INVALID_ARGUMENT for another dtype, target or
// scale, RESOURCE_EXHAUSTED where the scratch, about 1 MiB a thread, cannot be had. Same inputs and target:
// same bits, for any number of threads.
absl::Status CpuAttentionBlock(const AttentionBlockArgs& args, DType dtype, const std::string& target,
                               ThreadPool& pool, const StopToken* stop);

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CPU_ATTENTION_H_
