#include "server/pool/holder_call.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "grpcpp/grpcpp.h"
#include "kernels/return_if_error.h"
#include "meshfill/v1/prefill.grpc.pb.h"
#include "server/access/bearer_token.h"
#include "server/access/file_watch.h"
#include "server/access/tenant.h"
#include "server/access/transport.h"
#include "server/api/status_details.h"
#include "server/observe/log.h"

namespace meshfill {
namespace {

constexpr int kWindowBytes = 1 << 20;  // bytes that a holder may send ahead of what is read
constexpr size_t kIdleChannels = 256;  // more than these are looked through for some that nobody uses

// What connections to holders depend on.
std::vector<std::string> FilesOf(const v1::ApiSection& api) {
  const v1::ApiSection::Tls& tls = api.tls();
  if (tls.ca().empty()) return {api.token()};
  return {api.token(), tls.ca(), tls.cert(), tls.key()};
}

}  // namespace

class HolderChannels::Connections {
 public:
  explicit Connections(const v1::ApiSection& api) : api_(api), watch_(FilesOf(api)) {}

  absl::Status Open() {
    RETURN_IF_ERROR(Read());
    watch_.Start([this] {
      const absl::Status read = Read();
      if (read.ok()) return Log("connections to workers take the new certificates and the new token");
      Log(absl::StrCat("connections to workers stay as they were: ", read.message()),
          {.level = LogLevel::kWarning});
    });
    return absl::OkStatus();
  }

  std::string authorization() const {
    const MutexLock lock(mu_);
    return authorization_;
  }

  std::shared_ptr<grpc::Channel> To(const std::string& address) {
    const MutexLock lock(mu_);
    ++calls_;
    if (channels_.size() >= kIdleChannels) {
      std::erase_if(channels_, [](const auto& entry) { return entry.second.use_count() == 1; });
    }
    std::shared_ptr<grpc::Channel>& channel = channels_[address];
    if (channel == nullptr) channel = MakeChannel(address);
    return channel;
  }
  void CallEnded() {
    const MutexLock lock(mu_);
    --calls_;
    ended_.NotifyAll();  // under the lock: afterwards this may be gone
  }
  void WaitUntilNoCall() {
    MutexLock lock(mu_);
    while (calls_ > 0) ended_.Wait(mu_);
  }

 private:
  // What the files say now. Calls that are under way keep their connections.
  absl::Status Read() {
    ASSIGN_OR_RETURN(auto credentials, HolderChannelCredentials(api_.tls()));
    std::string authorization;
    if (!api_.token().empty()) {
      ASSIGN_OR_RETURN(const std::string token, ReadBearerToken("api.token", api_.token()));
      authorization = BearerHeader(token);
    }
    const MutexLock lock(mu_);
    credentials_ = std::move(credentials);
    authorization_ = std::move(authorization);
    for (auto& [address, channel] : channels_) retired_.push_back(std::move(channel));
    channels_.clear();
    std::erase_if(retired_, [](const auto& channel) { return channel.use_count() == 1; });
    return absl::OkStatus();
  }

  std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    constexpr int kNoLimit = -1;
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(kNoLimit);
    arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
    arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);  // it would let the window grow with the link
    arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, kWindowBytes);
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 20'000);  // finds holders that are gone without a word
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10'000);
    arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);  // a layer may take long
    const std::string& name = api_.tls().server_name();
    if (!name.empty()) arguments.SetSslTargetNameOverride(name);
    return grpc::CreateCustomChannel(address, credentials_, arguments);
  }

  const v1::ApiSection api_;
  mutable Mutex mu_;
  std::shared_ptr<grpc::ChannelCredentials> credentials_ ABSL_GUARDED_BY(mu_);
  std::string authorization_ ABSL_GUARDED_BY(mu_);  // sent with every call; empty: none
  CondVar ended_;
  int calls_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<std::string, std::shared_ptr<grpc::Channel>> channels_ ABSL_GUARDED_BY(mu_);
  // Channels that go once no call owns them.
  std::vector<std::shared_ptr<grpc::Channel>> retired_ ABSL_GUARDED_BY(mu_);
  FileWatch watch_;  // last: its thread uses all of the above
};

// Its own until OnDone.
class HolderCall::Impl final : public grpc::ClientReadReactor<v1::KvPart> {
 public:
  Impl(v1::FetchKvRequest request, std::function<void()> changed, std::function<void()> on_done)
      : request_(std::move(request)), changed_(std::move(changed)), on_done_(std::move(on_done)) {}

  void Start(std::shared_ptr<Impl> self, std::unique_ptr<v1::PrefillService::Stub> stub,
             const std::string& tenant, const std::string& authorization) {
    self_ = std::move(self);
    stub_ = std::move(stub);
    if (!tenant.empty()) context_.AddMetadata(kTenantMetadata, tenant);
    if (!authorization.empty()) context_.AddMetadata("authorization", authorization);
    stub_->async()->FetchKv(&context_, &request_, this);
    AddHold();  // for reads from outside of a reaction, until the last one has failed, or Cancel
    StartRead(&part_);
    StartCall();
  }

  const v1::KvPart* part() const {
    const MutexLock lock(mu_);
    return read_ ? &part_ : nullptr;
  }
  std::optional<absl::Status> end() const {
    const MutexLock lock(mu_);
    return read_ ? std::nullopt : end_;
  }
  void Next() {
    {
      const MutexLock lock(mu_);
      read_ = false;
    }
    StartRead(&part_);
  }
  void Cancel() {
    bool between_reads = false;
    {
      const MutexLock lock(mu_);
      between_reads = std::exchange(read_, false);
      cancelled_ = true;
    }
    context_.TryCancel();
    if (between_reads) RemoveHold();
  }

  void OnReadDone(bool ok) override {
    {
      const MutexLock lock(mu_);
      read_ = ok && !cancelled_;
      ok = read_;
    }
    ok ? changed_() : RemoveHold();
  }
  void OnDone(const grpc::Status& status) override {
    {
      const MutexLock lock(mu_);
      end_ = FromGrpcStatus(status);
    }
    changed_();
    const std::function<void()> on_done = std::move(on_done_);
    stub_.reset();
    std::shared_ptr<Impl> self = std::move(self_);
    self.reset();  // may destroy this
    on_done();
  }

 private:
  const v1::FetchKvRequest request_;
  const std::function<void()> changed_;
  std::function<void()> on_done_;
  std::shared_ptr<Impl> self_;
  std::unique_ptr<v1::PrefillService::Stub> stub_;
  grpc::ClientContext context_;
  v1::KvPart part_;  // gRPC's while a read is under way
  mutable Mutex mu_;
  bool read_ ABSL_GUARDED_BY(mu_) = false;  // part_ is there, and no read is under way
  bool cancelled_ ABSL_GUARDED_BY(mu_) = false;
  std::optional<absl::Status> end_ ABSL_GUARDED_BY(mu_);
};

HolderCall::HolderCall(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
HolderCall::~HolderCall() { impl_->Cancel(); }

const v1::KvPart* HolderCall::part() const { return impl_->part(); }
void HolderCall::Next() { impl_->Next(); }
std::optional<absl::Status> HolderCall::end() const { return impl_->end(); }

HolderChannels::HolderChannels(std::unique_ptr<Connections> connections)
    : connections_(std::move(connections)) {}

absl::StatusOr<std::unique_ptr<HolderChannels>> HolderChannels::Make(const v1::ApiSection& api) {
  auto connections = std::make_unique<Connections>(api);
  RETURN_IF_ERROR(connections->Open());
  return std::unique_ptr<HolderChannels>(new HolderChannels(std::move(connections)));
}

// No call may own the channels: gRPC's threads must not be the ones that destroy the last of them, for they
// would wait for themselves.
HolderChannels::~HolderChannels() { connections_->WaitUntilNoCall(); }

std::unique_ptr<HolderCall> HolderChannels::Fetch(const std::string& address,
                                                  const v1::FetchKvRequest& request,
                                                  const std::string& tenant, std::function<void()> changed) {
  auto stub = v1::PrefillService::NewStub(connections_->To(address));
  auto impl = std::make_shared<HolderCall::Impl>(request, std::move(changed),
                                                 [&connections = *connections_] { connections.CallEnded(); });
  auto call = std::make_unique<HolderCall>(impl);
  impl->Start(impl, std::move(stub), tenant, connections_->authorization());
  return call;
}

}  // namespace meshfill
