#include "server/pool/pool_kv_reader.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/kv/lease_name.h"
#include "kernels/monotonic_time.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

constexpr absl::Duration kHolderTimeout = absl::Seconds(10);  // for a part that a holder has

std::string NameOf(const KvDirectory::Holder& holder) {
  return absl::StrCat("worker ", holder.name, " with rank", holder.ranks.size() > 1 ? "s " : " ",
                      absl::StrJoin(holder.ranks, ", "));
}

}  // namespace

PoolKvReader::PoolKvReader(const KvShape& shape, const KvFetch& fetch, std::string lease, std::string tenant,
                           Find find, HolderChannels& channels, std::function<void()> changed)
    : shape_(shape),
      fetch_(fetch),
      lease_(std::move(lease)),
      tenant_(std::move(tenant)),
      find_(std::move(find)),
      channels_(channels),
      changed_(std::move(changed)),
      layer_(fetch.first_layer),
      token_(fetch.range.first_token) {}

int64_t PoolKvReader::part_tokens() const { return std::min(fetch_.part_tokens, end_token() - token_); }

// Calls to the holders that have tokens of the range.
void PoolKvReader::Open(const KvDirectory::Place& place) {
  sources_.clear();
  source_of_rank_.assign(place.layout.ranks(), -1);
  gathered_tokens_ = 0;
  v1::FetchKvRequest request;
  request.set_lease(lease_);
  request.set_first_token(static_cast<uint64_t>(fetch_.range.first_token));
  request.set_tokens(static_cast<uint64_t>(fetch_.range.tokens));
  request.set_first_layer(static_cast<uint32_t>(fetch_.first_layer));
  request.set_layers(static_cast<uint32_t>(fetch_.layers));
  request.set_first_head(static_cast<uint32_t>(fetch_.range.first_head));
  request.set_heads(static_cast<uint32_t>(fetch_.range.heads));
  for (const KvDirectory::Holder& holder : place.holders) {
    for (const int rank : holder.ranks) source_of_rank_[rank] = static_cast<int>(sources_.size());
    sources_.push_back({.name = NameOf(holder), .call = nullptr});
  }
  std::vector<bool> wanted(sources_.size());
  const int64_t stripe = place.layout.stripe();
  for (int64_t token = token_; token < end_token(); token = (token / stripe + 1) * stripe) {
    wanted[source_of_rank_[place.layout.RankOf(token)]] = true;
  }
  for (size_t i = 0; i < sources_.size(); ++i) {
    if (wanted[i]) sources_[i].call = channels_.Fetch(place.holders[i].address, request, tenant_, changed_);
  }
}

absl::StatusOr<KvReader::Next> PoolKvReader::Take(v1::KvPart& part) {
  if (layer_ == fetch_.first_layer + fetch_.layers) return Next::kEnd;  // whatever becomes of the lease
  ASSIGN_OR_RETURN(Found found, find_(run_));
  if (found.view.run != run_) {
    if (begun_) {
      return absl::UnavailableError(absl::StrCat(
          "lease ", ShownLease(lease_), ": its prefill was begun again, and so are its K and V, because ",
          found.view.last_failure, "; fetch them again"));
    }
    run_ = found.view.run;
    place_ = std::move(found.place);
    sources_.clear();
    if (run_ != 0) Open(*place_);
  }
  if (run_ == 0) return Next::kNotYet;
  if (gathered_ == nullptr) {
    gathered_.reset(new std::byte[static_cast<size_t>(2 * fetch_.part_tokens * row_bytes())]);
  }
  ASSIGN_OR_RETURN(const bool whole, Gather());
  if (!whole) {
    const int64_t token = token_ + gathered_tokens_;
    RETURN_IF_ERROR(
        CheckWait(sources_[source_of_rank_[place_->layout.RankOf(token)]], found.view.layers_done));
    return Next::kNotYet;
  }
  RETURN_IF_ERROR(Deliver(part));
  begun_ = true;
  return Next::kPart;
}

int64_t PoolKvReader::held_bytes() const {
  const int64_t part_bytes = 2 * std::min(fetch_.part_tokens, fetch_.range.tokens) * row_bytes();
  const auto calls = std::count_if(sources_.begin(), sources_.end(),
                                   [](const Source& source) { return source.call != nullptr; });
  return part_bytes * (1 + calls);
}

absl::StatusOr<bool> PoolKvReader::Gather() {
  const int64_t tokens = part_tokens();
  while (gathered_tokens_ < tokens) {
    const int64_t token = token_ + gathered_tokens_;
    Source& source = sources_[source_of_rank_[place_->layout.RankOf(token)]];
    const v1::KvPart* come = source.call->part();
    if (come == nullptr) {
      if (const std::optional<absl::Status> end = source.call->end()) return WhyItEnded(source, *end);
      return false;
    }
    RETURN_IF_ERROR(CheckPart(*come, source, token));
    const int64_t count =
        std::min(static_cast<int64_t>(come->tokens()) - source.taken_tokens, tokens - gathered_tokens_);
    const auto bytes = static_cast<size_t>(count * row_bytes());
    const int64_t from = source.taken_tokens * row_bytes(), to = gathered_tokens_ * row_bytes();
    std::memcpy(gathered_.get() + to, come->k().data() + from, bytes);
    std::memcpy(gathered_.get() + tokens * row_bytes() + to, come->v().data() + from, bytes);
    gathered_tokens_ += count;
    source.taken_tokens += count;
    waiting_since_ = absl::InfiniteFuture();
    if (source.taken_tokens < static_cast<int64_t>(come->tokens())) continue;
    source.taken_tokens = 0;
    source.call->Next();
  }
  return true;
}

absl::Status PoolKvReader::CheckPart(const v1::KvPart& part, const Source& source, int64_t token) const {
  const auto bytes = static_cast<size_t>(static_cast<int64_t>(part.tokens()) * row_bytes());
  if (part.tokens() == 0 || part.tokens() > static_cast<uint64_t>(end_token()) ||
      part.layer() != static_cast<uint32_t>(layer_) ||
      part.first_token() + static_cast<uint64_t>(source.taken_tokens) != static_cast<uint64_t>(token) ||
      part.k().size() != bytes || part.v().size() != bytes) {
    return absl::DataLossError(absl::StrCat(source.name, " sent tokens ", part.first_token(), " to ",
                                            part.first_token() + part.tokens(), " of layer ", part.layer(),
                                            " in place of token ", token, " of layer ", layer_,
                                            "; fetch them again"));
  }
  if (source.taken_tokens > 0 || part.crc32c() == PartChecksum(part)) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("K and V of layer ", layer_, " from token ", part.first_token(),
                                          " on came from ", source.name,
                                          " with a wrong checksum; fetch them again"));
}

absl::Status PoolKvReader::WhyItEnded(const Source& source, const absl::Status& end) const {
  return absl::UnavailableError(absl::StrCat(source.name, " sent no more from layer ", layer_, ", token ",
                                             token_, " on: ", end.ok() ? "it ended early" : end.message(),
                                             "; ask for the rest again"));
}

absl::Status PoolKvReader::CheckWait(const Source& source, int layers_done) {
  if (layers_done <= layer_) return absl::OkStatus();  // its prefill has deadlines of its own
  const absl::Time now = MonotonicNow();
  waiting_since_ = std::min(waiting_since_, now);
  if (now - waiting_since_ < kHolderTimeout) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat(source.name, " has not sent layer ", layer_, " from token ", token_ + gathered_tokens_,
                   " on for ", absl::FormatDuration(kHolderTimeout), "; ask for the rest again"));
}

// What was gathered is as the slab of one rank that has the part's tokens and heads alone.
absl::Status PoolKvReader::Deliver(v1::KvPart& part) {
  const int64_t tokens = part_tokens();
  const auto run = std::make_shared<KvRunSlabs>(
      KvRunSlabs{.layout = TokenLayout::Make(LayoutKind::kContiguous, 1, tokens, tokens).value(),
                 .slabs = {},
                 .charges = {}});
  const KvShape shape = {
      .layers = 1, .kv_heads = fetch_.range.heads, .head_dim = shape_.head_dim, .dtype = shape_.dtype};
  run->slabs.emplace_back().push_back(
      std::make_unique<KvSlab>(KvSlabShape{.model = shape, .tokens = tokens}, gathered_.get()));
  const KvSlabs slabs{.shape = shape, .pieces = {{.first_token = 0, .tokens = tokens, .run = run}}};
  KvFetch fetch = fetch_;
  fetch.range.first_head = 0;
  RETURN_IF_ERROR(FillPart(fetch, slabs, /*layer=*/0, /*first_token=*/0, tokens, part));
  part.set_layer(static_cast<uint32_t>(layer_));
  part.set_first_token(static_cast<uint64_t>(token_));
  gathered_tokens_ = 0;
  token_ += tokens;
  if (token_ < end_token()) return absl::OkStatus();
  token_ = fetch_.range.first_token;
  ++layer_;
  return absl::OkStatus();
}

}  // namespace meshfill
