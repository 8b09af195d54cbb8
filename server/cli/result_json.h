// The JSON of the command line: the same for an embedded pool and for a server's answer.
#ifndef MESHFILL_SERVER_CLI_RESULT_JSON_H_
#define MESHFILL_SERVER_CLI_RESULT_JSON_H_

#include <span>
#include <string>

#include "engine/plan/plan.h"
#include "meshfill/v1/prefill.pb.h"

namespace meshfill {

// Time to first token: from the request's begin to its result, all attempts in. `upload_seconds`: what the
// client waited for beside queue and prefill: for its connection, its upload and the answer's way; 0 where
// there was none.
double TtftSeconds(const v1::PrefillResult& result, double upload_seconds);

// One object on one line, without a newline, its keys always in the same order. Floats are written so that
// they read back to the same bits. `prefill --json`: the logits are not part of it.
std::string PrefillJson(const v1::PrefillResult& result, double upload_seconds);

// `plan --json`: blocks as [u, v], local indices Q#u and KV#v; candidates best first. `not_yet`: what of it
// cannot run so far.
std::string PlanJson(const v1::PlanReply& reply, std::span<const WeightModeBytes> weight_modes = {},
                     std::span<const std::string> not_yet = {});

// "striped", "zigzag", "contiguous".
const char* LayoutName(v1::Layout layout);

// All fields of the message: the object `pool` of /status.json.
std::string PoolJson(const v1::PoolStatus& status);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_CLI_RESULT_JSON_H_
