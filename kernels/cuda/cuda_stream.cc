#include "kernels/cuda/cuda_stream.h"

#include <chrono>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/attention.h"
#include "kernels/cuda/expert_ops.h"
#include "kernels/cuda/launch_status.h"
#include "kernels/cuda/layer_ops.h"
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

}  // namespace

CudaStream::CudaStream(Device& device, const Shared& shared, const StopToken* stop, CudaLane lane,
                       std::function<void(CudaLane)> done)
    : Stream(device), shared_(shared), stop_(stop), lane_(std::move(lane)), done_(std::move(done)) {}

CudaStream::~CudaStream() { done_(std::move(lane_)); }

template <typename Enqueue>
absl::Status CudaStream::Do(const char* operation, const Enqueue& enqueue) {
  if (stop_ != nullptr && !stop_->Proceed())
    return absl::CancelledError(absl::StrCat(operation, ": stopped"));
  const ScopedCudaDevice scope(shared_.info.ordinal);
  absl::Status status = enqueue();
  return status.ok() ? status : Diagnose(status);
}

template <typename Enqueue>
absl::Status CudaStream::Multiply(const char* operation, const Enqueue& enqueue) {
  const bool marks = ++products_ % kProductsPerMark == 0;
  if (marks) {
    RETURN_IF_ERROR(HoldBack());
  }
  absl::Status status = Do(operation, enqueue);
  return status.ok() && marks ? SetMark() : status;
}

absl::StatusOr<BufferRef> CudaStream::Allocate(size_t size_bytes) {
  absl::StatusOr<BufferRef> buffer = lane_.Allocate(size_bytes);
  if (!buffer.ok() && !absl::IsResourceExhausted(buffer.status())) return Diagnose(buffer.status());
  return buffer;
}

absl::StatusOr<std::shared_ptr<const StreamPoint>> CudaStream::Mark() {
  absl::StatusOr<std::shared_ptr<const CudaPoint>> point = lane_.queue->Mark();
  if (!point.ok()) return Diagnose(point.status());
  return *std::move(point);
}

absl::Status CudaStream::Finish() {
  absl::StatusOr<std::shared_ptr<const CudaPoint>> point = lane_.queue->Mark();
  if (!point.ok()) return Diagnose(point.status());
  marks_.clear();
  return WaitOnHost(**point, nullptr);
}

absl::StatusOr<BufferRef> CudaStream::Place(const void* host, size_t size_bytes) {
  ASSIGN_OR_RETURN(BufferRef buffer, Allocate(size_bytes));
  RETURN_IF_ERROR(Upload(host, size_bytes, buffer->data()));
  return buffer;
}

absl::Status CudaStream::Upload(const void* host, size_t size_bytes, void* to) {
  return Do("upload", [&] { return lane_.queue->Upload(host, size_bytes, to); });
}

absl::Status CudaStream::Download(const void* from, size_t size_bytes, void* host) {
  absl::Status status = Do("download", [&] {
    return LaunchStatus("download", cudaMemcpyAsync(host, from, size_bytes, cudaMemcpyDeviceToHost, queue()));
  });
  return status.ok() ? Finish() : status;
}

absl::StatusOr<DeviceMessage> CudaStream::Fetch(DeviceMessage message) {
  const int from = static_cast<const CudaPoint&>(*message.ready).device();
  if (from == shared_.info.ordinal || message.buffer->size_bytes() == 0) return message;
  absl::StatusOr<DeviceMessage> fetched = FetchFrom(from, message);
  if (!fetched.ok() && !absl::IsResourceExhausted(fetched.status())) return Diagnose(fetched.status());
  return fetched;
}

absl::StatusOr<BufferRef> CudaStream::TakeOver(DeviceMessage message) {
  CudaAllocation::Of(*message.buffer).AddUser(lane_.queue);
  RETURN_IF_ERROR(
      Do("take over", [&] { return lane_.queue->WaitFor(static_cast<const CudaPoint&>(*message.ready)); }));
  return std::move(message.buffer);
}

absl::Status CudaStream::Embed(std::span<const uint32_t> ids, const void* table, DType table_dtype,
                               int64_t width, float* x) {
  ASSIGN_OR_RETURN(BufferRef on_device, Place(ids.data(), ids.size_bytes()));
  return Do("embed", [&] {
    return LaunchEmbed(on_device->data<uint32_t>(), std::ssize(ids), table, table_dtype, width, x, queue());
  });
}

absl::Status CudaStream::RmsNorm(const float* x, const float* weight, int64_t tokens, int64_t width,
                                 float eps, void* y) {
  return Do("rms norm",
            [&] { return LaunchRmsNorm(x, weight, tokens, width, eps, static_cast<BFloat16*>(y), queue()); });
}

absl::Status CudaStream::AddRmsNorm(const float* y, const float* weight, int64_t tokens, int64_t width,
                                    float eps, float* x) {
  return Do("add rms norm", [&] { return LaunchAddRmsNorm(y, weight, tokens, width, eps, x, queue()); });
}

absl::Status CudaStream::Scale(float* x, int64_t count, float factor) {
  return Do("scale", [&] { return LaunchScale(x, count, factor, queue()); });
}

absl::Status CudaStream::Gemm(const GemmArgs& args) {
  return Multiply("gemm", [&] { return shared_.gemm.Run(args, lane_); });
}

absl::Status CudaStream::SplitQkv(const SplitQkvArgs& args) {
  return Do("split qkv", [&] { return LaunchSplitQkv(args, queue()); });
}

absl::Status CudaStream::AttentionBlock(const AttentionBlockArgs& args) {
  RETURN_IF_ERROR(HoldBack());
  absl::Status status = Do("attention block", [&] {
    return CudaAttentionBlock(args, DType::kBf16, shared_.info.traits, queue());
  });
  return status.ok() ? SetMark() : status;
}

absl::Status CudaStream::MergePartial(const MergePartialArgs& args) {
  return Do("merge partial", [&] { return LaunchMergePartial(args, queue()); });
}

absl::Status CudaStream::ApplySinks(const ApplySinksArgs& args) {
  return Do("apply sinks", [&] { return LaunchApplySinks(args, queue()); });
}

absl::Status CudaStream::CopyHeads(const CopyHeadsArgs& args) {
  return Do("copy heads", [&] { return LaunchCopyHeads(args, queue()); });
}

absl::StatusOr<std::unique_ptr<HostCopy>> CudaStream::CopyHeadsToHost(const CopyHeadsArgs& args,
                                                                      BufferRef source) {
  if (stop_ != nullptr && !stop_->Proceed()) return absl::CancelledError("copy to the host: stopped");
  absl::StatusOr<std::shared_ptr<const CudaPoint>> ready = lane_.queue->Mark();
  if (!ready.ok()) return Diagnose(ready.status());
  return lane_.host_copies->Start(args, std::move(source), *std::move(ready), stop_, shared_.health);
}

absl::Status CudaStream::Activate(const ActivateArgs& args) {
  return Do("activation", [&] { return LaunchActivate(args, queue()); });
}

absl::Status CudaStream::Route(const RouteArgs& args) {
  return Do("route", [&] { return LaunchRoute(args, queue()); });
}

absl::Status CudaStream::ExpertMlp(const ExpertMlpArgs& args) {
  const auto multiply = [&](const ExpertGemmArgs& product) {
    return Multiply("expert gemm", [&] { return shared_.gemm.RunExperts(product, lane_); });
  };
  RETURN_IF_ERROR(multiply(GateUpProductOf(args)));
  RETURN_IF_ERROR(Activate(ActivationOf(args)));
  return multiply(DownProductOf(args));
}

absl::Status CudaStream::AddExperts(const AddExpertsArgs& args) {
  return Do("add experts", [&] { return LaunchAddExperts(args, queue()); });
}

absl::Status CudaStream::Convert(const float* from, int64_t count, DType to_dtype, void* to) {
  return Do("convert", [&] { return LaunchConvert(from, DType::kF32, count, to_dtype, to, queue()); });
}

absl::Status CudaStream::WaitOnHost(const CudaPoint& point, const StopToken* stop) {
  const auto start = std::chrono::steady_clock::now();
  while (true) {
    const cudaError_t passed = point.Query();
    if (passed == cudaSuccess) return absl::OkStatus();
    if (passed != cudaErrorNotReady) return Diagnose(LaunchStatus("waiting for the device", passed));
    if (stop != nullptr && stop->stopped()) return absl::CancelledError("waiting for the device: stopped");
    if (std::chrono::steady_clock::now() - start < kAwake) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(kNap);
    }
  }
}

absl::Status CudaStream::HoldBack() {
  while (marks_.size() >= kMarksAhead) {
    RETURN_IF_ERROR(WaitOnHost(*marks_.front(), stop_));
    marks_.pop_front();
  }
  return absl::OkStatus();
}

absl::Status CudaStream::SetMark() {
  absl::StatusOr<std::shared_ptr<const CudaPoint>> mark = lane_.queue->Mark();
  if (!mark.ok()) return Diagnose(mark.status());
  marks_.push_back(*std::move(mark));
  return absl::OkStatus();
}

// By the copy engines, on a stream of this device's, so that neither rank's compute waits for it.
absl::StatusOr<DeviceMessage> CudaStream::FetchFrom(int from, const DeviceMessage& message) {
  const ScopedCudaDevice scope(shared_.info.ordinal);
  const size_t size_bytes = message.buffer->size_bytes();
  ASSIGN_OR_RETURN(BufferRef copy, CudaAllocation::Allocate(size_bytes, lane_.copies, lane_.retire));
  RETURN_IF_ERROR(lane_.copies->WaitFor(static_cast<const CudaPoint&>(*message.ready)));
  CudaAllocation::Of(*message.buffer).AddUser(lane_.copies);
  RETURN_IF_ERROR(LaunchStatus("copying from a peer",
                               cudaMemcpyPeerAsync(copy->data(), shared_.info.ordinal, message.buffer->data(),
                                                   from, size_bytes, lane_.copies->get())));
  ASSIGN_OR_RETURN(std::shared_ptr<const CudaPoint> ready, lane_.copies->Mark());
  return DeviceMessage{std::move(copy), std::move(ready)};
}

}  // namespace meshfill
