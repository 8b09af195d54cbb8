// CUDA's runtime on the host, for tests without a device: link these sources before the kernels' library, and
// the product's own CudaBackend runs over them.
//
// What a device may do, this does on purpose. A stream is a thread that dawdles, so that whatever is not
// ordered by an event happens too late or too early. Device pointers cannot be read by the host, nor host
// pointers by an operation, and a copy whose direction its pointers are not is refused. Memory is NaN before
// its allocation's turn on the stream and after its free's, which is kept a while unused. Products (cuBLASLt)
// depend in their last bits on the algorithm, as do their speeds. Layer kernels and attention are the plain
// reference's: the kernels themselves have tests of their own.
//
// What only a device shows: whether the driver means by its calls what is written here.
#ifndef MESHFILL_TESTS_FAKE_CUDA_FAKE_CUDA_H_
#define MESHFILL_TESTS_FAKE_CUDA_FAKE_CUDA_H_

#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <thread>

namespace meshfill {

struct FakeCuda {
  // Before the first call of the runtime.
  static void set_devices(int count);             // else MESHFILL_FAKE_DEVICES, or 1
  static void set_driver_version(int version);    // 13000 is 13.0; 0: no driver
  static void set_compute_capability(int major);  // of all devices
  // At any time.
  static void set_memory_bytes(size_t bytes);               // of each device
  static void set_foreign_bytes(int device, size_t bytes);  // what other processes have of its memory
  static void set_most_delay_microseconds(int microseconds);
  static inline std::atomic<int> kernel_microseconds = 0;  // what each kernel takes, beside its work
  static inline std::atomic<bool> refuses_pinned_memory = false;
  static void BreakDevice();            // every call from now on fails, as after a fault
  static void BreakDevice(int device);  // every call on that one
  static void RepairDevice();  // a new process's device; no backend that was there when it broke may be used

  static bool has_context(int device);  // whether any thread has begun to use it
  static int64_t bytes_in_use();        // allocated and not yet freed by their calls
  static int64_t TakeMostBytes();       // the most that were in use since the last call
  static inline int speed_measurements = 0;
  static int nccl_communicators();  // of all ranks, that were begun so far
  // As NCCL does between ranks of one host. Else they may share one, as ranks may that NCCL takes to be on
  // several hosts.
  static void set_nccl_refuses_shared_devices(bool refuses);
  // Messages of a communicator that were called while some of another one had not ended on that device.
  static int nccl_mixes();

  // For the fakes of kernels and libraries: `run` in its turn on the stream; what a kernel does first in its
  // turn.
  static cudaError_t Enqueue(cudaStream_t stream, std::function<void()> run);
  static void TakeTime() {
    const int microseconds = kernel_microseconds;
    if (microseconds > 0) std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
  }
  // The memory behind a device pointer. Anything else ends the test.
  static void* Memory(const void* device_pointer);
  template <typename T>
  static T* At(T* device_pointer) {
    return device_pointer == nullptr ? nullptr : static_cast<T*>(Memory(device_pointer));
  }
};

}  // namespace meshfill

#endif  // MESHFILL_TESTS_FAKE_CUDA_FAKE_CUDA_H_
