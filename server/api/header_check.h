// What can be said of a prefill's header by itself and by the model's name.
#ifndef MESHFILL_SERVER_API_HEADER_CHECK_H_
#define MESHFILL_SERVER_API_HEADER_CHECK_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "meshfill/v1/prefill.pb.h"

namespace meshfill {

// INVALID_ARGUMENT: a name is too long, or there are no tokens. NOT_FOUND: it is for another model.
absl::Status CheckHeader(const v1::PrefillHeader& header, const std::string& model_name);

// INVALID_ARGUMENT: there are no tokens.
absl::Status CheckTokenCount(uint64_t token_count);

// What logs and spans show of a name: a header that is refused may have names of any length.
std::string ShownName(const std::string& name);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_API_HEADER_CHECK_H_
