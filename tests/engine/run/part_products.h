// What tests of weights that are shared have in common: a model with odd cuts, and products with the matrices
// of a part, by which parts are compared.
#ifndef MESHFILL_TESTS_ENGINE_RUN_PART_PRODUCTS_H_
#define MESHFILL_TESTS_ENGINE_RUN_PART_PRODUCTS_H_

#include <gtest/gtest.h>

#include <cstddef>
#include <string>
#include <vector>

#include "engine/model/family.h"
#include "engine/model/make_model.h"
#include "engine/model/weight_feed.h"
#include "kernels/stream.h"

namespace meshfill {

inline constexpr int64_t kHidden = 64;
inline constexpr int64_t kVocab = 1304;  // of GPUs a multiple of eight
inline constexpr int kLayers = 4;

struct SharedModelCase {
  ModelFamily family;
  DType dtype = DType::kF32;  // of the weights
};

inline std::string NameOf(const testing::TestParamInfo<SharedModelCase>& info) {
  return std::string(FamilyOf(info.param.family).name) + "_" + DTypeName(info.param.dtype);
}

inline absl::Status MakeSharedModel(const SharedModelCase& of, const std::string& path) {
  return MakeModel({.family = of.family,
                    .layers = kLayers,
                    .hidden = kHidden,
                    .intermediate = 640,
                    .q_heads = 8,
                    .kv_heads = 2,
                    .head_dim = 96,
                    .vocab = kVocab,
                    .experts = FamilyOf(of.family).has_experts ? 5 : 0,
                    .dtype = of.dtype},
                   path);
}

// Of one token.
inline std::vector<float> ProductWith(Stream& stream, const PackedWeight& weight) {
  const DType dtype = stream.device().dtype();
  std::vector<float> y(static_cast<size_t>(weight.out_features()));
  std::vector<std::byte> x(static_cast<size_t>(weight.in_features()) * DTypeBytes(dtype));
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<std::byte>(i % 61);  // no NaN in any dtype
  const auto x_there = stream.Place(x.data(), x.size()), y_there = stream.Allocate(y.size() * sizeof(float));
  EXPECT_TRUE(x_there.ok() && y_there.ok()) << x_there.status() << y_there.status();
  absl::Status status = stream.Gemm({.weight = &weight,
                                     .x = (*x_there)->data(),
                                     .tokens = 1,
                                     .y = (*y_there)->data(),
                                     .y_dtype = DType::kF32});
  EXPECT_TRUE(status.ok()) << status;
  status = stream.Download((*y_there)->data(), (*y_there)->size_bytes(), y.data());
  EXPECT_TRUE(status.ok()) << status;
  return y;
}

// With each matrix of the part.
inline std::vector<std::vector<float>> ProductsWith(Stream& stream, const WeightPart& part) {
  std::vector<const PackedWeight*> weights = {part.layer.qkv.get(),
                                              part.layer.o.get(),
                                              part.layer.gate_up.get(),
                                              part.layer.down.get(),
                                              part.layer.experts.router.get(),
                                              part.head.get()};
  for (const auto& expert : part.layer.experts.gate_up) weights.push_back(expert.get());
  for (const auto& expert : part.layer.experts.down) weights.push_back(expert.get());
  std::vector<std::vector<float>> products;
  for (const PackedWeight* weight : weights) {
    if (weight != nullptr) products.push_back(ProductWith(stream, *weight));
  }
  return products;
}

}  // namespace meshfill

#endif  // MESHFILL_TESTS_ENGINE_RUN_PART_PRODUCTS_H_
