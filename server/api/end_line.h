// The log's line about the end of a request.
#ifndef MESHFILL_SERVER_API_END_LINE_H_
#define MESHFILL_SERVER_API_END_LINE_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "meshfill/v1/prefill.pb.h"

namespace meshfill {

struct EndedRequest {
  const v1::PrefillHeader& header;
  const v1::PlanSummary& plan;      // the one of its Accepted; of no ranks: it was refused before
  const v1::PrefillResult& result;  // if it ended with OK: its plan ran, which after a retry is another
  double seconds;                   // from the begin of its call
  const absl::Status& status;
  absl::string_view message;  // in place of the status', which tells of the prompt; empty: that one
};

std::string EndLine(const EndedRequest& ended);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_API_END_LINE_H_
