#include "server/pool/worker/control_client.h"

#include <deque>
#include <map>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "grpcpp/grpcpp.h"
#include "kernels/mutex.h"
#include "kernels/return_if_error.h"
#include "meshfill/v1/control.grpc.pb.h"
#include "server/access/transport.h"
#include "server/api/status_details.h"
#include "server/config/address.h"
#include "server/observe/log.h"

namespace meshfill {

class ControlClient::Impl {
 public:
  Impl(std::string address, HostPort parsed, v1::PoolSection::Tls tls,
       std::shared_ptr<grpc::ChannelCredentials> credentials, Listener& listener)
      : address_(std::move(address)),
        parsed_(std::move(parsed)),
        tls_(std::move(tls)),
        credentials_(std::move(credentials)),
        listener_(listener) {}

  ~Impl() {
    MutexLock lock(mu_);
    for (const auto& [connection, stream] : streams_) stream->Cancel();
    while (!streams_.empty()) gone_.Wait(mu_);
  }

  void Connect(Connection connection) {
    auto stream = std::make_shared<Stream>(*this, connection);
    {
      const MutexLock lock(mu_);
      streams_[connection] = stream;
      newest_ = stream;
    }
    stream->Start(MakeChannel());
    std::vector<std::shared_ptr<Stream>> ended;  // destroyed after the lock
    const MutexLock lock(mu_);
    ended.swap(ended_);
  }

  void Disconnect(Connection connection) {
    if (auto stream = Find(connection)) stream->Cancel();
  }

  void Send(v1::WorkerMessage message) {
    std::shared_ptr<Stream> stream;
    {
      const MutexLock lock(mu_);
      stream = newest_;
    }
    if (stream != nullptr) stream->Enqueue(std::move(message));
  }

 private:
  // One stream. gRPC's share of it is its place in streams_, given up in OnDone.
  class Stream final : public grpc::ClientBidiReactor<v1::WorkerMessage, v1::LeaderMessage> {
   public:
    Stream(Impl& client, Connection connection) : client_(client), connection_(connection) {}

    void Start(const std::shared_ptr<grpc::Channel>& channel) {
      stub_ = v1::ControlService::NewStub(channel);
      stub_->async()->Attach(&context_, this);
      AddHold();  // for writes from outside of a reaction, until the reads end
      StartRead(&incoming_);
      StartCall();
      const MutexLock lock(mu_);
      started_ = true;
      Pump();
    }
    void Cancel() { context_.TryCancel(); }
    void Enqueue(v1::WorkerMessage message) {
      const MutexLock lock(mu_);
      if (ended_) return;
      outbox_.push_back(std::move(message));
      Pump();
    }

    void OnReadDone(bool ok) override {
      if (ok) {
        heard_ = true;
        client_.listener_.OnMessage(connection_, incoming_);
        return StartRead(&incoming_);
      }
      {
        const MutexLock lock(mu_);
        ended_ = true;
        outbox_.clear();
      }
      RemoveHold();
    }
    void OnWriteDone(bool) override {
      const MutexLock lock(mu_);
      writing_ = false;
      Pump();
    }
    void OnDone(const grpc::Status& status) override {
      client_.listener_.OnDisconnected(connection_, WhyItEnded(status));
      client_.Forget(connection_);
    }

   private:
    // A TLS handshake that fails tells this side no more than that the connection is gone.
    absl::Status WhyItEnded(const grpc::Status& status) const {
      if (status.ok()) return absl::UnavailableError("the leader closed it");
      const absl::Status why = FromGrpcStatus(status);
      if (heard_ || !absl::IsUnavailable(why)) return why;
      return absl::UnavailableError(
          absl::StrCat(why.message(),
                       "; the leader is not there, or takes none without a certificate that its pool.tls.ca "
                       "has signed"));
    }

    // Starts the next write, if none is under way.
    void Pump() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
      if (!started_ || writing_ || ended_ || outbox_.empty()) return;
      writing_ = true;
      outgoing_ = std::move(outbox_.front());
      outbox_.pop_front();
      StartWrite(&outgoing_);
    }

    Impl& client_;
    const Connection connection_;
    std::unique_ptr<v1::ControlService::Stub> stub_;
    grpc::ClientContext context_;
    v1::LeaderMessage incoming_;  // gRPC's while a read is under way
    bool heard_ = false;          // a message came; of gRPC's reactions, which come one after another
    v1::WorkerMessage outgoing_;  // gRPC's while a write is under way
    Mutex mu_;
    std::deque<v1::WorkerMessage> outbox_ ABSL_GUARDED_BY(mu_);
    bool started_ ABSL_GUARDED_BY(mu_) = false;
    bool writing_ ABSL_GUARDED_BY(mu_) = false;
    bool ended_ ABSL_GUARDED_BY(mu_) = false;
  };

  // A channel of its own for each attempt: who asks decides when to try again, not gRPC's backoff.
  std::shared_ptr<grpc::Channel> MakeChannel() const {
    constexpr int kNoLimit = -1;
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
    arguments.SetMaxReceiveMessageSize(kNoLimit);
    arguments.SetMaxSendMessageSize(kNoLimit);
    // The files may have changed since the last connection.
    const auto credentials = ControlChannelCredentials(tls_, parsed_);
    if (!credentials.ok()) {
      LogLimited(
          "control_tls",
          absl::StrCat("joins with the certificate as it was at start: ", credentials.status().message()),
          {.level = LogLevel::kWarning});
    }
    return grpc::CreateCustomChannel(address_, credentials.value_or(credentials_), arguments);
  }

  std::shared_ptr<Stream> Find(Connection connection) {
    const MutexLock lock(mu_);
    const auto entry = streams_.find(connection);
    return entry == streams_.end() ? nullptr : entry->second;
  }

  void Forget(Connection connection) {
    const MutexLock lock(mu_);
    const auto entry = streams_.find(connection);
    if (newest_ == entry->second) newest_ = nullptr;
    ended_.push_back(std::move(entry->second));
    streams_.erase(entry);
    gone_.NotifyAll();
  }

  const std::string address_;
  const HostPort parsed_;
  const v1::PoolSection::Tls tls_;
  const std::shared_ptr<grpc::ChannelCredentials> credentials_;  // made of the files at start
  Listener& listener_;
  Mutex mu_;
  CondVar gone_;
  std::map<Connection, std::shared_ptr<Stream>> streams_ ABSL_GUARDED_BY(mu_);
  std::shared_ptr<Stream> newest_ ABSL_GUARDED_BY(mu_);
  // With the last channel, gRPC joins the threads that call back: so none is destroyed on such a thread, in
  // OnDone.
  std::vector<std::shared_ptr<Stream>> ended_ ABSL_GUARDED_BY(mu_);
};

ControlClient::ControlClient(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ControlClient::~ControlClient() = default;

absl::StatusOr<std::unique_ptr<ControlClient>> ControlClient::Make(const std::string& address,
                                                                   const v1::PoolSection::Tls& tls,
                                                                   Listener& listener) {
  ASSIGN_OR_RETURN(const auto parsed, ParseHostPort(address));
  ASSIGN_OR_RETURN(auto credentials, ControlChannelCredentials(tls, parsed));
  return std::unique_ptr<ControlClient>(
      new ControlClient(std::make_unique<Impl>(address, parsed, tls, std::move(credentials), listener)));
}

void ControlClient::Connect(Connection connection) { impl_->Connect(connection); }
void ControlClient::Disconnect(Connection connection) { impl_->Disconnect(connection); }
void ControlClient::Send(v1::WorkerMessage message) { impl_->Send(std::move(message)); }

}  // namespace meshfill
