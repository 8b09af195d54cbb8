#include "engine/run/rank_runner.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <utility>

#include "engine/model/rope.h"
#include "engine/run/executor.h"
#include "engine/run/head_exchange.h"
#include "engine/run/timeline_recorder.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

double SecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Runs one rank; members are what all layers share.
class Runner {
 public:
  explicit Runner(const RankRun& run)
      : run_(run),
        shape_(run.model.shape()),
        config_(run.model.config()),
        stream_(run.stream),
        chunk_tokens_(run.plan.layout.ChunkTokens(run.rank)),
        slice_tokens_(std::min(run.plan.slice_tokens, chunk_tokens_)),
        exchange_(run.plan, shape_, run.rank, run.stream, run.communicator, run.wait_timeout, output_.stats,
                  run.recorder),
        executor_(run.plan, shape_, run.rank, run.stream, run.communicator, run.wait_timeout, output_.stats,
                  run.recorder) {}

  absl::StatusOr<RankOutput> Run() {
    RETURN_IF_ERROR(ProbeLinks());
    const auto start = std::chrono::steady_clock::now();
    if (run_.recorder != nullptr) run_.recorder->set_stream(stream_);
    RETURN_IF_ERROR(Prepare());
    for (int layer = 0; layer < shape_.layers; ++layer) {
      SetRecordedLayer(layer);
      RETURN_IF_ERROR(RunLayer(layer));
      run_.on_layer_done(layer);
    }
    SetRecordedLayer(-1);
    RETURN_IF_ERROR(LmHead());
    RETURN_IF_ERROR(stream_.Finish());
    if (run_.recorder != nullptr) run_.recorder->Settle();
    output_.stats.total_seconds = SecondsSince(start);
    return std::move(output_);
  }

 private:
  // One slice's rows of a [tokens, width] buffer.
  template <typename T = void>
  T* Rows(const BufferRef& buffer, int64_t token, int64_t width, DType dtype) const {
    return reinterpret_cast<T*>(buffer->data<std::byte>() + token * width * DTypeBytes(dtype));
  }
  float* Residual(int64_t token) const { return Rows<float>(x_, token, shape_.hidden, DType::kF32); }

  void SetRecordedLayer(int layer) {
    if (run_.recorder != nullptr) run_.recorder->set_layer(layer);
  }

  absl::Status ProbeLinks() {
    const auto start = std::chrono::steady_clock::now();
    for (const LinkProbe& probe : run_.probes) {
      ASSIGN_OR_RETURN(std::optional<Link> link, Probe(probe, run_.communicator, stream_, run_.wait_timeout));
      output_.links.push_back(link);
    }
    output_.probe_seconds = run_.probes.empty() ? 0 : SecondsSince(start);
    return absl::OkStatus();
  }

  absl::StatusOr<BufferRef> Elements(int64_t count, DType dtype) {
    return stream_.Allocate(static_cast<size_t>(count) * DTypeBytes(dtype));
  }

  // Slice buffers, the residual stream from the embedding, and the RoPE tables of this chunk's positions.
  absl::Status Prepare() {
    SpanTimer timer(nullptr, run_.recorder, {.what = "embed"});
    const int64_t q_width = static_cast<int64_t>(shape_.q_heads) * shape_.head_dim;
    const int64_t qkv_width = q_width + 2 * static_cast<int64_t>(shape_.kv_heads) * shape_.head_dim;
    const struct {
      BufferRef* buffer;
      int64_t elements;
      DType dtype;
    } buffers[] = {
        {&x_, chunk_tokens_ * shape_.hidden, DType::kF32},
        {&normed_, slice_tokens_ * shape_.hidden, shape_.dtype},
        // A slice's projections and its MLP are never needed at the same time.
        {&wide_, slice_tokens_ * std::max(qkv_width, 2 * shape_.intermediate), shape_.dtype},
        {&narrow_, slice_tokens_ * std::max(q_width, shape_.intermediate), shape_.dtype},
    };
    for (const auto& [buffer, elements, dtype] : buffers) {
      ASSIGN_OR_RETURN(BufferRef allocated, Elements(elements, dtype));
      *buffer = std::move(allocated);
    }
    const SlotPositions positions = run_.plan.layout.Positions(run_.rank);
    RETURN_IF_ERROR(PlaceRopeTables(positions));
    std::vector<uint32_t> ids(chunk_tokens_);
    for (int64_t slot = 0; slot < chunk_tokens_; ++slot) ids[slot] = run_.tokens[positions.At(slot)];
    return stream_.Embed(ids, run_.model.embedding(), run_.model.embedding_dtype(), shape_.hidden,
                         Residual(0));
  }

  absl::Status PlaceRopeTables(const SlotPositions& positions) {
    const size_t elements = static_cast<size_t>(chunk_tokens_ * shape_.head_dim / 2);
    rope_.reset(new float[2 * elements]);
    FillRopeTables(config_.rope, shape_.head_dim, positions, chunk_tokens_, rope_.get(),
                   rope_.get() + elements, stream_.device().grain().host_threads);
    ASSIGN_OR_RETURN(BufferRef tables, stream_.Place(rope_.get(), 2 * elements * sizeof(float)));
    cos_ = PartOf(tables, 0, elements * sizeof(float));
    sin_ = PartOf(tables, elements * sizeof(float), elements * sizeof(float));
    return absl::OkStatus();
  }

  absl::Status RunLayer(int layer) {
    const LayerWeights& weights = run_.model.layers()[layer];
    ASSIGN_OR_RETURN(LayerChunks chunks, Project(weights));
    if (run_.kv != nullptr) {
      RETURN_IF_ERROR(KeepKv(*chunks.kv, run_.kv->layers[layer]));
    }
    ASSIGN_OR_RETURN(LayerOutput attended, Attend(std::move(chunks), config_.layer_window[layer]));
    for (int64_t begin = 0; begin < chunk_tokens_; begin += slice_tokens_) {
      const int64_t tokens = std::min(slice_tokens_, chunk_tokens_ - begin);
      RETURN_IF_ERROR(OutputAndMlp(weights, attended, begin, tokens));
    }
    return absl::OkStatus();
  }

  // Norm, q k v, RoPE: the chunks that move.
  absl::StatusOr<LayerChunks> Project(const LayerWeights& weights) {
    SpanTimer timer(nullptr, run_.recorder, {.what = "projections"});
    ASSIGN_OR_RETURN(BufferRef q, Elements(shape_.q_elements(chunk_tokens_), shape_.dtype));
    ASSIGN_OR_RETURN(BufferRef kv, Elements(shape_.kv_elements(chunk_tokens_), shape_.dtype));
    for (int64_t begin = 0; begin < chunk_tokens_; begin += slice_tokens_) {
      const int64_t tokens = std::min(slice_tokens_, chunk_tokens_ - begin);
      RETURN_IF_ERROR(Norm(weights.attention_norm, begin, tokens));
      RETURN_IF_ERROR(stream_.Gemm({.weight = weights.qkv.get(),
                                    .x = normed_->data(),
                                    .tokens = tokens,
                                    .y = wide_->data(),
                                    .y_dtype = shape_.dtype}));
      RETURN_IF_ERROR(stream_.SplitQkv({
          .qkv = wide_->data(),
          .tokens = tokens,
          .slot_begin = begin,
          .chunk_tokens = chunk_tokens_,
          .q_heads = shape_.q_heads,
          .kv_heads = shape_.kv_heads,
          .head_dim = shape_.head_dim,
          .q_norm = weights.q_norm.data(),
          .k_norm = weights.k_norm.data(),
          .norm_eps = config_.norm_eps,
          .rope_cos = cos_->data<float>(),
          .rope_sin = sin_->data<float>(),
          .q = q->data(),
          .k = kv->data(),
          .v = kv->data<std::byte>() + kv->size_bytes() / 2,
      }));
    }
    return LayerChunks{.q = std::move(q), .kv = std::move(kv)};
  }

  absl::StatusOr<LayerOutput> Attend(LayerChunks chunks, int64_t window) {
    ASSIGN_OR_RETURN(LayerChunks mesh_chunks, exchange_.ToHeads(std::move(chunks)));
    ASSIGN_OR_RETURN(BufferRef mesh_output, executor_.Run(std::move(mesh_chunks), window));
    return exchange_.ToTokens(std::move(mesh_output));
  }

  absl::Status Norm(const PlacedVector& weight, int64_t begin, int64_t tokens) {
    return stream_.RmsNorm(Residual(begin), weight.data(), tokens, shape_.hidden, config_.norm_eps,
                           normed_->data());
  }

  // One slice after attention: x += o(attended); x += down(silu(gate) · up)(norm(x)).
  absl::Status OutputAndMlp(const LayerWeights& weights, const LayerOutput& attended, int64_t begin,
                            int64_t tokens) {
    RETURN_IF_ERROR(Output(weights, attended, begin, tokens));
    SpanTimer timer(nullptr, run_.recorder, {.what = "mlp"});
    RETURN_IF_ERROR(Norm(weights.mlp_norm, begin, tokens));
    RETURN_IF_ERROR(stream_.Gemm({.weight = weights.gate_up.get(),
                                  .x = normed_->data(),
                                  .tokens = tokens,
                                  .y = wide_->data(),
                                  .y_dtype = shape_.dtype}));
    RETURN_IF_ERROR(stream_.SwiGlu(wide_->data(), tokens, shape_.intermediate, narrow_->data()));
    return AddToResidual(*weights.down, begin, tokens);
  }

  absl::Status Output(const LayerWeights& weights, const LayerOutput& attended, int64_t begin,
                      int64_t tokens) {
    SpanTimer timer(nullptr, run_.recorder, {.what = "output projection"});
    RETURN_IF_ERROR(GatherAttended(attended, begin, tokens));
    return AddToResidual(*weights.o, begin, tokens);
  }

  // A slice of the finished output in the order of the output projection: [tokens, q_heads·head_dim].
  absl::Status GatherAttended(const LayerOutput& attended, int64_t begin, int64_t tokens) {
    const int part_heads = shape_.q_heads / static_cast<int>(attended.parts.size());
    const size_t part_bytes = part_heads * shape_.head_dim * DTypeBytes(shape_.dtype);
    auto* to = narrow_->data<std::byte>();
    for (const BufferRef& part : attended.parts) {
      RETURN_IF_ERROR(stream_.CopyHeads({.from = part->data(),
                                         .from_rows = {.dtype = attended.dtype,
                                                       .head_stride = chunk_tokens_ * shape_.head_dim,
                                                       .slot_stride = shape_.head_dim,
                                                       .slots = {.base = begin}},
                                         .to = std::exchange(to, to + part_bytes),
                                         .to_rows = {.dtype = shape_.dtype,
                                                     .head_stride = shape_.head_dim,
                                                     .slot_stride = shape_.q_elements(1)},
                                         .heads = part_heads,
                                         .tokens = tokens,
                                         .head_dim = shape_.head_dim}));
    }
    return absl::OkStatus();
  }

  absl::Status AddToResidual(const PackedWeight& weight, int64_t begin, int64_t tokens) {
    return stream_.Gemm({.weight = &weight,
                         .x = narrow_->data(),
                         .tokens = tokens,
                         .y = Residual(begin),
                         .y_dtype = DType::kF32,
                         .accumulate = true});
  }

  // Copies this rank's K and V rows to their tokens' places.
  absl::Status KeepKv(const Buffer& kv, KvCache::Layer& layer) {
    SpanTimer timer(nullptr, run_.recorder, {.what = "keep kv"});
    const std::byte* const halves = kv.data<std::byte>();
    const std::pair<const std::byte*, std::vector<std::byte>*> tensors[] = {
        {halves, &layer.k}, {halves + kv.size_bytes() / 2, &layer.v}};
    for (const auto& [from, to] : tensors) {
      RETURN_IF_ERROR(
          stream_.CopyHeadsToHost({.from = from,
                                   .from_rows = {.dtype = shape_.dtype,
                                                 .head_stride = chunk_tokens_ * shape_.head_dim,
                                                 .slot_stride = shape_.head_dim},
                                   .to = to->data(),
                                   .to_rows = {.dtype = shape_.dtype,
                                               .head_stride = shape_.head_dim,
                                               .slot_stride = int64_t{shape_.kv_heads} * shape_.head_dim,
                                               .slots = run_.plan.layout.Positions(run_.rank)},
                                   .heads = shape_.kv_heads,
                                   .tokens = chunk_tokens_,
                                   .head_dim = shape_.head_dim}));
    }
    return absl::OkStatus();
  }

  // On the last token's rank.
  absl::Status LmHead() {
    const int64_t last_token = run_.plan.layout.tokens() - 1;
    if (run_.plan.layout.RankOf(last_token) != run_.rank) return absl::OkStatus();
    SpanTimer timer(nullptr, run_.recorder, {.what = "lm head"});
    RETURN_IF_ERROR(Norm(run_.model.final_norm(), run_.plan.layout.SlotOf(last_token), 1));
    ASSIGN_OR_RETURN(BufferRef logits, Elements(shape_.vocab, DType::kF32));
    RETURN_IF_ERROR(stream_.Gemm({.weight = &run_.model.lm_head(),
                                  .x = normed_->data(),
                                  .tokens = 1,
                                  .y = logits->data(),
                                  .y_dtype = DType::kF32}));
    output_.logits.resize(shape_.vocab);
    return stream_.Download(logits->data(), logits->size_bytes(), output_.logits.data());
  }

  const RankRun& run_;
  const ModelShape& shape_;
  const ModelConfig& config_;
  Stream& stream_;
  const int64_t chunk_tokens_;
  const int64_t slice_tokens_;
  RankOutput output_;
  HeadExchange exchange_;
  AttentionExecutor executor_;
  std::unique_ptr<float[]> rope_;  // cos, then sin
  BufferRef x_;                    // [chunk_tokens, hidden], f32: the residual stream
  BufferRef cos_;                  // [chunk_tokens, head_dim/2], f32
  BufferRef sin_;                  // [chunk_tokens, head_dim/2], f32
  BufferRef normed_;               // [slice_tokens, hidden], compute dtype
  BufferRef wide_;  // [slice_tokens, max((q_heads + 2·kv_heads)·head_dim, 2·intermediate)], compute dtype
  BufferRef narrow_;  // [slice_tokens, max(q_heads·head_dim, intermediate)], compute dtype
};

}  // namespace

absl::StatusOr<RankOutput> RunRank(const RankRun& run) { return Runner(run).Run(); }

}  // namespace meshfill
