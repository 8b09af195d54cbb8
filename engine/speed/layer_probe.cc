#include "engine/speed/layer_probe.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include "engine/model/layer_shape.h"
#include "engine/model/rope.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

constexpr float kNormEps = 1e-5f;
constexpr int64_t kLmHeadElements = int64_t{8} << 20;

// Multiples of 64, like stripes; small enough where work for one token is much.
int64_t Tokens(double wanted, int64_t least, int64_t most) {
  return std::clamp<int64_t>(static_cast<int64_t>(wanted) / 64 * 64, least, most);
}

// The form of most of the model's layers, whatever their window.
LayerForm CommonForm(const ModelShape& model) {
  std::map<LayerForm, int> layers;
  model.ForEachKind(
      [&](const LayerForm& form, int count) { layers[{.mlp = form.mlp, .wide = form.wide}] += count; });
  return std::max_element(layers.begin(), layers.end(),
                          [](const auto& x, const auto& y) { return x.second < y.second; })
      ->first;
}

int64_t ProbedSliceTokens(const ModelShape& shape, const Grain& grain) {
  return Tokens(grain.probe_flops / ProjectionFlopsPerToken(shape), 128, grain.slice_tokens);
}

ModelShape ProbedShape(const ModelShape& model, const Grain& grain) {
  const int64_t width = grain.probe_width;
  ModelShape shape = model;
  const int group = model.q_heads / model.kv_heads;
  shape.layers = 1;
  shape.hidden = std::min(model.hidden, width);
  shape.intermediate = std::min(model.intermediate, 2 * width);
  shape.kinds = {LayerKind{.form = CommonForm(model), .layers = 1}};
  shape.kv_heads = std::clamp(static_cast<int>(width / (int64_t{group} * model.head_dim)), 1, model.kv_heads);
  shape.q_heads = group * shape.kv_heads;
  shape.vocab = std::clamp<int64_t>(kLmHeadElements / shape.hidden, 1, std::max<int64_t>(1, model.vocab));
  const ExpertsShape& experts = model.experts;
  if (experts.count == 0) return shape;
  shape.experts = {.count = 1,
                   .used = 1,
                   .width = std::min(experts.width, width / 2),
                   .shared_width = std::min(experts.shared_width, width / 2)};
  // So many that each has as many of the probed slice's tokens as of the model's: that decides how fast their
  // products are.
  const int64_t of_expert = std::max<int64_t>(1, SliceTokensOf(model, grain) * experts.used / experts.count);
  shape.experts.count =
      std::clamp(static_cast<int>(ProbedSliceTokens(shape, grain) / of_expert), 1, experts.count);
  return shape;
}

constexpr int64_t kPeriod = 8191;  // elements after which the noise repeats
constexpr int64_t kUploadedAtOnce = 128 * kPeriod;

// Normal values, as a model's are: what a GPU at its power limit computes in a second depends on the bits
// that change. They repeat, which no operation notices.
std::vector<std::byte> HostNoise(int64_t elements, DType dtype, double deviation = 1) {
  std::minstd_rand random(1);
  std::normal_distribution<float> normal(0, static_cast<float>(deviation));
  std::vector<std::byte> period(kPeriod * DTypeBytes(dtype));
  for (size_t at = 0; at < period.size(); at += DTypeBytes(dtype)) {
    const float value = normal(random);
    const BFloat16 half = BFloat16::FromFloat(value);
    std::memcpy(&period[at], dtype == DType::kF32 ? static_cast<const void*>(&value) : &half,
                DTypeBytes(dtype));
  }
  std::vector<std::byte> noise(elements * DTypeBytes(dtype));
  for (size_t at = 0; at < noise.size(); at += period.size()) {
    std::memcpy(&noise[at], period.data(), std::min(period.size(), noise.size() - at));
  }
  return noise;
}

// A weight in FP8 with scales as the model has them.
absl::StatusOr<std::unique_ptr<PackedWeight>> PackFp8Noise(Device& device, const ProductShape& product,
                                                           const Fp8Blocks& blocks) {
  constexpr unsigned kNoNan = 0xf7;  // clears a bit of each byte, so that none is a NaN
  std::minstd_rand random(1);
  std::vector<uint8_t> values(product.out_features * product.in_features);
  for (uint8_t& value : values) value = static_cast<uint8_t>(random() >> 8 & kNoNan);
  const int64_t scale_count =
      blocks.ScaleRows(product.out_features) * blocks.ScaleColumns(product.in_features);
  const std::vector<float> scales(scale_count, 1.0f / 512);
  const WeightRows source{.data = values.data(),
                          .dtype = DType::kF8E4M3,
                          .rows = product.out_features,
                          .scales = scales.data(),
                          .scale_rows = std::min(blocks.rows, product.out_features),
                          .scale_columns = std::min(blocks.columns, product.in_features)};
  return device.PackWeight({&source, 1}, product.in_features);
}

// A weight in MXFP4.
absl::StatusOr<std::unique_ptr<PackedWeight>> PackFp4Noise(Device& device, const ProductShape& product) {
  constexpr uint8_t kScale = 125;  // 2^-2
  std::minstd_rand random(1);
  const int64_t elements = product.out_features * product.in_features;
  std::vector<uint8_t> values(elements / 2);
  for (uint8_t& value : values) value = static_cast<uint8_t>(random() >> 8);
  const std::vector<uint8_t> exponents(elements / kMxBlock, kScale);
  const WeightRows source{.data = values.data(),
                          .dtype = DType::kF4E2M1,
                          .rows = product.out_features,
                          .exponents = exponents.data()};
  return device.PackWeight({&source, 1}, product.in_features);
}

absl::StatusOr<BufferRef> Noise(Stream& stream, int64_t elements, DType dtype) {
  const std::vector<std::byte> noise = HostNoise(std::min(elements, kUploadedAtOnce), dtype);
  ASSIGN_OR_RETURN(BufferRef buffer, stream.Allocate(elements * DTypeBytes(dtype)));
  auto* const bytes = buffer->data<std::byte>();
  for (size_t at = 0; at < buffer->size_bytes(); at += noise.size()) {
    const size_t part = std::min(noise.size(), buffer->size_bytes() - at);
    RETURN_IF_ERROR(stream.Upload(noise.data(), part, bytes + at));
  }
  return buffer;
}

}  // namespace

int64_t SliceTokensOf(const ModelShape& model, const Grain& grain) {
  constexpr int64_t kMostGrains = 8;
  const int64_t one = grain.slice_tokens;
  if (model.experts.count == 0) return one;
  const int64_t wanted = grain.expert_rows * model.experts.count / model.experts.used;
  return std::clamp((wanted + one - 1) / one, int64_t{1}, kMostGrains) * one;
}

absl::StatusOr<std::shared_ptr<const ProbeWeights>> MakeProbeWeights(const ModelShape& model,
                                                                     Stream& stream) {
  auto weights = std::make_shared<ProbeWeights>();
  Device& device = stream.device();
  const ModelShape shape = ProbedShape(model, device.grain());
  weights->shape = shape;
  weights->layer_scale = ProjectionFlopsPerToken(model) / model.layers / ProjectionFlopsPerToken(shape);
  weights->layer_shape = LayerShapeOf(shape, shape.kinds.front().form);
  const auto pack = [&](const ProductShape& product,
                        const Fp8Blocks& fp8) -> absl::StatusOr<std::unique_ptr<PackedWeight>> {
    if (fp8.rows != 0) return PackFp8Noise(device, product, fp8);
    const double deviation = 1 / std::sqrt(static_cast<double>(product.in_features));
    const std::vector<std::byte> values =
        HostNoise(product.out_features * product.in_features, shape.dtype, deviation);
    const WeightRows source{.data = values.data(), .dtype = shape.dtype, .rows = product.out_features};
    return device.PackWeight({&source, 1}, product.in_features);
  };
  const auto blocks_of = [&](LayerPart part) {
    const bool is_wide = part == LayerPart::kRouter || weights->layer_shape.wide.Has(part);
    return is_wide ? Fp8Blocks() : shape.fp8;
  };
  ExpertWeights& experts = weights->layer.experts;
  const std::pair<LayerPart, std::unique_ptr<PackedWeight>*> parts[] = {
      {LayerPart::kQkv, &weights->layer.qkv},        {LayerPart::kO, &weights->layer.o},
      {LayerPart::kGateUp, &weights->layer.gate_up}, {LayerPart::kDown, &weights->layer.down},
      {LayerPart::kRouter, &experts.router},         {LayerPart::kSharedGateUp, &experts.shared_gate_up},
      {LayerPart::kSharedDown, &experts.shared_down}};
  for (const auto& [part, weight] : parts) {
    const ProductShape product = ProductOf(weights->layer_shape, part);
    if (product.out_features == 0) continue;  // such a layer has none
    ASSIGN_OR_RETURN(*weight, pack(product, blocks_of(part)));
  }
  const std::pair<LayerPart, std::vector<std::unique_ptr<PackedWeight>>*> by_expert[] = {
      {LayerPart::kExpertGateUp, &experts.gate_up}, {LayerPart::kExpertDown, &experts.down}};
  for (const auto& [part, of_experts] : by_expert) {
    const ProductShape product = ProductOf(weights->layer_shape, part);
    for (int expert = 0; product.out_features > 0 && expert < shape.experts.count; ++expert) {
      ASSIGN_OR_RETURN(std::unique_ptr<PackedWeight> weight,
                       shape.fp4_experts ? PackFp4Noise(device, product) : pack(product, blocks_of(part)));
      of_experts->push_back(std::move(weight));
    }
  }
  ASSIGN_OR_RETURN(weights->lm_head, pack({.out_features = shape.vocab, .in_features = shape.hidden}, {}));
  ASSIGN_OR_RETURN(weights->embedding, Noise(stream, shape.vocab * shape.hidden, shape.dtype));
  const std::pair<LayerPart, PlacedVector*> norms[] = {
      {LayerPart::kAttentionNorm, &weights->layer.attention_norm},
      {LayerPart::kAttentionPostNorm, &weights->layer.attention_post_norm},
      {LayerPart::kMlpNorm, &weights->layer.mlp_norm},
      {LayerPart::kMlpPostNorm, &weights->layer.mlp_post_norm}};
  for (const auto& [part, norm] : norms) {
    const std::vector<float> ones(ProductOf(weights->layer_shape, part).out_features, 1.0f);
    ASSIGN_OR_RETURN(*norm, PlacedVector::Make(device, ones));
  }
  return std::shared_ptr<const ProbeWeights>(std::move(weights));
}

LayerProbe::LayerProbe(std::shared_ptr<const ProbeWeights> weights, Stream& stream)
    : weights_(std::move(weights)),
      shape_(weights_->shape),
      stream_(stream),
      // A busy device's speed does not depend on more heads; measuring time does.
      kv_heads_(std::min(shape_.kv_heads, stream.device().grain().probe_kv_heads)),
      q_heads_(kv_heads_ * (shape_.q_heads / shape_.kv_heads)),
      slice_tokens_(ProbedSliceTokens(shape_, stream.device().grain())),
      block_tokens_(
          Tokens(std::sqrt(stream.device().grain().probe_flops / 2 / (2.0 * shape_.head_dim * q_heads_)), 256,
                 2 * stream.device().grain().slice_tokens)),
      rope_(slice_tokens_ * shape_.rotated_dim()),
      ids_(slice_tokens_) {
  for (size_t i = 0; i < ids_.size(); ++i) ids_[i] = static_cast<uint32_t>(i * 7919 % shape_.vocab);
}

absl::StatusOr<std::unique_ptr<LayerProbe>> LayerProbe::Make(std::shared_ptr<const ProbeWeights> weights,
                                                             Stream& stream) {
  std::unique_ptr<LayerProbe> probe(new LayerProbe(std::move(weights), stream));
  RETURN_IF_ERROR(probe->Prepare());
  return probe;
}

absl::Status LayerProbe::Prepare() {
  const SliceWidths widths = SliceWidthsOf(weights_->layer_shape);
  const int64_t block_q = block_tokens_ * q_heads_ * shape_.head_dim;
  const int64_t block_state = block_q + block_tokens_ * q_heads_;
  const struct {
    BufferRef* buffer;
    int64_t elements;
    DType dtype;
  } buffers[] = {
      {&residual_, kProbeSlices * slice_tokens_ * shape_.hidden, DType::kF32},
      {&buffers_.normed, slice_tokens_ * widths.normed, shape_.dtype},
      {&buffers_.wide, slice_tokens_ * widths.wide, shape_.dtype},
      {&buffers_.narrow, slice_tokens_ * widths.narrow, shape_.dtype},
      {&chunk_q_, kProbeSlices * shape_.q_elements(slice_tokens_), shape_.dtype},
      {&chunk_kv_, kProbeSlices * shape_.kv_elements(slice_tokens_), shape_.dtype},
      {&attended_, kProbeSlices * shape_.q_elements(slice_tokens_), DType::kF32},
      {&block_q_, block_q, shape_.dtype},
      {&block_kv_, 2 * block_tokens_ * kv_heads_ * shape_.head_dim, shape_.dtype},
      {&state_, block_state, DType::kF32},
      {&other_state_, block_state, DType::kF32},
      {&logits_, shape_.vocab, DType::kF32},
  };
  for (const auto& [buffer, elements, dtype] : buffers) {
    ASSIGN_OR_RETURN(BufferRef noise, Noise(stream_, elements, dtype));
    *buffer = std::move(noise);
  }
  const ExpertsShape& experts = widths.experts;
  ASSIGN_OR_RETURN(
      buffers_.expert_rows,
      stream_.Allocate(static_cast<size_t>(ExpertRowsBytes(experts.count, experts.used, slice_tokens_))));
  return PlaceRopeTables(slice_tokens_);
}

absl::Status LayerProbe::PlaceRopeTables(int64_t tokens) {
  const size_t elements = static_cast<size_t>(tokens * shape_.rotated_dim() / 2);
  FillRopeTables({}, shape_.rotated_dim(), tokens, /*first=*/0, {.base = 0, .stride = 1, .width = 64}, tokens,
                 rope_.data(), rope_.data() + elements);
  ASSIGN_OR_RETURN(BufferRef tables, stream_.Place(rope_.data(), 2 * elements * sizeof(float)));
  cos_ = PartOf(tables, 0, elements * sizeof(float));
  sin_ = PartOf(tables, elements * sizeof(float), elements * sizeof(float));
  return absl::OkStatus();
}

absl::Status LayerProbe::TokenWork(int64_t tokens) {
  const int64_t slice = std::exchange(slice_, (slice_ + 1) % kProbeSlices);
  const int64_t element_bytes = static_cast<int64_t>(DTypeBytes(shape_.dtype));
  float* const residual = residual_->data<float>() + slice * slice_tokens_ * shape_.hidden;
  const void* const attended = attended_->data<float>() + slice * shape_.q_elements(slice_tokens_);
  std::byte* const q = chunk_q_->data<std::byte>() + slice * shape_.q_elements(slice_tokens_) * element_bytes;
  const int64_t kv_bytes = shape_.kv_elements(slice_tokens_) * element_bytes;
  std::byte* const k = chunk_kv_->data<std::byte>() + slice * kv_bytes;
  const Layer layer(weights_->layer_shape, weights_->layer, kNormEps, buffers_, stream_);
  const ChunkSlice whole = {.begin = 0, .tokens = tokens};
  const Layer::Heads heads = {.tokens = tokens,
                              .rope_cos = cos_->data<float>(),
                              .rope_sin = sin_->data<float>(),
                              .q = q,
                              .k = k,
                              .v = k + kv_bytes / 2};
  const Layer::Attended output = {.tokens = tokens, .parts = {&attended, 1}, .dtype = DType::kF32};
  RETURN_IF_ERROR(layer.Project(residual, whole, {&heads, 1}));
  RETURN_IF_ERROR(layer.AddAttention({&output, 1}, whole, residual));
  return layer.AddMlp(tokens, residual);
}

double LayerProbe::TokenFlops(int64_t tokens) const {
  return static_cast<double>(tokens) * ProjectionFlopsPerToken(shape_);
}

absl::Status LayerProbe::Block(int64_t tokens) {
  return stream_.AttentionBlock({
      .q = block_q_->data(),
      .k = block_kv_->data(),
      .v = block_kv_->data<std::byte>() + block_kv_->size_bytes() / 2,
      .q_tokens = tokens,
      .k_tokens = tokens,
      .q_heads = q_heads_,
      .kv_heads = kv_heads_,
      .head_dim = shape_.head_dim,
      .band = {.q = {.base = 0, .stride = 1, .width = 64}, .k = {.base = 0, .stride = 1, .width = 64}},
      .scale = shape_.score_scale(),
      .carry_in = true,
      .o = state_->data<float>(),
      .lse = state_->data<float>() + block_tokens_ * q_heads_ * shape_.head_dim,
  });
}

double LayerProbe::BlockFlops(int64_t tokens) const {
  return PairFlops(q_heads_, shape_.head_dim) * VisiblePairs(tokens, 0);
}

double LayerProbe::BlockRows(int64_t tokens) const { return static_cast<double>(tokens * q_heads_); }

absl::Status LayerProbe::Merge(int64_t tokens) {
  const int64_t lse_begin = block_tokens_ * q_heads_ * shape_.head_dim;
  return stream_.MergePartial({.o = state_->data<float>(),
                               .lse = state_->data<float>() + lse_begin,
                               .other_o = other_state_->data(),
                               .other_dtype = DType::kF32,
                               .other_lse = other_state_->data<float>() + lse_begin,
                               .rows = tokens * q_heads_,
                               .head_dim = shape_.head_dim});
}

double LayerProbe::MergeBytes(int64_t tokens) const {
  return static_cast<double>(tokens * q_heads_ * (shape_.head_dim + 1)) * sizeof(float);
}

absl::Status LayerProbe::Begin(int64_t tokens) {
  RETURN_IF_ERROR(PlaceRopeTables(tokens));
  return stream_.Embed({ids_.data(), static_cast<size_t>(tokens)}, weights_->embedding->data(), shape_.dtype,
                       shape_.hidden, residual_->data<float>());
}

absl::Status LayerProbe::LmHead(int64_t) {
  return stream_.Gemm({.weight = weights_->lm_head.get(),
                       .x = buffers_.normed->data(),
                       .tokens = 1,
                       .y = logits_->data(),
                       .y_dtype = DType::kF32});
}

double LayerProbe::LmHeadBytes() const {
  return static_cast<double>(meshfill::LmHeadBytes(shape_, shape_.dtype));
}

}  // namespace meshfill
