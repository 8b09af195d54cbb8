// NCCL between ranks that are threads of one process: point-to-point in groups, init that takes its time,
// abort.
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "engine/comm/nccl/nccl_library.h"
#include "tests/fake_cuda/fake_cuda.h"

namespace meshfill {
namespace {

// Where the ranks of one id meet.
struct Hub {
  std::mutex mutex;
  std::condition_variable changed;
  int joined = 0;
  std::set<int> devices;
  std::map<std::pair<int, int>, std::deque<std::vector<char>>> messages;  // by sender and receiver
};

struct Comm {
  std::shared_ptr<Hub> hub;
  int rank;
  int ranks;
  int device;
  bool refused;  // another rank has this one's device
  std::shared_ptr<std::atomic<bool>> aborted = std::make_shared<std::atomic<bool>>(false);
};

// Messages that have been called and have not ended, by device and communicator.
class UnderWay {
 public:
  void Begin(int device, const Hub* hub) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::map<const Hub*, int>& of_hub = messages_[device];
    ++of_hub[hub];
    if (of_hub.size() > 1) ++mixes_;
  }
  void End(int device, const Hub* hub) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (--messages_[device][hub] == 0) messages_[device].erase(hub);
  }
  int mixes() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return mixes_;
  }

 private:
  std::mutex mutex_;
  std::map<int, std::map<const Hub*, int>> messages_;
  int mixes_ = 0;
};
UnderWay& AllUnderWay() {
  static auto* const all = new UnderWay;
  return *all;
}

Comm& Of(ncclComm_t comm) { return *reinterpret_cast<Comm*>(comm); }

std::shared_ptr<Hub> HubOf(const ncclUniqueId& id) {
  static std::mutex mutex;
  static auto* const hubs = new std::map<uint64_t, std::shared_ptr<Hub>>;
  uint64_t number;
  std::memcpy(&number, id.internal, sizeof(number));
  const std::lock_guard<std::mutex> lock(mutex);
  std::shared_ptr<Hub>& hub = (*hubs)[number];
  if (hub == nullptr) hub = std::make_shared<Hub>();
  return hub;
}

// Its few CTAs would wait behind all of a block's that compute has queued before.
bool StandsBehindCompute(cudaStream_t stream) {
  int priority = 0, least = 0, greatest = 0;
  return cudaStreamGetPriority(stream, &priority) != cudaSuccess ||
         cudaDeviceGetStreamPriorityRange(&least, &greatest) != cudaSuccess || priority != greatest;
}

ncclResult_t FakeSend(const void* from, size_t bytes, ncclDataType_t, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  if (StandsBehindCompute(stream)) return ncclInvalidUsage;
  const Comm self = Of(comm);
  AllUnderWay().Begin(self.device, self.hub.get());
  const cudaError_t error = FakeCuda::Enqueue(stream, [=] {
    const auto* data = static_cast<const char*>(FakeCuda::Memory(from));
    const std::lock_guard<std::mutex> lock(self.hub->mutex);
    self.hub->messages[{self.rank, peer}].emplace_back(data, data + bytes);
    self.hub->changed.notify_all();
    AllUnderWay().End(self.device, self.hub.get());
  });
  return error == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

ncclResult_t FakeReceive(void* to, size_t bytes, ncclDataType_t, int peer, ncclComm_t comm,
                         cudaStream_t stream) {
  const Comm self = Of(comm);
  AllUnderWay().Begin(self.device, self.hub.get());
  const cudaError_t error = FakeCuda::Enqueue(stream, [=] {
    std::unique_lock<std::mutex> lock(self.hub->mutex);
    auto& messages = self.hub->messages[{peer, self.rank}];
    self.hub->changed.wait(lock, [&] { return *self.aborted || !messages.empty(); });
    AllUnderWay().End(self.device, self.hub.get());
    if (messages.empty()) return;  // aborted: the buffer holds anything
    if (messages.front().size() == bytes) std::memcpy(FakeCuda::Memory(to), messages.front().data(), bytes);
    messages.pop_front();
  });
  return error == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

ncclResult_t FakeAbort(ncclComm_t comm) {
  Comm* const self = &Of(comm);
  {
    const std::lock_guard<std::mutex> lock(self->hub->mutex);
    *self->aborted = true;
    self->hub->changed.notify_all();
  }
  delete self;
  return ncclSuccess;
}

std::atomic<int> communicators{0};
std::atomic<bool> refuses_shared_devices{false};

}  // namespace

int FakeCuda::nccl_communicators() { return communicators; }
int FakeCuda::nccl_mixes() { return AllUnderWay().mixes(); }
void FakeCuda::set_nccl_refuses_shared_devices(bool refuses) { refuses_shared_devices = refuses; }

absl::StatusOr<const Nccl*> Nccl::Load() {
  static constexpr Nccl kFake = {
      .GetUniqueId =
          [](ncclUniqueId* id) {
            static std::atomic<uint64_t> last{0};
            const uint64_t number = ++last;
            *id = {};
            std::memcpy(id->internal, &number, sizeof(number));
            return ncclSuccess;
          },
      .CommInitRankConfig =
          [](ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t* config) {
            if (config->blocking != 0) return ncclInvalidArgument;
            ++communicators;
            int device = 0;
            if (cudaGetDevice(&device) != cudaSuccess) return ncclUnhandledCudaError;
            const std::shared_ptr<Hub> hub = HubOf(id);
            const std::lock_guard<std::mutex> lock(hub->mutex);
            const bool shares = !hub->devices.insert(device).second;
            auto* made = new Comm{hub, rank, ranks, device, shares && refuses_shared_devices};
            ++hub->joined;
            *comm = reinterpret_cast<ncclComm_t>(made);
            return ncclInProgress;
          },
      .CommGetAsyncError =
          [](ncclComm_t comm, ncclResult_t* state) {
            const std::lock_guard<std::mutex> lock(Of(comm).hub->mutex);
            const bool waits = Of(comm).hub->joined < Of(comm).ranks;
            *state = waits ? ncclInProgress : Of(comm).refused ? ncclInvalidUsage : ncclSuccess;
            return ncclSuccess;
          },
      .CommAbort = FakeAbort,
      .CommFinalize = [](ncclComm_t) { return ncclInProgress; },
      .CommDestroy = FakeAbort,
      .GroupStart = [] { return ncclSuccess; },
      .GroupEnd = [] { return ncclInProgress; },
      .Send = FakeSend,
      .Recv = FakeReceive,
      .GetErrorString = [](ncclResult_t) { return "a fake error"; },
      .GetLastError =
          [](ncclComm_t comm) {
            return Of(comm).refused ? "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 18000"
                                    : "";
          },
  };
  return &kFake;
}

}  // namespace meshfill
