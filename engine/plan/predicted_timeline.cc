#include "engine/plan/predicted_timeline.h"

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "engine/mesh/traffic.h"
#include "engine/schedule/schedule_walk.h"

namespace meshfill {
namespace {

// Lays spans one after the other, for rank 0.
class LayerSpans : public ScheduleVisitor {
 public:
  explicit LayerSpans(const AttentionSeconds& seconds) : seconds_(seconds) {}

  std::vector<Span> Run(const Schedule& schedule) {
    AllToAll(seconds_.to_heads_wait);
    Work({.what = "reorder"}, seconds_.reorder_to_heads);
    Walk(schedule, *this);
    Work({.what = "reorder"}, seconds_.reorder_to_tokens);
    AllToAll(seconds_.to_tokens_wait);
    return std::move(spans_);
  }

  // Visits the walk.
  void Start(const Transfer& transfer) {
    const auto& [ring, message] = seconds_.MessageOf(transfer.traffic, transfer.number);
    messages_.Leave(ring, message, now_);
    left_[static_cast<int>(ring)] = now_;
  }
  void Block(BlockIndex block, RowState) { Work({.what = "block", .block = block}, seconds_.Block(block)); }
  void End(const Transfer& transfer, RowState) {
    const char* const name = OperationName(transfer.traffic);
    const double arrives = messages_.ArrivalOf(transfer.ring);
    Add({.kind = SpanKind::kTransfer, .what = name}, left_[static_cast<int>(transfer.ring)], arrives);
    if (arrives > now_) Wait(name, arrives);
    if (transfer.traffic == Traffic::kO) Work({.what = "merge"}, seconds_.merge);
  }

 private:
  void AllToAll(double seconds) {
    const char* const name = OperationName(Traffic::kAllToAll);
    Add({.kind = SpanKind::kTransfer, .what = name}, now_, now_ + seconds);
    Wait(name, now_ + seconds);
  }

  void Work(Span span, double seconds) {
    Add(span, now_, now_ + seconds);
    now_ += seconds;
  }

  void Wait(const char* name, double until) {
    Add({.kind = SpanKind::kWait, .what = name}, now_, until);
    now_ = until;
  }

  void Add(Span span, double start, double end) {
    if (start == end) return;
    span.start_seconds = start;
    span.end_seconds = end;
    spans_.push_back(span);
  }

  const AttentionSeconds seconds_;
  double now_ = 0;
  MessagesUnderWay messages_;
  std::array<double, kRings> left_ = {};  // when the last message along each ring did
  std::vector<Span> spans_;
};

}  // namespace

Timeline PredictLayer(const ModelShape& model, const PoolSpeed& speed, const Plan& plan) {
  // The layer is of the first kind, which sees all keys if any kind does.
  const int64_t window = model.kinds.empty() ? 0 : model.kinds.front().form.window;
  const std::vector<Span> spans =
      LayerSpans(AttentionSecondsOf(model, speed, plan, window)).Run(plan.schedule);
  Timeline timeline{.ranks = plan.ranks()};
  for (int rank = 0; rank < timeline.ranks; ++rank) {
    for (Span span : spans) {
      span.rank = rank;
      timeline.spans.push_back(span);
    }
  }
  return timeline;
}

}  // namespace meshfill
