#include "engine/sim/head_groups.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/model/model_shape.h"

namespace meshfill::sim {
namespace {

// The longest chunk of `chunks` even ones.
int64_t ChunkTokens(int64_t tokens, int chunks) { return (tokens + chunks - 1) / chunks; }

}  // namespace

HeadGroups::HeadGroups(const AttentionJob& job, int heads, int places)
    : job_(job),
      heads_(heads),
      places_(places),
      share_(ChunkBytesOf(job, ChunkTokens(job.tokens, heads * places), job.q_heads, job.kv_heads)),
      chunk_(ChunkBytesOf(job, heads * ChunkTokens(job.tokens, heads * places), job.q_heads / heads,
                          std::max(1, job.kv_heads / heads))) {}

double HeadGroups::BlockFlops(Pass pass) const {
  return job_.Flops(pass) / heads_ / (static_cast<double>(places_) * places_);
}

std::vector<int> HeadGroups::InEveryMesh(const std::vector<int>& from) const {
  std::vector<int> all(ranks());
  for (int rank = 0; rank < ranks(); ++rank) all[rank] = from[rank / heads_] * heads_ + rank % heads_;
  return all;
}

void HeadGroups::Exchange(ProgramBuilder& builder, std::initializer_list<int64_t> tensor_bytes) const {
  std::vector<int> channels;
  for (int shift = 1; shift < heads_; ++shift) {
    std::vector<int> from(ranks());
    for (int rank = 0; rank < ranks(); ++rank) {
      from[rank] = rank / heads_ * heads_ + (rank + heads_ - shift) % heads_;
    }
    channels.push_back(builder.AddChannel(Traffic::kAllToAll, std::move(from)));
  }
  for (const int64_t bytes : tensor_bytes) {
    for (int channel : channels) builder.Start(channel, bytes / heads_);
    for (int channel : channels) builder.Wait(channel);
  }
}

absl::Status CheckHeadGroups(const AttentionJob& job, int heads) {
  const ModelShape model = {.q_heads = job.q_heads, .kv_heads = job.kv_heads};
  if (model.CanSplitHeads(heads)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(heads, " head groups cannot share ", job.q_heads,
                                                 " query heads and ", job.kv_heads, " KV heads"));
}

}  // namespace meshfill::sim
