// Messages of the API from bytes, and back. Services take bytes: gRPC itself answers a call whose message it
// cannot decode with UNIMPLEMENTED and no word, and takes such a message of a stream for the stream's end. It
// has a bound on a message's bytes, too, but says of it neither the key nor what to do.
#ifndef MESHFILL_SERVER_API_DECODED_H_
#define MESHFILL_SERVER_API_DECODED_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "grpcpp/support/byte_buffer.h"
#include "kernels/return_if_error.h"
#include "meshfill/v1/prefill.grpc.pb.h"  // how messages become bytes
#include "server/queue/refusal.h"

namespace meshfill {

// `what`: "the request". RESOURCE_EXHAUSTED: more bytes than `most_bytes`, which is limits.max_message_bytes.
// INVALID_ARGUMENT where the bytes are no such message. The copy shares the bytes.
template <typename Message>
absl::Status Decode(absl::string_view what, grpc::ByteBuffer bytes, int64_t most_bytes, Message& message) {
  if (bytes.Length() > static_cast<size_t>(most_bytes)) {
    return WithRefusal(absl::ResourceExhaustedError(
                           absl::StrCat(what, " has ", bytes.Length(), " bytes; at most ", most_bytes,
                                        " are allowed (limits.max_message_bytes); send smaller messages")),
                       Refusal::kInvalid);
  }
  if (grpc::SerializationTraits<Message>::Deserialize(&bytes, &message).ok()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(what, " cannot be decoded; send ", message.GetTypeName(),
                                                 ", uncompressed, its texts in UTF-8"));
}

template <typename Message>
absl::StatusOr<Message> Decoded(const grpc::ByteBuffer& bytes, int64_t most_bytes) {
  Message message;
  RETURN_IF_ERROR(Decode("the request", bytes, most_bytes, message));
  return message;
}

// Replaces what `bytes` had.
template <typename Message>
void Encode(const Message& message, grpc::ByteBuffer& bytes) {
  bool own = false;
  bytes.Clear();
  grpc::SerializationTraits<Message>::Serialize(message, &bytes, &own);
}

}  // namespace meshfill

#endif  // MESHFILL_SERVER_API_DECODED_H_
