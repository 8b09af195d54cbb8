// Weights that come in parts: packed by panels on several devices, they are those that one device packs.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "kernels/cpu/cpu_device.h"
#include "kernels/cpu/packed_matrix.h"
#include "kernels/reference/reference_device.h"
#include "kernels/return_if_error.h"
#include "tests/kernels/random_tensor.h"

namespace meshfill {
namespace {

class PackedPanelsTest : public testing::TestWithParam<DType> {
 protected:
  // x · Wᵀ on the device.
  static Tensor Product(Device& device, const PackedWeight& weight, const Tensor& x, int64_t tokens) {
    Tensor y(DType::kF32, tokens * weight.out_features());
    const auto stream = device.NewStream(nullptr);
    EXPECT_TRUE(stream.ok()) << stream.status();
    const absl::Status status = (*stream)->Gemm(
        {.weight = &weight, .x = x.data(), .tokens = tokens, .y = y.data(), .y_dtype = DType::kF32});
    EXPECT_TRUE(status.ok()) << status;
    return y;
  }

  // Packs any panels at a time, and puts them one behind the other.
  static absl::StatusOr<BufferRef> PackInParts(Device& packer, std::span<const WeightRows> stacked,
                                               int64_t in_features, const PackedForm& form,
                                               std::mt19937_64& random, Device& user) {
    ASSIGN_OR_RETURN(BufferRef bytes, user.Allocate(static_cast<size_t>(form.bytes)));
    std::memset(bytes->data(), 0x55, bytes->size_bytes());
    for (int64_t panel = 0; panel < form.panels();) {
      const int64_t panels = Draw(random, 1, form.panels() - panel);
      ASSIGN_OR_RETURN(const BufferRef part, packer.PackPanels(stacked, in_features, panel, panels));
      EXPECT_EQ(static_cast<int64_t>(part->size_bytes()), form.ByteOf(panel + panels) - form.ByteOf(panel));
      std::memcpy(bytes->data<std::byte>() + form.ByteOf(panel), part->data(), part->size_bytes());
      panel += panels;
    }
    return bytes;
  }

  void ExpectSameProducts(Device& device, const PackedWeight& weight, const PackedWeight& expected,
                          int64_t in_features, std::mt19937_64& random) {
    for (const int64_t tokens : {1, 7, 40}) {
      const Tensor x = Tensor::Normal(random, GetParam(), tokens * in_features);
      const Tensor y = Product(device, weight, x, tokens), of_whole = Product(device, expected, x, tokens);
      ASSERT_EQ(std::memcmp(y.data(), of_whole.data(), sizeof(float) * y.count()), 0)
          << tokens << " tokens, " << in_features << " to " << weight.out_features();
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Dtypes, PackedPanelsTest, testing::Values(DType::kF32, DType::kBf16),
                         [](const auto& param) { return DTypeName(param.param); });

TEST_P(PackedPanelsTest, PutTogetherAreTheWholeWeight) {
  const uint64_t seed = TestSeed();
  for (int draw = 0; draw < 12; ++draw) {
    SCOPED_TRACE(testing::Message() << "MESHFILL_SEED=" << seed << ", draw " << draw);
    std::mt19937_64 random(seed + draw);
    const int64_t in = Draw(random, 1, draw % 3 == 0 ? 1300 : 200);
    const int64_t first_rows = Draw(random, 1, 1500), rows = Draw(random, 1, 1500);
    const int64_t out = first_rows + rows;
    const Tensor first = Tensor::Normal(random, DType::kBf16, first_rows * in);
    const Tensor second = Tensor::Normal(random, DType::kF32, rows * in);
    const Tensor bias = Tensor::Normal(random, DType::kF32, rows);
    const bool biased = Draw(random, 0, 1) == 1;
    const WeightRows stacked[] = {{.data = first.data(), .dtype = DType::kBf16, .rows = first_rows},
                                  {.data = second.data(),
                                   .dtype = DType::kF32,
                                   .rows = rows,
                                   .bias = biased ? bias.data<float>() : nullptr}};
    const auto packer = MakeCpuDevice(GetParam(), 2, 1), user = MakeCpuDevice(GetParam(), 1, 1);
    const auto form = user->FormOf(out, in, {});
    ASSERT_TRUE(form.ok()) << form.status();
    ASSERT_EQ(form->panels(), (out + kPanelFeatures - 1) / kPanelFeatures);
    EXPECT_EQ(form->ByteOf(form->panels()), form->bytes);
    EXPECT_EQ(form->layout, packer->FormOf(out, in, {})->layout);
    EXPECT_NE(form->layout, user->FormOf(out, in + 64, {})->layout);
    const auto bytes = PackInParts(*packer, stacked, in, *form, random, *user);
    ASSERT_TRUE(bytes.ok()) << bytes.status();
    std::vector<float> all_bias;
    if (biased) {
      all_bias.resize(static_cast<size_t>(out));
      std::copy_n(bias.data<float>(), rows, all_bias.begin() + first_rows);
    }
    const auto whole = packer->PackWeight(stacked, in);
    const auto assembled = user->WeightOf(out, in, {}, *bytes, all_bias);
    ASSERT_TRUE(whole.ok() && assembled.ok()) << assembled.status();
    ASSERT_NO_FATAL_FAILURE(ExpectSameProducts(*user, **assembled, **whole, in, random));
  }
}

// Elements in FP8 and MXFP4 and their scales travel as they lie, whatever the stack's rows and the blocks.
TEST_P(PackedPanelsTest, NarrowOnesPutTogetherAreTheWholeWeight) {
  const uint64_t seed = TestSeed();
  for (int draw = 0; draw < 24; ++draw) {
    SCOPED_TRACE(testing::Message() << "MESHFILL_SEED=" << seed << ", draw " << draw);
    std::mt19937_64 random(seed + draw);
    const bool fp4 = draw % 2 == 0;
    const DType dtype = fp4 ? DType::kF4E2M1 : DType::kF8E4M3;
    const int64_t in = fp4 ? kMxBlock * Draw(random, 1, 6) : Draw(random, 1, 200);
    const int64_t columns = fp4 ? kMxBlock : Draw(random, 1, 200);
    std::vector<std::vector<uint8_t>> elements;
    std::vector<std::vector<float>> scales;
    std::vector<std::vector<uint8_t>> exponents;
    std::vector<WeightRows> stacked;
    int64_t out = 0;
    for (int part = 0; part < 2; ++part) {
      WeightRows rows = {.data = nullptr, .dtype = dtype, .rows = Draw(random, 1, 300)};
      auto& bytes = elements.emplace_back(ElementsBytes(dtype, rows.rows * in));
      for (uint8_t& byte : bytes) {
        byte = static_cast<uint8_t>(Draw(random, 0, 255));
        if (!fp4 && (byte & 0x7f) == 0x7f) byte = 0;  // NaN
      }
      if (fp4) {
        auto& of_rows = exponents.emplace_back(rows.rows * in / kMxBlock);
        for (uint8_t& exponent : of_rows) exponent = static_cast<uint8_t>(Draw(random, 120, 130));
        rows.exponents = of_rows.data();
      } else {
        rows.scale_rows = Draw(random, 1, 300);
        rows.scale_columns = std::min(columns, in);
        const Tensor factors = Tensor::Normal(random, DType::kF32, rows.rows * in);
        rows.scales =
            scales.emplace_back(factors.data<float>(), factors.data<float>() + rows.rows * in).data();
      }
      rows.data = bytes.data();
      out += rows.rows;
      stacked.push_back(rows);
    }
    const ElementKind kind = {.dtype = dtype, .scale_columns = columns};
    const auto packer = MakeCpuDevice(GetParam(), 2, 1), user = MakeCpuDevice(GetParam(), 1, 1);
    const auto form = user->FormOf(out, in, kind);
    ASSERT_TRUE(form.ok()) << form.status();
    EXPECT_EQ(form->panel_rows * form->panels(), (out + 63) / 64 * 64);
    const auto bytes = PackInParts(*packer, stacked, in, *form, random, *user);
    ASSERT_TRUE(bytes.ok()) << bytes.status();
    const auto whole = packer->PackWeight(stacked, in);
    const auto assembled = user->WeightOf(out, in, kind, *bytes, {});
    ASSERT_TRUE(whole.ok() && assembled.ok()) << assembled.status();
    ASSERT_NO_FATAL_FAILURE(ExpectSameProducts(*user, **assembled, **whole, in, random));
    auto more = user->Allocate(static_cast<size_t>(form->bytes) + 64);
    ASSERT_TRUE(more.ok()) << more.status();
    EXPECT_TRUE(absl::IsInternal(user->WeightOf(out, in, kind, *more, {}).status()));
  }
}

// Rows that are read from a file while its disk stands still.
class StuckRows final : public RowSource {
 public:
  absl::Status Read(int64_t, int64_t, std::byte*) const override {
    reading = true;
    while (!go_on) std::this_thread::yield();
    return absl::DataLossError("the disk is gone");
  }
  mutable std::atomic<bool> reading{false};
  std::atomic<bool> go_on{false};
};

TEST_P(PackedPanelsTest, WhoWaitsForADiskHoldsUpNobodyElse) {
  const auto device = MakeCpuDevice(GetParam(), 1, 1);
  StuckRows stuck;
  std::thread waits([&] {
    const WeightRows rows = {.data = nullptr, .dtype = GetParam(), .rows = 3, .source = &stuck};
    EXPECT_TRUE(absl::IsDataLoss(device->PackWeight({&rows, 1}, 5).status()));
  });
  while (!stuck.reading) std::this_thread::yield();
  const Tensor values(GetParam(), 15);
  const WeightRows rows = {.data = values.data(), .dtype = GetParam(), .rows = 3};
  EXPECT_TRUE(device->PackWeight({&rows, 1}, 5).ok());
  EXPECT_TRUE(device->PackPanels({&rows, 1}, 5, 0, 1).ok());
  stuck.go_on = true;
  waits.join();
}

TEST_P(PackedPanelsTest, BytesOfAnotherWeightAreRefused) {
  const auto device = MakeCpuDevice(GetParam(), 1, 1);
  const auto form = device->FormOf(96, 64, {});
  ASSERT_TRUE(form.ok()) << form.status();
  auto bytes = device->Allocate(static_cast<size_t>(form->bytes) + 64);
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  EXPECT_TRUE(absl::IsInternal(device->WeightOf(96, 64, {}, *bytes, {}).status()));
}

TEST(DividedWeightsTest, ADeviceThatCannotSaysSo) {
  const auto device = MakeReferenceDevice(DType::kF32);
  EXPECT_TRUE(absl::IsUnimplemented(device->FormOf(8, 8, {}).status()));
}

}  // namespace
}  // namespace meshfill
