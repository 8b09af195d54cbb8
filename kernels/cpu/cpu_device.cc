#include "kernels/cpu/cpu_device.h"

#include <algorithm>
#include <string>
#include <system_error>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "kernels/cpu/attention.h"
#include "kernels/cpu/cpu_stream.h"
#include "kernels/cpu/host_memory.h"
#include "kernels/cpu/narrow_matrix.h"
#include "kernels/cpu/onednn.h"
#include "kernels/cpu/packed_matrix.h"
#include "kernels/mutex.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

class CpuDevice final : public Device {
 public:
  CpuDevice(DType dtype, int threads, int streams)
      : dtype_(dtype),
        target_(SupportedAttentionTargets().front()),
        threads_(threads),
        stream_threads_(std::max(1, threads / streams)) {
    for (int i = 0; i < streams; ++i) idle_.push_back(std::make_unique<CpuTeam>(dtype_, stream_threads_));
  }

  std::string name() const override { return absl::StrCat("cpu/", target_); }
  DType dtype() const override { return dtype_; }
  Grain grain() const override {
    if (dtype_ != DType::kBf16 || !OneDnnUsesTiles()) return {};
    return {.expert_rows = 512, .probe_flops = 4e10};  // as many seconds as elsewhere
  }
  bool rows_are_independent() const override { return OneDnnSumsRowsAlike(dtype_); }
  bool lost() const override { return false; }

  absl::StatusOr<BufferRef> Allocate(size_t size_bytes) override { return AllocateHostMemory(size_bytes); }
  absl::StatusOr<BufferRef> Place(const void* host, size_t size_bytes) override {
    return PlaceOnHost(host, size_bytes);
  }
  absl::Status Copy(std::span<const BufferCopy> copies) override { return CopyOnHost(copies); }

  absl::StatusOr<std::unique_ptr<PackedWeight>> PackWeight(std::span<const WeightRows> rows,
                                                           int64_t in_features) override {
    return WithPackers([&](PackTeam& packers) -> absl::StatusOr<std::unique_ptr<PackedWeight>> {
      if (NarrowMatrix::Holds(rows.front().dtype)) {
        return NarrowMatrix::Pack(rows, in_features, dtype_, packers.pool);
      }
      return PackMatrix(rows, in_features, dtype_, packers);
    });
  }

  absl::StatusOr<PackedForm> FormOf(int64_t out_features, int64_t in_features,
                                    const ElementKind& kind) override {
    if (NarrowMatrix::Holds(kind.dtype)) return NarrowMatrix::FormOf(in_features, out_features, kind);
    return PackedFormOf(in_features, out_features, dtype_);
  }
  absl::StatusOr<BufferRef> PackPanels(std::span<const WeightRows> rows, int64_t in_features, int64_t first,
                                       int64_t panels) override {
    return WithPackers([&](PackTeam& packers) {
      return NarrowMatrix::Holds(rows.front().dtype)
                 ? NarrowMatrix::PackTiles(rows, in_features, first, panels, packers.pool)
                 : PackMatrixPanels(rows, in_features, dtype_, first, panels, packers);
    });
  }
  absl::StatusOr<std::unique_ptr<PackedWeight>> WeightOf(int64_t out_features, int64_t in_features,
                                                         const ElementKind& kind, BufferRef packed,
                                                         std::vector<float> bias) override {
    if (NarrowMatrix::Holds(kind.dtype)) {
      return NarrowMatrix::OfTiles(in_features, out_features, kind, dtype_, std::move(packed),
                                   std::move(bias));
    }
    return MatrixOfPanels(in_features, out_features, dtype_, std::move(packed), std::move(bias));
  }

  absl::StatusOr<std::unique_ptr<Stream>> NewStream(const StopToken* stop) override {
    ASSIGN_OR_RETURN(std::unique_ptr<CpuTeam> team, TakeTeam());
    return std::make_unique<CpuStream>(*this, stop, target_, std::move(team),
                                       [this](std::unique_ptr<CpuTeam> team) {
                                         const MutexLock lock(mu_);
                                         idle_.push_back(std::move(team));
                                       });
  }

 private:
  // Threads that pack one weight. Who packs while others do has threads of its own: theirs may wait for a
  // disk.
  template <typename Pack>
  std::invoke_result_t<Pack, PackTeam&> WithPackers(const Pack& pack) {
    std::unique_ptr<PackTeam> packers;
    {
      const MutexLock lock(mu_);
      if (!idle_packers_.empty()) {
        packers = std::move(idle_packers_.back());
        idle_packers_.pop_back();
      }
    }
    try {
      if (packers == nullptr) packers = std::make_unique<PackTeam>(threads_);
    } catch (const std::system_error& error) {
      return absl::ResourceExhaustedError(absl::StrCat("no thread could be started to pack a weight (",
                                                       error.what(),
                                                       "); raise the limits of threads and memory"));
    }
    auto packed = pack(*packers);
    const MutexLock lock(mu_);
    idle_packers_.push_back(std::move(packers));
    return packed;
  }

  absl::StatusOr<std::unique_ptr<CpuTeam>> TakeTeam() {
    {
      const MutexLock lock(mu_);
      if (!idle_.empty()) {
        std::unique_ptr<CpuTeam> team = std::move(idle_.back());
        idle_.pop_back();
        return team;
      }
    }
    try {
      return std::make_unique<CpuTeam>(dtype_, stream_threads_);
    } catch (const std::system_error& error) {
      return absl::ResourceExhaustedError(
          absl::StrCat("no thread could be started for a stream (", error.what(),
                       "); use fewer ranks, or raise the limits of threads and memory"));
    }
  }

  const DType dtype_;
  const std::string target_;
  const int threads_;
  const int stream_threads_;
  Mutex mu_;
  std::vector<std::unique_ptr<PackTeam>> idle_packers_ ABSL_GUARDED_BY(mu_);
  std::vector<std::unique_ptr<CpuTeam>> idle_ ABSL_GUARDED_BY(mu_);  // teams that no stream has
};

}  // namespace

std::unique_ptr<Device> MakeCpuDevice(DType dtype, int threads, int streams) {
  return std::make_unique<CpuDevice>(dtype, threads, streams);
}

DType CpuWeightDType(DType dtype) { return MultiplyDType(dtype); }

}  // namespace meshfill
