#include "engine/model/layer.h"

#include <algorithm>
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

// Experts want long slices. What has one weight for all tokens goes over a slice a grain at a time, so that
// what lies between its operations stays in the caches.
template <class Body>
absl::Status Layer::ForEachGrain(int64_t tokens, const Body& body) const {
  const int64_t grain = stream_.device().grain().slice_tokens;
  for (int64_t begin = 0; begin < tokens; begin += grain) {
    RETURN_IF_ERROR(body(begin, std::min(grain, tokens - begin)));
  }
  return absl::OkStatus();
}

// Calls body(chunk, its first slot, the slice's row of that, tokens) for what the slice has of each chunk.
template <class Chunk, class Body>
absl::Status ForEachChunk(std::span<const Chunk> chunks, const ChunkSlice& slice, const Body& body) {
  const int64_t end = slice.begin + slice.tokens;
  int64_t chunk_begin = 0;
  for (const Chunk& chunk : chunks) {
    const int64_t from = std::max(slice.begin, chunk_begin);
    const int64_t to = std::min(end, chunk_begin + chunk.tokens);
    if (from < to) {
      RETURN_IF_ERROR(body(chunk, from - chunk_begin, from - slice.begin, to - from));
    }
    chunk_begin += chunk.tokens;
  }
  return absl::OkStatus();
}

absl::Status Layer::Project(const float* x, const ChunkSlice& slice, std::span<const Heads> chunks) const {
  return ForEachGrain(slice.tokens, [&](int64_t begin, int64_t tokens) {
    return ProjectGrain(x + begin * shape_.hidden, {.begin = slice.begin + begin, .tokens = tokens}, chunks);
  });
}

absl::Status Layer::ProjectGrain(const float* x, const ChunkSlice& slice,
                                 std::span<const Heads> chunks) const {
  RETURN_IF_ERROR(Norm(x, weights_.attention_norm, slice.tokens));
  RETURN_IF_ERROR(Multiply(*weights_.qkv, buffers_.normed->data(), slice.tokens));
  const size_t row_bytes = shape_.qkv_width() * DTypeBytes(shape_.dtype);
  return ForEachChunk(chunks, slice, [&](const Heads& heads, int64_t slot, int64_t row, int64_t tokens) {
    return stream_.SplitQkv({.qkv = buffers_.wide->data<std::byte>() + row * row_bytes,
                             .tokens = tokens,
                             .slot_begin = slot,
                             .chunk_tokens = heads.tokens,
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
  });
}

absl::Status Layer::AddAttention(std::span<const Attended> chunks, const ChunkSlice& slice, float* x) const {
  return ForEachGrain(slice.tokens, [&](int64_t begin, int64_t tokens) -> absl::Status {
    RETURN_IF_ERROR(Gather(chunks, {.begin = slice.begin + begin, .tokens = tokens}));
    return AddProduct(*weights_.o, weights_.attention_post_norm, tokens, x + begin * shape_.hidden);
  });
}

absl::Status Layer::AddMlp(int64_t tokens, float* x, int32_t* tokens_per_expert) const {
  RETURN_IF_ERROR(Norm(x, weights_.mlp_norm, tokens));
  if (shape_.mlp == MlpKind::kExperts) return AddExperts(tokens, x, tokens_per_expert);
  return AddDense(*weights_.gate_up, *weights_.down, shape_.intermediate, tokens, x);
}

absl::Status Layer::AddDense(const PackedWeight& gate_up, const PackedWeight& down, int64_t width,
                             int64_t tokens, float* x) const {
  return ForEachGrain(tokens, [&](int64_t begin, int64_t count) -> absl::Status {
    const size_t before = static_cast<size_t>(begin * shape_.hidden) * DTypeBytes(shape_.dtype);
    RETURN_IF_ERROR(Multiply(gate_up, buffers_.normed->data<std::byte>() + before, count));
    RETURN_IF_ERROR(stream_.Activate({.activation = DenseActivation(),
                                      .x = buffers_.wide->data(),
                                      .tokens = count,
                                      .width = width,
                                      .y = buffers_.narrow->data()}));
    return AddProduct(down, weights_.mlp_post_norm, count, x + begin * shape_.hidden);
  });
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
  RETURN_IF_ERROR(stream_.ExpertMlp({.gate_up = experts.gate_up,
                                     .down = experts.down,
                                     .rows = rows,
                                     .row_count = tokens * used,
                                     .activation = ExpertActivation(),
                                     .x = buffers_.normed->data(),
                                     .narrow = buffers_.narrow->data(),
                                     .y = buffers_.wide->data()}));
  return stream_.AddExperts({.y = buffers_.wide->data(),
                             .rows = rows,
                             .tokens = tokens,
                             .used = used,
                             .width = shape_.hidden,
                             .x = x});
}

GatedActivation Layer::DenseActivation() const {
  return {.gating = shape_.activation == Activation::kGelu ? Gating::kGeGlu : Gating::kSwiGlu};
}

GatedActivation Layer::ExpertActivation() const {
  const auto& [alpha, limit] = shape_.swiglu_clamp;
  if (limit == 0) return DenseActivation();
  return {.gating = Gating::kClampedSwiGlu, .alpha = alpha, .limit = limit};
}

absl::Status Layer::Norm(const float* x, const PlacedVector& weight, int64_t tokens) const {
  return stream_.RmsNorm(x, weight.data(), tokens, shape_.hidden, norm_eps_, buffers_.normed->data());
}

absl::Status Layer::Multiply(const PackedWeight& weight, const void* normed, int64_t tokens) const {
  return stream_.Gemm({.weight = &weight,
                       .x = normed,
                       .tokens = tokens,
                       .y = buffers_.wide->data(),
                       .y_dtype = shape_.dtype});
}

// Puts attention's output in the order of the output projection, [tokens, q_heads·head_dim].
absl::Status Layer::Gather(std::span<const Attended> chunks, const ChunkSlice& slice) const {
  const size_t row_bytes = shape_.q_width() * DTypeBytes(shape_.dtype);
  return ForEachChunk(
      chunks, slice,
      [&](const Attended& attended, int64_t slot, int64_t row, int64_t tokens) -> absl::Status {
        const int part_heads = shape_.q_heads / static_cast<int>(attended.parts.size());
        const size_t part_bytes = part_heads * shape_.head_dim * DTypeBytes(shape_.dtype);
        auto* to = buffers_.narrow->data<std::byte>() + row * row_bytes;
        for (const void* part : attended.parts) {
          RETURN_IF_ERROR(stream_.CopyHeads({.from = part,
                                             .from_rows = {.dtype = attended.dtype,
                                                           .head_stride = attended.tokens * shape_.head_dim,
                                                           .slot_stride = shape_.head_dim,
                                                           .slots = {.base = slot}},
                                             .to = std::exchange(to, to + part_bytes),
                                             .to_rows = {.dtype = shape_.dtype,
                                                         .head_stride = shape_.head_dim,
                                                         .slot_stride = shape_.q_width()},
                                             .heads = part_heads,
                                             .tokens = tokens,
                                             .head_dim = shape_.head_dim}));
        }
        return absl::OkStatus();
      });
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
