// What people read, in full: every figure with its unit, and what is left out where it is as usual.
#include "server/cli/result_text.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "meshfill/v1/prefill.pb.h"

namespace meshfill {
namespace {

TEST(FormatBytes, TakesTheUnitThatReadsBest) {
  EXPECT_EQ(FormatBytes(0), "0 B");
  EXPECT_EQ(FormatBytes(1023), "1023 B");
  EXPECT_EQ(FormatBytes(1024), "1.0 KiB");
  EXPECT_EQ(FormatBytes(1.5 * (1 << 20)), "1.5 MiB");
  EXPECT_EQ(FormatBytes(80.0 * (1 << 30)), "80.0 GiB");
  EXPECT_EQ(FormatBytes(2048.0 * 1024 * (1 << 30)), "2048.0 TiB");
}

TEST(FormatCount, GroupsDigitsInThrees) {
  EXPECT_EQ(FormatCount(0), "0");
  EXPECT_EQ(FormatCount(999), "999");
  EXPECT_EQ(FormatCount(1000), "1,000");
  EXPECT_EQ(FormatCount(123456), "123,456");
  EXPECT_EQ(FormatCount(1048576.4), "1,048,576");
}

v1::CommBytes Bytes(uint64_t unit) {
  v1::CommBytes bytes;
  bytes.set_q(unit);
  bytes.set_kv(2 * unit);
  bytes.set_o(4 * unit);
  bytes.set_all_to_all(8 * unit);
  bytes.set_gather(16 * unit);
  return bytes;
}

// One with all that is rare.
v1::PlanSummary RarePlan() {
  v1::PlanSummary plan;
  plan.set_ranks(12);
  plan.set_heads(2);
  plan.set_a(3);
  plan.set_b(2);
  plan.set_layout(v1::LAYOUT_STRIPED);
  plan.set_stripe(64);
  plan.set_partial_dtype("bf16");
  plan.set_placement("box 1x2x1");
  plan.set_kv_inner(4);
  plan.set_exchange_tokens(4096);
  plan.set_pieces(2);
  plan.set_piece_tokens(14080);
  return plan;
}

v1::PlanSummary PlainPlan() {
  v1::PlanSummary plan;
  plan.set_ranks(1);
  plan.set_heads(1);
  plan.set_a(1);
  plan.set_b(1);
  plan.set_layout(v1::LAYOUT_ZIGZAG);
  plan.set_partial_dtype("f32");
  plan.set_pieces(1);
  return plan;
}

TEST(PrefillText, SaysAllThatIsRare) {
  v1::PrefillResult result;
  result.set_request_id("r-1");
  result.set_tokens(1 << 20);
  result.set_cached_tokens(5120);
  result.set_first_token(17);
  for (const auto& [token, logit] : {std::pair{17u, 9.25f}, std::pair{3u, -1.5f}}) {
    v1::TokenLogit& best = *result.add_top();
    best.set_token(token);
    best.set_logit(logit);
  }
  v1::PrefillResult::Seconds& seconds = *result.mutable_seconds();
  seconds.set_queue(0.25);
  seconds.set_prefill(2);
  seconds.set_attention(0.5);
  seconds.set_comm_wait(0.125);
  result.set_attempts(2);
  result.set_pack_prompts(7);
  result.set_mfu(0.625);
  *result.mutable_plan() = RarePlan();
  *result.mutable_comm_bytes() = Bytes(1024);
  EXPECT_EQ(PrefillText(result, /*upload_seconds=*/0.75), R"(request         r-1
first token     17
top (logit)     17 (9.25)  3 (-1.5)
tokens          1,048,576, 5,120 of them cached
TTFT            3.0 s (upload 750 ms, queue 250 ms, prefill 2.0 s)
attempts        2, after the loss of workers
pack            7 prompts, in one pass over the weights
tokens/s        524,288
comm wait       125 ms, 25.0 % of attention (500 ms)
MFU             62.5 %
plan            12 ranks: 2 head groups of 3x2, striped in stripes of 64 tokens, partial outputs in bf16, ranks box 1x2x1 on a host
KV rings        of 4 ranks, beside one that leads from each to the next
exchange        by 4,096 tokens of each rank, beside the work on others
pieces          2 of 14,080 tokens, one after the other, to fit the memory
sent by a rank  31.0 KiB (Q 1.0 KiB, KV 2.0 KiB, O 4.0 KiB)
)");
}

TEST(PrefillText, LeavesOutWhatIsAsUsual) {
  v1::PrefillResult result;
  result.set_request_id("r-2");
  result.set_tokens(100);
  result.set_first_token(5);
  result.add_top()->set_token(5);
  result.set_attempts(1);
  result.set_pack_prompts(1);
  *result.mutable_plan() = PlainPlan();
  EXPECT_EQ(PrefillText(result, /*upload_seconds=*/0), R"(request         r-2
first token     5
top (logit)     5 (0)
tokens          100
TTFT            0 ms (queue 0 ms, prefill 0 ms)
tokens/s        0
comm wait       0 ms, 0.0 % of attention (0 ms)
MFU             0.0 %
plan            1 rank: 1 head group of 1x1, zigzag, partial outputs in f32, ranks row-first
sent by a rank  0 B (Q 0 B, KV 0 B, O 0 B)
)");
}

TEST(PoolText, HasARowForEachRequestAndWorker) {
  v1::PoolStatus status;
  status.set_state(v1::PoolStatus::STATE_DRAINING);
  status.set_model("tiny");
  status.set_backend("cpu/avx2");
  status.set_ranks(1);
  status.set_queued_requests(2);
  status.set_queued_tokens(70000);
  EXPECT_EQ(PoolText(status), R"(pool            draining, 1 rank of cpu/avx2
model           tiny
queue           2 waiting, 70,000 tokens
)");

  status.set_ranks(3);
  v1::PoolStatus::Request& running = *status.add_requests();
  running.set_id("r-1\n\x1b");
  running.set_tenant("search");
  running.set_phase("running");
  running.set_tokens(65536);
  running.set_layers_done(12);
  running.set_layers(32);
  running.set_elapsed_seconds(8.1);
  running.set_predicted_rest_seconds(13.5);
  v1::PoolStatus::Request& waiting = *status.add_requests();
  waiting.set_id("second");
  waiting.set_phase("waiting");
  waiting.set_tokens(7);
  v1::PoolStatus::Worker& first = *status.add_workers();
  first.set_name("w");
  first.set_state("running");
  first.set_ranks(2);
  first.set_first_rank(0);
  first.set_host("alpha");
  first.set_backend("cpu/avx2");
  v1::PoolStatus::Worker& idle = *status.add_workers();
  idle.set_name("longer");
  idle.set_state("ready");
  idle.set_ranks(1);
  idle.set_first_rank(-1);
  idle.set_host("b");
  idle.set_backend("cuda");
  EXPECT_EQ(PoolText(status), R"(pool            draining, 3 ranks of cpu/avx2
model           tiny
queue           2 waiting, 70,000 tokens

request  tenant  phase    tokens  layers  elapsed  rest
r-1??    search  running  65,536  12/32   8.1 s    13.5 s
second   -       waiting  7       -       0 ms     0 ms

worker  state    ranks  first rank  host   backend
w       running  2      0           alpha  cpu/avx2
longer  ready    1      -           b      cuda
)");
}

void AddStep(const char* comm, const std::vector<std::pair<int, int>>& blocks, int spans,
             v1::PlanReply& reply) {
  v1::PlanReply::Step& step = *reply.add_steps();
  step.set_comm(comm);
  step.set_spans(static_cast<uint32_t>(spans));
  for (const auto& [u, v] : blocks) {
    v1::PlanReply::Block& block = *step.add_blocks();
    block.set_u(static_cast<uint32_t>(u));
    block.set_v(static_cast<uint32_t>(v));
  }
}

v1::PlanReply::Prediction Predicted(double seconds) {
  v1::PlanReply::Prediction predicted;
  predicted.set_seconds(seconds);
  predicted.set_compute_seconds(seconds / 2);
  predicted.set_comm_wait_seconds(seconds / 4);
  *predicted.mutable_comm_bytes() = Bytes(1024);
  predicted.set_peak_bytes(3 << 20);
  predicted.set_weight_bytes(1 << 20);
  predicted.set_weight_seconds(seconds / 8);
  return predicted;
}

v1::PlanReply::Candidate& AddCandidate(const v1::PlanSummary& plan, double seconds, v1::PlanReply& reply) {
  v1::PlanReply::Candidate& candidate = *reply.add_candidates();
  candidate.set_ranks(plan.ranks());
  candidate.set_heads(plan.heads());
  candidate.set_a(plan.a());
  candidate.set_b(plan.b());
  candidate.set_layout(plan.layout());
  candidate.set_partial_dtype(plan.partial_dtype());
  candidate.set_placement(plan.placement());
  *candidate.mutable_predicted() = Predicted(seconds);
  return candidate;
}

TEST(PlanText, SaysAllThatIsRare) {
  v1::PlanReply reply;
  *reply.mutable_plan() = RarePlan();
  AddStep("q", {{0, 0}}, 3, reply);
  AddStep("none", {}, 0, reply);
  AddStep("kv", {{0, 1}, {1, 0}}, 1, reply);
  *reply.mutable_predicted() = Predicted(4);
  reply.set_weights("streamed");
  AddCandidate(RarePlan(), 4, reply);
  AddCandidate(RarePlan(), 8, reply).set_a(6);
  AddCandidate(RarePlan(), 8, reply).set_b(1);
  AddCandidate(RarePlan(), 8, reply).set_heads(1);
  v1::PlanReply::Candidate& plain = AddCandidate(RarePlan(), 8, reply);
  plain.set_ranks(6);
  plain.set_layout(v1::LAYOUT_CONTIGUOUS);
  plain.set_partial_dtype("f32");
  plain.set_placement("");
  const std::vector<WeightModeBytes> modes = {{WeightMode::kResident, 5 << 20, false},
                                              {WeightMode::kStreamed, 1 << 20, true, 4, 6 << 20, 6 << 20},
                                              {WeightMode::kSharded, 2 << 20, true, 5}};
  const std::vector<std::string> not_yet = {"streamed weights", "weights in FP8"};
  EXPECT_EQ(PlanText(reply, 131072, modes, "a GPU", not_yet), R"(tokens          131,072
plan            12 ranks: 2 head groups of 3x2, striped in stripes of 64 tokens, partial outputs in bf16, ranks box 1x2x1 on a host
KV rings        of 4 ranks, beside one that leads from each to the next
exchange        by 4,096 tokens of each rank, beside the work on others
pieces          2 of 14,080 tokens, one after the other, to fit the memory
predicted       4.0 s, of it 1.0 s comm wait
weights         streamed, 1.0 MiB of memory, 6.0 MiB of each node's host, which adds 500 ms
                resident would need 5.0 MiB of a GPU, more than is free
                sharded would need 2.0 MiB of a GPU, and take 5.0 s
not yet         streamed weights, weights in FP8

step  comm    blocks (Q#u,KV#v) computed meanwhile
0     q to 2  (0,0)
1     .       .
2     kv      (0,1)(1,0)

ranks heads*tile     layout      wire  on a host      seconds     compute   comm wait        sent        peak
12    2*3x2          striped     bf16  box 1x2x1        4.0 s       2.0 s       1.0 s    31.0 KiB     3.0 MiB  <- chosen
12    2*6x2          striped     bf16  box 1x2x1        8.0 s       4.0 s       2.0 s    31.0 KiB     3.0 MiB
12    2*3x1          striped     bf16  box 1x2x1        8.0 s       4.0 s       2.0 s    31.0 KiB     3.0 MiB
12    3x2            striped     bf16  box 1x2x1        8.0 s       4.0 s       2.0 s    31.0 KiB     3.0 MiB
6     2*3x2          contiguous  f32   row-first        8.0 s       4.0 s       2.0 s    31.0 KiB     3.0 MiB
)");
}

// Where a node's host has no room, its memory is what lacks.
TEST(PlanText, SaysWhatAHostLacks) {
  v1::PlanReply reply;
  *reply.mutable_plan() = PlainPlan();
  AddStep("none", {{0, 0}}, 0, reply);
  *reply.mutable_predicted() = Predicted(4);
  reply.set_weights("resident");
  AddCandidate(PlainPlan(), 4, reply);
  const std::vector<WeightModeBytes> modes = {{WeightMode::kSharded, 1 << 20, true, 5, 3 << 20, 0},
                                              {WeightMode::kStreamed, 2 << 20, false, 0, 6 << 20, 4 << 20}};
  const std::string text = PlanText(reply, 1000, modes, "a GPU");
  EXPECT_NE(text.find("sharded would need 1.0 MiB of a GPU, 3.0 MiB of each node's host, and take 5.0 s\n"),
            std::string::npos)
      << text;
  EXPECT_NE(
      text.find("streamed would need 2.0 MiB of a GPU, 6.0 MiB of each node's host, which has 4.0 MiB\n"),
      std::string::npos)
      << text;
}

// Columns of a wire dtype, a placement or ranks are there only where a candidate differs in them.
TEST(PlanText, LeavesOutWhatIsAsUsual) {
  v1::PlanReply reply;
  *reply.mutable_plan() = PlainPlan();
  AddStep("none", {{0, 0}}, 0, reply);
  *reply.mutable_predicted() = Predicted(4);
  reply.set_weights("resident");
  AddCandidate(PlainPlan(), 4, reply);
  EXPECT_EQ(PlanText(reply, 1000), R"(tokens          1,000
plan            1 rank: 1 head group of 1x1, zigzag, partial outputs in f32, ranks row-first
predicted       4.0 s, of it 1.0 s comm wait
weights         resident, 1.0 MiB of memory

step  comm  blocks (Q#u,KV#v) computed meanwhile
0     .     (0,0)

heads*tile     layout         seconds     compute   comm wait        sent        peak
1x1            zigzag           4.0 s       2.0 s       1.0 s    31.0 KiB     3.0 MiB  <- chosen
)");

  const auto headings = [](const v1::PlanReply& of) {
    const std::string text = PlanText(of, 1000);
    const size_t begin = text.find("heads*tile"), line = text.rfind('\n', begin) + 1;
    return text.substr(line, text.find(" seconds", begin) - line);
  };
  const std::string usual = headings(reply);
  v1::PlanReply other = reply;
  other.mutable_candidates(0)->set_ranks(2);
  EXPECT_EQ(headings(other), "ranks " + usual);
  other = reply;
  other.mutable_candidates(0)->set_partial_dtype("bf16");
  EXPECT_EQ(headings(other), usual.substr(0, 27) + "wire  " + usual.substr(27));
  other = reply;
  other.mutable_candidates(0)->set_placement("box 1x1x1");
  EXPECT_EQ(headings(other), usual.substr(0, 27) + "on a host   " + usual.substr(27));
}

}  // namespace
}  // namespace meshfill
