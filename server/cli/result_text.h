// What a person reads after a command: the prefill's answer and figures, the plan's table and schedule.
#ifndef MESHFILL_SERVER_CLI_RESULT_TEXT_H_
#define MESHFILL_SERVER_CLI_RESULT_TEXT_H_

#include <cstdint>
#include <span>
#include <string>

#include "engine/plan/plan.h"
#include "meshfill/v1/prefill.pb.h"

namespace meshfill {

// `upload_seconds` as in TtftSeconds (result_json.h).
std::string PrefillText(const v1::PrefillResult& result, double upload_seconds);

// The chosen shape, its schedule as a grid of steps × (communication, blocks), and all candidates. `place`:
// of what the weights' bytes are. `not_yet`: what of it cannot run so far.
std::string PlanText(const v1::PlanReply& reply, int64_t tokens,
                     std::span<const WeightModeBytes> weight_modes = {}, const char* place = "a host",
                     std::span<const std::string> not_yet = {});

std::string FormatBytes(double bytes);  // "3.2 MiB"
std::string FormatCount(double count);  // "1,048,576"

std::string PoolText(const v1::PoolStatus& status);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_CLI_RESULT_TEXT_H_
