// The operations of a layer, queued on a CUDA device.
#ifndef MESHFILL_KERNELS_CUDA_CUDA_STREAM_H_
#define MESHFILL_KERNELS_CUDA_CUDA_STREAM_H_

#include <deque>
#include <functional>
#include <memory>

#include "kernels/cuda/cuda_lane.h"
#include "kernels/cuda/device_info.h"
#include "kernels/cuda/gemm.h"
#include "kernels/cuda/health.h"
#include "kernels/stream.h"

namespace meshfill {

class CudaStream final : public Stream {
 public:
  // What a stream needs of its device, which outlives it.
  struct Shared {
    const CudaDeviceInfo& info;
    CudaGemm& gemm;
    CudaHealth& health;
  };

  // `done` gets the lane back when the stream goes.
  CudaStream(Device& device, const Shared& shared, const StopToken* stop, CudaLane lane,
             std::function<void(CudaLane)> done);
  ~CudaStream() override;

  absl::StatusOr<BufferRef> Allocate(size_t size_bytes) override;
  absl::StatusOr<BufferRef> Place(const void* host, size_t size_bytes) override;
  absl::Status Upload(const void* host, size_t size_bytes, void* to) override;
  absl::Status Download(const void* from, size_t size_bytes, void* host) override;
  absl::StatusOr<std::shared_ptr<const StreamPoint>> Mark() override;
  absl::Status Finish() override;
  absl::StatusOr<DeviceMessage> Fetch(DeviceMessage message) override;
  absl::StatusOr<BufferRef> TakeOver(DeviceMessage message) override;

  absl::Status Embed(std::span<const uint32_t> ids, const void* table, DType table_dtype, int64_t width,
                     float* x) override;
  absl::Status RmsNorm(const float* x, const float* weight, int64_t tokens, int64_t width, float eps,
                       void* y) override;
  absl::Status AddRmsNorm(const float* y, const float* weight, int64_t tokens, int64_t width, float eps,
                          float* x) override;
  absl::Status Scale(float* x, int64_t count, float factor) override;
  absl::Status Gemm(const GemmArgs& args) override;
  absl::Status SplitQkv(const SplitQkvArgs& args) override;
  absl::Status AttentionBlock(const AttentionBlockArgs& args) override;
  absl::Status MergePartial(const MergePartialArgs& args) override;
  absl::Status ApplySinks(const ApplySinksArgs& args) override;
  absl::Status CopyHeads(const CopyHeadsArgs& args) override;
  absl::StatusOr<std::unique_ptr<HostCopy>> CopyHeadsToHost(const CopyHeadsArgs& args,
                                                            BufferRef source) override;
  absl::Status Activate(const ActivateArgs& args) override;
  absl::Status Route(const RouteArgs& args) override;
  absl::Status ExpertMlp(const ExpertMlpArgs& args) override;
  absl::Status AddExperts(const AddExpertsArgs& args) override;
  absl::Status Convert(const float* from, int64_t count, DType to_dtype, void* to) override;

 private:
  // Runs on this stream's device, unless stopped.
  template <typename Enqueue>
  absl::Status Do(const char* operation, const Enqueue& enqueue);
  // Do for a product. One in kProductsPerMark products sets a mark.
  template <typename Enqueue>
  absl::Status Multiply(const char* operation, const Enqueue& enqueue);
  absl::Status Diagnose(const absl::Status& error) { return shared_.health.Diagnose(error, *lane_.queue); }
  cudaStream_t queue() const { return lane_.queue->get(); }

  // Blocks until the device has passed `point`, or `stop` (may be null) is raised.
  absl::Status WaitOnHost(const CudaPoint& point, const StopToken* stop);
  absl::Status HoldBack();  // while the device is kMarksAhead marks behind
  absl::Status SetMark();
  absl::StatusOr<DeviceMessage> FetchFrom(int from, const DeviceMessage& message);

  const Shared shared_;
  const StopToken* const stop_;
  CudaLane lane_;
  const std::function<void(CudaLane)> done_;
  std::deque<std::shared_ptr<const CudaPoint>> marks_;
  int64_t products_ = 0;
};

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CUDA_CUDA_STREAM_H_
