// What ranks did when: spans of work, of waiting and of communication, whether they were measured, simulated
// or predicted. Every picture and trace is drawn from this.
//
//     rank 0  compute  [block (0,0)][block (1,0)][wait recv_kv][block (1,1)] …
//             comm     [recv_q     ][recv_kv                  ][send_o     ] …
#ifndef MESHFILL_ENGINE_SCHEDULE_TIMELINE_H_
#define MESHFILL_ENGINE_SCHEDULE_TIMELINE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "engine/schedule/schedule.h"

namespace meshfill {

enum class SpanKind {
  kWork,      // the rank computes
  kWait,      // its compute stands still for a message: exposed communication
  kTransfer,  // a communication is under way, beside the other two
};

// On one rank, work and waits never overlap; nor do transfers, unless two are under way at once by design.
enum class Lane { kCompute, kComm };
inline constexpr int kLanes = 2;
const char* LaneName(Lane lane);  // "compute", "comm"

struct Span {
  int rank = 0;
  SpanKind kind = SpanKind::kWork;
  // Static storage. A wait's or transfer's operation as the metrics name it: "recv_q", "recv_kv", "send_o",
  // "all_to_all". Kinds of work: "block", "merge", "projections", "mlp" …
  absl::string_view what;
  std::optional<BlockIndex> block = std::nullopt;  // one block: its local indices, as in the schedule
  int blocks = 0;                                  // several blocks in one span: how many; else 0
  int layer = -1;                                  // -1: the span belongs to no layer
  double start_seconds = 0;                        // since the start of the run
  double end_seconds = 0;

  double seconds() const { return end_seconds - start_seconds; }
  Lane lane() const { return kind == SpanKind::kTransfer ? Lane::kComm : Lane::kCompute; }
  std::string Name() const;  // "block (1,0)", "3 blocks", "mlp", "wait recv_kv", "recv_kv"
};

struct Timeline {
  int ranks = 0;
  std::vector<Span> spans;    // in any order
  int64_t dropped_spans = 0;  // what a recorder's bound left out

  double end_seconds() const;  // end of the last span; 0 if there is none

  // The share of a rank's time, from its first span of a layer to its last, in which it neither computed nor
  // waited for a peer: its device had nothing to do. The largest rank's share; 0 where no span is of a layer.
  double idle_share() const;
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_SCHEDULE_TIMELINE_H_
