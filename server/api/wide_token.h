// Token ids of more than 32 bits in an upload. Protobuf drops their high bits, so that 2^32 + 5 would be
// served as 5.
#ifndef MESHFILL_SERVER_API_WIDE_TOKEN_H_
#define MESHFILL_SERVER_API_WIDE_TOKEN_H_

#include <cstdint>
#include <optional>

#include "grpcpp/support/byte_buffer.h"
#include "meshfill/v1/prefill.pb.h"

namespace meshfill {

struct WideToken {
  int64_t index = 0;  // index in the message
  uint64_t id = 0;

  bool operator==(const WideToken&) const = default;
};

// The first one in `bytes`, which were decoded to `message`. Reads them only where encoding the message would
// give another length: so does whatever lost bits.
std::optional<WideToken> FindWideToken(const grpc::ByteBuffer& bytes, const v1::PrefillRequest& message);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_API_WIDE_TOKEN_H_
