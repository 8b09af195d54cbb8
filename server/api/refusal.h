// Why a request was refused, for the metrics: part of a status inside our code, unknown to clients.
#ifndef MESHFILL_SERVER_API_REFUSAL_H_
#define MESHFILL_SERVER_API_REFUSAL_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "server/observe/metrics.h"

namespace meshfill {

inline constexpr absl::string_view kRefusalUrl = "meshfill/refusal";  // of the status' payload

// `status`, an error, with its reason where the code alone does not tell.
absl::Status WithRefusal(absl::Status status, Refusal refusal);
// The reason that it was given, or what its code says.
Refusal RefusalOf(const absl::Status& status);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_API_REFUSAL_H_
