#include "server/pool/run_plan.h"

#include <algorithm>
#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/return_if_error.h"
#include "kernels/word_hash.h"

namespace meshfill {
namespace {

absl::StatusOr<std::optional<Traffic>> ParseComm(const std::string& name) {
  for (std::optional<Traffic> comm : {std::optional<Traffic>(), std::optional(Traffic::kQ),
                                      std::optional(Traffic::kKv), std::optional(Traffic::kO)}) {
    if (name == CommName(comm)) return comm;
  }
  return absl::InvalidArgumentError(absl::StrCat("a step of the plan communicates \"", name, "\""));
}

absl::StatusOr<DType> ParsePartialDType(const std::string& name) {
  for (DType dtype : {DType::kF32, DType::kBf16}) {
    if (name == DTypeName(dtype)) return dtype;
  }
  return absl::InvalidArgumentError(absl::StrCat("a plan with partial outputs in \"", name, "\""));
}

// True for an empty list or a permutation of [0, ranks).
bool IsPermutation(const google::protobuf::RepeatedField<uint32_t>& seats, int ranks) {
  if (seats.empty()) return true;
  std::vector<uint32_t> sorted(seats.begin(), seats.end());
  std::sort(sorted.begin(), sorted.end());
  for (size_t seat = 0; seat < sorted.size(); ++seat) {
    if (sorted[seat] != seat) return false;
  }
  return std::ssize(sorted) == ranks;
}

}  // namespace

v1::RunPlan ToRunPlan(const Plan& plan) {
  v1::RunPlan message;
  message.set_layout(LayoutName(plan.layout.kind()));
  message.set_ranks(static_cast<uint32_t>(plan.ranks()));
  message.set_tokens(static_cast<uint64_t>(plan.layout.tokens()));
  message.set_stripe(static_cast<uint64_t>(plan.layout.stripe()));
  message.set_heads(static_cast<uint32_t>(plan.heads));
  message.set_a(static_cast<uint32_t>(plan.tile.a));
  message.set_b(static_cast<uint32_t>(plan.tile.b));
  message.set_kv_inner(static_cast<uint32_t>(plan.kv_inner));
  message.set_partial_dtype(DTypeName(plan.partial_dtype));
  for (const Step& step : plan.schedule.steps) {
    v1::RunPlan::Step& step_message = *message.add_steps();
    step_message.set_comm(CommName(step.comm));
    step_message.set_spans(static_cast<uint32_t>(step.spans));
    for (const BlockIndex& block : step.blocks) {
      step_message.add_blocks(static_cast<uint32_t>(block.u));
      step_message.add_blocks(static_cast<uint32_t>(block.v));
    }
  }
  message.set_cached_tokens(static_cast<uint64_t>(plan.cached_tokens));
  message.set_predicted_seconds(plan.predicted.seconds);
  message.set_slice_tokens(static_cast<uint64_t>(plan.slice_tokens));
  message.set_exchange_tokens(static_cast<uint64_t>(plan.exchange_tokens));
  message.mutable_seats()->Assign(plan.placement.seat_of_rank.begin(), plan.placement.seat_of_rank.end());
  return message;
}

absl::StatusOr<Plan> FromRunPlan(const v1::RunPlan& message) {
  ASSIGN_OR_RETURN(const auto kind, ParseLayout(message.layout()));
  if (message.ranks() > kMaxPlanRanks || message.heads() > kMaxPlanRanks || message.a() > kMaxPlanRanks ||
      message.b() > kMaxPlanRanks || message.a() == 0 || message.b() == 0 ||
      uint64_t{message.heads()} * message.a() * message.b() != message.ranks()) {
    return absl::InvalidArgumentError(absl::StrCat("a plan of ", message.heads(), " head groups and tile ",
                                                   message.a(), "x", message.b(), " for ", message.ranks(),
                                                   " ranks"));
  }
  if (message.tokens() > std::numeric_limits<int32_t>::max() ||
      message.cached_tokens() > std::numeric_limits<int32_t>::max() ||
      message.tokens() + message.cached_tokens() > std::numeric_limits<int32_t>::max() ||
      message.stripe() > std::numeric_limits<int32_t>::max() ||
      message.exchange_tokens() > std::numeric_limits<int32_t>::max()) {
    return absl::InvalidArgumentError("a plan of more than 2^31 tokens");
  }
  if (message.slice_tokens() < 1 || message.slice_tokens() > std::numeric_limits<int32_t>::max()) {
    return absl::InvalidArgumentError(
        absl::StrCat("a plan in slices of ", message.slice_tokens(), " tokens"));
  }
  ASSIGN_OR_RETURN(const auto layout, TokenLayout::Make(kind, static_cast<int>(message.ranks()),
                                                        static_cast<int64_t>(message.tokens()),
                                                        static_cast<int64_t>(message.stripe())));
  const Tile tile{static_cast<int>(message.a()), static_cast<int>(message.b())};
  if (message.kv_inner() > kMaxPlanRanks) {
    return absl::InvalidArgumentError(absl::StrCat("a plan with KV rings of ", message.kv_inner(), " ranks"));
  }
  const int kv_inner = static_cast<int>(message.kv_inner());
  Schedule schedule{.tile = tile, .steps = {}, .kv_inner = kv_inner};
  for (const v1::RunPlan::Step& step_message : message.steps()) {
    ASSIGN_OR_RETURN(const auto comm, ParseComm(step_message.comm()));
    if (step_message.blocks_size() % 2 != 0) {
      return absl::InvalidArgumentError("a plan with a block that has a row and no column");
    }
    if (step_message.spans() > static_cast<uint32_t>(message.steps_size())) {
      return absl::InvalidArgumentError(absl::StrCat(
          "a plan of ", message.steps_size(), " steps, with a communication of ", step_message.spans()));
    }
    Step step{.comm = comm, .blocks = {}, .spans = static_cast<int>(step_message.spans())};
    for (int i = 0; i < step_message.blocks_size(); i += 2) {
      const uint32_t u = step_message.blocks(i), v = step_message.blocks(i + 1);
      if (u >= message.a() || v >= message.b()) {
        return absl::InvalidArgumentError(
            absl::StrCat("a plan with block (", u, ", ", v, ") outside its tile"));
      }
      step.blocks.push_back({static_cast<int>(u), static_cast<int>(v)});
    }
    schedule.steps.push_back(std::move(step));
  }
  RETURN_IF_ERROR(CheckSchedule(schedule));
  ASSIGN_OR_RETURN(const DType partial_dtype, ParsePartialDType(message.partial_dtype()));
  const PlanShape shape{.layout = layout,
                        .heads = static_cast<int>(message.heads()),
                        .tile = tile,
                        .kv_inner = kv_inner,
                        .partial_dtype = partial_dtype,
                        .cached_tokens = static_cast<int64_t>(message.cached_tokens()),
                        .exchange_tokens = static_cast<int64_t>(message.exchange_tokens())};
  if (message.exchange_tokens() % message.slice_tokens() != 0 || shape.exchanges() > kMostExchanges) {
    return absl::InvalidArgumentError(absl::StrCat("a plan in slices of ", message.slice_tokens(),
                                                   " tokens, ", message.exchange_tokens(),
                                                   " of which are exchanged at once"));
  }
  Plan plan{shape, static_cast<int64_t>(message.slice_tokens()), {}, std::move(schedule), {}};
  plan.predicted.seconds = message.predicted_seconds();
  if (!IsPermutation(message.seats(), plan.ranks())) {
    return absl::InvalidArgumentError("a plan that does not give each of its ranks a seat of its own");
  }
  plan.placement.seat_of_rank.assign(message.seats().begin(), message.seats().end());
  return plan;
}

uint64_t RunHash(const Plan& plan, int first_rank, std::span<const std::vector<uint32_t>> shards) {
  WordHash hash;
  for (int64_t word : {int64_t{plan.ranks()}, plan.layout.tokens(), plan.layout.stripe(),
                       static_cast<int64_t>(plan.layout.kind()), int64_t{plan.heads}, int64_t{plan.tile.a},
                       int64_t{plan.tile.b}, int64_t{plan.kv_inner}, static_cast<int64_t>(plan.partial_dtype),
                       plan.cached_tokens, plan.slice_tokens, plan.exchange_tokens, int64_t{first_rank},
                       static_cast<int64_t>(shards.size())}) {
    hash.Add(static_cast<uint64_t>(word));
  }
  for (int rank = 0; rank < plan.ranks(); ++rank) hash.Add(static_cast<uint64_t>(plan.SeatOf(rank)));
  for (const Step& step : plan.schedule.steps) {
    hash.Add(uint64_t{step.comm.has_value() ? static_cast<uint32_t>(*step.comm) + 1 : 0} << 32 |
             step.blocks.size());
    hash.Add(static_cast<uint64_t>(step.spans));
    for (const BlockIndex& block : step.blocks) {
      hash.Add(static_cast<uint64_t>(block.u) << 32 | static_cast<uint32_t>(block.v));
    }
  }
  for (const std::vector<uint32_t>& shard : shards) {
    hash.Add(shard.size());
    for (uint32_t id : shard) hash.Add(id);
  }
  return hash.Finish();
}

uint64_t DataPlaneRun(uint64_t epoch, uint64_t run, Traffic traffic) {
  WordHash hash;
  hash.Add(epoch);
  hash.Add(run);
  hash.Add(static_cast<uint64_t>(traffic));
  return hash.Finish();
}

v1::RankRunStats ToProto(const RankStats& stats) {
  v1::RankRunStats message;
  message.set_attention_seconds(stats.attention_seconds);
  message.set_block_seconds(stats.block_seconds);
  message.set_merge_seconds(stats.merge_seconds);
  for (Traffic traffic : kPrefillTraffics) message.add_wait_seconds(stats.wait_seconds[traffic]);
  message.set_total_seconds(stats.total_seconds);
  message.set_sent_q_bytes(static_cast<uint64_t>(stats.sent[Traffic::kQ]));
  message.set_sent_kv_bytes(static_cast<uint64_t>(stats.sent[Traffic::kKv]));
  message.set_sent_o_bytes(static_cast<uint64_t>(stats.sent[Traffic::kO]));
  message.set_sent_all_to_all_bytes(static_cast<uint64_t>(stats.sent[Traffic::kAllToAll]));
  message.set_sent_gather_bytes(static_cast<uint64_t>(stats.sent[Traffic::kGather]));
  message.set_blocks(static_cast<uint64_t>(stats.blocks));
  message.mutable_tokens_per_expert()->Assign(stats.tokens_per_expert.begin(), stats.tokens_per_expert.end());
  return message;
}

RankStats FromProto(const v1::RankRunStats& message) {
  RankStats stats;
  stats.attention_seconds = message.attention_seconds();
  stats.block_seconds = message.block_seconds();
  stats.merge_seconds = message.merge_seconds();
  const int waits = std::min<int>(std::ssize(kPrefillTraffics), message.wait_seconds_size());
  for (int i = 0; i < waits; ++i) stats.wait_seconds[kPrefillTraffics[i]] = message.wait_seconds(i);
  stats.total_seconds = message.total_seconds();
  stats.sent = {{Traffic::kQ, static_cast<int64_t>(message.sent_q_bytes())},
                {Traffic::kKv, static_cast<int64_t>(message.sent_kv_bytes())},
                {Traffic::kO, static_cast<int64_t>(message.sent_o_bytes())},
                {Traffic::kAllToAll, static_cast<int64_t>(message.sent_all_to_all_bytes())},
                {Traffic::kGather, static_cast<int64_t>(message.sent_gather_bytes())}};
  stats.blocks = static_cast<int64_t>(message.blocks());
  stats.tokens_per_expert.assign(message.tokens_per_expert().begin(), message.tokens_per_expert().end());
  return stats;
}

MeasuredLinks ToProto(std::span<const std::optional<Link>> links) {
  MeasuredLinks messages;
  for (const std::optional<Link>& link : links) {
    v1::MeasuredLink& message = *messages.Add();
    if (!link.has_value()) continue;
    message.set_bytes_per_second(link->bytes_per_second);
    message.set_latency_seconds(link->latency_seconds);
  }
  return messages;
}

std::vector<std::optional<Link>> FromProto(const MeasuredLinks& messages) {
  std::vector<std::optional<Link>> links;
  for (const v1::MeasuredLink& message : messages) {
    std::optional<Link>& link = links.emplace_back();
    if (message.bytes_per_second() == 0 && message.latency_seconds() == 0) continue;
    link = {.latency_seconds = message.latency_seconds(), .bytes_per_second = message.bytes_per_second()};
  }
  return links;
}

v1::Outcome ToOutcome(const absl::Status& status) {
  constexpr size_t kMostCharacters = 1024;
  v1::Outcome outcome;
  outcome.set_code(static_cast<int32_t>(status.code()));
  outcome.set_message(std::string(status.message().substr(0, kMostCharacters)));
  return outcome;
}

absl::Status FromOutcome(const v1::Outcome& outcome) {
  return absl::Status(static_cast<absl::StatusCode>(outcome.code()), outcome.message());
}

}  // namespace meshfill
