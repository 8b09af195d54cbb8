// What CUDA promises of streams and memory: messages between streams, marks, stops, and memory that runs out.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/kernels/cuda_stream_fixture.h"

namespace meshfill {
namespace {

// Adds ones to a tensor of zeros, [tokens, kWidth], one in each operation: work whose end is far.
class Counter {
 public:
  static constexpr int64_t kWidth = 8;

  Counter(Stream& stream, int64_t tokens)
      : stream_(stream),
        tokens_(tokens),
        zeros_(DType::kF32, tokens * kWidth),
        ones_(DType::kBf16, tokens * kWidth) {
    for (int64_t i = 0; i < zeros_.count(); ++i) zeros_.Set(i, 0), ones_.Set(i, 1);
    // y += x Wᵀ with eighths in W: every product adds a one.
    const std::vector<BFloat16> eighths(kWidth * kWidth, BFloat16::FromFloat(1.0f / kWidth));
    const WeightRows rows{.data = eighths.data(), .dtype = DType::kBf16, .rows = kWidth};
    weight_ = *stream.device().PackWeight({&rows, 1}, kWidth);
    ones_on_device_ = *stream.Place(ones_.data(), ones_.count() * sizeof(BFloat16));
  }
  BufferRef Count(int times) {
    BufferRef y = *stream_.Place(zeros_.data(), zeros_.count() * sizeof(float));
    for (int time = 0; time < times; ++time) {
      EXPECT_TRUE(stream_
                      .Gemm({.weight = weight_.get(),
                             .x = ones_on_device_->data(),
                             .tokens = tokens_,
                             .y = y->data(),
                             .y_dtype = DType::kF32,
                             .accumulate = true})
                      .ok());
    }
    return y;
  }

 private:
  Stream& stream_;
  const int64_t tokens_;
  Tensor zeros_, ones_;
  std::unique_ptr<PackedWeight> weight_;
  BufferRef ones_on_device_;
};

void ExpectAll(Stream& stream, const BufferRef& buffer, float expected) {
  std::vector<float> values(buffer->size_bytes() / sizeof(float));
  ASSERT_OK(stream.Download(buffer->data(), buffer->size_bytes(), values.data()));
  for (const float value : values) ASSERT_EQ(value, expected);
}

// Null where it fails.
std::shared_ptr<const StreamPoint> MarkOf(Stream& stream) {
  auto point = stream.Mark();
  EXPECT_TRUE(point.ok()) << point.status();
  return std::move(point).value_or(nullptr);
}

TEST_F(CudaStreamTest, ReceiversSeeWhatSendersHaveQueued) {
  const LoneStream elsewhere(MakeDevice(1));  // on the second device where there is one
  const std::unique_ptr<Stream> sender = Make(), here = Make();
  for (Stream* const receiver : {here.get(), elsewhere.get()}) {
    Counter counter(*sender, 333);
    for (int round = 0; round < 12; ++round) {
      const int times = 3 + round;
      auto message = receiver->Fetch({counter.Count(times), MarkOf(*sender)});
      ASSERT_TRUE(message.ok()) << message.status();
      auto taken = receiver->TakeOver(*std::move(message));
      ASSERT_TRUE(taken.ok()) << taken.status();
      auto copy = receiver->Allocate((*taken)->size_bytes());
      ASSERT_TRUE(copy.ok());
      ASSERT_OK(
          receiver->Convert((*taken)->data<float>(), 333 * Counter::kWidth, DType::kF32, (*copy)->data()));
      taken->reset();  // before the receiver's stream has come to the copy
      // Memory of the same size, written at once: it must not be what the receiver still reads.
      const BufferRef next = counter.Count(1);
      ExpectAll(*receiver, *copy, static_cast<float>(times));
      ExpectAll(*sender, next, 1);
    }
  }
}

TEST_F(CudaStreamTest, MemoryThatAnotherRankReadsOutlivesItsOwner) {
  const std::unique_ptr<Stream> reader = Make();
  Counter counter(*reader, 200);
  for (int round = 0; round < 12; ++round) {
    auto owner = std::make_unique<LoneStream>(MakeDevice());
    Counter owned(**owner, 200);  // its weight stays: it is the device's, not in the stream's order
    BufferRef shared = owned.Count(5);
    auto taken = reader->TakeOver({shared, MarkOf(**owner)});
    ASSERT_TRUE(taken.ok());
    const BufferRef slow = counter.Count(4);  // the reader's stream is busy
    auto copy = reader->Allocate(shared->size_bytes());
    ASSERT_OK(reader->Convert((*taken)->data<float>(), 200 * Counter::kWidth, DType::kF32, (*copy)->data()));
    taken->reset();
    shared.reset();
    owner.reset();
    ExpectAll(*reader, *copy, 5);
  }
}

TEST_F(CudaStreamTest, MarksTellTheDevicesTime) {
  Counter counter(*stream_, 100);
  const auto begin = MarkOf(*stream_);
  counter.Count(20);
  const auto middle = MarkOf(*stream_);
  counter.Count(20);
  const auto end = MarkOf(*stream_);
  ASSERT_OK(stream_->Finish());
  ASSERT_TRUE(begin != nullptr && middle != nullptr && end != nullptr);
  EXPECT_GT(middle->SecondsSince(*begin), 0);
  EXPECT_GT(end->SecondsSince(*middle), 0);
  EXPECT_NEAR(end->SecondsSince(*begin), end->SecondsSince(*middle) + middle->SecondsSince(*begin), 1e-4);
}

TEST_F(CudaStreamTest, AStopTokenEndsEveryOperation) {
  StopToken stop;
  const std::unique_ptr<Stream> stopped = Make(&stop);
  auto buffer = stopped->Allocate(4096);
  ASSERT_TRUE(buffer.ok());
  float* const data = (*buffer)->data<float>();
  stop.Stop();
  EXPECT_TRUE(absl::IsCancelled(stopped->RmsNorm(data, data, 1, 16, 0, data + 64)));
  EXPECT_TRUE(absl::IsCancelled(stopped->Convert(data, 16, DType::kF32, data + 64)));
  AttentionBlockArgs block{.q_heads = 1, .kv_heads = 1, .head_dim = 8};
  EXPECT_TRUE(absl::IsCancelled(stopped->AttentionBlock(block)));
  // A stream that was made without it goes on.
  EXPECT_TRUE(stream_->Convert(data, 16, DType::kF32, data + 64).ok());
  EXPECT_TRUE(stream_->Finish().ok());
}

TEST_F(CudaStreamTest, TheDevicesMemoryIsThereForEveryStream) {
  const std::vector<float> values(1 << 16, 7);
  const auto placed = device_->Place(values.data(), values.size() * sizeof(float));
  ASSERT_TRUE(placed.ok()) << placed.status();
  const auto raw = device_->Allocate(values.size() * sizeof(float));
  ASSERT_TRUE(raw.ok()) << raw.status();
  const std::unique_ptr<Stream> first = Make(), second = Make();
  ExpectAll(*first, *placed, 7);
  ASSERT_OK(second->Convert((*placed)->data<float>(), 1 << 16, DType::kF32, (*raw)->data()));
  ExpectAll(*second, *raw, 7);
}

TEST_F(CudaStreamTest, RefusesMoreMemoryThanThereIs) {
  const auto refused = stream_->Allocate(size_t{1} << 46);
  EXPECT_TRUE(absl::IsResourceExhausted(refused.status())) << refused.status();
  EXPECT_NE(refused.status().message().find("70368744177664 bytes"), std::string::npos) << refused.status();
  EXPECT_FALSE(device_->lost());
  EXPECT_TRUE(stream_->Allocate(1 << 20).ok());
  EXPECT_TRUE(stream_->Allocate(0).ok());
}

}  // namespace
}  // namespace meshfill
