#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/fake_cuda/fake_cuda.h"

namespace meshfill {
namespace {

using Clock = std::chrono::steady_clock;

[[noreturn]] void Fail(const char* what) {
  std::fprintf(stderr, "fake cuda: %s\n", what);
  std::abort();
}

// No mapping of a process lies here: the host faults when it reads a device pointer.
constexpr uintptr_t kDeviceOffset = uintptr_t{1} << 52;
constexpr size_t kGraveyardBytes = size_t{256} << 20;
constexpr size_t kSpareBytes = size_t{256} << 20;
constexpr size_t kLargeBytes = size_t{1} << 20;

struct Allocation {
  std::unique_ptr<unsigned char[]> memory;
  size_t size_bytes;
  bool freed = false;   // its free was called
  bool buried = false;  // and has run
};

int DevicesFromEnvironment() {
  const char* count = std::getenv("MESHFILL_FAKE_DEVICES");
  return count == nullptr ? 1 : std::atoi(count);
}

std::atomic<int> devices{DevicesFromEnvironment()};
std::atomic<int> driver_version{CUDART_VERSION};
std::atomic<int> compute_major{9};
std::atomic<size_t> memory_bytes{size_t{8} << 30};
std::array<std::atomic<size_t>, 64> foreign_bytes{};  // by device
std::atomic<int> most_delay_microseconds{60};
std::atomic<uint64_t> broken{0};    // bit by device
std::atomic<uint64_t> contexts{0};  // bit by device
thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;

bool IsBroken() { return (broken >> current_device & 1) != 0; }

cudaError_t Return(cudaError_t error) {
  if (IsBroken()) error = cudaErrorIllegalAddress;
  if (error != cudaSuccess && error != cudaErrorNotReady) last_error = error;
  return error;
}

// Of calls that make a context of this thread's device where there is none: all but those that ask what
// devices there are.
cudaError_t ReturnInContext(cudaError_t error) {
  contexts |= uint64_t{1} << current_device;
  return Return(error);
}

// Every allocation there was, and those whose memory is kept unused.
class Memory {
 public:
  void* Allocate(size_t size_bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (in_use_ + size_bytes > memory_bytes) return nullptr;
    in_use_ += size_bytes;
    most_ = std::max(most_, in_use_);
    // With room before and behind, so that neighbours never touch.
    std::unique_ptr<unsigned char[]> memory = TakeSpare(size_bytes);
    if (memory == nullptr) memory.reset(new unsigned char[size_bytes + 512]);
    const uintptr_t begin = (reinterpret_cast<uintptr_t>(memory.get()) + 255) / 256 * 256;
    allocations_[begin] = {std::move(memory), size_bytes};
    return reinterpret_cast<void*>(begin + kDeviceOffset);
  }
  void CountFree(void* device_pointer) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto found = allocations_.find(reinterpret_cast<uintptr_t>(device_pointer) - kDeviceOffset);
    if (found == allocations_.end() || found->second.freed) Fail("freed what is not allocated");
    found->second.freed = true;
    in_use_ -= found->second.size_bytes;
  }
  void Poison(void* device_pointer) {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(device_pointer) - kDeviceOffset;
    size_t size_bytes;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      size_bytes = allocations_.at(begin).size_bytes;
    }
    std::memset(reinterpret_cast<void*>(begin), 0xff, size_bytes);
  }
  void Bury(void* device_pointer) {
    const std::lock_guard<std::mutex> lock(mutex_);
    graveyard_.push_back(reinterpret_cast<uintptr_t>(device_pointer) - kDeviceOffset);
    allocations_.at(graveyard_.back()).buried = true;
    buried_ += allocations_.at(graveyard_.back()).size_bytes;
    while (buried_ > kGraveyardBytes) {
      const auto oldest = allocations_.find(graveyard_.front());
      buried_ -= oldest->second.size_bytes;
      Spare(std::move(oldest->second));
      allocations_.erase(oldest);
      graveyard_.pop_front();
    }
  }
  void* Find(const void* device_pointer) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(device_pointer) - kDeviceOffset;
    const std::lock_guard<std::mutex> lock(mutex_);
    auto next = allocations_.upper_bound(address);
    if (next == allocations_.begin()) Fail("an operation was given a pointer that is not the device's");
    --next;
    if (address > next->first + next->second.size_bytes)
      Fail("an operation was given a pointer to no allocation");
    if (next->second.buried) Fail("an operation uses memory that was freed before it");
    return reinterpret_cast<void*>(address);
  }
  size_t in_use() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return in_use_;
  }
  // The most that was in use since the last call.
  size_t TakeMost() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(most_, in_use_);
  }

 private:
  // Memory that was large goes to the next of its size: the system takes longer to give new pages than the
  // operations of a test's model take.
  void Spare(Allocation allocation) {
    if (allocation.size_bytes < kLargeBytes || spare_ + allocation.size_bytes > kSpareBytes) return;
    spare_ += allocation.size_bytes;
    spares_.emplace(allocation.size_bytes, std::move(allocation.memory));
  }
  std::unique_ptr<unsigned char[]> TakeSpare(size_t size_bytes) {
    auto found = spares_.extract(size_bytes);
    if (found.empty()) return nullptr;
    spare_ -= size_bytes;
    return std::move(found.mapped());
  }

  std::mutex mutex_;
  std::map<uintptr_t, Allocation> allocations_;  // by their first byte on the host
  std::deque<uintptr_t> graveyard_;
  size_t buried_ = 0;
  std::multimap<size_t, std::unique_ptr<unsigned char[]>> spares_;  // by size
  size_t spare_ = 0;                                                // their bytes
  size_t in_use_ = 0;
  size_t most_ = 0;
};

Memory& TheMemory() {
  static auto* const memory = new Memory;
  return *memory;
}

// Host memory that copies reach by themselves; of each piece, by its first byte, how long it is.
std::mutex pinned_mutex;
std::map<uintptr_t, size_t> pinned;

bool IsPinned(const void* pointer) {
  const std::lock_guard<std::mutex> lock(pinned_mutex);
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  const auto next = pinned.upper_bound(address);
  return next != pinned.begin() && address < std::prev(next)->first + std::prev(next)->second;
}

bool IsDevicePointer(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) >= kDeviceOffset; }

// A record of an event: over when its stream has come to it.
struct Record {
  std::mutex mutex;
  std::condition_variable passed;
  bool over = false;
  Clock::time_point at;

  void Pass() {
    const std::lock_guard<std::mutex> lock(mutex);
    over = true;
    at = Clock::now();
    passed.notify_all();
  }
  void Wait() {
    std::unique_lock<std::mutex> lock(mutex);
    passed.wait(lock, [&] { return over; });
  }
  bool IsOver() {
    const std::lock_guard<std::mutex> lock(mutex);
    return over;
  }
};

class Stream {
 public:
  Stream(int device, int priority)
      : device_(device), priority_(priority), random_(std::random_device()()), thread_([this] { Work(); }) {}
  ~Stream() {
    Push(nullptr);
    thread_.join();
  }
  int device() const { return device_; }
  int priority() const { return priority_; }

  void Push(std::function<void()> run) {
    const std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(run));
    changed_.notify_all();
  }
  bool Idle() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return queue_.empty();
  }

 private:
  void Work() {
    while (true) {
      std::function<void()> run;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [this] { return !queue_.empty(); });
        run = queue_.front();
      }
      if (run == nullptr) return;
      if (const int most = most_delay_microseconds; most > 0 && random_() % 4 == 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(random_() % most));
      }
      run();
      run = nullptr;
      const std::lock_guard<std::mutex> lock(mutex_);
      queue_.pop_front();
    }
  }

  const int device_;
  const int priority_;
  std::mt19937_64 random_;  // of the worker
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  std::thread thread_;  // last
};

struct Event {
  int device;
  std::mutex mutex;
  std::shared_ptr<Record> latest;

  std::shared_ptr<Record> Latest() {
    const std::lock_guard<std::mutex> lock(mutex);
    return latest;
  }
};

Stream& Of(cudaStream_t stream) {
  if (stream == nullptr) Fail("the default stream is not this project's");
  return *reinterpret_cast<Stream*>(stream);
}
Event& Of(cudaEvent_t event) { return *reinterpret_cast<Event*>(event); }

std::mutex streams_mutex;
std::vector<Stream*> streams;

}  // namespace

void FakeCuda::set_devices(int count) { devices = count; }
void FakeCuda::set_driver_version(int version) { driver_version = version; }
void FakeCuda::set_compute_capability(int major) { compute_major = major; }
void FakeCuda::set_memory_bytes(size_t bytes) { memory_bytes = bytes; }
void FakeCuda::set_foreign_bytes(int device, size_t bytes) { foreign_bytes.at(device) = bytes; }
void FakeCuda::set_most_delay_microseconds(int microseconds) { most_delay_microseconds = microseconds; }
void FakeCuda::BreakDevice() { broken = ~uint64_t{0}; }
void FakeCuda::BreakDevice(int device) { broken |= uint64_t{1} << device; }
void FakeCuda::RepairDevice() {
  broken = 0;
  current_device = 0;  // a call that failed may have left another
  last_error = cudaSuccess;
}
bool FakeCuda::has_context(int device) { return (contexts >> device & 1) != 0; }
int64_t FakeCuda::TakeMostBytes() { return static_cast<int64_t>(TheMemory().TakeMost()); }
int64_t FakeCuda::bytes_in_use() { return static_cast<int64_t>(TheMemory().in_use()); }

cudaError_t FakeCuda::Enqueue(cudaStream_t stream, std::function<void()> run) {
  if (IsBroken()) return Return(cudaErrorIllegalAddress);
  if (Of(stream).device() != current_device) return ReturnInContext(cudaErrorInvalidResourceHandle);
  Of(stream).Push(std::move(run));
  return cudaSuccess;
}

void* FakeCuda::Memory(const void* device_pointer) { return TheMemory().Find(device_pointer); }

}  // namespace meshfill

using meshfill::FakeCuda;
using meshfill::Return;
using meshfill::ReturnInContext;

extern "C" {

cudaError_t cudaDriverGetVersion(int* version) {
  *version = meshfill::driver_version;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = meshfill::devices;
  return Return(*count == 0 ? cudaErrorNoDevice : cudaSuccess);
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  *properties = {};
  std::strcpy(properties->name, "Fake GPU");
  properties->totalGlobalMem = meshfill::memory_bytes;
  return Return(cudaSuccess);
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = meshfill::compute_major;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = 4;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = 227 << 10;
      break;
    case cudaDevAttrL2CacheSize:
      *value = 1 << 20;
      break;
    default:
      *value = 0;
  }
  return Return(cudaSuccess);
}
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : "a fake error";
}
const char* cudaGetErrorName(cudaError_t error) {
  static thread_local std::string name;
  name = "error " + std::to_string(error);
  return name.c_str();
}
cudaError_t cudaGetLastError() { return std::exchange(meshfill::last_error, cudaSuccess); }

cudaError_t cudaGetDevice(int* device) {
  *device = meshfill::current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  meshfill::current_device = device;
  return ReturnInContext(cudaSuccess);
}
cudaError_t cudaDeviceSynchronize() {
  if (meshfill::IsBroken()) return ReturnInContext(cudaSuccess);
  const std::lock_guard<std::mutex> lock(meshfill::streams_mutex);
  for (meshfill::Stream* stream : meshfill::streams) {
    while (!stream->Idle()) std::this_thread::yield();
  }
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  *total_bytes = meshfill::memory_bytes;
  const size_t taken_bytes =
      meshfill::TheMemory().in_use() + meshfill::foreign_bytes[meshfill::current_device];
  *free_bytes = *total_bytes - std::min(*total_bytes, taken_bytes);
  return ReturnInContext(cudaSuccess);
}
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) {
  *pool = nullptr;
  return Return(cudaSuccess);
}
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* value) {
  *static_cast<uint64_t*>(value) = 0;  // it keeps nothing
  return Return(cudaSuccess);
}
cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) {
  return Return(cudaSuccess);
}
cudaError_t cudaDeviceCanAccessPeer(int* reachable, int, int) {
  *reachable = 1;
  return Return(cudaSuccess);
}
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return Return(cudaSuccess); }
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return Return(cudaSuccess); }

cudaError_t cudaMallocAsync(void** pointer, size_t size_bytes, cudaStream_t stream) {
  *pointer = meshfill::TheMemory().Allocate(size_bytes);
  if (*pointer == nullptr) return ReturnInContext(cudaErrorMemoryAllocation);
  return FakeCuda::Enqueue(stream, [memory = *pointer] { meshfill::TheMemory().Poison(memory); });
}
cudaError_t cudaFreeAsync(void* pointer, cudaStream_t stream) {
  meshfill::TheMemory().CountFree(pointer);
  return FakeCuda::Enqueue(stream, [pointer] {
    meshfill::TheMemory().Poison(pointer);
    meshfill::TheMemory().Bury(pointer);
  });
}

// Smaller numbers go first.
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return ReturnInContext(cudaSuccess);
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = meshfill::Of(stream).priority();
  return ReturnInContext(cudaSuccess);
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned int, int priority) {
  auto* made = new meshfill::Stream(meshfill::current_device, priority);
  *stream = reinterpret_cast<cudaStream_t>(made);
  const std::lock_guard<std::mutex> lock(meshfill::streams_mutex);
  meshfill::streams.push_back(made);
  return ReturnInContext(cudaSuccess);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  {
    const std::lock_guard<std::mutex> lock(meshfill::streams_mutex);
    std::erase(meshfill::streams, &meshfill::Of(stream));
  }
  delete &meshfill::Of(stream);
  return ReturnInContext(cudaSuccess);
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return ReturnInContext(meshfill::Of(stream).Idle() ? cudaSuccess : cudaErrorNotReady);
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  const auto record = std::make_shared<meshfill::Record>();
  const cudaError_t error = FakeCuda::Enqueue(stream, [record] { record->Pass(); });
  if (error == cudaSuccess) record->Wait();
  return error;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int) {
  std::shared_ptr<meshfill::Record> record = meshfill::Of(event).Latest();
  if (record == nullptr) return ReturnInContext(cudaSuccess);  // never recorded: no wait
  return FakeCuda::Enqueue(stream, [record = std::move(record)] { record->Wait(); });
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int) {
  auto* made = new meshfill::Event;
  made->device = meshfill::current_device;
  *event = reinterpret_cast<cudaEvent_t>(made);
  return ReturnInContext(cudaSuccess);
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete &meshfill::Of(event);
  return ReturnInContext(cudaSuccess);
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  if (meshfill::Of(event).device != meshfill::Of(stream).device())
    return ReturnInContext(cudaErrorInvalidResourceHandle);
  auto record = std::make_shared<meshfill::Record>();
  {
    const std::lock_guard<std::mutex> lock(meshfill::Of(event).mutex);
    meshfill::Of(event).latest = record;
  }
  return FakeCuda::Enqueue(stream, [record] { record->Pass(); });
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  const std::shared_ptr<meshfill::Record> record = meshfill::Of(event).Latest();
  return ReturnInContext(record == nullptr || record->IsOver() ? cudaSuccess : cudaErrorNotReady);
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  const auto first = meshfill::Of(start).Latest(), last = meshfill::Of(end).Latest();
  if (first == nullptr || last == nullptr) return ReturnInContext(cudaErrorInvalidResourceHandle);
  if (!first->IsOver() || !last->IsOver()) return cudaErrorNotReady;
  *milliseconds = std::chrono::duration<float, std::milli>(last->at - first->at).count();
  return ReturnInContext(cudaSuccess);
}

cudaError_t cudaHostAlloc(void** pointer, size_t size_bytes, unsigned int) {
  if (FakeCuda::refuses_pinned_memory) return ReturnInContext(cudaErrorMemoryAllocation);
  *pointer = std::malloc(size_bytes);
  const std::lock_guard<std::mutex> lock(meshfill::pinned_mutex);
  meshfill::pinned[reinterpret_cast<uintptr_t>(*pointer)] = size_bytes;
  return ReturnInContext(cudaSuccess);
}
cudaError_t cudaFreeHost(void* pointer) {
  {
    const std::lock_guard<std::mutex> lock(meshfill::pinned_mutex);
    meshfill::pinned.erase(reinterpret_cast<uintptr_t>(pointer));
  }
  std::free(pointer);
  return ReturnInContext(cudaSuccess);
}

// To and from pinned memory in its turn. Pageable host memory: read before the call returns, written before
// it returns.
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size_bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  if (kind == cudaMemcpyHostToDevice) {
    if (meshfill::IsDevicePointer(from)) return ReturnInContext(cudaErrorInvalidValue);
    if (meshfill::IsPinned(from)) {
      return FakeCuda::Enqueue(stream, [=] { std::memcpy(FakeCuda::Memory(to), from, size_bytes); });
    }
    std::vector<unsigned char> staged(static_cast<const unsigned char*>(from),
                                      static_cast<const unsigned char*>(from) + size_bytes);
    return FakeCuda::Enqueue(stream, [to, staged = std::move(staged)] {
      if (!staged.empty()) std::memcpy(FakeCuda::Memory(to), staged.data(), staged.size());
    });
  }
  if (kind != cudaMemcpyDeviceToHost) return ReturnInContext(cudaErrorInvalidValue);
  return cudaMemcpy2DAsync(to, size_bytes, from, size_bytes, size_bytes, 1, kind, stream);
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
  if (kind != cudaMemcpyDeviceToHost || width > to_pitch || width > from_pitch ||
      meshfill::IsDevicePointer(to))
    return ReturnInContext(cudaErrorInvalidValue);
  auto copied = std::make_shared<meshfill::Record>();
  const cudaError_t error = FakeCuda::Enqueue(stream, [=] {
    for (size_t row = 0; row < height && width > 0; ++row) {
      std::memcpy(static_cast<char*>(to) + row * to_pitch,
                  static_cast<const char*>(FakeCuda::Memory(from)) + row * from_pitch, width);
    }
    copied->Pass();
  });
  if (error == cudaSuccess && !meshfill::IsPinned(to)) copied->Wait();
  return error;
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size_bytes,
                                cudaStream_t stream) {
  return FakeCuda::Enqueue(stream,
                           [=] { std::memcpy(FakeCuda::Memory(to), FakeCuda::Memory(from), size_bytes); });
}

}  // extern "C"
