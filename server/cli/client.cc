#include "server/cli/client.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "kernels/monotonic_time.h"
#include "kernels/return_if_error.h"
#include "meshfill/v1/prefill.grpc.pb.h"
#include "server/api/status_details.h"

namespace meshfill {
namespace {

// A varint has at most 5 bytes: a chunk stays below 64 KiB, the least that limits.max_message_bytes may be.
constexpr size_t kChunkTokens = 12288;

using PrefillStream = grpc::ClientReaderWriter<v1::PrefillRequest, v1::PrefillEvent>;

// False where the call has ended already: its status tells why.
bool Upload(v1::PrefillHeader header, std::span<const uint32_t> tokens, PrefillStream& stream) {
  v1::PrefillRequest request;
  *request.mutable_header() = std::move(header);
  if (!stream.Write(request)) return false;
  while (!tokens.empty()) {
    const std::span<const uint32_t> chunk = tokens.first(std::min(tokens.size(), kChunkTokens));
    request.mutable_tokens()->mutable_ids()->Assign(chunk.begin(), chunk.end());
    if (!stream.Write(request)) return false;
    tokens = tokens.subspan(chunk.size());
  }
  return stream.WritesDone();
}

absl::Status ServerError(const std::string& address, const grpc::Status& status) {
  const absl::Status said = FromGrpcStatus(status);
  if (absl::StrContains(status.error_message(), "DNS resolution failed")) {
    return absl::NotFoundError(
        absl::StrCat("server ", address, ": no host of this name is known; check the address and the DNS"));
  }
  std::string message = absl::StrCat("server ", address, ": ", status.error_message());
  if (absl::IsUnavailable(said) && absl::StrContains(message, "failed to connect")) {
    // gRPC names what speaks HTTP/1 there: a page, not the API.
    absl::StrAppend(&message,
                    absl::StrContains(message, "http1")
                        ? "; this is no port of the API (metrics_listen?): give the server's `listen`"
                        : "; is `meshfill serve` listening there?");
  }
  absl::Status error(said.code(), message);
  said.ForEachPayload(
      [&](absl::string_view url, const absl::Cord& payload) { error.SetPayload(url, payload); });
  return error;
}

// A call of one message each way.
template <typename Request, typename Reply, typename Method>
absl::Status CallOnce(const ServerChannel& server, absl::Duration timeout, const Request& request,
                      Reply& reply, Method method) {
  grpc::ClientContext context;
  server.Authorize(context);
  context.set_deadline(absl::ToChronoTime(absl::Now() + timeout));
  const std::unique_ptr<v1::PrefillService::Stub> stub = v1::PrefillService::NewStub(server.channel());
  const grpc::Status status = (stub.get()->*method)(&context, request, &reply);
  return status.ok() ? absl::OkStatus() : ServerError(server.address(), status);
}

}  // namespace

class PrefillClient::Call {
 public:
  absl::StatusOr<v1::PrefillResult> Run(const ServerChannel& server, v1::PrefillHeader header,
                                        std::span<const uint32_t> tokens, absl::Time deadline,
                                        PrefillEvents& events) {
    const std::unique_ptr<v1::PrefillService::Stub> stub = v1::PrefillService::NewStub(server.channel());
    server.Authorize(context_);
    if (deadline != absl::InfiniteFuture()) {
      context_.set_deadline(absl::ToChronoTime(absl::Now() + (deadline - MonotonicNow())));
    }
    header.set_token_count(tokens.size());
    const std::unique_ptr<PrefillStream> stream = stub->Prefill(&context_);
    Upload(std::move(header), tokens, *stream);

    std::optional<v1::PrefillResult> result;
    v1::PrefillEvent event;
    while (stream->Read(&event)) {
      switch (event.event_case()) {
        case v1::PrefillEvent::kAccepted:
          events.OnAccepted(event.accepted());
          break;
        case v1::PrefillEvent::kProgress:
          events.OnProgress(event.progress());
          break;
        case v1::PrefillEvent::kResult:
          result = std::move(*event.mutable_result());
          break;
        case v1::PrefillEvent::EVENT_NOT_SET:
          break;
      }
    }
    if (grpc::Status status = stream->Finish(); !status.ok()) return ServerError(server.address(), status);
    if (!result.has_value()) {
      return absl::InternalError(
          absl::StrCat("server ", server.address(), " ended the call without a result; see its log"));
    }
    return *std::move(result);
  }

  void Cancel() { context_.TryCancel(); }

 private:
  grpc::ClientContext context_;
};

PrefillClient::PrefillClient() : call_(std::make_unique<Call>()) {}
PrefillClient::~PrefillClient() = default;

absl::StatusOr<v1::PrefillResult> PrefillClient::Prefill(const ServerChannel& server,
                                                         v1::PrefillHeader header,
                                                         std::span<const uint32_t> tokens,
                                                         absl::Time deadline, PrefillEvents& events) {
  return call_->Run(server, std::move(header), tokens, deadline, events);
}

void PrefillClient::Cancel() { call_->Cancel(); }

absl::StatusOr<v1::PoolStatus> GetPool(const ServerChannel& server, absl::Duration timeout) {
  v1::PoolStatus status;
  RETURN_IF_ERROR(
      CallOnce(server, timeout, v1::GetPoolRequest(), status, &v1::PrefillService::Stub::GetPool));
  return status;
}

absl::StatusOr<v1::PlanReply> PlanOnServer(const ServerChannel& server, const v1::PlanRequest& request,
                                           absl::Duration timeout) {
  v1::PlanReply reply;
  RETURN_IF_ERROR(CallOnce(server, timeout, request, reply, &v1::PrefillService::Stub::Plan));
  return reply;
}

absl::Status CancelOnServer(const ServerChannel& server, const std::string& request_id,
                            absl::Duration timeout) {
  v1::CancelRequest request;
  request.set_request_id(request_id);
  v1::CancelReply reply;
  return CallOnce(server, timeout, request, reply, &v1::PrefillService::Stub::Cancel);
}

}  // namespace meshfill
