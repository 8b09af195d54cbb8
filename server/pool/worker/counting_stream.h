// A stream that tells what its rank is at: how many operations have begun and ended, and whether one is
// under way. From this the leader knows a rank that computes from one that stands still.
#ifndef MESHFILL_SERVER_POOL_WORKER_COUNTING_STREAM_H_
#define MESHFILL_SERVER_POOL_WORKER_COUNTING_STREAM_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "kernels/stream.h"

namespace meshfill {

class CountingStream final : public Stream {
 public:
  explicit CountingStream(std::unique_ptr<Stream> stream)
      : Stream(stream->device()), stream_(std::move(stream)) {}

  // Odd while an operation is under way. Any thread.
  uint64_t operations() const { return operations_.load(std::memory_order_relaxed); }

  absl::StatusOr<BufferRef> Allocate(size_t size_bytes) override { return stream_->Allocate(size_bytes); }
  absl::StatusOr<std::shared_ptr<const StreamPoint>> Mark() override { return stream_->Mark(); }
  absl::Status Finish() override {
    return Count([&] { return stream_->Finish(); });
  }
  absl::StatusOr<BufferRef> Place(const void* host, size_t size_bytes) override {
    return stream_->Place(host, size_bytes);
  }
  absl::Status Upload(const void* host, size_t size_bytes, void* to) override {
    return stream_->Upload(host, size_bytes, to);
  }
  absl::Status Download(const void* from, size_t size_bytes, void* host) override {
    return Count([&] { return stream_->Download(from, size_bytes, host); });
  }
  absl::StatusOr<DeviceMessage> Fetch(DeviceMessage message) override {
    return stream_->Fetch(std::move(message));
  }
  absl::StatusOr<BufferRef> TakeOver(DeviceMessage message) override {
    return stream_->TakeOver(std::move(message));
  }

  absl::Status Embed(std::span<const uint32_t> ids, const void* table, DType table_dtype, int64_t width,
                     float* x) override {
    return Count([&] { return stream_->Embed(ids, table, table_dtype, width, x); });
  }
  absl::Status RmsNorm(const float* x, const float* weight, int64_t tokens, int64_t width, float eps,
                       void* y) override {
    return Count([&] { return stream_->RmsNorm(x, weight, tokens, width, eps, y); });
  }
  absl::Status AddRmsNorm(const float* y, const float* weight, int64_t tokens, int64_t width, float eps,
                          float* x) override {
    return Count([&] { return stream_->AddRmsNorm(y, weight, tokens, width, eps, x); });
  }
  absl::Status Scale(float* x, int64_t count, float factor) override {
    return Count([&] { return stream_->Scale(x, count, factor); });
  }
  absl::Status Gemm(const GemmArgs& args) override {
    return Count([&] { return stream_->Gemm(args); });
  }
  absl::Status SplitQkv(const SplitQkvArgs& args) override {
    return Count([&] { return stream_->SplitQkv(args); });
  }
  absl::Status AttentionBlock(const AttentionBlockArgs& args) override {
    return Count([&] { return stream_->AttentionBlock(args); });
  }
  absl::Status MergePartial(const MergePartialArgs& args) override {
    return Count([&] { return stream_->MergePartial(args); });
  }
  absl::Status ApplySinks(const ApplySinksArgs& args) override {
    return Count([&] { return stream_->ApplySinks(args); });
  }
  absl::Status CopyHeads(const CopyHeadsArgs& args) override {
    return Count([&] { return stream_->CopyHeads(args); });
  }
  absl::StatusOr<std::unique_ptr<HostCopy>> CopyHeadsToHost(const CopyHeadsArgs& args,
                                                            BufferRef source) override {
    return Count([&] { return stream_->CopyHeadsToHost(args, std::move(source)); });
  }
  absl::Status Activate(const ActivateArgs& args) override {
    return Count([&] { return stream_->Activate(args); });
  }
  absl::Status Route(const RouteArgs& args) override {
    return Count([&] { return stream_->Route(args); });
  }
  absl::Status ExpertMlp(const ExpertMlpArgs& args) override {
    return Count([&] { return stream_->ExpertMlp(args); });
  }
  absl::Status AddExperts(const AddExpertsArgs& args) override {
    return Count([&] { return stream_->AddExperts(args); });
  }
  absl::Status Convert(const float* from, int64_t count, DType to_dtype, void* to) override {
    return Count([&] { return stream_->Convert(from, count, to_dtype, to); });
  }

 private:
  template <typename Operation>
  auto Count(Operation operation) -> decltype(operation()) {
    operations_.fetch_add(1, std::memory_order_relaxed);
    auto status = operation();
    operations_.fetch_add(1, std::memory_order_relaxed);
    return status;
  }

  const std::unique_ptr<Stream> stream_;
  std::atomic<uint64_t> operations_{0};
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_POOL_WORKER_COUNTING_STREAM_H_
