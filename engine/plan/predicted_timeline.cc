#include "engine/plan/predicted_timeline.h"

#include <utility>
#include <vector>

#include "engine/mesh/traffic.h"

namespace meshfill {
namespace {

// Lays spans one after the other, for rank 0.
class LayerSpans {
 public:
  explicit LayerSpans(const AttentionSeconds& seconds) : seconds_(seconds) {}

  std::vector<Span> Run(const Schedule& schedule) {
    AllToAll(seconds_.to_heads);
    Work({.what = "reorder"}, seconds_.reorder_to_heads);
    for (const Step& step : schedule.steps) RunStep(step);
    Work({.what = "reorder"}, seconds_.reorder_to_tokens);
    AllToAll(seconds_.to_tokens);
    return std::move(spans_);
  }

 private:
  void RunStep(const Step& step) {
    const char* const name = step.comm.has_value() ? OperationName(*step.comm) : "";
    const double arrival = now_ + seconds_.Transfer(step.comm);
    if (step.comm.has_value()) Add({.kind = SpanKind::kTransfer, .what = name}, now_, arrival);
    for (const BlockIndex& block : step.blocks) Work({.what = "block", .block = block}, seconds_.block);
    if (arrival > now_) Wait(name, arrival);
    if (step.comm == Traffic::kO) Work({.what = "merge"}, seconds_.merge);
  }

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
  std::vector<Span> spans_;
};

}  // namespace

Timeline PredictLayer(const ModelShape& model, const PoolSpeed& speed, const Plan& plan,
                      int64_t cached_tokens) {
  const int64_t window = model.windowed_layers == model.layers ? model.sliding_window : 0;
  const PlanShape shape = {.layout = plan.layout,
                           .heads = plan.heads,
                           .tile = plan.tile,
                           .partial_dtype = plan.partial_dtype,
                           .cached_tokens = cached_tokens,
                           .links = plan.predicted.links};
  const std::vector<Span> spans =
      LayerSpans(AttentionSecondsOf(model, speed, shape, window)).Run(plan.schedule);
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
