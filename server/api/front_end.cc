#include "server/api/front_end.h"

#include <algorithm>
#include <atomic>
#include <initializer_list>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "grpcpp/ext/proto_server_reflection_plugin.h"
#include "grpcpp/grpcpp.h"
#include "grpcpp/health_check_service_interface.h"
#include "kernels/monotonic_time.h"
#include "kernels/return_if_error.h"
#include "meshfill/v1/prefill.grpc.pb.h"
#include "server/access/access.h"
#include "server/access/tenant.h"
#include "server/access/transport.h"
#include "server/api/decoded.h"
#include "server/api/header_check.h"
#include "server/api/kv_service.h"
#include "server/api/live_streams.h"
#include "server/api/plan_proto.h"
#include "server/api/prefill_stream.h"
#include "server/api/refused_stream.h"
#include "server/api/status_details.h"
#include "server/api/store_leases.h"
#include "server/config/address.h"
#include "server/config/config.h"
#include "server/config/config_units.h"
#include "server/listener/channel_limits.h"
#include "server/listener/grpc_listener.h"
#include "server/observe/build_name.h"
#include "server/queue/prefill_queue.h"
#include "server/queue/refusal.h"

namespace meshfill {
namespace {

constexpr absl::Duration kAnswerGrace = absl::Milliseconds(50);  // time for clients to take what has ended
constexpr absl::Duration kCloseGrace = absl::Milliseconds(50);   // time for clients to hang up

PrefillQueue::Limits QueueLimits(const v1::Config& config) {
  const v1::QueueSection& queue = config.queue();
  return {.max_requests = queue.max_requests(),
          .max_tokens = static_cast<int64_t>(queue.max_tokens()),
          .max_wait = ToDuration(queue.max_wait()),
          .max_age = ToDuration(queue.max_age()),
          .tenants = Tenants(config)};
}

const char* PhaseName(PrefillQueue::Phase phase) {
  switch (phase) {
    case PrefillQueue::Phase::kRunning:
      return "running";
    case PrefillQueue::Phase::kPaused:
      return "paused";
    case PrefillQueue::Phase::kWaiting:
      return "waiting";
    case PrefillQueue::Phase::kUploading:
      return "uploading";
  }
  return "?";
}

LiveStreams::Limits StreamLimits(const v1::LimitsSection& limits) {
  return {.upload_timeout = ToDuration(limits.upload_timeout()),
          .upload_tokens_per_second = static_cast<double>(limits.upload_tokens_per_second()),
          .result_timeout = ToDuration(limits.result_timeout()),
          .unread_bytes = static_cast<int64_t>(limits.unread_bytes())};
}

KvService::Options KvOptions(const v1::Config& config) {
  return {.lease = ToDuration(config.kv().lease()),
          .max_lease = ToDuration(config.kv().max_lease()),
          .block_tokens = static_cast<int>(config.kv().block_tokens()),
          .tenants = Tenants(config),
          .streams = {.max_message_bytes = static_cast<int64_t>(config.limits().max_message_bytes()),
                      .read_timeout = ToDuration(config.limits().result_timeout()),
                      .unread_bytes = static_cast<int64_t>(config.limits().unread_bytes())}};
}

constexpr std::initializer_list<Role> kServed = {Role::kClient, Role::kAdmin};
constexpr std::initializer_list<Role> kFetching = {Role::kClient, Role::kWorker, Role::kAdmin};

}  // namespace

// Messages come as bytes (decoded.h).
using ServiceBase =
    v1::PrefillService::WithRawCallbackMethod_Prefill<v1::PrefillService::WithRawCallbackMethod_FetchKv<
        v1::PrefillService::WithRawCallbackMethod_RenewKv<v1::PrefillService::WithRawCallbackMethod_ReleaseKv<
            v1::PrefillService::WithRawCallbackMethod_Cancel<v1::PrefillService::WithRawCallbackMethod_Plan<
                v1::PrefillService::WithRawCallbackMethod_GetPool<v1::PrefillService::Service>>>>>>>;

class FrontEnd::Service final : public ServiceBase {
 public:
  Service(const v1::Config& config, Metrics& metrics, SpanExporter* spans)
      : queue_limits_(QueueLimits(config)),
        embedded_ranks_(
            config.pool().control_listen().empty() ? static_cast<int>(config.pool().embedded().ranks()) : 0),
        metrics_(metrics),
        spans_(spans),
        kv_options_(KvOptions(config)),
        max_top_k_(static_cast<int>(config.limits().max_top_k())),
        return_logits_(config.limits().return_logits()),
        max_message_bytes_(static_cast<int64_t>(config.limits().max_message_bytes())),
        live_(StreamLimits(config.limits())) {
    metrics_.SetPool(PoolState::kLoading, embedded_ranks_);
  }

  absl::Status Listen(const v1::Config& config) {
    ASSIGN_OR_RETURN(auto address, ResolveFreeAddress(config.listen()));
    ASSIGN_OR_RETURN(const auto transport, ApiServerTransport(config.api().tls(), address));
    ASSIGN_OR_RETURN(access_, Access::Open(config.api(), transport.peers));
    grpc::EnableDefaultHealthCheckService(true);  // for everybody: load balancers have no credential
    if (!access_->asks_for_credentials()) grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    grpc::ServerBuilder builder;
    LimitChannel(config.limits(), builder);
    builder.RegisterService(this);
    builder.RegisterCallbackGenericService(&unknown_methods_);
    ASSIGN_OR_RETURN(port_, ListenAt(address, PortLimitsOf(config.limits()), transport, builder));
    SetHealth(false);
    return absl::OkStatus();
  }

  void Open(std::unique_ptr<PrefillEngine> engine, KvLeases* kv) {
    engine_ = std::move(engine);
    queue_ = std::make_unique<PrefillQueue>(*engine_, queue_limits_, metrics_, last_prefill_);
    if (KvStore* store = engine_->kv_store()) store_leases_ = std::make_unique<StoreLeases>(*store);
    if (kv == nullptr) kv = store_leases_.get();
    if (kv != nullptr) kv_ = std::make_unique<KvService>(*kv, kv_options_, metrics_);
    if (engine_->ranks() > 0) metrics_.SetPool(PoolState::kReady, engine_->ranks());
    metrics_.SetPeakFlops(engine_->peak_flops());
    state_.store(PoolState::kReady, std::memory_order_release);
    Refresh();
  }

  void Refresh() {
    if (state_.load(std::memory_order_acquire) != PoolState::kReady) return;
    SetHealth(engine_->ranks() > 0);
    if (lost()) metrics_.SetPool(PoolState::kReady, 0);  // no state has a rank
  }

  // Ranks of an embedded pool go for this reason alone, and all at once.
  bool lost() const { return embedded_ranks_ > 0 && has_engine() && engine_->ranks() == 0; }

  void StartDrain() {
    SetHealth(false);
    if (queue_ != nullptr) queue_->Drain();
    live_.StartDrain();
    if (members().empty()) metrics_.SetPool(PoolState::kDraining, ranks());
    state_.store(PoolState::kDraining, std::memory_order_release);
  }

  std::string standstill() {
    return embedded_ranks_ > 0 && queue_ != nullptr ? queue_->standstill(MonotonicNow()) : "";
  }

  bool WaitUntilIdle(absl::Time deadline) {
    return live_.WaitUntilNone(deadline) && (kv_ == nullptr || kv_->WaitUntilNoLease(deadline));
  }

  void Stop() {
    if (port_.server == nullptr) return;
    StartDrain();
    if (queue_ != nullptr)
      queue_->StopAll(absl::UnavailableError("the server is shutting down; try another one"));
    live_.StopUploads();
    // Clients that do not take their answers do not hang up either.
    const bool taken = live_.WaitUntilNone(MonotonicNow() + kAnswerGrace);
    port_.Shutdown(absl::ToChronoTime(absl::Now() + (taken ? kCloseGrace : absl::ZeroDuration())));
    live_.WaitUntilNone(absl::InfiniteFuture());
    if (kv_ != nullptr) kv_->WaitUntilNoStream();
    queue_.reset();
    kv_.reset();
    port_.server.reset();
  }

  const std::string& address() const { return port_.address; }
  const LastPrefill& last_prefill() const { return last_prefill_; }

  PrefillReactor* Prefill(grpc::CallbackServerContext* context) override {
    const absl::StatusOr<Caller> caller = access_->Admit(*context, kServed);
    if (const auto status = caller.ok() ? CheckOpen() : caller.status(); !status.ok()) {
      metrics_.OnRequestDone(status.code());
      metrics_.OnRequestRefused(RefusalOf(status));
      return new RefusedStream<PrefillReactor>(status);
    }
    return PrefillStream::Start(context, *caller,
                                {.engine = *engine_,
                                 .queue = *queue_,
                                 .live = live_,
                                 .metrics = metrics_,
                                 .kv = kv_.get(),
                                 .spans = spans_,
                                 .max_top_k = max_top_k_,
                                 .return_logits = return_logits_,
                                 .max_message_bytes = max_message_bytes_});
  }

  KvFetchReactor* FetchKv(grpc::CallbackServerContext* context, const grpc::ByteBuffer* bytes) override {
    absl::StatusOr<std::string> tenant = access_->AdmitTenant(*context, kFetching);
    absl::Status status = tenant.ok() ? CheckKv() : tenant.status();
    v1::FetchKvRequest request;
    if (status.ok()) status = Decode("the request", *bytes, max_message_bytes_, request);
    if (!status.ok()) {
      metrics_.OnCallRefused("FetchKv", status.code());
      return new RefusedStream<KvFetchReactor>(status);
    }
    return kv_->Fetch(context, *std::move(tenant), std::move(request));
  }

  grpc::ServerUnaryReactor* RenewKv(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                    grpc::ByteBuffer* reply) override {
    return Answer(context, "RenewKv", Renew(*context, *request), reply);
  }
  grpc::ServerUnaryReactor* ReleaseKv(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                      grpc::ByteBuffer* reply) override {
    return Answer(context, "ReleaseKv", Release(*context, *request), reply);
  }
  grpc::ServerUnaryReactor* Cancel(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                   grpc::ByteBuffer* reply) override {
    return Answer(context, "Cancel", CancelRequest(*context, *request), reply);
  }
  grpc::ServerUnaryReactor* Plan(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                 grpc::ByteBuffer* reply) override {
    return Answer(context, "Plan", MakePlan(*context, *request), reply);
  }
  grpc::ServerUnaryReactor* GetPool(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                    grpc::ByteBuffer* reply) override {
    return Answer(context, "GetPool", PoolFor(*context, *request), reply);
  }

  // The pool's status with the requests of one tenant; null: of all tenants.
  v1::PoolStatus pool_status(const std::string* tenant) const {
    v1::PoolStatus status;
    const PoolState state = state_.load(std::memory_order_acquire);
    status.set_ranks(static_cast<uint32_t>(ranks()));
    status.set_build(kBuildName);
    status.set_state(state == PoolState::kLoading ? v1::PoolStatus::STATE_LOADING
                     : state == PoolState::kReady ? v1::PoolStatus::STATE_READY
                                                  : v1::PoolStatus::STATE_DRAINING);
    if (state == PoolState::kLoading || engine_ == nullptr) return status;
    status.set_model(engine_->model_name());
    status.set_backend(engine_->backend_name());
    status.set_peak_flops(engine_->peak_flops());
    status.set_context_tokens(engine_->model().context_tokens);
    status.set_vocab(engine_->model().vocab);
    const PrefillQueue::Snapshot queue = queue_->snapshot();
    for (const PoolMember& member : members()) {
      v1::PoolStatus::Worker& worker = *status.add_workers();
      worker.set_name(member.name);
      worker.set_host(member.host);
      worker.set_backend(member.backend);
      worker.set_state(member.state);
      worker.set_ranks(static_cast<uint32_t>(member.ranks));
      worker.set_first_rank(member.first_rank);
    }
    for (const PoolLink& link : engine_->links()) {
      v1::PoolStatus::Link& message = *status.add_links();
      message.set_where(link.where);
      message.set_bytes_per_second(link.link.bytes_per_second);
      message.set_latency_seconds(link.link.latency_seconds);
      message.set_source(link.source);
    }
    status.set_queued_requests(static_cast<uint32_t>(queue.requests));
    status.set_queued_tokens(static_cast<uint64_t>(queue.tokens));
    const auto shown = [&](const PrefillQueue::JobView& job) {
      return tenant == nullptr || job.tenant == *tenant;
    };
    if (!queue.jobs.empty() && queue.jobs.front().phase == PrefillQueue::Phase::kRunning &&
        shown(queue.jobs.front())) {
      status.set_running_request_id(queue.jobs.front().id);
      status.set_running_layers_done(static_cast<uint32_t>(queue.jobs.front().layers_done));
      status.set_running_layers(static_cast<uint32_t>(queue.jobs.front().layers));
    }
    for (const PrefillQueue::JobView& job : queue.jobs) {
      if (!shown(job)) continue;
      v1::PoolStatus::Request& request = *status.add_requests();
      request.set_id(job.id);
      request.set_phase(PhaseName(job.phase));
      request.set_tokens(static_cast<uint64_t>(job.tokens));
      request.set_elapsed_seconds(job.elapsed_seconds);
      request.set_predicted_rest_seconds(job.predicted_rest_seconds);
      request.set_layers_done(static_cast<uint32_t>(job.layers_done));
      request.set_layers(static_cast<uint32_t>(job.layers));
      request.set_tenant(job.tenant);
    }
    return status;
  }

 private:
  absl::Status CheckOpen() const {
    switch (state_.load(std::memory_order_acquire)) {
      case PoolState::kLoading:
        return absl::UnavailableError("the server is loading its model; try again soon");
      case PoolState::kDraining:
        return absl::UnavailableError("the server is draining; try another one");
      case PoolState::kReady:
        break;
    }
    return absl::OkStatus();
  }

  template <typename Reply>
  grpc::ServerUnaryReactor* Answer(grpc::CallbackServerContext* context, const char* call,
                                   const absl::StatusOr<Reply>& reply, grpc::ByteBuffer* bytes) {
    reply.ok() ? Encode(*reply, *bytes) : metrics_.OnCallRefused(call, reply.status().code());
    grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
    reactor->Finish(ToGrpcStatus(reply.status()));
    return reactor;
  }

  // Leases are served while draining, too.
  absl::Status CheckKv() const {
    if (!has_engine()) return absl::UnavailableError("the server is loading its model; try again soon");
    if (kv_ == nullptr) return absl::NotFoundError("this pool keeps no K and V, and has no leases");
    return absl::OkStatus();
  }

  absl::StatusOr<v1::KvLease> Renew(const grpc::CallbackServerContext& context,
                                    const grpc::ByteBuffer& bytes) {
    ASSIGN_OR_RETURN(const std::string tenant, access_->AdmitTenant(context, kServed));
    ASSIGN_OR_RETURN(const auto request, Decoded<v1::RenewKvRequest>(bytes, max_message_bytes_));
    RETURN_IF_ERROR(CheckKv());
    return kv_->Renew(request, tenant);
  }

  absl::StatusOr<v1::ReleaseKvReply> Release(const grpc::CallbackServerContext& context,
                                             const grpc::ByteBuffer& bytes) {
    ASSIGN_OR_RETURN(const std::string tenant, access_->AdmitTenant(context, kServed));
    ASSIGN_OR_RETURN(const auto request, Decoded<v1::ReleaseKvRequest>(bytes, max_message_bytes_));
    if (CheckKv().ok()) kv_->Release(request, tenant);
    return v1::ReleaseKvReply();
  }

  // An admin who names no tenant need not know whose request it is.
  absl::StatusOr<v1::CancelReply> CancelRequest(const grpc::CallbackServerContext& context,
                                                const grpc::ByteBuffer& bytes) {
    ASSIGN_OR_RETURN(const Caller caller, access_->Admit(context, kServed));
    ASSIGN_OR_RETURN(const std::string tenant, TenantFor(caller, TenantOf(context)));
    ASSIGN_OR_RETURN(const auto request, Decoded<v1::CancelRequest>(bytes, max_message_bytes_));
    const bool of_any = caller.role == Role::kAdmin && tenant.empty();
    RETURN_IF_ERROR(live_.CancelRequest(request.request_id(), of_any ? nullptr : &tenant));
    return v1::CancelReply();
  }

  absl::StatusOr<v1::PlanReply> MakePlan(const grpc::CallbackServerContext& context,
                                         const grpc::ByteBuffer& bytes) const {
    RETURN_IF_ERROR(access_->Admit(context, kServed).status());
    ASSIGN_OR_RETURN(const auto request, Decoded<v1::PlanRequest>(bytes, max_message_bytes_));
    RETURN_IF_ERROR(CheckOpen());
    if (!request.model().empty() && request.model() != engine_->model_name()) {
      return absl::NotFoundError(absl::StrCat("model \"", request.model().substr(0, 128),
                                              "\" is not served here; name \"", engine_->model_name(),
                                              "\" or none"));
    }
    RETURN_IF_ERROR(CheckTokenCount(request.token_count()));
    ASSIGN_OR_RETURN(const auto options, ToPrefillOptions(request.plan()));
    ASSIGN_OR_RETURN(const int64_t tokens, ToTokenCount(request.token_count(), *engine_));
    ASSIGN_OR_RETURN(const auto choice, engine_->MakePlan(tokens, options));
    return ToProto(choice);
  }

  absl::StatusOr<v1::PoolStatus> PoolFor(const grpc::CallbackServerContext& context,
                                         const grpc::ByteBuffer& bytes) const {
    ASSIGN_OR_RETURN(const Caller caller, access_->Admit(context, kServed));
    RETURN_IF_ERROR(Decoded<v1::GetPoolRequest>(bytes, max_message_bytes_).status());
    return pool_status(caller.role == Role::kClient ? &caller.tenant : nullptr);
  }

  bool has_engine() const {
    return state_.load(std::memory_order_acquire) != PoolState::kLoading && engine_ != nullptr;
  }
  int ranks() const { return has_engine() ? engine_->ranks() : embedded_ranks_; }
  std::vector<PoolMember> members() const {
    return has_engine() ? engine_->members() : std::vector<PoolMember>();
  }

  void SetHealth(bool ready) {
    port_.server->GetHealthCheckService()->SetServingStatus(v1::PrefillService::service_full_name(), ready);
  }

  const PrefillQueue::Limits queue_limits_;
  const int embedded_ranks_;
  Metrics& metrics_;
  SpanExporter* const spans_;
  LastPrefill last_prefill_;
  const KvService::Options kv_options_;
  const int max_top_k_;
  const bool return_logits_;
  const int64_t max_message_bytes_;
  UnknownMethods unknown_methods_;
  std::unique_ptr<const Access> access_;  // before the port
  LiveStreams live_;
  // engine_, queue_ and kv_ are set before it leaves kLoading
  std::atomic<PoolState> state_{PoolState::kLoading};
  std::unique_ptr<PrefillEngine> engine_;
  std::unique_ptr<PrefillQueue> queue_;
  std::unique_ptr<StoreLeases> store_leases_;  // null: the engine has no store
  std::unique_ptr<KvService> kv_;              // null: the engine keeps no K and V
  GrpcListener port_;
};

FrontEnd::FrontEnd(std::unique_ptr<Service> service) : service_(std::move(service)) {}
FrontEnd::~FrontEnd() { Stop(); }

absl::StatusOr<std::unique_ptr<FrontEnd>> FrontEnd::Start(const v1::Config& config, Metrics& metrics,
                                                          SpanExporter* spans) {
  auto service = std::make_unique<Service>(config, metrics, spans);
  RETURN_IF_ERROR(service->Listen(config));
  return std::unique_ptr<FrontEnd>(new FrontEnd(std::move(service)));
}

const std::string& FrontEnd::address() const { return service_->address(); }
v1::PoolStatus FrontEnd::pool_status() const { return service_->pool_status(nullptr); }
const LastPrefill& FrontEnd::last_prefill() const { return service_->last_prefill(); }
void FrontEnd::Open(std::unique_ptr<PrefillEngine> engine, KvLeases* kv) {
  service_->Open(std::move(engine), kv);
}
void FrontEnd::Refresh() { service_->Refresh(); }
void FrontEnd::StartDrain() { service_->StartDrain(); }
bool FrontEnd::lost() const { return service_->lost(); }
std::string FrontEnd::standstill() { return service_->standstill(); }
bool FrontEnd::WaitUntilIdle(absl::Time deadline) { return service_->WaitUntilIdle(deadline); }
void FrontEnd::Stop() { service_->Stop(); }

}  // namespace meshfill
