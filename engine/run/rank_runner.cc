#include "engine/run/rank_runner.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/model/layer.h"
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

// The slabs of a prefix that one layer of a rank reads, each asked for once.
class PrefixSlabs {
 public:
  explicit PrefixSlabs(Stream& stream) : stream_(stream) {}

  // As the stream's operations read it; null: it is on the host.
  absl::StatusOr<BufferRef> OnDevice(KvSlab& slab) {
    if (const auto known = known_.find(&slab); known != known_.end()) return known->second;
    BufferRef kept;
    if (std::optional<DeviceMessage> on_device = slab.On(stream_.device()); on_device.has_value()) {
      ASSIGN_OR_RETURN(kept, stream_.TakeOver(*std::move(on_device)));
    } else {
      RETURN_IF_ERROR(slab.BringToHost());
    }
    return known_[&slab] = kept;
  }

 private:
  Stream& stream_;
  std::map<const KvSlab*, BufferRef> known_;
};

// Runs one rank; members are what all layers share.
class Runner {
 public:
  explicit Runner(const RankRun& run)
      : run_(run),
        shape_(run.model.shape()),
        config_(run.model.config()),
        stream_(run.stream),
        chunk_tokens_(run.plan.layout.ChunkTokens(run.rank)),
        prefix_slots_(run.plan.kv_layout().ChunkTokens(run.rank) - chunk_tokens_),
        slice_tokens_(SliceTokens(run.plan, run.rank, run.plan.slice_tokens)),
        exchange_(run.plan, shape_, run.rank, run.stream, run.communicator, run.wait_timeout, output_.stats,
                  run.recorder),
        executor_(run.plan, shape_, run.rank, run.stream, run.communicator, run.wait_timeout, output_.stats,
                  run.recorder) {}

  absl::StatusOr<RankOutput> Run() {
    RETURN_IF_ERROR(CheckRun());
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
    RETURN_IF_ERROR(EndKeeping());
    RETURN_IF_ERROR(stream_.Finish());
    if (run_.recorder != nullptr) run_.recorder->Settle();
    output_.stats.total_seconds = SecondsSince(start);
    if (run_.reader == 0) output_.stats.sent[Traffic::kGather] = run_.weights.sent_bytes();
    return std::move(output_);
  }

 private:
  float* Residual(int64_t token) const { return x_->data<float>() + token * shape_.hidden; }

  void SetRecordedLayer(int layer) {
    if (run_.recorder != nullptr) run_.recorder->set_layer(layer);
  }

  absl::Status CheckRun() const {
    const int64_t cached_tokens = run_.plan.cached_tokens;
    if (!CanFollow(run_.plan.layout, cached_tokens)) {
      return absl::InternalError(absl::StrCat("rank ", run_.rank, ": ", run_.plan.layout.DebugString(),
                                              " cannot follow ", cached_tokens, " cached tokens"));
    }
    if (cached_tokens != (run_.prefix == nullptr ? 0 : run_.prefix->tokens())) {
      return absl::InternalError(absl::StrCat("rank ", run_.rank, ": the plan has ", cached_tokens,
                                              " cached tokens, the prefix ",
                                              run_.prefix == nullptr ? 0 : run_.prefix->tokens()));
    }
    if (std::ssize(run_.ids) == chunk_tokens_) return absl::OkStatus();
    return absl::InternalError(
        absl::StrCat("rank ", run_.rank, ": ", run_.ids.size(), " token ids for a chunk of ", chunk_tokens_));
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
    ASSIGN_OR_RETURN(x_, Elements(chunk_tokens_ * shape_.hidden, DType::kF32));
    ASSIGN_OR_RETURN(buffers_,
                     LayerBuffers::Make(stream_, SliceWidthsOf(shape_), shape_.dtype, slice_tokens_));
    for (const LayerForm& form : config_.layers) {
      RopeTables& tables = ropes_[form.rope];
      if (tables.cos == nullptr) {
        ASSIGN_OR_RETURN(tables, PlaceRopeTables(config_.RopeOf(form.rope)));
      }
    }
    return run_.model.Embed(stream_, run_.ids, Residual(0));
  }

  // Of one rotary embedding.
  struct RopeTables {
    std::unique_ptr<float[]> host;  // cos, then sin; goes after them
    BufferRef cos, sin;             // [chunk_tokens, rotated_dim/2], f32
  };

  absl::StatusOr<RopeTables> PlaceRopeTables(const RopeConfig& rope) {
    const size_t elements = static_cast<size_t>(chunk_tokens_ * shape_.rotated_dim() / 2);
    RopeTables tables;
    tables.host.reset(new float[2 * elements]);
    FillRopeTables(rope, shape_.rotated_dim(), run_.plan.cached_tokens, run_.plan.layout.Positions(run_.rank),
                   chunk_tokens_, tables.host.get(), tables.host.get() + elements,
                   stream_.device().grain().host_threads);
    ASSIGN_OR_RETURN(BufferRef placed, stream_.Place(tables.host.get(), 2 * elements * sizeof(float)));
    tables.cos = PartOf(placed, 0, elements * sizeof(float));
    tables.sin = PartOf(placed, elements * sizeof(float), elements * sizeof(float));
    return tables;
  }

  absl::Status RunLayer(int index) {
    const LayerShape shape = LayerShapeOf(config_, index);
    ASSIGN_OR_RETURN(const WeightPart* const weights, TakeWeights(index));
    const Layer layer(shape, weights->layer, config_.norm_eps, buffers_, stream_);
    RETURN_IF_ERROR(EndKeeping());  // of the layer before: one layer's K and V at a time (peak_bytes.h)
    ASSIGN_OR_RETURN(LayerChunks chunks, Project(layer, ropes_.at(shape.rope)));
    if (run_.kv != nullptr) {
      RETURN_IF_ERROR(KeepKv(chunks.kv, index));
    }
    if (run_.prefix != nullptr) {
      ASSIGN_OR_RETURN(chunks.kv, BehindPrefix(std::move(chunks.kv), index));
    }
    ASSIGN_OR_RETURN(LayerOutput attended, Attend(std::move(chunks), shape.window));
    return ForEachSlice([&](const ChunkSlice& slice) { return OutputAndMlp(layer, attended, slice); });
  }

  absl::StatusOr<const WeightPart*> TakeWeights(int part) {
    if (run_.model.weight_mode() == WeightMode::kResident) {
      return run_.weights.Take(run_.reader, part, run_.wait_timeout);
    }
    double* const wait = run_.model.weight_mode() == WeightMode::kSharded
                             ? &output_.stats.wait_seconds[Traffic::kGather]
                             : nullptr;
    SpanTimer timer(wait, run_.recorder, {.kind = SpanKind::kWait, .what = "weights"});
    return run_.weights.Take(run_.reader, part, run_.wait_timeout);
  }

  template <typename Body>
  absl::Status ForEachSlice(const Body& body) const {
    for (int64_t begin = 0; begin < chunk_tokens_; begin += slice_tokens_) {
      RETURN_IF_ERROR(body(ChunkSlice{.begin = begin,
                                      .tokens = std::min(slice_tokens_, chunk_tokens_ - begin),
                                      .chunk_tokens = chunk_tokens_}));
    }
    return absl::OkStatus();
  }

  // The chunks that move.
  absl::StatusOr<LayerChunks> Project(const Layer& layer, const RopeTables& rope) {
    SpanTimer timer(nullptr, run_.recorder, {.what = "projections"});
    ASSIGN_OR_RETURN(BufferRef q, Elements(shape_.q_elements(chunk_tokens_), shape_.dtype));
    ASSIGN_OR_RETURN(BufferRef kv, Elements(shape_.kv_elements(chunk_tokens_), shape_.dtype));
    const Layer::Heads heads = {.rope_cos = rope.cos->data<float>(),
                                .rope_sin = rope.sin->data<float>(),
                                .q = q->data(),
                                .k = kv->data(),
                                .v = kv->data<std::byte>() + kv->size_bytes() / 2};
    RETURN_IF_ERROR(ForEachSlice(
        [&](const ChunkSlice& slice) { return layer.Project(Residual(slice.begin), slice, heads); }));
    return LayerChunks{.q = std::move(q), .kv = std::move(kv)};
  }

  // The keys and values that queries see: those of the prefix that the rank has, then its own.
  absl::StatusOr<BufferRef> BehindPrefix(BufferRef own, int layer) {
    SpanTimer timer(nullptr, run_.recorder, {.what = "read prefix"});
    const int64_t slots = prefix_slots_ + chunk_tokens_;
    ASSIGN_OR_RETURN(BufferRef all, Elements(shape_.kv_elements(slots), shape_.dtype));
    const auto half_of = [&](const BufferRef& kv, int half) {
      return kv->data<std::byte>() + half * kv->size_bytes() / 2;
    };
    for (int half = 0; half < 2; ++half) {
      RETURN_IF_ERROR(stream_.CopyHeads({.from = half_of(own, half),
                                         .from_rows = HeadsOutermost(chunk_tokens_),
                                         .to = half_of(all, half),
                                         .to_rows = HeadsOutermost(slots, prefix_slots_),
                                         .heads = shape_.kv_heads,
                                         .tokens = chunk_tokens_,
                                         .head_dim = shape_.head_dim}));
    }
    const TokenLayout layout = run_.plan.kv_layout();
    const auto copy = [&](int half, const std::byte* from, const HeadRows& from_rows, int64_t slot,
                          int64_t tokens) {
      return stream_.CopyHeads({.from = from,
                                .from_rows = from_rows,
                                .to = half_of(all, half),
                                .to_rows = HeadsOutermost(slots, slot),
                                .heads = shape_.kv_heads,
                                .tokens = tokens,
                                .head_dim = shape_.head_dim});
    };
    PrefixSlabs slabs(stream_);
    for (int64_t slot = 0; slot < prefix_slots_;) {
      KvRows rows = KvRowsOf(*run_.prefix, layer, layout, run_.rank, slot, /*most=*/1);
      ASSIGN_OR_RETURN(const BufferRef kept, slabs.OnDevice(*rows.slab));
      if (kept == nullptr) {
        ASSIGN_OR_RETURN(rows.slots, UploadPrefix(layout, layer, slot, slabs));
      } else {
        rows = KvRowsOf(*run_.prefix, layer, layout, run_.rank, slot, prefix_slots_ - slot);
      }
      for (int half = 0; half < 2; ++half) {
        RETURN_IF_ERROR(kept == nullptr
                            ? copy(half, SliceHalf(half), TokensOutermost(rows.slots), slot, rows.slots)
                            : copy(half, half_of(kept, half),
                                   HeadsOutermost(rows.slab->shape().tokens, rows.first_slot), slot,
                                   rows.slots));
      }
      slot += rows.slots;
    }
    return all;
  }

  // Brings tokens of the prefix that are on the host, at most a slice, [tokens, kv_heads, head_dim] of K and
  // of V, to where the projections will be. How many: up to the first that are on the device.
  absl::StatusOr<int64_t> UploadPrefix(const TokenLayout& layout, int layer, int64_t begin,
                                       PrefixSlabs& slabs) {
    const int64_t most = std::min(slice_tokens_, prefix_slots_ - begin);
    int64_t done = 0;
    while (done < most) {
      const KvRows rows = KvRowsOf(*run_.prefix, layer, layout, run_.rank, begin + done, most - done);
      ASSIGN_OR_RETURN(const BufferRef kept, slabs.OnDevice(*rows.slab));
      if (kept != nullptr) break;
      const auto slot_bytes = static_cast<size_t>(rows.slab->shape().slot_bytes());
      for (int half = 0; half < 2; ++half) {
        RETURN_IF_ERROR(stream_.Upload(rows.slab->Row(half, rows.first_slot), rows.slots * slot_bytes,
                                       SliceHalf(half) + done * slot_bytes));
      }
      done += rows.slots;
    }
    return done;
  }

  // K (half 0) or V of a slice, in the buffer of the projections.
  std::byte* SliceHalf(int half) const {
    return buffers_.wide->data<std::byte>() +
           half * slice_tokens_ * shape_.kv_heads * shape_.head_dim * DTypeBytes(shape_.dtype);
  }

  HeadRows HeadsOutermost(int64_t slots, int64_t first_slot = 0) const {
    return {.dtype = shape_.dtype,
            .head_stride = slots * shape_.head_dim,
            .slot_stride = shape_.head_dim,
            .slots = {.base = first_slot}};
  }
  HeadRows TokensOutermost(int64_t tokens) const {
    return {.dtype = shape_.dtype,
            .head_stride = shape_.head_dim,
            .slot_stride = int64_t{shape_.kv_heads} * shape_.head_dim,
            .slots = {.width = std::max<int64_t>(1, tokens)}};
  }

  absl::StatusOr<LayerOutput> Attend(LayerChunks chunks, int64_t window) {
    ASSIGN_OR_RETURN(LayerChunks mesh_chunks, exchange_.ToHeads(std::move(chunks)));
    ASSIGN_OR_RETURN(BufferRef mesh_output, executor_.Run(std::move(mesh_chunks), window));
    return exchange_.ToTokens(std::move(mesh_output));
  }

  // One slice after attention.
  absl::Status OutputAndMlp(const Layer& layer, const LayerOutput& attended, const ChunkSlice& slice) {
    std::vector<const void*> parts;
    for (const BufferRef& part : attended.parts) parts.push_back(part->data());
    {
      SpanTimer timer(nullptr, run_.recorder, {.what = "output projection"});
      RETURN_IF_ERROR(
          layer.AddAttention({.parts = parts, .dtype = attended.dtype}, slice, Residual(slice.begin)));
    }
    SpanTimer timer(nullptr, run_.recorder, {.what = "mlp"});
    return layer.AddMlp(slice.tokens, Residual(slice.begin));
  }

  // Begins to keep this rank's K and V, as the sink wants them.
  absl::Status KeepKv(const BufferRef& kv, int layer) {
    SpanTimer timer(nullptr, run_.recorder, {.what = "keep kv"});
    ASSIGN_OR_RETURN(keeping_, run_.kv->Keep(run_.rank, layer, kv, stream_));
    return absl::OkStatus();
  }

  absl::Status EndKeeping() {
    const std::unique_ptr<KvKeeping> keeping = std::move(keeping_);
    return keeping == nullptr ? absl::OkStatus() : keeping->Finish();
  }

  // On the last token's rank.
  absl::Status LmHead() {
    if (!ReadsHead(run_.plan, run_.rank, run_.wants_logits)) return absl::OkStatus();
    const int64_t last_token = run_.plan.layout.tokens() - 1;
    SpanTimer timer(nullptr, run_.recorder, {.what = "lm head"});
    RETURN_IF_ERROR(stream_.RmsNorm(Residual(run_.plan.layout.SlotOf(last_token)),
                                    run_.model.final_norm().data(), 1, shape_.hidden, config_.norm_eps,
                                    buffers_.normed->data()));
    ASSIGN_OR_RETURN(BufferRef logits, Elements(shape_.vocab, DType::kF32));
    auto* piece = logits->data<float>();
    for (int part = shape_.layers; part < run_.model.parts(); ++part) {
      ASSIGN_OR_RETURN(const WeightPart* const weights, TakeWeights(part));
      RETURN_IF_ERROR(stream_.Gemm({.weight = weights->head.get(),
                                    .x = buffers_.normed->data(),
                                    .tokens = 1,
                                    .y = piece,
                                    .y_dtype = DType::kF32}));
      piece += weights->head->out_features();
    }
    output_.logits.resize(shape_.vocab);
    return stream_.Download(logits->data(), logits->size_bytes(), output_.logits.data());
  }

  const RankRun& run_;
  const ModelShape& shape_;
  const ModelConfig& config_;
  Stream& stream_;
  const int64_t chunk_tokens_;
  const int64_t prefix_slots_;  // of the rank's keys, before those of its chunk
  const int64_t slice_tokens_;
  RankOutput output_;
  HeadExchange exchange_;
  AttentionExecutor executor_;
  BufferRef x_;  // [chunk_tokens, hidden], f32: the residual stream
  std::map<LayerRope, RopeTables> ropes_;
  LayerBuffers buffers_;                // of a slice
  std::unique_ptr<KvKeeping> keeping_;  // goes on beside the layer; null: nothing does
};

}  // namespace

bool ReadsHead(const Plan& plan, int rank, bool wants_logits) {
  return wants_logits && plan.layout.RankOf(plan.layout.tokens() - 1) == rank;
}

absl::StatusOr<RankOutput> RunRank(const RankRun& run) {
  absl::StatusOr<RankOutput> output = Runner(run).Run();
  run.weights.Leave(run.reader);
  return output;
}

}  // namespace meshfill
