#include "kernels/cuda/cuda_device.h"

#include <algorithm>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "kernels/cuda/cuda_lane.h"
#include "kernels/cuda/cuda_stream.h"
#include "kernels/cuda/cuda_weight.h"
#include "kernels/cuda/gemm.h"
#include "kernels/cuda/health.h"
#include "kernels/cuda/launch_status.h"
#include "kernels/cuda/memory.h"
#include "kernels/cuda/queue.h"
#include "kernels/mutex.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

// Threads that read weights. Eight filled about half of a link of PCIe 5.0 x16 (docs/tuning.md); others have
// the cores for what the host does besides.
int UploadThreads() { return std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, 8); }

class CudaDevice final : public Device {
 public:
  CudaDevice(const CudaDeviceInfo& info, std::unique_ptr<CudaGemm> gemm, CudaLane loading)
      : info_(info),
        health_(absl::StrCat("GPU ", info.ordinal, " (", info.name, ")")),
        gemm_(std::move(gemm)),
        retire_(loading.retire),
        loading_(std::move(loading)) {}

  std::string name() const override {
    return absl::StrCat("cuda/sm", info_.traits.compute_major, info_.traits.compute_minor);
  }
  DType dtype() const override { return DType::kBf16; }
  Grain grain() const override { return CudaGrain(); }
  // cuBLASLt has other algorithms for other numbers of rows.
  bool rows_are_independent() const override { return false; }
  bool lost() const override { return health_.lost(); }

  absl::StatusOr<BufferRef> Allocate(size_t size_bytes) override {
    return Load([&](const CudaLane& lane) { return lane.Allocate(size_bytes); });
  }

  absl::StatusOr<BufferRef> Place(const void* host, size_t size_bytes) override {
    return Load([&](const CudaLane& lane) -> absl::StatusOr<BufferRef> {
      ASSIGN_OR_RETURN(BufferRef buffer, lane.Allocate(size_bytes));
      RETURN_IF_ERROR(lane.queue->Upload(host, size_bytes, buffer->data()));
      return buffer;
    });
  }

  absl::Status Copy(std::span<const BufferCopy> copies) override {
    return Load([&](const CudaLane& lane) -> absl::StatusOr<BufferRef> {
             for (const BufferCopy& copy : copies) RETURN_IF_ERROR(CopyFromPeer(copy, lane));
             return BufferRef();
           })
        .status();
  }

  absl::StatusOr<std::unique_ptr<PackedWeight>> PackWeight(std::span<const WeightRows> rows,
                                                           int64_t in_features) override {
    return Load([&](const CudaLane& lane) -> absl::StatusOr<std::unique_ptr<PackedWeight>> {
      return PackCudaWeight(rows, in_features, lane);
    });
  }

  absl::StatusOr<PackedForm> FormOf(int64_t out_features, int64_t in_features,
                                    const ElementKind& kind) override {
    return CudaWeightForm(out_features, in_features, kind);
  }
  absl::StatusOr<BufferRef> PackPanels(std::span<const WeightRows> rows, int64_t in_features, int64_t first,
                                       int64_t panels) override {
    return Load([&](const CudaLane& lane) { return PackCudaRows(rows, in_features, first, panels, lane); });
  }
  absl::StatusOr<std::unique_ptr<PackedWeight>> WeightOf(int64_t out_features, int64_t in_features,
                                                         const ElementKind& kind, BufferRef packed,
                                                         std::vector<float> bias) override {
    return Load([&](const CudaLane& lane) -> absl::StatusOr<std::unique_ptr<PackedWeight>> {
      return CudaWeightOfRows(out_features, in_features, kind, packed, bias, lane);
    });
  }

  absl::StatusOr<std::unique_ptr<Stream>> NewStream(const StopToken* stop) override {
    ASSIGN_OR_RETURN(CudaLane lane, TakeLane());
    return std::make_unique<CudaStream>(*this, CudaStream::Shared{info_, *gemm_, health_}, stop,
                                        std::move(lane), [this](CudaLane used) {
                                          const MutexLock lock(mu_);
                                          idle_.push_back(std::move(used));
                                        });
  }

 private:
  // What `make(lane)` returns, once it is there for all streams.
  template <typename Make>
  auto Load(const Make& make) -> decltype(make(std::declval<const CudaLane&>())) {
    const MutexLock lock(loading_mu_);
    const ScopedCudaDevice scope(info_.ordinal);
    auto made = make(loading_);
    if (made.ok()) {
      const cudaError_t error = cudaStreamSynchronize(loading_.queue->get());
      if (error == cudaSuccess) return made;
      return health_.Diagnose(LaunchStatus("loading", error), *loading_.queue);
    }
    if (absl::IsResourceExhausted(made.status())) return made;
    return health_.Diagnose(made.status(), *loading_.queue);
  }

  // By the copy engines, where the devices reach one another.
  absl::Status CopyFromPeer(const BufferCopy& copy, const CudaLane& lane) const {
    if (copy.from->size_bytes() == 0) return absl::OkStatus();
    return LaunchStatus("copying from a peer",
                        cudaMemcpyPeerAsync(copy.to->data(), info_.ordinal, copy.from->data(),
                                            CudaAllocation::Of(*copy.from).device(), copy.from->size_bytes(),
                                            lane.queue->get()));
  }

  absl::StatusOr<CudaLane> TakeLane() {
    {
      const MutexLock lock(mu_);
      if (!idle_.empty()) {
        CudaLane lane = std::move(idle_.back());
        idle_.pop_back();
        return lane;
      }
    }
    const ScopedCudaDevice scope(info_.ordinal);
    CudaLane lane{.retire = retire_};
    ASSIGN_OR_RETURN(lane.queue, CudaQueue::Make(info_.ordinal));
    ASSIGN_OR_RETURN(lane.copies, CudaQueue::Make(info_.ordinal));
    absl::StatusOr<BufferRef> workspace = lane.Allocate(CudaGemm::kWorkspaceBytes);
    if (!workspace.ok()) {
      return absl::IsResourceExhausted(workspace.status())
                 ? workspace.status()
                 : health_.Diagnose(workspace.status(), *lane.queue);
    }
    lane.workspace = *std::move(workspace);
    absl::StatusOr<std::unique_ptr<CudaHostCopies>> host_copies =
        CudaHostCopies::Make(info_.ordinal, retire_);
    if (!host_copies.ok()) {
      return absl::IsResourceExhausted(host_copies.status())
                 ? host_copies.status()
                 : health_.Diagnose(host_copies.status(), *lane.queue);
    }
    lane.host_copies = *std::move(host_copies);
    return lane;
  }

  const CudaDeviceInfo info_;
  CudaHealth health_;
  const std::unique_ptr<CudaGemm> gemm_;
  const std::shared_ptr<CudaQueue> retire_;
  Mutex loading_mu_;
  const CudaLane loading_ ABSL_GUARDED_BY(loading_mu_);  // without a workspace
  Mutex mu_;
  std::vector<CudaLane> idle_ ABSL_GUARDED_BY(mu_);  // lanes of streams that are gone
};

}  // namespace

absl::StatusOr<std::unique_ptr<Device>> MakeCudaDevice(const CudaDeviceInfo& info) {
  const ScopedCudaDevice scope(info.ordinal);
  RETURN_IF_ERROR(SetUpPool(info.ordinal));
  CudaLane loading;
  ASSIGN_OR_RETURN(loading.retire, CudaQueue::Make(info.ordinal));
  ASSIGN_OR_RETURN(loading.queue, CudaQueue::Make(info.ordinal));
  ASSIGN_OR_RETURN(loading.row_uploads, CudaRowUploads::Make(info.ordinal, UploadThreads()));
  ASSIGN_OR_RETURN(std::unique_ptr<CudaGemm> gemm, CudaGemm::Make());
  return std::make_unique<CudaDevice>(info, std::move(gemm), std::move(loading));
}

}  // namespace meshfill
