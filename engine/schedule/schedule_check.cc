// CheckSchedule: runs a schedule on paper. Knows schedule.h's rules and nothing of how schedules are made.
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/schedule/rings_under_way.h"
#include "engine/schedule/schedule.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

// What one rank holds as the steps go by. A step's communication uses what was there when the step began, and
// what it delivers is there when the step has ended.
class ScheduleChecker {
 public:
  explicit ScheduleChecker(const Schedule& schedule)
      : schedule_(schedule),
        a_(schedule.tile.a),
        b_(schedule.tile.b),
        rings_(schedule.tile, schedule.kv_inner) {}

  absl::Status Run() {
    if (a_ < 1 || b_ < 1) return absl::InternalError(absl::StrCat("schedule of a tile ", a_, "x", b_));
    if (!CanSplitKvRing(schedule_.tile, schedule_.kv_inner)) {
      return absl::InternalError(
          absl::StrCat("schedule of ", b_, " ranks of a KV group in rings of ", schedule_.kv_inner));
    }
    computed_.assign(a_, std::vector<bool>(b_, false));
    row_blocks_.assign(a_, 0);
    for (step_ = 0; step_ < static_cast<int>(schedule_.steps.size()); ++step_) {
      RETURN_IF_ERROR(CheckStep(schedule_.steps[step_]));
    }
    return CheckEnd();
  }

 private:
  absl::Status CheckStep(const Step& step) {
    if (!step.comm.has_value() && step.blocks.empty()) return Refuse("is idle");
    if (step.comm.has_value()) {
      RETURN_IF_ERROR(CheckStart(*step.comm));
      RETURN_IF_ERROR(CheckSpans(step));
      rings_.Start(*step.comm, step_, step.spans);
    } else if (step.spans != 1) {
      return Refuse(absl::StrCat("has no communication, of ", step.spans, " steps"));
    }
    for (const BlockIndex& block : step.blocks) {
      RETURN_IF_ERROR(CheckBlock(block));
    }
    rings_.End(step_);
    return absl::OkStatus();
  }

  absl::Status CheckSpans(const Step& step) {
    if (step.spans < 1) return Refuse(absl::StrCat("has a communication of ", step.spans, " steps"));
    if (step.spans > std::ssize(schedule_.steps) - step_) {
      return Refuse("has a communication that ends behind the last step");
    }
    const RingsUnderWay::UnderWay& along = rings_.Along(rings_.RingOf(*step.comm));
    if (along.comm.has_value()) {
      return Refuse(absl::StrCat("starts ", CommName(step.comm), " before the ", CommName(along.comm),
                                 " before it along its ring has ended"));
    }
    return absl::OkStatus();
  }

  absl::Status CheckStart(Traffic comm) const {
    switch (comm) {
      case Traffic::kQ:
        if (rings_.q_received() == a_ - 1) return Refuse("receives a Q chunk beyond the tile's rows");
        return absl::OkStatus();
      case Traffic::kKv:
        if (rings_.kv_started() == b_ - 1) return Refuse("receives a KV chunk beyond the tile's columns");
        if (!rings_.HasToSend(rings_.RingOf(comm))) return Refuse("sends a KV chunk that has not arrived");
        return absl::OkStatus();
      case Traffic::kO: {
        // What arrived for row k+1 came with the Send O before, which an earlier step has ended: steps run in
        // turn.
        const int row = rings_.o_sent() + 1;
        if (row > a_ - 1) return Refuse("sends an O chunk beyond the tile's rows");
        if (row_blocks_[row] != b_) {
          return Refuse(
              absl::StrCat("sends O#", row, " with ", row_blocks_[row], " of ", b_, " blocks computed"));
        }
        return absl::OkStatus();
      }
      case Traffic::kDq:
      case Traffic::kDkv:
      case Traffic::kAllToAll:
      case Traffic::kGather:
        break;
    }
    return Refuse("has an unknown communication");
  }

  absl::Status CheckBlock(BlockIndex block) {
    const int u = block.u, v = block.v;
    const auto refuse = [&](const char* why) {
      return Refuse(absl::StrCat("block (", u, ",", v, ") ", why));
    };
    if (u < 0 || u >= a_ || v < 0 || v >= b_) return refuse("is outside the tile");
    if (u > rings_.q_received()) return refuse("needs a Q chunk that has not arrived");
    if (!rings_.HasKv(v)) return refuse("needs a KV chunk that has not arrived");
    if (computed_[u][v]) return refuse("is computed twice");
    computed_[u][v] = true;
    ++row_blocks_[u];
    return absl::OkStatus();
  }

  absl::Status CheckEnd() const {
    const auto refuse = [this](const auto&... why) {
      return absl::InternalError(
          absl::StrCat("schedule ", schedule_.tile.DebugString(), " ends with ", why...));
    };
    if (rings_.q_received() != a_ - 1) return refuse(rings_.q_received(), " Recv Q, not ", a_ - 1);
    if (rings_.kv_received() != b_ - 1) return refuse(rings_.kv_received(), " Recv KV, not ", b_ - 1);
    if (rings_.o_sent() != a_ - 1) return refuse(rings_.o_sent(), " Send O, not ", a_ - 1);
    for (int u = 0; u < a_; ++u) {
      for (int v = 0; v < b_; ++v) {
        if (!computed_[u][v]) return refuse("block (", u, ",", v, ") never computed");
      }
    }
    return absl::OkStatus();
  }

  absl::Status Refuse(std::string_view why) const {
    return absl::InternalError(
        absl::StrCat("schedule ", schedule_.tile.DebugString(), ", step ", step_, ": ", std::string(why)));
  }

  const Schedule& schedule_;
  const int a_;
  const int b_;
  int step_ = 0;
  RingsUnderWay rings_;
  std::vector<std::vector<bool>> computed_;  // [a][b]
  std::vector<int> row_blocks_;              // [a]
};

}  // namespace

absl::Status CheckSchedule(const Schedule& schedule) { return ScheduleChecker(schedule).Run(); }

}  // namespace meshfill
