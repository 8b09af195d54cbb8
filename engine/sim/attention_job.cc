#include "engine/sim/attention_job.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace meshfill::sim {
namespace {

// Of Q at its widest. O, dO, Q and LSE of a chunk take four times as much at most, and all that a rank holds
// or sends at once, of all tokens, 16 times: int64 counts that.
constexpr double kMostTensorBytes = 0x1p58;

}  // namespace

const char* PassName(Pass pass) { return pass == Pass::kForward ? "forward" : "backward"; }

double AttentionJob::Flops(Pass pass) const {
  const double pairs = static_cast<double>(tokens) * static_cast<double>(tokens) * (causal ? 0.5 : 1.0);
  const double products = pass == Pass::kForward ? 2 : 5;
  return 2.0 * products * head_dim * q_heads * pairs;
}

absl::Status CheckJob(const AttentionJob& job) {
  if (job.tokens < 1 || job.q_heads < 1 || job.kv_heads < 1 || job.head_dim < 1) {
    return absl::InvalidArgumentError(absl::StrCat("attention: ", job.tokens, " tokens, ", job.q_heads,
                                                   " query heads and ", job.kv_heads, " KV heads of ",
                                                   job.head_dim, "; each must be at least 1"));
  }
  if (job.tokens >= int64_t{1} << 31) {
    return absl::InvalidArgumentError(
        absl::StrCat("attention: ", job.tokens, " tokens; use fewer than 2^31"));
  }
  if (job.q_heads % job.kv_heads != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "attention: ", job.kv_heads, " KV heads do not divide the ", job.q_heads, " query heads"));
  }
  if (job.wire.element < 1 || job.wire.partial < 1 || job.wire.gradient < 1 || job.wire.lse < 0) {
    return absl::InvalidArgumentError("attention: a number on the wire takes at least 1 byte");
  }
  const int widest = std::max({4, job.wire.element, job.wire.partial, job.wire.gradient, job.wire.lse});
  const double numbers = static_cast<double>(job.tokens) * job.q_heads * job.head_dim;
  if (numbers * widest >= kMostTensorBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("attention: ", job.tokens, " tokens of ", job.q_heads, " query heads of ", job.head_dim,
                     " are too many bytes to count; lower the tokens, the heads or head_dim"));
  }
  return absl::OkStatus();
}

ChunkBytes ChunkBytesOf(const AttentionJob& job, int64_t tokens, int q_heads, int kv_heads) {
  const int64_t q_numbers = tokens * q_heads * job.head_dim;
  const int64_t kv_numbers = 2 * tokens * kv_heads * job.head_dim;
  const int64_t lse = tokens * q_heads * job.wire.lse;
  return {.q = q_numbers * job.wire.element,
          .kv = kv_numbers * job.wire.element,
          .o = q_numbers * job.wire.partial + lse,
          .o_finished = q_numbers * job.wire.element,
          .o_state = q_numbers * 4 + tokens * q_heads * 4,
          .odoq = 3 * q_numbers * job.wire.element + lse,
          .dq = q_numbers * job.wire.gradient,
          .dkv = kv_numbers * job.wire.gradient};
}

}  // namespace meshfill::sim
