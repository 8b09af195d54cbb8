#include "engine/schedule/schedule_walk.h"

#include <array>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/engine/random_seed.h"
#include "tests/engine/schedule/random_schedule.h"

namespace meshfill {
namespace {

// Keeps what a rank holds by the rules of schedule.h, and compares each event with it.
class Checker : public ScheduleVisitor {
 public:
  explicit Checker(const Schedule& schedule)
      : tile_(schedule.tile), kv_inner_(schedule.kv_inner), rows_(tile_.a, RowState::kEmpty) {}

  void Start(const Transfer& transfer) {
    std::optional<Transfer>& along = Along(transfer);
    EXPECT_FALSE(along.has_value());
    along = transfer;
    EXPECT_EQ(transfer.number, started_[transfer.traffic]++);
    const int a = tile_.a;
    if (transfer.traffic == Traffic::kO) {
      ++sent_o_;
      EXPECT_EQ(transfer.sent, sent_o_);
      EXPECT_EQ(transfer.received, (sent_o_ + 1) % a);
      return;
    }
    std::set<int>& here = transfer.traffic == Traffic::kQ ? q_ : kv_;
    EXPECT_TRUE(here.contains(transfer.sent));
    // The outer ring brings the first chunk of the next round.
    const bool outer = transfer.ring == Ring::kKvOuter;
    EXPECT_EQ(transfer.received, transfer.sent + (outer ? kv_inner_ : 1));
    if (kv_inner_ > 0 && transfer.traffic == Traffic::kKv) {
      EXPECT_EQ(transfer.received % kv_inner_ == 0, outer);
    }
  }

  void Block(BlockIndex block, RowState row) {
    EXPECT_TRUE(q_.contains(block.u) && kv_.contains(block.v)) << "(" << block.u << "," << block.v << ")";
    EXPECT_EQ(row, rows_[block.u]);
    rows_[block.u] = RowState::kBegun;
    ++blocks_;
  }

  void End(const Transfer& transfer, RowState row) {
    std::optional<Transfer>& along = Along(transfer);
    ASSERT_TRUE(along.has_value());
    EXPECT_EQ(transfer.traffic, along->traffic);
    EXPECT_EQ(transfer.sent, along->sent);
    EXPECT_EQ(transfer.received, along->received);
    along.reset();
    if (transfer.traffic == Traffic::kQ) q_.insert(transfer.received);
    if (transfer.traffic == Traffic::kKv) kv_.insert(transfer.received);
    if (transfer.traffic != Traffic::kO) return;
    EXPECT_EQ(row, rows_[transfer.received]);
    if (row == RowState::kEmpty) rows_[transfer.received] = RowState::kArrived;
  }

  void FreeQ(int u) { EXPECT_EQ(q_.erase(u), 1u) << "Q#" << u; }
  void FreeKv(int v) { EXPECT_EQ(kv_.erase(v), 1u) << "KV#" << v; }

  // Each chunk has come and gone.
  void ExpectDone() const {
    EXPECT_EQ(blocks_, tile_.ranks());
    EXPECT_EQ(sent_o_, tile_.a - 1);
    EXPECT_TRUE(q_.empty() && kv_.empty());
    EXPECT_EQ(rows_, std::vector<RowState>(tile_.a, RowState::kBegun));
  }

 private:
  std::optional<Transfer>& Along(const Transfer& transfer) {
    EXPECT_EQ(transfer.ring == Ring::kQ, transfer.traffic != Traffic::kKv);
    return under_way_[static_cast<int>(transfer.ring)];
  }

  const Tile tile_;
  const int kv_inner_;
  std::set<int> q_ = {0};  // chunks that are here
  std::set<int> kv_ = {0};
  std::vector<RowState> rows_;
  std::array<std::optional<Transfer>, kRings> under_way_;
  PerTraffic<int> started_;
  int sent_o_ = 0;
  int blocks_ = 0;
};

TEST(ScheduleWalk, HoldsEachChunkFromItsArrivalToItsLastUse) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  for (int i = 0; i < 300; ++i) {
    const Tile tile = {Draw(random, 1, 5), Draw(random, 1, 8)};
    const Schedule schedule = RandomSchedule(random, tile, DrawKvInner(random, tile));
    SCOPED_TRACE(testing::Message() << "seed " << seed << ", draw " << i << ": " << schedule.DebugString());
    Checker checker(schedule);
    Walk(schedule, checker);
    checker.ExpectDone();
    if (HasFailure()) return;
  }
}

// What happens, as text.
struct Log : ScheduleVisitor {
  std::string text;
  void Start(const Transfer& t) {
    absl::StrAppend(&text, TrafficName(t.traffic), t.sent, ">", t.received, " ");
  }
  void Block(BlockIndex block, RowState) { absl::StrAppend(&text, "(", block.u, ",", block.v, ") "); }
  void End(const Transfer& t, RowState) { absl::StrAppend(&text, "end-", TrafficName(t.traffic), " "); }
  void FreeQ(int u) { absl::StrAppend(&text, "-Q", u, " "); }
  void FreeKv(int v) { absl::StrAppend(&text, "-KV", v, " "); }
};

TEST(ScheduleWalk, TellsEventsInTheirOrder) {
  const Schedule schedule = {.tile = {.a = 2, .b = 1},
                             .steps = {{.comm = Traffic::kQ, .blocks = {{0, 0}}},
                                       {.comm = std::nullopt, .blocks = {{1, 0}}},
                                       {.comm = Traffic::kO, .blocks = {}}}};
  ASSERT_TRUE(CheckSchedule(schedule).ok());
  Log log;
  Walk(schedule, log);
  EXPECT_EQ(log.text, "q0>1 (0,0) end-q -Q0 (1,0) -Q1 -KV0 o1>0 end-o ");
}

TEST(ScheduleWalk, EndsWhatSpansStepsWithTheLastOfThem) {
  const Schedule schedule = {.tile = {.a = 2, .b = 2},
                             .steps = {{.comm = Traffic::kKv, .blocks = {}, .spans = 3},
                                       {.comm = Traffic::kQ, .blocks = {{0, 0}}},
                                       {.comm = std::nullopt, .blocks = {{1, 0}}},
                                       {.comm = std::nullopt, .blocks = {{1, 1}}},
                                       {.comm = Traffic::kO, .blocks = {{0, 1}}}}};
  ASSERT_TRUE(CheckSchedule(schedule).ok());
  Log log;
  Walk(schedule, log);
  EXPECT_EQ(log.text, "kv0>1 q0>1 (0,0) end-q (1,0) end-kv -KV0 (1,1) -Q1 o1>0 (0,1) -Q0 -KV1 end-o ");
}

// KV#0 is passed on twice: along the outer ring, and inside its own.
TEST(ScheduleWalk, PassesAChunkOnAlongBothRingsOfADoubleRing) {
  const Schedule schedule = {.tile = {.a = 1, .b = 4},
                             .steps = {{.comm = Traffic::kKv, .blocks = {}, .spans = 2},
                                       {.comm = Traffic::kKv, .blocks = {{0, 0}}},
                                       {.comm = Traffic::kKv, .blocks = {{0, 2}}},
                                       {.comm = std::nullopt, .blocks = {{0, 1}, {0, 3}}}},
                             .kv_inner = 2};
  ASSERT_TRUE(CheckSchedule(schedule).ok()) << CheckSchedule(schedule);
  Log log;
  Walk(schedule, log);
  EXPECT_EQ(log.text,
            "kv0>2 kv0>1 (0,0) end-kv end-kv -KV0 kv2>3 (0,2) end-kv -KV2 (0,1) -KV1 (0,3) -Q0 -KV3 ");
}

struct HandingOverLog : Log {
  static constexpr bool kHandsOver = true;
};

TEST(ScheduleWalk, FreesWhatIsHandedOverAsItsSendStarts) {
  const Schedule schedule = {.tile = {.a = 1, .b = 3},
                             .steps = {{.comm = Traffic::kKv, .blocks = {{0, 0}}},
                                       {.comm = std::nullopt, .blocks = {{0, 1}}},
                                       {.comm = Traffic::kKv, .blocks = {}},
                                       {.comm = std::nullopt, .blocks = {{0, 2}}}}};
  ASSERT_TRUE(CheckSchedule(schedule).ok());
  HandingOverLog log;
  Walk(schedule, log);
  EXPECT_EQ(log.text, "kv0>1 (0,0) -KV0 end-kv (0,1) kv1>2 -KV1 end-kv (0,2) -Q0 -KV2 ");
}

// Fails at the n-th event.
struct Failing : ScheduleVisitor {
  int events_left;
  explicit Failing(int n) : events_left(n) {}
  absl::Status Next() {
    EXPECT_GE(events_left, 0) << "an event after an error";
    return events_left-- == 0 ? absl::AbortedError("enough") : absl::OkStatus();
  }
  absl::Status Start(const Transfer&) { return Next(); }
  absl::Status Block(BlockIndex, RowState) { return Next(); }
  absl::Status End(const Transfer&, RowState) { return Next(); }
};

TEST(ScheduleWalk, StopsAtTheFirstError) {
  const Schedule schedule = GreedySchedule({.a = 3, .b = 3}, {.c_q = 1, .c_kv = 2, .c_o = 1});
  const int events = 9 + 2 * (2 + 2 + 2);
  for (int n = 0; n < events; ++n) {
    Failing failing(n);
    EXPECT_EQ(Walk(schedule, failing), absl::AbortedError("enough")) << n;
  }
  Failing never(events);
  EXPECT_TRUE(Walk(schedule, never).ok());
  EXPECT_EQ(never.events_left, 0);
}

}  // namespace
}  // namespace meshfill
