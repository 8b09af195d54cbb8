// Which trace of its caller a call belongs to: the metadata `traceparent` (W3C Trace Context, level 1).
#ifndef MESHFILL_SERVER_API_TRACEPARENT_H_
#define MESHFILL_SERVER_API_TRACEPARENT_H_

#include <string>

#include "absl/strings/string_view.h"
#include "grpcpp/server_context.h"

namespace meshfill {

// The fields that this version of the standard knows,
// "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", of a header's value; empty where the standard
// says to ignore the value. A later version may have more behind them.
std::string ParseTraceparent(absl::string_view value);

// The traceparent of a call. Empty where the call has none, more than one, or one to be ignored.
std::string TraceparentOf(const grpc::ServerContextBase& context);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_API_TRACEPARENT_H_
