// The reference, and what a rank does with it: counts operations and memory.
#ifndef MESHFILL_TESTS_ENGINE_RUN_WATCHED_STREAM_H_
#define MESHFILL_TESTS_ENGINE_RUN_WATCHED_STREAM_H_

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <utility>

#include "tests/kernels/lone_stream.h"

namespace meshfill {

// Memory that knows how much of it is alive. Copies are the same memory. Its buffers may outlive it, on any
// thread.
class CountedMemory {
 public:
  BufferRef Allocate(size_t size_bytes) {
    counts_->peak = std::max<int64_t>(counts_->peak, counts_->live += static_cast<int64_t>(size_bytes));
    void* data = std::malloc(size_bytes + 1);
    std::memset(data, 0xff, size_bytes);  // NaN, for whoever reads before it writes
    return std::make_shared<Buffer>(data, size_bytes, [counts = counts_](void* data, size_t size_bytes) {
      counts->live -= static_cast<int64_t>(size_bytes);
      std::free(data);
    });
  }
  int64_t peak_bytes() const { return counts_->peak; }
  int64_t live_bytes() const { return counts_->live; }

 private:
  struct Counts {
    std::atomic<int64_t> live = 0;
    std::atomic<int64_t> peak = 0;
  };
  std::shared_ptr<Counts> counts_ = std::make_shared<Counts>();
};

// Forwards to the reference; counts, and lets a test look in before each block.
class WatchedStream : public Stream {
 public:
  explicit WatchedStream(DType dtype, const StopToken* stop = nullptr)
      : WatchedStream(ReferenceStream(dtype, stop)) {}

  std::function<absl::Status(int block)> before_block;  // may be null; an error is the block's
  std::function<void(const RouteArgs&)> before_route;   // may be null
  int blocks = 0;
  int merges = 0;
  int allocations = 0;
  int64_t most_product_tokens = 0;
  bool copies_late = false;  // to the host: while they are waited for
  CountedMemory memory;

  absl::StatusOr<BufferRef> Allocate(size_t size_bytes) override {
    ++allocations;
    return memory.Allocate(size_bytes);
  }
  absl::StatusOr<BufferRef> Place(const void* host, size_t size_bytes) override {
    return reference_->Place(host, size_bytes);
  }
  absl::Status Upload(const void* host, size_t size_bytes, void* to) override {
    return reference_->Upload(host, size_bytes, to);
  }
  absl::Status Download(const void* from, size_t size_bytes, void* host) override {
    return reference_->Download(from, size_bytes, host);
  }
  absl::StatusOr<std::shared_ptr<const StreamPoint>> Mark() override { return reference_->Mark(); }
  absl::Status Finish() override { return reference_->Finish(); }
  absl::StatusOr<DeviceMessage> Fetch(DeviceMessage message) override {
    return reference_->Fetch(std::move(message));
  }
  absl::StatusOr<BufferRef> TakeOver(DeviceMessage message) override {
    return reference_->TakeOver(std::move(message));
  }

  absl::Status Embed(std::span<const uint32_t> ids, const void* table, DType table_dtype, int64_t width,
                     float* x) override {
    return reference_->Embed(ids, table, table_dtype, width, x);
  }
  absl::Status RmsNorm(const float* x, const float* weight, int64_t tokens, int64_t width, float eps,
                       void* y) override {
    return reference_->RmsNorm(x, weight, tokens, width, eps, y);
  }
  absl::Status AddRmsNorm(const float* y, const float* weight, int64_t tokens, int64_t width, float eps,
                          float* x) override {
    return reference_->AddRmsNorm(y, weight, tokens, width, eps, x);
  }
  absl::Status Scale(float* x, int64_t count, float factor) override {
    return reference_->Scale(x, count, factor);
  }
  absl::Status Gemm(const GemmArgs& args) override {
    most_product_tokens = std::max(most_product_tokens, args.tokens);
    return reference_->Gemm(args);
  }
  absl::Status SplitQkv(const SplitQkvArgs& args) override { return reference_->SplitQkv(args); }
  absl::Status AttentionBlock(const AttentionBlockArgs& args) override {
    if (before_block != nullptr) {
      if (absl::Status status = before_block(blocks); !status.ok()) return status;
    }
    ++blocks;
    return reference_->AttentionBlock(args);
  }
  absl::Status MergePartial(const MergePartialArgs& args) override {
    ++merges;
    return reference_->MergePartial(args);
  }
  absl::Status ApplySinks(const ApplySinksArgs& args) override { return reference_->ApplySinks(args); }
  absl::Status CopyHeads(const CopyHeadsArgs& args) override { return reference_->CopyHeads(args); }
  absl::StatusOr<std::unique_ptr<HostCopy>> CopyHeadsToHost(const CopyHeadsArgs& args,
                                                            BufferRef source) override {
    if (!copies_late) return reference_->CopyHeadsToHost(args, std::move(source));
    return std::make_unique<LateCopy>(*reference_, args, std::move(source));
  }
  absl::Status Activate(const ActivateArgs& args) override { return reference_->Activate(args); }
  absl::Status Route(const RouteArgs& args) override {
    if (before_route != nullptr) before_route(args);
    return reference_->Route(args);
  }
  absl::Status ExpertMlp(const ExpertMlpArgs& args) override { return reference_->ExpertMlp(args); }
  absl::Status AddExperts(const AddExpertsArgs& args) override { return reference_->AddExperts(args); }
  absl::Status Convert(const float* from, int64_t count, DType to_dtype, void* to) override {
    return reference_->Convert(from, count, to_dtype, to);
  }

 private:
  class LateCopy : public HostCopy {
   public:
    LateCopy(Stream& stream, const CopyHeadsArgs& args, BufferRef source)
        : stream_(stream), args_(args), source_(std::move(source)) {}
    absl::Status Wait() override { return stream_.CopyHeadsToHost(args_, source_).status(); }

   private:
    Stream& stream_;
    const CopyHeadsArgs args_;
    const BufferRef source_;
  };

  explicit WatchedStream(LoneStream reference)
      : Stream(reference.device()), reference_(std::move(reference)) {}

  const LoneStream reference_;
};

}  // namespace meshfill

#endif  // MESHFILL_TESTS_ENGINE_RUN_WATCHED_STREAM_H_
