// A timeline in the Trace Event Format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.
//
// A rank is a process (pid), a lane a thread (tid: 0 compute, 1 comm); both have their names as metadata
// events. Spans are complete events ("X") with times in µs. Names are those of the schedule and the metrics;
// "cat" is work, wait or transfer; "args" has the layer.
#ifndef MESHFILL_SERVER_PICTURES_TRACE_JSON_H_
#define MESHFILL_SERVER_PICTURES_TRACE_JSON_H_

#include <string>

#include "engine/schedule/timeline.h"

namespace meshfill {

std::string TraceJson(const Timeline& timeline);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_PICTURES_TRACE_JSON_H_
