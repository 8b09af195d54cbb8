#include "server/pictures/schedule_picture.h"

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "engine/schedule/rings_under_way.h"
#include "server/pictures/legend.h"

namespace meshfill {
namespace {

constexpr double kTileSide = 96;  // most tiles; long rows and columns have thinner cells, down to kThinCell
constexpr double kThinCell = 4;
constexpr double kThickCell = 20;
constexpr double kMark = 6;    // thickness of a chunk's mark beside the tile
constexpr double kMarks = 10;  // a mark and the gap to the tile
constexpr double kHead = 46;   // above the tile: the step's number and its communication
constexpr double kFoot = 34;   // below it: its blocks
constexpr double kGap = 18;    // between two steps
constexpr double kSmallCard = 92;
constexpr int kMostCells = 16000;  // most cells of all cards together: a viewer draws so many at once

enum class BlockState { kUntouched, kComputing, kDone };

std::string CommText(std::optional<Traffic> comm, int index) {
  if (comm == Traffic::kQ) return absl::StrCat("Recv Q#", index);
  if (comm == Traffic::kKv) return absl::StrCat("Recv KV#", index);
  if (comm == Traffic::kO) return absl::StrCat("Send O#", index);
  return "no message";
}

absl::string_view CommClass(std::optional<Traffic> comm) {
  return comm.has_value() ? OperationName(*comm) : "track";
}

std::string BlocksText(const Step& step) {
  std::string text;
  for (const auto [u, v] : step.blocks) absl::StrAppend(&text, text.empty() ? "" : " ", "(", u, ",", v, ")");
  return text;
}

// Walks the schedule's steps, and draws each as a card.
class SchedulePicture {
 public:
  SchedulePicture(const Schedule& schedule, SvgWriter& svg)
      : schedule_(schedule),
        a_(schedule.tile.a),
        b_(schedule.tile.b),
        row_(std::clamp(kTileSide / a_, kThinCell, kThickCell)),
        column_(std::clamp(kTileSide / b_, kThinCell, kThickCell)),
        svg_(svg),
        state_(a_ * b_, BlockState::kUntouched),
        rings_(schedule.tile, schedule.kv_inner) {}

  double CardWidth() const { return std::max(kSmallCard, b_ * column_ + 2 * kMarks); }
  double CardHeight() const { return kHead + kMarks + a_ * row_ + kFoot; }

  double Draw(double x, double y, double width) {
    const int in_a_line = static_cast<int>((width + kGap) / (CardWidth() + kGap));
    const int steps = static_cast<int>(schedule_.steps.size());
    // A schedule that is too long shows as many whole lines of its first and of its last steps.
    const bool all = in_a_line > 0 && steps <= kMostCells / (a_ * b_);
    const int some =
        in_a_line == 0 ? 0 : std::min(steps / 2, kMostCells / (2 * a_ * b_)) / in_a_line * in_a_line;
    const int head = all ? steps : some, tail = all ? steps : steps - some;
    y = DrawSteps(0, head, in_a_line, x, y);
    if (all) return y;
    y = svg_.Paragraph(x, y + 14, width,
                       absl::StrCat("… steps ", head, " to ", tail - 1,
                                    " are left out: they are too many, or their tiles "
                                    "too wide, to be drawn. `meshfill plan --json` lists them."),
                       "muted");
    for (int step = head; step < tail; ++step) {
      Begin(step);
      End(step);
    }
    return DrawSteps(tail, steps, in_a_line, x, y);
  }

 private:
  double DrawSteps(int first, int end, int in_a_line, double x, double y) {
    for (int step = first; step < end; ++step) {
      const int line = (step - first) / in_a_line, place = (step - first) % in_a_line;
      Begin(step);
      DrawStep(step, x + place * (CardWidth() + kGap), y + line * CardHeight());
      End(step);
    }
    return first == end ? y : y + ((end - first - 1) / in_a_line + 1) * CardHeight();
  }

  void DrawStep(int number, double x, double y) {
    const Step& step = schedule_.steps[number];
    std::string comm = CommText(step.comm, started_);
    if (step.spans > 1) absl::StrAppend(&comm, " …");
    if (!step.comm.has_value() && AnyUnderWay()) comm = "… goes on";
    const std::string until =
        step.spans > 1 ? absl::StrCat(" until step ", number + step.spans - 1) : std::string();
    svg_.OpenGroup("step", absl::StrCat("step ", number, ": ", comm, until, "; blocks ", BlocksText(step)));
    svg_.Text(x, y + 12, absl::StrCat("step ", number), "muted", 11);
    svg_.Rect({x, y + 17, kSmallCard, 18}, CommClass(step.comm));
    svg_.Text(x + kSmallCard / 2, y + 30, comm, step.comm.has_value() ? "mid bold on-colour" : "mid muted",
              11);
    DrawTile(x + kMarks, y + kHead + kMarks);
    DrawMarks(x, y + kHead);
    DrawFoot(step, x, y + CardHeight() - kFoot + 15);
    svg_.CloseGroup();
  }

  void DrawTile(double x, double y) {
    for (int u = 0; u < a_; ++u) {
      for (int v = 0; v < b_; ++v) {
        svg_.Rect({x + v * column_ + 0.5, y + u * row_ + 0.5, column_ - 1, row_ - 1}, BlockClass(u, v));
      }
    }
  }

  absl::string_view BlockClass(int u, int v) {
    if (Block(u, v) == BlockState::kComputing) return "block";
    if (Block(u, v) == BlockState::kDone) return "done";
    return u <= rings_.q_received() && rings_.HasKv(v) ? "ready" : "absent";
  }

  // The chunks that are here, beside their rows and columns: Q on the left, KV above, and O on the right as
  // it leaves.
  void DrawMarks(double x, double y) {
    const double left = x + kMarks, top = y + kMarks;
    const auto q_mark = [&](int u) { return Box{x, top + u * row_ + 0.5, kMark, row_ - 1}; };
    const auto kv_mark = [&](int v) { return Box{left + v * column_ + 0.5, y, column_ - 1, kMark}; };
    for (int u = 0; u <= rings_.q_received(); ++u) svg_.Rect(q_mark(u), "recv_q");
    for (int v = 0; v < b_; ++v) {
      if (rings_.HasKv(v)) svg_.Rect(kv_mark(v), "recv_kv");
    }
    for (const Ring ring : {Ring::kKv, Ring::kKvOuter}) {
      const RingsUnderWay::UnderWay& along = rings_.Along(ring);
      if (along.comm.has_value()) svg_.Rect(kv_mark(along.index), "recv_kv arriving");
    }
    const RingsUnderWay::UnderWay& along_q = rings_.Along(Ring::kQ);
    if (along_q.comm == Traffic::kQ) svg_.Rect(q_mark(along_q.index), "recv_q arriving");
    if (along_q.comm != Traffic::kO) return;
    svg_.Rect({left + b_ * column_ + kMarks - kMark, top + along_q.index * row_ + 0.5, kMark, row_ - 1},
              "send_o");
  }

  // Lists as many blocks as fit, or gives their number.
  void DrawFoot(const Step& step, double x, double y) {
    const std::string list = BlocksText(step);
    const bool fits = static_cast<double>(list.size()) * 6 <= CardWidth() + kGap;
    svg_.Text(x, y, fits ? list : absl::StrCat(step.blocks.size(), " blocks"), "", 11);
  }

  bool AnyUnderWay() const {
    return rings_.Along(Ring::kQ).comm.has_value() || rings_.Along(Ring::kKv).comm.has_value() ||
           rings_.Along(Ring::kKvOuter).comm.has_value();
  }

  void Begin(int number) {
    const Step& step = schedule_.steps[number];
    for (const auto [u, v] : step.blocks) Block(u, v) = BlockState::kComputing;
    if (!step.comm.has_value()) return;
    const Ring ring = rings_.RingOf(*step.comm);
    rings_.Start(*step.comm, number, step.spans);
    started_ = rings_.Along(ring).index;
  }

  void End(int number) {
    for (const auto [u, v] : schedule_.steps[number].blocks) Block(u, v) = BlockState::kDone;
    rings_.End(number);
  }

  BlockState& Block(int u, int v) { return state_[u * b_ + v]; }

  const Schedule& schedule_;
  const int a_;
  const int b_;
  const double row_;     // height of a block
  const double column_;  // its width
  SvgWriter& svg_;
  std::vector<BlockState> state_;  // [a, b]
  RingsUnderWay rings_;
  int started_ = 0;  // the chunk that the present step's communication is about
};

}  // namespace

double DrawSchedule(const Schedule& schedule, double x, double y, double width, SvgWriter& svg) {
  y = DrawLegend({{"recv_q", "Q chunk here"},
                  {"recv_q arriving", "arriving"},
                  {"recv_kv", "KV chunk here"},
                  {"recv_kv arriving", "arriving"},
                  {"block", "computed in this step"},
                  {"done", "done"},
                  {"ready", "could be computed"},
                  {"absent", "chunks missing"},
                  {"send_o", "partial output leaving"}},
                 x, y, width, svg);
  return SchedulePicture(schedule, svg).Draw(x, y + 6, width);
}

}  // namespace meshfill
