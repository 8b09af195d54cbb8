#include "kernels/cuda/cuda_backend.h"

#include <chrono>
#include <deque>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/attention.h"
#include "kernels/cuda/gemm.h"
#include "kernels/cuda/launch_status.h"
#include "kernels/cuda/layer_ops.h"
#include "kernels/cuda/memory.h"
#include "kernels/cuda/stream.h"
#include "kernels/mutex.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

// How far the host runs ahead of the device: two marks, of which an attention block sets one and so do so
// many products. One is under way, and one is queued behind it: the device never waits for the host.
constexpr size_t kMarksAhead = 2;
constexpr int kProductsPerMark = 16;

// A wait of the host for the device: awake at first, then in naps that cost no core.
constexpr auto kAwake = std::chrono::microseconds(200);
constexpr auto kNap = std::chrono::microseconds(50);

// The streams that all ranks on a device share.
struct DeviceStreams {
  std::shared_ptr<CudaStream> retire;  // frees what several streams used
};

absl::StatusOr<DeviceStreams> StreamsOf(int device) {
  static Mutex mutex;
  static auto* const streams = new std::map<int, DeviceStreams>;
  const MutexLock lock(mutex);
  const auto found = streams->find(device);
  if (found != streams->end()) return found->second;
  RETURN_IF_ERROR(SetUpPool(device));
  ASSIGN_OR_RETURN(std::shared_ptr<CudaStream> retire, CudaStream::Make(device));
  return streams->emplace(device, DeviceStreams{std::move(retire)}).first->second;
}

// In slices of 1024 tokens the first product of an 8B model's layer has 192 tiles of 256 × 128 for an H100's
// 132 multiprocessors, which is one wave and a half; in slices of 4096 it has 768, near six.
constexpr Grain kGrain = {
    .slice_tokens = 4096, .host_threads = 8, .probe_width = 4096, .probe_kv_heads = 8, .probe_flops = 2e12};

class CudaBackend final : public Backend {
 public:
  CudaBackend(const CudaDevice& device, std::shared_ptr<CudaStream> stream,
              std::shared_ptr<CudaStream> copies, DeviceStreams shared)
      : device_(device), stream_(std::move(stream)), copies_(std::move(copies)), shared_(std::move(shared)) {}

  absl::Status Start() {
    ASSIGN_OR_RETURN(std::unique_ptr<CudaGemm> gemm, CudaGemm::Make(*this, stream_));
    gemm_ = std::move(gemm);
    return absl::OkStatus();
  }

  std::string name() const override {
    return absl::StrCat("cuda/sm", device_.traits.compute_major, device_.traits.compute_minor);
  }
  DType dtype() const override { return DType::kBf16; }
  Grain grain() const override { return kGrain; }
  void set_stop_token(const StopToken* stop) override { stop_ = stop; }
  bool lost() const override { return lost_; }

  absl::StatusOr<BufferRef> Allocate(size_t size_bytes) override {
    absl::StatusOr<BufferRef> buffer = CudaAllocation::Allocate(size_bytes, stream_, shared_.retire);
    if (!buffer.ok() && !absl::IsResourceExhausted(buffer.status())) return Diagnose(buffer.status());
    return buffer;
  }

  std::shared_ptr<const StreamPoint> Mark() override {
    absl::StatusOr<std::shared_ptr<const CudaPoint>> point = stream_->Mark();
    if (point.ok()) return *std::move(point);
    Diagnose(point.status()).IgnoreError();  // the next operation tells
    return nullptr;
  }

  absl::Status Finish() override {
    absl::StatusOr<std::shared_ptr<const CudaPoint>> point = stream_->Mark();
    if (!point.ok()) return Diagnose(point.status());
    marks_.clear();
    return WaitOnHost(**point, nullptr);
  }

  absl::StatusOr<BufferRef> Place(const void* host, size_t size_bytes) override {
    ASSIGN_OR_RETURN(BufferRef buffer, Allocate(size_bytes));
    RETURN_IF_ERROR(Upload(host, size_bytes, buffer->data()));
    return buffer;
  }

  // From pageable memory the driver has read all of it when it returns.
  absl::Status Upload(const void* host, size_t size_bytes, void* to) override {
    return Do("upload", [&] {
      return LaunchStatus("upload",
                          cudaMemcpyAsync(to, host, size_bytes, cudaMemcpyHostToDevice, stream_->get()));
    });
  }

  absl::Status Download(const void* from, size_t size_bytes, void* host) override {
    absl::Status status = Do("download", [&] {
      return LaunchStatus("download",
                          cudaMemcpyAsync(host, from, size_bytes, cudaMemcpyDeviceToHost, stream_->get()));
    });
    return status.ok() ? Finish() : status;
  }

  absl::StatusOr<DeviceMessage> Fetch(DeviceMessage message) override {
    if (message.ready == nullptr) return absl::UnavailableError("cuda: a sender's device has failed");
    const int from = static_cast<const CudaPoint&>(*message.ready).device();
    if (from == device_.ordinal || message.buffer->size_bytes() == 0) return message;
    return FetchFrom(from, message);
  }

  absl::StatusOr<BufferRef> TakeOver(DeviceMessage message) override {
    if (message.ready == nullptr) return absl::UnavailableError("cuda: a sender's device has failed");
    CudaAllocation::Of(*message.buffer).AddUser(stream_);
    RETURN_IF_ERROR(
        Do("take over", [&] { return stream_->WaitFor(static_cast<const CudaPoint&>(*message.ready)); }));
    return std::move(message.buffer);
  }

  absl::StatusOr<std::unique_ptr<PackedWeight>> PackWeight(std::span<const WeightRows> rows,
                                                           int64_t in_features) override {
    const ScopedCudaDevice scope(device_.ordinal);
    absl::StatusOr<std::unique_ptr<PackedWeight>> weight = gemm_->Pack(rows, in_features);
    if (!weight.ok() && !absl::IsResourceExhausted(weight.status())) return Diagnose(weight.status());
    return weight;
  }

  absl::Status Embed(std::span<const uint32_t> ids, const void* table, DType table_dtype, int64_t width,
                     float* x) override {
    ASSIGN_OR_RETURN(BufferRef on_device, Place(ids.data(), ids.size_bytes()));
    return Do("embed", [&] {
      return LaunchEmbed(on_device->data<uint32_t>(), std::ssize(ids), table, table_dtype, width, x,
                         stream_->get());
    });
  }

  absl::Status RmsNorm(const float* x, const float* weight, int64_t tokens, int64_t width, float eps,
                       void* y) override {
    return Do("rms norm", [&] {
      return LaunchRmsNorm(x, weight, tokens, width, eps, static_cast<BFloat16*>(y), stream_->get());
    });
  }

  absl::Status Gemm(const GemmArgs& args) override {
    const bool marks = ++products_ % kProductsPerMark == 0;
    if (marks) {
      RETURN_IF_ERROR(HoldBack());
    }
    absl::Status status = Do("gemm", [&] { return gemm_->Run(args); });
    return status.ok() && marks ? SetMark() : status;
  }

  absl::Status SplitQkv(const SplitQkvArgs& args) override {
    return Do("split qkv", [&] { return LaunchSplitQkv(args, stream_->get()); });
  }

  absl::Status AttentionBlock(const AttentionBlockArgs& args) override {
    RETURN_IF_ERROR(HoldBack());
    absl::Status status = Do("attention block", [&] {
      return CudaAttentionBlock(args, DType::kBf16, device_.traits, stream_->get());
    });
    return status.ok() ? SetMark() : status;
  }

  absl::Status MergePartial(const MergePartialArgs& args) override {
    return Do("merge partial", [&] { return LaunchMergePartial(args, stream_->get()); });
  }

  absl::Status CopyHeads(const CopyHeadsArgs& args) override {
    return Do("copy heads", [&] { return LaunchCopyHeads(args, stream_->get()); });
  }

  // Gathered on the device into [slots, heads, head_dim]; then whole stripes go where their positions are.
  absl::Status CopyHeadsToHost(const CopyHeadsArgs& args) override {
    const int64_t slot_elements = int64_t{args.heads} * args.head_dim;
    const size_t slot_bytes = slot_elements * DTypeBytes(args.to_rows.dtype);
    ASSIGN_OR_RETURN(BufferRef gathered, Allocate(args.tokens * slot_bytes));
    CopyHeadsArgs gather = args;
    gather.to = gathered->data();
    gather.to_rows = {
        .dtype = args.to_rows.dtype, .head_stride = args.head_dim, .slot_stride = slot_elements};
    RETURN_IF_ERROR(CopyHeads(gather));
    return Do("copy to the host", [&] {
      return CopyStripes(gathered->data<std::byte>(), args.to_rows.slots, args.tokens, slot_bytes,
                         static_cast<std::byte*>(args.to));
    });
  }

  absl::Status SwiGlu(const void* x, int64_t tokens, int64_t width, void* y) override {
    return Do("swiglu", [&] {
      return LaunchSwiGlu(static_cast<const BFloat16*>(x), tokens, width, static_cast<BFloat16*>(y),
                          stream_->get());
    });
  }

  absl::Status Convert(const float* from, int64_t count, DType to_dtype, void* to) override {
    return Do("convert",
              [&] { return LaunchConvert(from, DType::kF32, count, to_dtype, to, stream_->get()); });
  }

 private:
  // Runs on this backend's device, unless stopped.
  template <typename Enqueue>
  absl::Status Do(const char* operation, const Enqueue& enqueue) {
    if (Stopped(stop_)) return absl::CancelledError(absl::StrCat(operation, ": stopped"));
    const ScopedCudaDevice scope(device_.ordinal);
    absl::Status status = enqueue();
    return status.ok() ? status : Diagnose(status);
  }

  static bool Stopped(const StopToken* stop) { return stop != nullptr && stop->stopped(); }

  // A failure that stays is the device's: every later call has it, too.
  absl::Status Diagnose(const absl::Status& status) {
    cudaGetLastError();
    const cudaError_t now = cudaStreamQuery(stream_->get());
    if (now == cudaSuccess || now == cudaErrorNotReady) return status;
    lost_ = true;
    return absl::UnavailableError(absl::StrCat("GPU ", device_.ordinal, " (", device_.name,
                                               ") has failed: ", status.message(),
                                               "; start the process anew, and see nvidia-smi"));
  }

  // Blocks until the device has passed `point`, or `stop` (may be null) is raised.
  absl::Status WaitOnHost(const CudaPoint& point, const StopToken* stop) {
    const auto start = std::chrono::steady_clock::now();
    while (true) {
      const cudaError_t passed = cudaEventQuery(point.event());
      if (passed == cudaSuccess) return absl::OkStatus();
      if (passed != cudaErrorNotReady) return Diagnose(LaunchStatus("waiting for the device", passed));
      if (Stopped(stop)) return absl::CancelledError("waiting for the device: stopped");
      if (std::chrono::steady_clock::now() - start < kAwake) {
        std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(kNap);
      }
    }
  }

  absl::Status HoldBack() {
    while (marks_.size() >= kMarksAhead) {
      RETURN_IF_ERROR(WaitOnHost(*marks_.front(), stop_));
      marks_.pop_front();
    }
    return absl::OkStatus();
  }

  absl::Status SetMark() {
    absl::StatusOr<std::shared_ptr<const CudaPoint>> mark = stream_->Mark();
    if (!mark.ok()) return Diagnose(mark.status());
    marks_.push_back(*std::move(mark));
    return absl::OkStatus();
  }

  // By the copy engines, on a stream of this device's, so that neither rank's compute waits for it.
  absl::StatusOr<DeviceMessage> FetchFrom(int from, const DeviceMessage& message) {
    const ScopedCudaDevice scope(device_.ordinal);
    const size_t size_bytes = message.buffer->size_bytes();
    ASSIGN_OR_RETURN(BufferRef copy, CudaAllocation::Allocate(size_bytes, copies_, shared_.retire));
    RETURN_IF_ERROR(copies_->WaitFor(static_cast<const CudaPoint&>(*message.ready)));
    CudaAllocation::Of(*message.buffer).AddUser(copies_);
    RETURN_IF_ERROR(LaunchStatus("copying from a peer",
                                 cudaMemcpyPeerAsync(copy->data(), device_.ordinal, message.buffer->data(),
                                                     from, size_bytes, copies_->get())));
    ASSIGN_OR_RETURN(std::shared_ptr<const CudaPoint> ready, copies_->Mark());
    return DeviceMessage{std::move(copy), std::move(ready)};
  }

  // Slot s, slot_bytes long, to its position (band.h): stripes of `width` slots are as far apart as `stride`
  // of them.
  absl::Status CopyStripes(const std::byte* from, const SlotPositions& slots, int64_t tokens,
                           size_t slot_bytes, std::byte* to) {
    const size_t stripe_bytes = slots.width * slot_bytes;
    const int64_t whole = tokens / slots.width, rest = tokens % slots.width;
    std::byte* const first = to + slots.At(0) * slot_bytes;
    if (whole > 0) {
      const cudaError_t error =
          cudaMemcpy2DAsync(first, slots.stride * stripe_bytes, from, stripe_bytes, stripe_bytes, whole,
                            cudaMemcpyDeviceToHost, stream_->get());
      if (error != cudaSuccess) return LaunchStatus("copying stripes", error);
    }
    if (rest == 0) return absl::OkStatus();
    return LaunchStatus(
        "copying the last stripe",
        cudaMemcpyAsync(to + slots.At(whole * slots.width) * slot_bytes, from + whole * stripe_bytes,
                        rest * slot_bytes, cudaMemcpyDeviceToHost, stream_->get()));
  }

  const CudaDevice device_;
  const std::shared_ptr<CudaStream> stream_;  // computes
  const std::shared_ptr<CudaStream> copies_;  // brings messages from other devices
  const DeviceStreams shared_;
  std::unique_ptr<CudaGemm> gemm_;
  const StopToken* stop_ = nullptr;
  std::deque<std::shared_ptr<const CudaPoint>> marks_;
  int64_t products_ = 0;
  bool lost_ = false;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Backend>> MakeCudaBackend(const CudaDevice& device) {
  const ScopedCudaDevice scope(device.ordinal);
  ASSIGN_OR_RETURN(DeviceStreams shared, StreamsOf(device.ordinal));
  ASSIGN_OR_RETURN(std::shared_ptr<CudaStream> stream, CudaStream::Make(device.ordinal));
  ASSIGN_OR_RETURN(std::shared_ptr<CudaStream> copies, CudaStream::Make(device.ordinal));
  auto backend =
      std::make_unique<CudaBackend>(device, std::move(stream), std::move(copies), std::move(shared));
  RETURN_IF_ERROR(backend->Start());
  return backend;
}

}  // namespace meshfill
