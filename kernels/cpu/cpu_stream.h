// The operations of a layer on a team of CPU threads.
#ifndef MESHFILL_KERNELS_CPU_CPU_STREAM_H_
#define MESHFILL_KERNELS_CPU_CPU_STREAM_H_

#include <functional>
#include <memory>
#include <string>

#include "kernels/cpu/gemm.h"
#include "kernels/cpu/host_memory.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/host_stream.h"

namespace meshfill {

// Threads, and the products that have been compiled for them: what a stream computes with, and its device
// keeps for the next.
struct CpuTeam {
  CpuTeam(DType dtype, int threads) : pool(threads), gemm(dtype, pool) {}
  ThreadPool pool;
  CpuGemm gemm;  // uses pool
};

class CpuStream final : public HostStream {
 public:
  // `done` gets the team back when the stream goes.
  CpuStream(Device& device, const StopToken* stop, std::string attention_target,
            std::unique_ptr<CpuTeam> team, std::function<void(std::unique_ptr<CpuTeam>)> done);
  ~CpuStream() override;

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
  absl::Status Activate(const ActivateArgs& args) override;
  absl::Status Route(const RouteArgs& args) override;
  absl::Status ExpertMlp(const ExpertMlpArgs& args) override;
  absl::Status AddExperts(const AddExpertsArgs& args) override;
  absl::Status Convert(const float* from, int64_t count, DType to_dtype, void* to) override;

 private:
  // Element `index` of a tensor in the compute dtype.
  void* At(void* tensor, int64_t index) const;
  // body(begin, end) over ranges of rows that make up [0, rows), on the team, until the stop token is raised.
  absl::Status Share(const char* operation, int64_t rows, int64_t row_bytes,
                     const std::function<void(int64_t, int64_t)>& body);
  bool Stopped() const { return stop_ != nullptr && stop_->stopped(); }

  const SpareMappings spare_;  // the stream frees in one layer what it allocates in the next
  const DType dtype_;
  const StopToken* const stop_;
  const std::string attention_target_;
  std::unique_ptr<CpuTeam> team_;
  const std::function<void(std::unique_ptr<CpuTeam>)> done_;
};

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CPU_CPU_STREAM_H_
