// Streams that are refused before anything is read of them, or written to them.
#ifndef MESHFILL_SERVER_API_REFUSED_STREAM_H_
#define MESHFILL_SERVER_API_REFUSED_STREAM_H_

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "grpcpp/generic/async_generic_service.h"
#include "server/api/status_details.h"

namespace meshfill {

template <typename Reactor>
class RefusedStream final : public Reactor {
 public:
  explicit RefusedStream(const absl::Status& status) { this->Finish(ToGrpcStatus(status)); }
  void OnDone() override { delete this; }
};

// Calls of methods that a server does not have: gRPC's own answer is UNIMPLEMENTED without a word. Register
// it with grpc::ServerBuilder::RegisterCallbackGenericService; it outlives the server.
class UnknownMethods final : public grpc::CallbackGenericService {
 public:
  grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext* context) override {
    constexpr size_t kShownBytes = 128;
    return new RefusedStream<grpc::ServerGenericBidiReactor>(absl::UnimplementedError(
        absl::StrCat("no method \"", absl::CHexEscape(context->method().substr(0, kShownBytes)),
                     "\" here; call those of meshfill.v1.PrefillService, or grpc.health.v1.Health")));
  }
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_API_REFUSED_STREAM_H_
