// Every operation of a stream that may take long counts: an odd number while it runs, an even one after.
#include "server/pool/worker/counting_stream.h"

#include <memory>
#include <span>
#include <utility>

#include "gtest/gtest.h"
#include "kernels/reference/reference_device.h"

namespace meshfill {
namespace {

// Its operations do nothing but look at the count of who calls them.
class LookingStream final : public Stream {
 public:
  using Stream::Stream;

  void Watch(const CountingStream& counting) { counting_ = &counting; }
  bool saw_odd() const { return counted_ % 2 == 1; }

  absl::StatusOr<BufferRef> Allocate(size_t) override { return BufferRef(); }
  absl::StatusOr<std::shared_ptr<const StreamPoint>> Mark() override {
    return std::shared_ptr<const StreamPoint>();
  }
  absl::Status Finish() override { return Look(); }
  absl::StatusOr<BufferRef> Place(const void*, size_t) override { return BufferRef(); }
  absl::Status Upload(const void*, size_t, void*) override { return absl::OkStatus(); }
  absl::Status Download(const void*, size_t, void*) override { return Look(); }
  absl::StatusOr<DeviceMessage> Fetch(DeviceMessage message) override { return message; }
  absl::StatusOr<BufferRef> TakeOver(DeviceMessage message) override { return message.buffer; }
  absl::Status Embed(std::span<const uint32_t>, const void*, DType, int64_t, float*) override {
    return Look();
  }
  absl::Status RmsNorm(const float*, const float*, int64_t, int64_t, float, void*) override { return Look(); }
  absl::Status AddRmsNorm(const float*, const float*, int64_t, int64_t, float, float*) override {
    return Look();
  }
  absl::Status Scale(float*, int64_t, float) override { return Look(); }
  absl::Status Gemm(const GemmArgs&) override { return Look(); }
  absl::Status SplitQkv(const SplitQkvArgs&) override { return Look(); }
  absl::Status AttentionBlock(const AttentionBlockArgs&) override { return Look(); }
  absl::Status MergePartial(const MergePartialArgs&) override { return Look(); }
  absl::Status ApplySinks(const ApplySinksArgs&) override { return Look(); }
  absl::Status CopyHeads(const CopyHeadsArgs&) override { return Look(); }
  absl::StatusOr<std::unique_ptr<HostCopy>> CopyHeadsToHost(const CopyHeadsArgs&, BufferRef) override {
    return Look();
  }
  absl::Status Activate(const ActivateArgs&) override { return Look(); }
  absl::Status Route(const RouteArgs&) override { return Look(); }
  absl::Status ExpertMlp(const ExpertMlpArgs&) override { return Look(); }
  absl::Status AddExperts(const AddExpertsArgs&) override { return Look(); }
  absl::Status Convert(const float*, int64_t, DType, void*) override { return Look(); }

 private:
  // Fails, so that what it says must be passed on.
  absl::Status Look() {
    counted_ = counting_->operations();
    return absl::DataLossError("it looked");
  }

  const CountingStream* counting_ = nullptr;
  uint64_t counted_ = 0;
};

TEST(CountingStreamTest, CountsEachOperation) {
  const std::unique_ptr<Device> device = MakeReferenceDevice(DType::kF32);
  auto looking = std::make_unique<LookingStream>(*device);
  LookingStream& inner = *looking;
  CountingStream stream(std::move(looking));
  inner.Watch(stream);
  uint64_t operations = 0;
  const auto expect = [&](const char* name, const absl::Status& status) {
    EXPECT_TRUE(absl::IsDataLoss(status)) << name << ": " << status;
    EXPECT_TRUE(inner.saw_odd()) << name;
    EXPECT_EQ(stream.operations(), operations += 2) << name;
  };
  expect("Finish", stream.Finish());
  expect("Download", stream.Download(nullptr, 0, nullptr));
  expect("Embed", stream.Embed({}, nullptr, DType::kF32, 1, nullptr));
  expect("RmsNorm", stream.RmsNorm(nullptr, nullptr, 1, 1, 1, nullptr));
  expect("AddRmsNorm", stream.AddRmsNorm(nullptr, nullptr, 1, 1, 1, nullptr));
  expect("Scale", stream.Scale(nullptr, 1, 1));
  expect("Gemm", stream.Gemm({}));
  expect("SplitQkv", stream.SplitQkv({}));
  expect("AttentionBlock", stream.AttentionBlock({}));
  expect("MergePartial", stream.MergePartial({}));
  expect("ApplySinks", stream.ApplySinks({}));
  expect("CopyHeads", stream.CopyHeads({}));
  expect("CopyHeadsToHost", stream.CopyHeadsToHost({}, nullptr).status());
  expect("Activate", stream.Activate({}));
  expect("Route", stream.Route({}));
  expect("ExpertMlp", stream.ExpertMlp({}));
  expect("AddExperts", stream.AddExperts({}));
  expect("Convert", stream.Convert(nullptr, 1, DType::kF32, nullptr));
}

}  // namespace
}  // namespace meshfill
