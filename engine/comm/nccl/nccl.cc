#include "engine/comm/nccl/nccl.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "engine/comm/nccl/nccl_comm.h"
#include "engine/comm/nccl/nccl_library.h"
#include "engine/comm/nccl/nccl_links.h"
#include "kernels/cuda/memory.h"
#include "kernels/cuda/queue.h"
#include "kernels/monotonic_time.h"
#include "kernels/mutex.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

constexpr char kGreeting[] = "nccl:";
constexpr absl::Duration kWatch = absl::Milliseconds(20);  // interval of looks at the device's transfers

// Aborts when a transfer that was waited for is not over by its deadline, or NCCL has met an error.
class Watch {
 public:
  explicit Watch(std::shared_ptr<NcclComm> comm) : comm_(std::move(comm)), thread_([this] { Work(); }) {}
  ~Watch() {
    {
      const MutexLock lock(mu_);
      quit_ = true;
      changed_.NotifyAll();
    }
    thread_.join();
  }

  void Add(std::shared_ptr<const CudaPoint> end, std::string what, absl::Time deadline) {
    const MutexLock lock(mu_);
    transfers_.push_back({std::move(end), std::move(what), deadline});
    changed_.NotifyAll();
  }

 private:
  struct Transfer {
    std::shared_ptr<const CudaPoint> end;
    std::string what;
    absl::Time deadline;
  };

  void Work() {
    MutexLock lock(mu_);
    while (!quit_) {
      if (transfers_.empty()) {
        changed_.Wait(mu_);
        continue;
      }
      // Transfers end in the order of the stream: the first is over before the others.
      if (transfers_.front().end->Query() != cudaErrorNotReady) {
        transfers_.pop_front();
        continue;
      }
      const std::string what = transfers_.front().what;
      absl::Status status = comm_->Check(what);
      if (status.ok() && MonotonicNow() >= transfers_.front().deadline) {
        status = absl::DeadlineExceededError(absl::StrCat(what, ": nothing arrived before the deadline"));
      }
      if (!status.ok()) {
        comm_->Abort(status);
        transfers_.clear();
        continue;
      }
      changed_.WaitFor(mu_, kWatch);
    }
  }

  const std::shared_ptr<NcclComm> comm_;
  Mutex mu_;
  CondVar changed_;
  bool quit_ ABSL_GUARDED_BY(mu_) = false;
  std::deque<Transfer> transfers_ ABSL_GUARDED_BY(mu_);
  std::thread thread_;  // last
};

class NcclReceive : public PendingReceive {
 public:
  NcclReceive(std::shared_ptr<NcclComm> comm, Watch& watch, Stream& stream, DeviceMessage message,
              std::string what)
      : comm_(std::move(comm)),
        watch_(watch),
        stream_(stream),
        message_(std::move(message)),
        what_(std::move(what)) {}

  absl::StatusOr<BufferRef> Wait(absl::Time deadline) override {
    if (message_.buffer == nullptr) return absl::InternalError(absl::StrCat(what_, ": waited twice"));
    RETURN_IF_ERROR(comm_->Check(what_));
    watch_.Add(std::static_pointer_cast<const CudaPoint>(message_.ready), what_, deadline);
    return stream_.TakeOver(std::exchange(message_, {}));
  }

 private:
  const std::shared_ptr<NcclComm> comm_;
  Watch& watch_;
  Stream& stream_;
  DeviceMessage message_;
  const std::string what_;
};

class NcclCommunicator : public Communicator {
 public:
  NcclCommunicator(const Nccl& nccl, const NcclOptions& options, std::shared_ptr<NcclComm> comm,
                   Stream& stream, std::shared_ptr<CudaQueue> queue)
      : nccl_(nccl),
        options_(options),
        comm_(std::move(comm)),
        stream_(stream),
        queue_(std::move(queue)),
        watch_(comm_) {}

  int rank() const override { return options_.rank; }
  int size() const override { return options_.ranks; }

  absl::StatusOr<std::unique_ptr<PendingReceive>> SendReceive(Traffic traffic, int to, BufferRef message,
                                                              int from, size_t receive_bytes) override {
    for (int peer : {to, from}) {
      if (peer < 0 || peer >= size() || peer == rank()) {
        return absl::InvalidArgumentError(absl::StrCat("rank ", rank(), ": ", OperationName(traffic),
                                                       " with rank ", peer, ", which is no other of the ",
                                                       size(), " ranks"));
      }
    }
    std::string what = absl::StrCat("rank ", rank(), ": ", OperationName(traffic), " from rank ", from);
    ASSIGN_OR_RETURN(BufferRef received, stream_.Allocate(receive_bytes));
    const ScopedCudaDevice scope(options_.device);
    // The message is written, and what is received into allocated, where the rank's own stream is now.
    ASSIGN_OR_RETURN(const std::shared_ptr<const StreamPoint> before, stream_.Mark());
    RETURN_IF_ERROR(queue_->WaitFor(static_cast<const CudaPoint&>(*before)));
    CudaAllocation::Of(*message).AddUser(queue_);
    CudaAllocation::Of(*received).AddUser(queue_);
    RETURN_IF_ERROR(comm_->Group(what, MonotonicNow() + kConnectTimeout, [&](ncclComm_t comm) {
      // An empty message is not sent: the peer expects as little.
      ncclResult_t result = ncclSuccess;
      if (message->size_bytes() > 0) {
        result = nccl_.Send(message->data(), message->size_bytes(), ncclInt8, to, comm, queue_->get());
      }
      if (receive_bytes > 0 && (result == ncclSuccess || result == ncclInProgress)) {
        result = nccl_.Recv(received->data(), receive_bytes, ncclInt8, from, comm, queue_->get());
      }
      return result;
    }));
    ASSIGN_OR_RETURN(std::shared_ptr<const CudaPoint> ready, queue_->Mark());
    return std::make_unique<NcclReceive>(
        comm_, watch_, stream_, DeviceMessage{std::move(received), std::move(ready)}, std::move(what));
  }

  void Abort(absl::Status reason) override { comm_->Abort(std::move(reason)); }

  // A byte to and from every other rank, so that the first step of a run finds its connections made.
  absl::Status Greet(absl::Time deadline) {
    for (int step = 1; step < size(); ++step) {
      ASSIGN_OR_RETURN(BufferRef byte, stream_.Allocate(1));
      ASSIGN_OR_RETURN(std::unique_ptr<PendingReceive> pending,
                       SendReceive(Traffic::kAllToAll, (rank() + step) % size(), std::move(byte),
                                   (rank() + size() - step) % size(), 1));
      RETURN_IF_ERROR(pending->Wait(deadline).status());
    }
    RETURN_IF_ERROR(stream_.Finish());
    return comm_->Check(absl::StrCat("rank ", rank(), ": connecting"));
  }

 private:
  // How long a group may take to be taken up: the first one of two peers makes their connection.
  static constexpr absl::Duration kConnectTimeout = absl::Seconds(60);

  const Nccl& nccl_;
  const NcclOptions options_;
  const std::shared_ptr<NcclComm> comm_;
  Stream& stream_;
  const std::shared_ptr<CudaQueue> queue_;
  Watch watch_;
};

uint64_t NameOf(const ncclUniqueId& id) {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (const char byte : id.internal) hash = (hash ^ static_cast<uint8_t>(byte)) * 0x100000001b3;
  return std::max<uint64_t>(hash, 1);  // 0: none
}

// The names of the communicators that a rank has idle, and rank 0's id.
struct NcclAddress {
  std::vector<uint64_t> idle;
  std::optional<ncclUniqueId> id;  // of rank 0's alone

  // nccl:, how many names, the names, the id.
  std::string Encode() const {
    std::string bytes = kGreeting;
    bytes.push_back(static_cast<char>(idle.size()));
    for (const uint64_t name : idle) bytes.append(reinterpret_cast<const char*>(&name), sizeof(name));
    if (id.has_value()) bytes.append(reinterpret_cast<const char*>(&*id), sizeof(*id));
    return bytes;
  }
  // Nothing: it is no address of such a rank.
  static std::optional<NcclAddress> Decode(std::string_view bytes, int rank) {
    constexpr size_t kNames = sizeof(kGreeting) - 1;
    if (!bytes.starts_with(kGreeting) || bytes.size() == kNames) return std::nullopt;
    bytes.remove_prefix(kNames);
    NcclAddress address;
    address.idle.resize(static_cast<uint8_t>(bytes.front()));
    bytes.remove_prefix(1);
    const size_t names = address.idle.size() * sizeof(uint64_t);
    if (bytes.size() != names + (rank == 0 ? sizeof(ncclUniqueId) : 0)) return std::nullopt;
    std::memcpy(address.idle.data(), bytes.data(), names);
    if (rank == 0) std::memcpy(&address.id.emplace(), bytes.data() + names, sizeof(ncclUniqueId));
    return address;
  }
};

// The first of rank 0's that all ranks have idle; 0: there is none.
uint64_t CommonName(const std::vector<NcclAddress>& by_rank) {
  const std::vector<uint64_t>& first = by_rank.front().idle;
  const auto common = std::find_if(first.begin(), first.end(), [&](uint64_t name) {
    return std::all_of(by_rank.begin(), by_rank.end(), [name](const NcclAddress& address) {
      return std::find(address.idle.begin(), address.idle.end(), name) != address.idle.end();
    });
  });
  return common != first.end() ? *common : 0;
}

class NcclEndpoint : public Endpoint {
 public:
  NcclEndpoint(const Nccl& nccl, const NcclOptions& options, std::vector<KeptComm> offered,
               std::string address)
      : nccl_(nccl),
        options_(options),
        address_(std::move(address)),
        offered_(std::move(offered)),
        fresh_(std::make_shared<NcclComm>(nccl, options.rank)) {}
  ~NcclEndpoint() override {
    if (options_.links != nullptr) options_.links->Return(std::move(offered_));
  }

  const std::string& address() const override { return address_; }

  absl::StatusOr<std::unique_ptr<Communicator>> Connect(std::span<const std::string> addresses,
                                                        Stream& stream, absl::Time deadline) override {
    if (static_cast<int>(addresses.size()) != options_.ranks) {
      return absl::InvalidArgumentError(absl::StrCat("rank ", options_.rank, ": ", addresses.size(),
                                                     " addresses for ", options_.ranks, " ranks"));
    }
    std::vector<NcclAddress> by_rank;
    for (size_t rank = 0; rank < addresses.size(); ++rank) {
      std::optional<NcclAddress> address = NcclAddress::Decode(addresses[rank], static_cast<int>(rank));
      if (!address.has_value()) {
        return absl::InvalidArgumentError(
            absl::StrCat("rank ", options_.rank, ": the address of rank ", rank,
                         " is not NCCL's; all workers of a pool need one kind of device"));
      }
      by_rank.push_back(*std::move(address));
    }
    const ncclUniqueId id = *by_rank.front().id;
    ASSIGN_OR_RETURN(const KeptComm kept, TakeOffered(CommonName(by_rank)));
    if (kept.comm == nullptr) return Make(id, stream, deadline);
    if (options_.rank == 0) options_.links->KeepSpareId(id);
    options_.links->Use(options_.run, kept, /*fresh=*/false);
    RETURN_IF_ERROR(kept.comm->Check(absl::StrCat("rank ", options_.rank, ": connecting")));
    return std::make_unique<NcclCommunicator>(nccl_, options_, kept.comm, stream, kept.queue);
  }

  void Abort(absl::Status reason) override {
    const MutexLock lock(mu_);
    if (in_use_ != nullptr) in_use_->Abort(reason);
    fresh_->Abort(reason);
    if (abort_reason_.ok()) abort_reason_ = std::move(reason);
  }

 private:
  // The one that was offered under this name, and lets go of the others; 0: of all. The reason of Abort.
  absl::StatusOr<KeptComm> TakeOffered(uint64_t name) {
    const MutexLock lock(mu_);
    RETURN_IF_ERROR(abort_reason_);
    const auto chosen = std::find_if(offered_.begin(), offered_.end(),
                                     [name](const KeptComm& kept) { return kept.name == name; });
    KeptComm kept;
    if (chosen != offered_.end()) {
      kept = std::move(*chosen);
      offered_.erase(chosen);
      in_use_ = kept.comm;
    }
    if (options_.links != nullptr) options_.links->Return(std::exchange(offered_, {}));
    return kept;
  }

  absl::StatusOr<std::unique_ptr<Communicator>> Make(const ncclUniqueId& id, Stream& stream,
                                                     absl::Time deadline) {
    const ScopedCudaDevice scope(options_.device);
    // Before compute: a transfer's few CTAs would stand behind the thousands of a block that was queued
    // first.
    ASSIGN_OR_RETURN(std::shared_ptr<CudaQueue> queue,
                     CudaQueue::Make(options_.device, CudaQueue::Priority::kFirst));
    if (options_.links != nullptr) {
      options_.links->Use(options_.run,
                          {.comm = fresh_,
                           .queue = queue,
                           .name = NameOf(id),
                           .epoch = options_.epoch,
                           .rank = options_.rank,
                           .ranks = options_.ranks},
                          /*fresh=*/true);
    }
    RETURN_IF_ERROR(fresh_->Init(options_.ranks, id, options_.most_ctas, deadline));
    auto communicator = std::make_unique<NcclCommunicator>(nccl_, options_, fresh_, stream, std::move(queue));
    RETURN_IF_ERROR(communicator->Greet(deadline));
    return communicator;
  }

  const Nccl& nccl_;
  const NcclOptions options_;
  const std::string address_;
  Mutex mu_;
  absl::Status abort_reason_ ABSL_GUARDED_BY(mu_);
  std::vector<KeptComm> offered_ ABSL_GUARDED_BY(mu_);     // until Connect
  std::shared_ptr<NcclComm> in_use_ ABSL_GUARDED_BY(mu_);  // one that was kept; null: none is
  const std::shared_ptr<NcclComm> fresh_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Endpoint>> ListenNccl(const NcclOptions& options) {
  ASSIGN_OR_RETURN(const Nccl* nccl, Nccl::Load());
  NcclAddress address;
  if (options.rank == 0) {
    if (options.links != nullptr) address.id = options.links->TakeSpareId();
    const ncclResult_t result =
        address.id.has_value() ? ncclSuccess : nccl->GetUniqueId(&address.id.emplace());
    if (result != ncclSuccess) {
      return absl::UnavailableError(absl::StrCat("NCCL cannot listen: ", nccl->GetErrorString(result),
                                                 "; set NCCL_SOCKET_IFNAME to an interface of this machine"));
    }
  }
  std::vector<KeptComm> offered;
  if (options.links != nullptr) offered = options.links->Offer(options.epoch, options.rank, options.ranks);
  for (const KeptComm& kept : offered) address.idle.push_back(kept.name);
  return std::make_unique<NcclEndpoint>(*nccl, options, std::move(offered), address.Encode());
}

}  // namespace meshfill
