#include "server/api/end_line.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/api/header_check.h"
#include "server/observe/log.h"

namespace meshfill {

std::string EndLine(const EndedRequest& ended) {
  const auto& [header, accepted_plan, result, seconds, status, message] = ended;
  std::string line =
      absl::StrCat("request id=", LogQuote(ShownName(header.request_id())),
                   " tenant=", LogQuote(ShownName(header.tenant())), " tokens=", header.token_count());
  const v1::PlanSummary& plan = status.ok() ? result.plan() : accepted_plan;
  if (plan.ranks() > 0) {
    absl::StrAppend(&line, " plan=", plan.a(), "x", plan.b(), " heads=", plan.heads(),
                    " ranks=", plan.ranks());
  }
  absl::StrAppendFormat(&line, " seconds=%.3f", seconds);
  if (status.ok()) {
    absl::StrAppendFormat(&line, " queue=%.3f prefill=%.3f", result.seconds().queue(),
                          result.seconds().prefill());
    if (result.attempts() > 1) absl::StrAppend(&line, " attempts=", result.attempts());
    if (result.pack_prompts() > 1) absl::StrAppend(&line, " pack=", result.pack_prompts());
  }
  absl::StrAppend(&line, " code=", absl::StatusCodeToString(status.code()));
  if (!status.ok()) {
    absl::StrAppend(&line, " message=", LogQuote(message.empty() ? status.message() : message));
  }
  return line;
}

}  // namespace meshfill
