#include "engine/schedule/timeline.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace meshfill {

const char* LaneName(Lane lane) { return lane == Lane::kCompute ? "compute" : "comm"; }

std::string Span::Name() const {
  if (kind == SpanKind::kWait) return absl::StrCat("wait ", what);
  if (block.has_value()) return absl::StrCat(what, " (", block->u, ",", block->v, ")");
  if (blocks > 0) return absl::StrCat(blocks, " ", what, blocks == 1 ? "" : "s");
  return std::string(what);
}

double Timeline::end_seconds() const {
  double end = 0;
  for (const Span& span : spans) end = std::max(end, span.end_seconds);
  return end;
}

double Timeline::idle_share() const {
  double largest = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    double begin = end_seconds(), end = 0, busy = 0;
    for (const Span& span : spans) {
      if (span.rank != rank || span.layer < 0 || span.lane() != Lane::kCompute) continue;
      begin = std::min(begin, span.start_seconds);
      end = std::max(end, span.end_seconds);
      busy += span.seconds();  // one lane's spans never overlap
    }
    if (end > begin) largest = std::max(largest, 1 - busy / (end - begin));
  }
  return largest;
}

}  // namespace meshfill
