#include "server/api/status_details.h"

#include <string>

#include "absl/strings/cord.h"
#include "absl/strings/string_view.h"
#include "google/rpc/status.pb.h"
#include "server/queue/refusal.h"

namespace meshfill {
namespace {

constexpr size_t kMaxMessageBytes = 1024;

// Cut between characters: a client may refuse a trailer that is not UTF-8.
std::string CutMessage(absl::string_view message) {
  if (message.size() <= kMaxMessageBytes) return std::string(message);
  size_t size = kMaxMessageBytes;
  while (size > 0 && (static_cast<unsigned char>(message[size]) & 0xc0) == 0x80) --size;
  return std::string(message.substr(0, size));
}

}  // namespace

grpc::Status ToGrpcStatus(const absl::Status& status) {
  const std::string message = CutMessage(status.message());
  google::rpc::Status details;
  status.ForEachPayload([&](absl::string_view url, const absl::Cord& payload) {
    if (url == kRefusalUrl) return;
    auto& detail = *details.add_details();
    detail.set_type_url(std::string(url));
    detail.set_value(std::string(payload));
  });
  const auto code = static_cast<grpc::StatusCode>(status.code());
  if (details.details().empty()) return grpc::Status(code, message);
  details.set_code(static_cast<int>(code));
  details.set_message(message);
  return grpc::Status(code, message, details.SerializeAsString());
}

absl::Status FromGrpcStatus(const grpc::Status& status) {
  absl::Status result(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
  google::rpc::Status details;
  if (details.ParseFromString(status.error_details())) {
    for (const auto& detail : details.details())
      result.SetPayload(detail.type_url(), absl::Cord(detail.value()));
  }
  return result;
}

}  // namespace meshfill
