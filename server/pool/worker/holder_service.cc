#include "server/pool/worker/holder_service.h"

#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/comm/interface_address.h"
#include "grpcpp/grpcpp.h"
#include "grpcpp/health_check_service_interface.h"
#include "kernels/return_if_error.h"
#include "meshfill/v1/prefill.grpc.pb.h"
#include "server/access/access.h"
#include "server/access/transport.h"
#include "server/api/decoded.h"
#include "server/api/kv_streams.h"
#include "server/api/refused_stream.h"
#include "server/config/address.h"
#include "server/config/config_units.h"
#include "server/listener/channel_limits.h"
#include "server/listener/grpc_listener.h"

namespace meshfill {
namespace {

constexpr auto kShutdownGrace = std::chrono::milliseconds(50);

// The numeric address of `listen`, which others can connect to.
absl::StatusOr<HostPort> ResolveReachable(const std::string& listen) {
  ASSIGN_OR_RETURN(HostPort named, ParseHostPort(listen));
  named.host = InterfaceAddress(named.host).value_or(named.host);
  ASSIGN_OR_RETURN(HostPort address, ResolveFreeAddress(named.DebugString()));
  if (address.host != "0.0.0.0" && address.host != "::") return address;
  return absl::InvalidArgumentError(absl::StrCat(
      "\"", listen,
      "\" is every interface; name the one at which clients and the front-end reach this worker"));
}

}  // namespace

class HolderService::Service final
    : public v1::PrefillService::WithRawCallbackMethod_FetchKv<v1::PrefillService::CallbackService> {
 public:
  Service(KvSource& held, const KvStreams::Limits& limits) : streams_(held, limits, nullptr) {}

  ~Service() override {
    if (port_.server != nullptr) port_.Shutdown(std::chrono::system_clock::now() + kShutdownGrace);
    streams_.WaitUntilNoStream();
    port_.server.reset();
  }

  absl::Status Listen(const std::string& listen, const v1::Config& config) {
    ASSIGN_OR_RETURN(HostPort address, ResolveReachable(listen));
    ASSIGN_OR_RETURN(const auto transport, ApiServerTransport(config.api().tls(), address));
    ASSIGN_OR_RETURN(access_, Access::Open(config.api(), transport.peers));
    grpc::EnableDefaultHealthCheckService(true);
    grpc::ServerBuilder builder;
    LimitChannel(config.limits(), builder);
    builder.RegisterService(this);
    builder.RegisterCallbackGenericService(&unknown_);
    ASSIGN_OR_RETURN(port_, ListenAt(address, PortLimitsOf(config.limits()), transport, builder));
    SetMember(false);
    return absl::OkStatus();
  }

  void SetMember(bool member) {
    port_.server->GetHealthCheckService()->SetServingStatus(kWorkerHealthService, member);
  }

  const std::string& address() const { return port_.address; }

  KvFetchReactor* FetchKv(grpc::CallbackServerContext* context, const grpc::ByteBuffer* bytes) override {
    auto tenant = access_->AdmitTenant(*context, {Role::kClient, Role::kWorker, Role::kAdmin});
    if (!tenant.ok()) return new RefusedStream<KvFetchReactor>(tenant.status());
    auto request = Decoded<v1::FetchKvRequest>(*bytes, streams_.limits().max_message_bytes);
    if (!request.ok()) return new RefusedStream<KvFetchReactor>(request.status());
    return streams_.Fetch(context, *std::move(tenant), *std::move(request));
  }

 private:
  UnknownMethods unknown_;
  KvStreams streams_;
  std::unique_ptr<const Access> access_;
  GrpcListener port_;
};

HolderService::HolderService(std::unique_ptr<Service> service) : service_(std::move(service)) {}
HolderService::~HolderService() = default;

absl::StatusOr<std::unique_ptr<HolderService>> HolderService::Start(const std::string& listen,
                                                                    const v1::Config& config,
                                                                    KvSource& held) {
  // Who reads from several holders takes their parts in the order of tokens: one may wait long for the
  // others, and its lease is kept alive meanwhile.
  const absl::Duration result_timeout = ToDuration(config.limits().result_timeout());
  auto service = std::make_unique<Service>(
      held, KvStreams::Limits{.max_message_bytes = static_cast<int64_t>(config.limits().max_message_bytes()),
                              .read_timeout = result_timeout,
                              .waits_for_lease = true,
                              .unread_bytes = static_cast<int64_t>(config.limits().unread_bytes()),
                              .least_wait = result_timeout});
  RETURN_IF_ERROR(service->Listen(listen, config));
  return std::unique_ptr<HolderService>(new HolderService(std::move(service)));
}

void HolderService::SetMember(bool member) { service_->SetMember(member); }

const std::string& HolderService::address() const { return service_->address(); }

}  // namespace meshfill
