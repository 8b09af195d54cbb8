#include "server/pool/control_service.h"

#include <chrono>
#include <deque>
#include <limits>
#include <map>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "grpcpp/grpcpp.h"
#include "grpcpp/resource_quota.h"
#include "kernels/mutex.h"
#include "kernels/return_if_error.h"
#include "meshfill/v1/control.grpc.pb.h"
#include "server/access/transport.h"
#include "server/config/address.h"
#include "server/listener/grpc_listener.h"

namespace meshfill {
namespace {

constexpr int kMaxMessageBytes = 16 << 20;  // logits of three million tokens; shards are cut smaller
constexpr int kMaxConnections = 4096;       // a worker has one
constexpr int kMaxStreams = 4;              // and one on it
constexpr int64_t kMaxChannelBytes = int64_t{1} << 30;  // memory of messages that are not complete yet
constexpr int kMaxMetadataBytes = 16 << 10;
constexpr auto kShutdownGrace = std::chrono::milliseconds(50);

using Reactor = grpc::ServerBidiReactor<v1::WorkerMessage, v1::LeaderMessage>;

}  // namespace

class ControlService::Service final : public v1::ControlService::CallbackService {
 public:
  explicit Service(Listener& listener) : listener_(listener) {}

  absl::Status Listen(const v1::PoolSection& pool) {
    ASSIGN_OR_RETURN(auto address, ResolveFreeAddress(pool.control_listen()));
    ASSIGN_OR_RETURN(const auto transport, ControlServerTransport(pool.tls(), address));
    grpc::ServerBuilder builder;
    builder.SetMaxReceiveMessageSize(kMaxMessageBytes);
    builder.SetMaxSendMessageSize(std::numeric_limits<int>::max());
    for (int algorithm = GRPC_COMPRESS_NONE + 1; algorithm < GRPC_COMPRESS_ALGORITHMS_COUNT; ++algorithm) {
      builder.SetCompressionAlgorithmSupportStatus(static_cast<grpc_compression_algorithm>(algorithm), false);
    }
    builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxStreams);
    builder.AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE, kMaxMetadataBytes);
    builder.SetResourceQuota(grpc::ResourceQuota("control").Resize(kMaxChannelBytes));
    builder.RegisterService(this);
    const PortLimits limits{
        .connections = kMaxConnections, .streams = kMaxStreams, .incomplete_bytes = kMaxChannelBytes};
    ASSIGN_OR_RETURN(port_, ListenAt(address, limits, transport, builder));
    return absl::OkStatus();
  }

  ~Service() override {
    if (port_.server == nullptr) return;
    port_.Shutdown(std::chrono::system_clock::now() + kShutdownGrace);
    MutexLock lock(mu_);
    while (!streams_.empty()) gone_.Wait(mu_);
  }

  const std::string& address() const { return port_.address; }

  Reactor* Attach(grpc::CallbackServerContext* context) override {
    auto stream = std::make_shared<Stream>(*this);
    {
      const MutexLock lock(mu_);
      stream->id_ = ++last_connection_;
      streams_[stream->id_] = stream;
    }
    listener_.OnConnected(stream->id_);
    stream->StartRead(&stream->incoming_);
    return stream.get();
  }

  void Send(Connection connection, v1::LeaderMessage message) {
    if (auto stream = Find(connection)) stream->Enqueue(std::move(message));
  }
  void Close(Connection connection) {
    if (auto stream = Find(connection)) stream->CloseAfterWrites();
  }

 private:
  // One worker's stream. gRPC's share of it is its place in streams_, given up in OnDone.
  class Stream final : public Reactor {
   public:
    explicit Stream(Service& service) : service_(service) {}

    void Enqueue(v1::LeaderMessage message) {
      const MutexLock lock(mu_);
      if (closing_ || finished_) return;
      outbox_.push_back(std::move(message));
      Pump();
    }
    void CloseAfterWrites() {
      const MutexLock lock(mu_);
      closing_ = true;
      Pump();
    }

    void OnReadDone(bool ok) override {
      if (!ok) return Disconnected();
      service_.listener_.OnMessage(id_, incoming_);
      StartRead(&incoming_);
    }
    void OnWriteDone(bool ok) override {
      const MutexLock lock(mu_);
      writing_ = false;
      if (!ok) outbox_.clear();
      Pump();
    }
    void OnCancel() override { Disconnected(); }
    void OnDone() override { service_.Forget(id_); }

    Connection id_ = 0;
    v1::WorkerMessage incoming_;  // gRPC's while a read is under way

   private:
    void Disconnected() {
      {
        const MutexLock lock(mu_);
        closing_ = true;
        outbox_.clear();
        Pump();
        if (std::exchange(told_, true)) return;
      }
      service_.listener_.OnDisconnected(id_);
    }

    // Starts the next write, or the finish, if none is under way.
    void Pump() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
      if (writing_ || finished_) return;
      if (!outbox_.empty()) {
        writing_ = true;
        outgoing_ = std::move(outbox_.front());
        outbox_.pop_front();
        return StartWrite(&outgoing_);
      }
      if (!closing_) return;
      finished_ = true;
      Finish(grpc::Status::OK);
    }

    Service& service_;
    Mutex mu_;
    v1::LeaderMessage outgoing_;  // gRPC's while a write is under way
    std::deque<v1::LeaderMessage> outbox_ ABSL_GUARDED_BY(mu_);
    bool writing_ ABSL_GUARDED_BY(mu_) = false;
    bool closing_ ABSL_GUARDED_BY(mu_) = false;
    bool finished_ ABSL_GUARDED_BY(mu_) = false;
    bool told_ ABSL_GUARDED_BY(mu_) = false;
  };

  std::shared_ptr<Stream> Find(Connection connection) {
    const MutexLock lock(mu_);
    const auto entry = streams_.find(connection);
    return entry == streams_.end() ? nullptr : entry->second;
  }

  void Forget(Connection connection) {
    std::shared_ptr<Stream> gone;  // destroyed after the lock
    const MutexLock lock(mu_);
    gone = std::move(streams_.at(connection));
    streams_.erase(connection);
    gone_.NotifyAll();
  }

  Listener& listener_;
  GrpcListener port_;
  Mutex mu_;
  CondVar gone_;
  std::map<Connection, std::shared_ptr<Stream>> streams_ ABSL_GUARDED_BY(mu_);
  Connection last_connection_ ABSL_GUARDED_BY(mu_) = 0;
};

ControlService::ControlService(std::unique_ptr<Service> service) : service_(std::move(service)) {}
ControlService::~ControlService() = default;

absl::StatusOr<std::unique_ptr<ControlService>> ControlService::Start(const v1::PoolSection& pool,
                                                                      Listener& listener) {
  auto service = std::make_unique<Service>(listener);
  RETURN_IF_ERROR(service->Listen(pool));
  return std::unique_ptr<ControlService>(new ControlService(std::move(service)));
}

const std::string& ControlService::address() const { return service_->address(); }
void ControlService::Send(Connection connection, v1::LeaderMessage message) {
  service_->Send(connection, std::move(message));
}
void ControlService::Close(Connection connection) { service_->Close(connection); }

}  // namespace meshfill
