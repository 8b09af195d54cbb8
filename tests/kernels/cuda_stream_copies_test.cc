// Copies of heads on CUDA's streams, to other rows and to the host, against the reference.
#include <chrono>
#include <memory>
#include <random>
#include <thread>
#include <utility>

#include "tests/kernels/cuda_stream_fixture.h"

namespace meshfill {
namespace {

// Rows for `tokens` slots anywhere among more, heads or slots outermost; the elements that they span.
std::pair<HeadRows, int64_t> DrawRows(std::mt19937_64& random, DType dtype, int heads, int64_t tokens,
                                      int head_dim) {
  const SlotPositions slots = {
      .base = Draw(random, 0, 3), .stride = Draw(random, 1, 3), .width = Draw(random, 1, 70)};
  const int64_t all_slots = tokens == 0 ? 0 : slots.At(tokens - 1) + Draw(random, 1, 3);
  const int64_t all_heads = heads + Draw(random, 0, 2);
  const HeadRows heads_outermost = {
      .dtype = dtype, .head_stride = all_slots * head_dim, .slot_stride = head_dim, .slots = slots};
  const HeadRows slots_outermost = {
      .dtype = dtype, .head_stride = head_dim, .slot_stride = all_heads * head_dim, .slots = slots};
  return {Draw(random, 0, 1) ? heads_outermost : slots_outermost, all_heads * all_slots * head_dim};
}

TEST_F(CudaStreamTest, CopyHeads) {
  ForRandomDraws(30, [&](std::mt19937_64& random) {
    const int heads = static_cast<int>(Draw(random, 1, 9)), head_dim = static_cast<int>(Draw(random, 1, 200));
    const int64_t tokens = Draw(random, 0, 200);
    const DType from_dtype = Draw(random, 0, 1) ? DType::kF32 : DType::kBf16;
    const DType to_dtype = Draw(random, 0, 1) ? DType::kF32 : DType::kBf16;
    const auto [from_rows, from_elements] = DrawRows(random, from_dtype, heads, tokens, head_dim);
    const auto [to_rows, to_elements] = DrawRows(random, to_dtype, heads, tokens, head_dim);
    const Tensor from = Tensor::Normal(random, from_dtype, from_elements);
    Tensor expected(to_dtype, to_elements);  // other rows must stay as they are
    OnDevice got = Copy(expected), device_from = Copy(from);
    CopyHeadsArgs args{.from = from.data(),
                       .from_rows = from_rows,
                       .to = expected.data(),
                       .to_rows = to_rows,
                       .heads = heads,
                       .tokens = tokens,
                       .head_dim = head_dim};
    ASSERT_OK(reference_->CopyHeads(args));
    args.from = device_from.data(), args.to = got.data();
    ASSERT_OK(stream_->CopyHeads(args));
    EXPECT_TRUE(got.Read().SameBits(expected));
  });
}

TEST_F(CudaStreamTest, CopyHeadsToHost) {
  ForRandomDraws(20, [&](std::mt19937_64& random) {
    const int heads = static_cast<int>(Draw(random, 1, 5)), head_dim = static_cast<int>(Draw(random, 1, 100));
    const int64_t tokens = Draw(random, 0, 200);
    const SlotPositions slots = {
        .base = Draw(random, 0, 3), .stride = Draw(random, 1, 3), .width = Draw(random, 1, 70)};
    const int64_t all_slots = tokens == 0 ? 0 : slots.At(tokens - 1) + Draw(random, 1, 3);
    const Tensor from = Tensor::Normal(random, DType::kBf16, heads * tokens * head_dim);
    Tensor expected(DType::kBf16, all_slots * heads * head_dim);
    Tensor got = expected;
    OnDevice device_from = Copy(from);
    CopyHeadsArgs args{
        .from = from.data(),
        .from_rows = {.dtype = DType::kBf16, .head_stride = tokens * head_dim, .slot_stride = head_dim},
        .to = expected.data(),
        .to_rows = {.dtype = DType::kBf16,
                    .head_stride = head_dim,
                    .slot_stride = int64_t{heads} * head_dim,
                    .slots = slots},
        .heads = heads,
        .tokens = tokens,
        .head_dim = head_dim};
    ASSERT_OK(reference_->CopyHeads(args));
    args.from = device_from.data(), args.to = got.data();
    const auto copy = stream_->CopyHeadsToHost(args, device_from.buffer());
    ASSERT_OK(copy.status());
    ASSERT_OK((*copy)->Wait());
    EXPECT_TRUE(got.SameBits(expected));
  });
}

// K and V of `tokens` slots of eight heads of 128, and where they go.
struct HostCopyCase {
  static constexpr int kHeads = 8, kHeadDim = 128;

  HostCopyCase(std::mt19937_64& random, int64_t tokens)
      : tokens(tokens),
        from(Tensor::Normal(random, DType::kBf16, kHeads * tokens * kHeadDim)),
        to(DType::kBf16, from.count()) {}
  CopyHeadsArgs Args(const void* source) {
    return {.from = source,
            .from_rows = {.dtype = DType::kBf16, .head_stride = tokens * kHeadDim, .slot_stride = kHeadDim},
            .to = to.data(),
            .to_rows = {.dtype = DType::kBf16,
                        .head_stride = kHeadDim,
                        .slot_stride = kHeads * kHeadDim,
                        .slots = {.width = tokens}},
            .heads = kHeads,
            .tokens = tokens,
            .head_dim = kHeadDim};
  }

  const int64_t tokens;
  const Tensor from;
  Tensor to;
};

// Longer than the pinned memory that it goes through, and than what another copy left there.
TEST_F(CudaStreamTest, LongCopiesToTheHostGoInPieces) {
  ForRandomDraws(2, [&](std::mt19937_64& random) {
    HostCopyCase first(random, Draw(random, 9'000, 20'000)), second(random, Draw(random, 1, 9'000));
    std::unique_ptr<HostCopy> copies[2];
    OnDevice first_from = Copy(first.from), second_from = Copy(second.from);
    copies[0] = stream_->CopyHeadsToHost(first.Args(first_from.data()), first_from.buffer()).value();
    copies[1] = stream_->CopyHeadsToHost(second.Args(second_from.data()), second_from.buffer()).value();
    ASSERT_OK(copies[1]->Wait());
    ASSERT_OK(copies[0]->Wait());
    for (HostCopyCase* const one : {&first, &second}) {
      HostCopyCase expected = *one;
      expected.to = Tensor(DType::kBf16, one->from.count());
      ASSERT_OK(reference_->CopyHeads(expected.Args(one->from.data())));
      EXPECT_TRUE(one->to.SameBits(expected.to));
    }
  });
}

// Its memory may go at once.
TEST_F(CudaStreamTest, ADroppedCopyToTheHostWritesNothingMore) {
  ForRandomDraws(5, [&](std::mt19937_64& random) {
    HostCopyCase dropped(random, 20'000);
    {
      OnDevice from = Copy(dropped.from);
      ASSERT_OK(stream_->CopyHeadsToHost(dropped.Args(from.data()), from.buffer()).status());
    }
    const Tensor left = dropped.to;
    ASSERT_OK(stream_->Finish());
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    EXPECT_TRUE(dropped.to.SameBits(left));
  });
}

TEST_F(CudaStreamTest, AStopTokenEndsTheWaitForACopyToTheHost) {
  ForRandomDraws(1, [&](std::mt19937_64& random) {
    StopToken stop;
    const std::unique_ptr<Stream> stopped = Make(&stop);
    HostCopyCase copied(random, 20'000);
    OnDevice from = Copy(copied.from);
    ASSERT_OK(stream_->Finish());  // another stream reads it
    const auto copy = stopped->CopyHeadsToHost(copied.Args(from.data()), from.buffer());
    ASSERT_OK(copy.status());
    stop.Stop();
    const absl::Status status = (*copy)->Wait();  // it may have been faster
    EXPECT_TRUE(status.ok() || absl::IsCancelled(status)) << status;
    EXPECT_TRUE(
        absl::IsCancelled(stopped->CopyHeadsToHost(copied.Args(from.data()), from.buffer()).status()));
  });
}

}  // namespace
}  // namespace meshfill
