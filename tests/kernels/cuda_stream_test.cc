// CUDA's streams against the reference, operation by operation, on fresh random inputs and poisoned outputs:
// embedding, norms, products, activations and conversions. Runs on a device, or ends with status 77: not run.
// Linked with tests/fake_cuda it runs anywhere.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tests/kernels/cuda_stream_fixture.h"
#include "tests/kernels/narrow_layers.h"

namespace meshfill {
namespace {

TEST_F(CudaStreamTest, SaysWhatItIs) {
  EXPECT_EQ(device_->name().rfind("cuda/sm", 0), 0u) << device_->name();
  EXPECT_EQ(device_->dtype(), DType::kBf16);
  EXPECT_FALSE(device_->lost());
}

TEST_F(CudaStreamTest, Embed) {
  ForRandomDraws(10, [&](std::mt19937_64& random) {
    const int64_t vocab = Draw(random, 1, 50), width = Draw(random, 1, 700), tokens = Draw(random, 0, 300);
    const DType dtype = std::vector{DType::kF32, DType::kBf16, DType::kF16}[Draw(random, 0, 2)];
    const Tensor table = Tensor::Normal(random, dtype, vocab * width);
    std::vector<uint32_t> ids(tokens);
    for (uint32_t& id : ids) id = static_cast<uint32_t>(Draw(random, 0, vocab - 1));
    Tensor expected(DType::kF32, tokens * width);
    OnDevice got = Copy(expected), device_table = Copy(table);
    ASSERT_OK(reference_->Embed(ids, table.data(), dtype, width, expected.data<float>()));
    ASSERT_OK(stream_->Embed(ids, device_table.data(), dtype, width, got.data<float>()));
    std::fill(ids.begin(), ids.end(), 0);  // the operation has them
    ExpectClose(got.Read(), expected, 0);
  });
}

TEST_F(CudaStreamTest, RmsNorm) {
  ForRandomDraws(10, [&](std::mt19937_64& random) {
    const int64_t tokens = Draw(random, 0, 200), width = Draw(random, 1, 1500);
    const Tensor x = Tensor::Normal(random, DType::kF32, tokens * width, 3);
    const Tensor weight = Tensor::Normal(random, DType::kF32, width);
    Tensor expected(DType::kBf16, tokens * width);
    OnDevice got = Copy(expected), device_x = Copy(x), device_weight = Copy(weight);
    ASSERT_OK(stream_->RmsNorm(device_x.data<float>(), device_weight.data<float>(), tokens, width, 1e-5f,
                               got.data()));
    ASSERT_OK(
        reference_->RmsNorm(x.data<float>(), weight.data<float>(), tokens, width, 1e-5f, expected.data()));
    ExpectClose(got.Read(), expected, 4e-6);
  });
}

TEST_F(CudaStreamTest, AddRmsNorm) {
  ForRandomDraws(10, [&](std::mt19937_64& random) {
    const int64_t tokens = Draw(random, 0, 200), width = Draw(random, 1, 1500);
    const Tensor y = Tensor::Normal(random, DType::kF32, tokens * width, 3);
    const Tensor weight = Tensor::Normal(random, DType::kF32, width);
    Tensor x = Tensor::Normal(random, DType::kF32, tokens * width);
    OnDevice got = Copy(x), device_y = Copy(y), device_weight = Copy(weight);
    ASSERT_OK(stream_->AddRmsNorm(device_y.data<float>(), device_weight.data<float>(), tokens, width, 1e-5f,
                                  got.data<float>()));
    ASSERT_OK(
        reference_->AddRmsNorm(y.data<float>(), weight.data<float>(), tokens, width, 1e-5f, x.data<float>()));
    ExpectClose(got.Read(), x, 1e-5);
  });
}

TEST_F(CudaStreamTest, Scale) {
  ForRandomDraws(6, [&](std::mt19937_64& random) {
    const int64_t count = Draw(random, 0, 100'000);
    Tensor x = Tensor::Normal(random, DType::kF32, count);
    OnDevice got = Copy(x);
    ASSERT_OK(stream_->Scale(got.data<float>(), count, 7.25f));
    ASSERT_OK(reference_->Scale(x.data<float>(), count, 7.25f));
    ExpectClose(got.Read(), x, 0);
  });
}

TEST_F(CudaStreamTest, Gemm) {
  ForRandomDraws(12, [&](std::mt19937_64& random) {
    const int64_t tokens = Draw(random, 0, 3) == 0 ? 1 : Draw(random, 0, 150);
    const int64_t in = 8 * Draw(random, 1, 40);
    std::vector<Tensor> matrices, biases;
    std::vector<WeightRows> rows;
    const bool bias = Draw(random, 0, 1) == 1;
    int64_t out = 0;
    for (int64_t part = Draw(random, 1, 3); part > 0; --part) {
      const DType dtype = std::vector{DType::kF32, DType::kBf16, DType::kF16}[Draw(random, 0, 2)];
      const int64_t part_rows = 8 * Draw(random, 1, 20);
      matrices.push_back(Tensor::Normal(random, dtype, part_rows * in));
      biases.push_back(RandomBias(random, part_rows));
      out += part_rows;
    }
    for (size_t part = 0; part < matrices.size(); ++part) {
      rows.push_back({.data = matrices[part].data(),
                      .dtype = matrices[part].dtype(),
                      .rows = matrices[part].count() / in,
                      .bias = bias ? biases[part].data<float>() : nullptr});
    }
    auto packed = device_->PackWeight(rows, in);
    ASSERT_TRUE(packed.ok()) << packed.status();
    auto reference_packed = reference_.device().PackWeight(rows, in);
    ASSERT_TRUE(reference_packed.ok());
    EXPECT_EQ((*packed)->out_features(), out);
    EXPECT_EQ((*packed)->in_features(), in);
    matrices.clear();  // the sources may go

    const Tensor x = Tensor::Normal(random, DType::kBf16, tokens * in);
    const DType y_dtype = Draw(random, 0, 1) == 0 ? DType::kF32 : DType::kBf16;
    const bool accumulate = y_dtype == DType::kF32 && Draw(random, 0, 1) == 1;
    Tensor expected =
        accumulate ? Tensor::Normal(random, y_dtype, tokens * out) : Tensor(y_dtype, tokens * out);
    OnDevice got = Copy(expected), device_x = Copy(x);
    ASSERT_OK(stream_->Gemm({.weight = packed->get(),
                             .x = device_x.data(),
                             .tokens = tokens,
                             .y = got.data(),
                             .y_dtype = y_dtype,
                             .accumulate = accumulate}));
    ASSERT_OK(reference_->Gemm({.weight = reference_packed->get(),
                                .x = x.data(),
                                .tokens = tokens,
                                .y = expected.data(),
                                .y_dtype = y_dtype,
                                .accumulate = accumulate}));
    ExpectClose(got.Read(), expected, 2e-4);
  });
}

// Long enough that algorithms are timed; an accumulated y must not be touched by that.
TEST_F(CudaStreamTest, GemmThatIsTimedGivesTheSameBitsAgain) {
  ForRandomDraws(1, [&](std::mt19937_64& random) {
    const int64_t tokens = 1024, in = 8 * Draw(random, 2, 5), out = 8 * Draw(random, 1, 4);
    const Tensor matrix = Tensor::Normal(random, DType::kBf16, out * in);
    const Tensor x = Tensor::Normal(random, DType::kBf16, tokens * in);
    const Tensor before = Tensor::Normal(random, DType::kF32, tokens * out);
    const WeightRows rows{.data = matrix.data(), .dtype = DType::kBf16, .rows = out};
    Tensor expected = before;
    auto reference_packed = reference_.device().PackWeight({&rows, 1}, in);
    ASSERT_OK(reference_->Gemm({.weight = reference_packed->get(),
                                .x = x.data(),
                                .tokens = tokens,
                                .y = expected.data(),
                                .y_dtype = DType::kF32,
                                .accumulate = true}));
    std::vector<Tensor> results;
    for (int time = 0; time < 3; ++time) {
      const std::unique_ptr<Stream> rank = Make();  // another rank on the device
      OnDevice got(*rank, before), device_x(*rank, x);
      auto packed = device_->PackWeight({&rows, 1}, in);
      ASSERT_TRUE(packed.ok()) << packed.status();
      ASSERT_OK(rank->Gemm({.weight = packed->get(),
                            .x = device_x.data(),
                            .tokens = tokens,
                            .y = got.data(),
                            .y_dtype = DType::kF32,
                            .accumulate = true}));
      results.push_back(got.Read());
      ExpectClose(results.back(), expected, 2e-4);
    }
    EXPECT_TRUE(results[0].SameBits(results[1]));
    EXPECT_TRUE(results[0].SameBits(results[2]));
  });
}

// The products of rows in FP8 or MXFP4, and of what they are in f32, rounded to bf16: of the same bits.
class CudaStreamNarrowTest : public CudaStreamTest {
 protected:
  template <class Layer>
  void ExpectTheBitsOfItsValues(std::mt19937_64& random, const Layer& layer) {
    const int64_t tokens = Draw(random, 0, 3) == 0 ? 1 : Draw(random, 1, 150);
    const Tensor x = Tensor::Normal(random, DType::kBf16, tokens * layer.in_features);
    const DType y_dtype = Draw(random, 0, 1) == 0 ? DType::kF32 : DType::kBf16;
    OnDevice device_x = Copy(x);
    const auto product = [&](std::span<const WeightRows> rows) {
      OnDevice y = Copy(Tensor(y_dtype, tokens * layer.out_features));
      const auto packed = device_->PackWeight(rows, layer.in_features);
      EXPECT_TRUE(packed.ok()) << packed.status();
      if (!packed.ok()) return y.Read();
      const absl::Status status = stream_->Gemm({.weight = packed->get(),
                                                 .x = device_x.data(),
                                                 .tokens = tokens,
                                                 .y = y.data(),
                                                 .y_dtype = y_dtype});
      EXPECT_TRUE(status.ok()) << status;
      return y.Read();
    };
    const Tensor got = product(layer.rows);
    EXPECT_TRUE(got.SameBits(product(layer.dequantised_rows)));
    Tensor expected(y_dtype, tokens * layer.out_features);
    const auto packed = reference_.device().PackWeight(layer.rows, layer.in_features);
    ASSERT_OK(reference_->Gemm({.weight = packed->get(),
                                .x = x.data(),
                                .tokens = tokens,
                                .y = expected.data(),
                                .y_dtype = y_dtype}));
    ExpectClose(got, expected, 2e-4);
  }
};

TEST_F(CudaStreamNarrowTest, Fp8) {
  ForRandomDraws(12, [&](std::mt19937_64& random) {
    ExpectTheBitsOfItsValues(random, Fp8Layer(random, 8 * Draw(random, 1, 70), 150, 3, /*granule=*/8));
  });
}

TEST_F(CudaStreamNarrowTest, Mxfp4) {
  ForRandomDraws(8, [&](std::mt19937_64& random) {
    ExpectTheBitsOfItsValues(random, Fp4Layer(random, Draw(random, 1, 20), 150, /*granule=*/8));
  });
}

// Packed some rows at a time on several devices, and copied to one: what that one packs itself.
class CudaStreamPartsTest : public CudaStreamTest {
 protected:
  void ExpectTheBitsOfTheWhole(std::mt19937_64& random, std::span<const WeightRows> rows, int64_t in_features,
                               const ElementKind& kind) {
    int64_t out_features = 0;
    std::vector<float> bias;
    for (const WeightRows& source : rows) {
      out_features += source.rows;
      if (source.bias != nullptr) bias.insert(bias.end(), source.bias, source.bias + source.rows);
    }
    const std::vector<std::unique_ptr<Device>> peers = [] {
      std::vector<std::unique_ptr<Device>> made;
      for (size_t i = 0; i < 2; ++i) made.push_back(MakeDevice(i));
      return made;
    }();
    const auto form = device_->FormOf(out_features, in_features, kind);
    ASSERT_TRUE(form.ok()) << form.status();
    EXPECT_EQ(form->layout, peers[1]->FormOf(out_features, in_features, kind)->layout);
    EXPECT_NE(form->layout, device_->FormOf(out_features, in_features + 64, kind)->layout);
    EXPECT_EQ(form->ByteOf(form->panels()), form->bytes);
    const auto bytes = device_->Allocate(static_cast<size_t>(form->bytes));
    ASSERT_TRUE(bytes.ok()) << bytes.status();
    std::vector<BufferCopy> copies;
    for (int64_t panel = 0; panel < form->panels();) {
      const int64_t panels = Draw(random, 1, form->panels() - panel);
      const auto part = peers[panel % 2]->PackPanels(rows, in_features, panel, panels);
      ASSERT_TRUE(part.ok()) << part.status();
      ASSERT_EQ(static_cast<int64_t>((*part)->size_bytes()),
                form->ByteOf(panel + panels) - form->ByteOf(panel));
      const auto at = static_cast<size_t>(form->ByteOf(panel));
      copies.push_back({.from = *part, .to = PartOf(*bytes, at, (*part)->size_bytes())});
      panel += panels;
    }
    ASSERT_OK(device_->Copy(copies));
    copies.clear();
    const auto whole = device_->PackWeight(rows, in_features);
    const auto assembled = device_->WeightOf(out_features, in_features, kind, *bytes, bias);
    ASSERT_TRUE(whole.ok() && assembled.ok()) << whole.status() << assembled.status();
    OnDevice x = Copy(Tensor::Normal(random, DType::kBf16, 9 * in_features));
    std::vector<Tensor> products;
    for (const PackedWeight* weight : {whole->get(), assembled->get()}) {
      OnDevice y = Copy(Tensor(DType::kF32, 9 * out_features));
      ASSERT_OK(stream_->Gemm(
          {.weight = weight, .x = x.data(), .tokens = 9, .y = y.data(), .y_dtype = DType::kF32}));
      products.push_back(y.Read());
    }
    EXPECT_TRUE(products[0].SameBits(products[1]));
    const auto more = device_->Allocate(static_cast<size_t>(form->bytes) + 16);
    ASSERT_TRUE(more.ok()) << more.status();
    EXPECT_TRUE(absl::IsInternal(device_->WeightOf(out_features, in_features, kind, *more, {}).status()));
    EXPECT_FALSE(device_->lost());
  }
};

TEST_F(CudaStreamPartsTest, Wide) {
  ForRandomDraws(6, [&](std::mt19937_64& random) {
    const int64_t in = 8 * Draw(random, 1, 40), first_rows = 8 * Draw(random, 1, 30), more_rows = 8 * 3;
    const Tensor first =
        Tensor::Normal(random, Draw(random, 0, 1) == 1 ? DType::kBf16 : DType::kF16, first_rows * in);
    const Tensor more = Tensor::Normal(random, DType::kF32, more_rows * in);
    const Tensor bias = RandomBias(random, first_rows + more_rows);
    const bool biased = Draw(random, 0, 1) == 1;
    const WeightRows rows[] = {{.data = first.data(),
                                .dtype = first.dtype(),
                                .rows = first_rows,
                                .bias = biased ? bias.data<float>() : nullptr},
                               {.data = more.data(),
                                .dtype = more.dtype(),
                                .rows = more_rows,
                                .bias = biased ? bias.data<float>() + first_rows : nullptr}};
    ExpectTheBitsOfTheWhole(random, rows, in, {});
  });
}

TEST_F(CudaStreamPartsTest, Narrow) {
  ForRandomDraws(6, [&](std::mt19937_64& random) {
    const Fp8Layer fp8(random, 8 * Draw(random, 1, 70), 150, 3, /*granule=*/8);
    ExpectTheBitsOfTheWhole(random, fp8.rows, fp8.in_features,
                            {.dtype = DType::kF8E4M3, .scale_columns = fp8.rows.front().scale_columns});
    const Fp4Layer fp4(random, Draw(random, 1, 20), 150, /*granule=*/8);
    ExpectTheBitsOfTheWhole(random, fp4.rows, fp4.in_features,
                            {.dtype = DType::kF4E2M1, .scale_columns = kMxBlock});
  });
}

// Longer than what is uploaded at a time, of every dtype, and of f32 longer than what is rounded at a time; a
// source that fails says so, and the next is right.
TEST_F(CudaStreamTest, RowsThatAreReadGiveTheBitsOfThoseInMemory) {
  int draws = 0;
  ForRandomDraws(3, [&](std::mt19937_64& random) {
    const DType dtype = std::vector{DType::kF32, DType::kBf16, DType::kF16}[draws++];
    const int64_t in = 8 * Draw(random, 300, 400);
    const int64_t rows = dtype == DType::kF32 ? (int64_t{70} << 20) / 4 / in : Draw(random, 1500, 3000);
    const Tensor matrix = Tensor::Normal(random, dtype, rows * in);
    const Tensor x = Tensor::Normal(random, DType::kBf16, in);
    OnDevice device_x = Copy(x);
    const auto product = [&](const WeightRows& from) {
      OnDevice y = Copy(Tensor(DType::kF32, rows));
      const auto packed = device_->PackWeight({&from, 1}, in);
      EXPECT_TRUE(packed.ok()) << packed.status();
      if (!packed.ok()) return y.Read();
      const absl::Status status = stream_->Gemm({.weight = packed->get(),
                                                 .x = device_x.data(),
                                                 .tokens = 1,
                                                 .y = y.data(),
                                                 .y_dtype = DType::kF32});
      EXPECT_TRUE(status.ok()) << status;
      return y.Read();
    };
    const WeightRows mapped = {.data = matrix.data(), .dtype = dtype, .rows = rows};
    const Tensor expected = product(mapped);
    Tensor reference_y(DType::kF32, rows);
    const auto reference_packed = reference_.device().PackWeight({&mapped, 1}, in);
    ASSERT_OK(reference_->Gemm({.weight = reference_packed->get(),
                                .x = x.data(),
                                .tokens = 1,
                                .y = reference_y.data(),
                                .y_dtype = DType::kF32}));
    ExpectClose(expected, reference_y, 2e-4);
    FileRows source(matrix, in * static_cast<int64_t>(DTypeBytes(dtype)));
    WeightRows read = {.data = nullptr, .dtype = dtype, .rows = rows, .source = &source};
    source.fails_at = Draw(random, int64_t{0}, rows);
    EXPECT_TRUE(absl::IsDataLoss(device_->PackWeight({&read, 1}, in).status()));
    EXPECT_FALSE(device_->lost());
    source.fails_at = INT64_MAX;
    EXPECT_TRUE(product(read).SameBits(expected));
  });
}

TEST_F(CudaStreamTest, RefusesARowLongerThanAPiece) {
  const int64_t in = (2 << 20) / 2 + 8;
  const Tensor row(DType::kBf16, in);
  const WeightRows rows = {.data = row.data(), .dtype = DType::kBf16, .rows = 1};
  const absl::Status status = device_->PackWeight({&rows, 1}, in).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_NE(status.message().find("choose the device cpu"), std::string::npos) << status;
}

TEST_F(CudaStreamTest, Activate) {
  for (const Gating gating : {Gating::kSwiGlu, Gating::kGeGlu, Gating::kClampedSwiGlu}) {
    SCOPED_TRACE(testing::Message() << "gating " << static_cast<int>(gating));
    ForRandomDraws(10, [&](std::mt19937_64& random) {
      const int64_t tokens = Draw(random, 0, 100), width = Draw(random, 1, 1100);
      const Tensor x = Tensor::Normal(random, DType::kBf16, tokens * 2 * width, 5);
      Tensor expected(DType::kBf16, tokens * width);
      OnDevice got = Copy(expected), device_x = Copy(x);
      ActivateArgs args{.activation = {.gating = gating, .alpha = 1.702f, .limit = 7},
                        .x = x.data(),
                        .tokens = tokens,
                        .width = width,
                        .y = expected.data()};
      ASSERT_OK(reference_->Activate(args));
      args.x = device_x.data(), args.y = got.data();
      ASSERT_OK(stream_->Activate(args));
      ExpectClose(got.Read(), expected, 4e-6);
    });
  }
}

TEST_F(CudaStreamTest, Convert) {
  ForRandomDraws(8, [&](std::mt19937_64& random) {
    const Tensor from = Tensor::Normal(random, DType::kF32, Draw(random, 0, 100000));
    OnDevice device_from = Copy(from);
    for (const DType to : {DType::kF32, DType::kBf16}) {
      Tensor expected(to, from.count());
      OnDevice got = Copy(expected);
      ASSERT_OK(stream_->Convert(device_from.data<float>(), from.count(), to, got.data()));
      ASSERT_OK(reference_->Convert(from.data<float>(), from.count(), to, expected.data()));
      EXPECT_TRUE(got.Read().SameBits(expected));
    }
  });
}

}  // namespace
}  // namespace meshfill

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (const auto devices = meshfill::FindCudaDevices(); !devices.ok()) {
    std::printf("not run: %s\n", std::string(devices.status().message()).c_str());
    return 77;
  }
  return RUN_ALL_TESTS();
}
