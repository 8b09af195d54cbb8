// Messages of the API from bytes, and back. Services take bytes: gRPC itself answers a call whose message it
// cannot decode with UNIMPLEMENTED and no word, and takes such a message of a stream for the stream's end.
#ifndef MESHFILL_SERVER_API_DECODED_H_
#define MESHFILL_SERVER_API_DECODED_H_

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "grpcpp/support/byte_buffer.h"
#include "meshfill/v1/prefill.grpc.pb.h"  // how messages become bytes

namespace meshfill {

// `what`: "the request". INVALID_ARGUMENT where the bytes are no such message. The copy shares the bytes.
template <typename Message>
absl::Status Decode(absl::string_view what, grpc::ByteBuffer bytes, Message& message) {
  if (grpc::SerializationTraits<Message>::Deserialize(&bytes, &message).ok()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(what, " cannot be decoded; send ", message.GetTypeName(),
                                                 ", uncompressed, its texts in UTF-8"));
}

template <typename Message>
absl::StatusOr<Message> Decoded(const grpc::ByteBuffer& bytes) {
  Message message;
  absl::Status status = Decode("the request", bytes, message);
  if (!status.ok()) return status;
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
