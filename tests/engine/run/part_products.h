// Products with the matrices of a part of the weights, by which tests compare parts.
#ifndef MESHFILL_TESTS_ENGINE_RUN_PART_PRODUCTS_H_
#define MESHFILL_TESTS_ENGINE_RUN_PART_PRODUCTS_H_

#include <gtest/gtest.h>

#include <cstddef>
#include <vector>

#include "engine/model/weight_feed.h"
#include "kernels/stream.h"

namespace meshfill {

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
