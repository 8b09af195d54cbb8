#include "engine/model/layer.h"

#include <cstddef>
#include <utility>

#include "kernels/return_if_error.h"

namespace meshfill {

absl::StatusOr<PlacedVector> PlacedVector::Make(Device& device, std::vector<float> values) {
  PlacedVector vector;
  vector.values_ = std::move(values);
  if (vector.values_.empty()) return vector;
  ASSIGN_OR_RETURN(vector.placed_,
                   device.Place(vector.values_.data(), vector.values_.size() * sizeof(float)));
  return vector;
}

absl::StatusOr<LayerBuffers> LayerBuffers::Make(Stream& stream, const SliceWidths& widths, DType dtype,
                                                int64_t slice_tokens) {
  const auto allocate = [&](int64_t width) {
    return stream.Allocate(static_cast<size_t>(slice_tokens * width) * DTypeBytes(dtype));
  };
  LayerBuffers buffers;
  ASSIGN_OR_RETURN(buffers.normed, allocate(widths.normed));
  ASSIGN_OR_RETURN(buffers.wide, allocate(widths.wide));
  ASSIGN_OR_RETURN(buffers.narrow, allocate(widths.narrow));
  ASSIGN_OR_RETURN(buffers.expert_rows, stream.Allocate(static_cast<size_t>(ExpertRowsBytes(
                                            widths.experts.count, widths.experts.used, slice_tokens))));
  return buffers;
}

absl::Status Layer::Project(const float* x, const ChunkSlice& slice, const Heads& heads) const {
  RETURN_IF_ERROR(Norm(x, weights_.attention_norm, slice.tokens));
  RETURN_IF_ERROR(Multiply(*weights_.qkv, slice.tokens));
  return stream_.SplitQkv({.qkv = buffers_.wide->data(),
                           .tokens = slice.tokens,
                           .slot_begin = slice.begin,
                           .chunk_tokens = slice.chunk_tokens,
                           .q_heads = shape_.q_heads,
                           .kv_heads = shape_.kv_heads,
                           .head_dim = shape_.head_dim,
                           .rotated_dim = shape_.rotated_dim,
                           .q_norm = weights_.q_norm.data(),
                           .k_norm = weights_.k_norm.data(),
                           .norm_all_heads = shape_.qk_norm == QkNorm::kHeads,
                           .norm_eps = norm_eps_,
                           .rope_cos = heads.rope_cos,
                           .rope_sin = heads.rope_sin,
                           .q = heads.q,
                           .k = heads.k,
                           .v = heads.v});
}

absl::Status Layer::AddAttention(const Attended& attended, const ChunkSlice& slice, float* x) const {
  RETURN_IF_ERROR(Gather(attended, slice));
  return AddProduct(*weights_.o, weights_.attention_post_norm, slice.tokens, x);
}

absl::Status Layer::AddMlp(int64_t tokens, float* x, int32_t* tokens_per_expert) const {
  RETURN_IF_ERROR(Norm(x, weights_.mlp_norm, tokens));
  if (shape_.mlp == MlpKind::kExperts) return AddExperts(tokens, x, tokens_per_expert);
  return AddDense(*weights_.gate_up, *weights_.down, shape_.intermediate, tokens, x);
}

absl::Status Layer::AddDense(const PackedWeight& gate_up, const PackedWeight& down, int64_t width,
                             int64_t tokens, float* x) const {
  RETURN_IF_ERROR(Multiply(gate_up, tokens));
  RETURN_IF_ERROR(Activate(tokens, width));
  return AddProduct(down, weights_.mlp_post_norm, tokens, x);
}

absl::Status Layer::AddExperts(int64_t tokens, float* x, int32_t* tokens_per_expert) const {
  const ExpertWeights& experts = weights_.experts;
  const auto& [count, used, width, shared_width] = shape_.experts;
  if (shared_width > 0) {
    RETURN_IF_ERROR(AddDense(*experts.shared_gate_up, *experts.shared_down, shared_width, tokens, x));
  }
  auto* const logits = buffers_.wide->data<float>();
  RETURN_IF_ERROR(stream_.Gemm({.weight = experts.router.get(),
                                .x = buffers_.normed->data(),
                                .tokens = tokens,
                                .y = logits,
                                .y_dtype = DType::kF32}));
  const ExpertRows rows = ExpertRowsIn(buffers_.expert_rows->data(), count, used, tokens);
  RETURN_IF_ERROR(stream_.Route({.logits = logits,
                                 .correction = experts.correction.data(),
                                 .tokens = tokens,
                                 .rule = shape_.router,
                                 .rows = rows,
                                 .tokens_per_expert = tokens_per_expert}));
  const int64_t row_count = tokens * used;
  RETURN_IF_ERROR(stream_.ExpertGemm({.weights = experts.gate_up,
                                      .rows = rows,
                                      .row_count = row_count,
                                      .by_token = true,
                                      .x = buffers_.normed->data(),
                                      .y = buffers_.wide->data()}));
  RETURN_IF_ERROR(ActivateExperts(row_count));
  RETURN_IF_ERROR(stream_.ExpertGemm({.weights = experts.down,
                                      .rows = rows,
                                      .row_count = row_count,
                                      .by_token = false,
                                      .x = buffers_.narrow->data(),
                                      .y = buffers_.wide->data()}));
  return stream_.AddExperts({.y = buffers_.wide->data(),
                             .rows = rows,
                             .tokens = tokens,
                             .used = used,
                             .width = shape_.hidden,
                             .x = x});
}

absl::Status Layer::ActivateExperts(int64_t rows) const {
  const int64_t width = shape_.experts.width;
  const SwiGluClamp& clamp = shape_.swiglu_clamp;
  if (clamp.limit == 0) return Activate(rows, width);
  return stream_.ClampedSwiGlu({.x = buffers_.wide->data(),
                                .tokens = rows,
                                .width = width,
                                .alpha = clamp.alpha,
                                .limit = clamp.limit,
                                .y = buffers_.narrow->data()});
}

absl::Status Layer::Norm(const float* x, const PlacedVector& weight, int64_t tokens) const {
  return stream_.RmsNorm(x, weight.data(), tokens, shape_.hidden, norm_eps_, buffers_.normed->data());
}

absl::Status Layer::Multiply(const PackedWeight& weight, int64_t tokens) const {
  return stream_.Gemm({.weight = &weight,
                       .x = buffers_.normed->data(),
                       .tokens = tokens,
                       .y = buffers_.wide->data(),
                       .y_dtype = shape_.dtype});
}

// Puts attention's output in the order of the output projection, [tokens, q_heads·head_dim].
absl::Status Layer::Gather(const Attended& attended, const ChunkSlice& slice) const {
  const int part_heads = shape_.q_heads / static_cast<int>(attended.parts.size());
  const size_t part_bytes = part_heads * shape_.head_dim * DTypeBytes(shape_.dtype);
  auto* to = buffers_.narrow->data<std::byte>();
  for (const void* part : attended.parts) {
    RETURN_IF_ERROR(stream_.CopyHeads(
        {.from = part,
         .from_rows = {.dtype = attended.dtype,
                       .head_stride = slice.chunk_tokens * shape_.head_dim,
                       .slot_stride = shape_.head_dim,
                       .slots = {.base = slice.begin}},
         .to = std::exchange(to, to + part_bytes),
         .to_rows = {.dtype = shape_.dtype, .head_stride = shape_.head_dim, .slot_stride = shape_.q_width()},
         .heads = part_heads,
         .tokens = slice.tokens,
         .head_dim = shape_.head_dim}));
  }
  return absl::OkStatus();
}

absl::Status Layer::Activate(int64_t rows, int64_t width) const {
  const void* const gate_up = buffers_.wide->data();
  void* const y = buffers_.narrow->data();
  switch (shape_.activation) {
    case Activation::kSilu:
      return stream_.SwiGlu(gate_up, rows, width, y);
    case Activation::kGelu:
      return stream_.GeGlu(gate_up, rows, width, y);
  }
  return absl::InternalError("no such activation");
}

absl::Status Layer::AddProduct(const PackedWeight& weight, const PlacedVector& post_norm, int64_t tokens,
                               float* x) const {
  const bool adds = post_norm.data() == nullptr;
  auto* const y = adds ? x : buffers_.wide->data<float>();
  RETURN_IF_ERROR(stream_.Gemm({.weight = &weight,
                                .x = buffers_.narrow->data(),
                                .tokens = tokens,
                                .y = y,
                                .y_dtype = DType::kF32,
                                .accumulate = adds}));
  if (adds) return absl::OkStatus();
  return stream_.AddRmsNorm(y, post_norm.data(), tokens, shape_.hidden, norm_eps_, x);
}

}  // namespace meshfill
