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
#include "kernels/monotonic_time.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

// The slabs of a prefix that one layer of a rank reads, each asked for once.
class PrefixSlabs {
 public:
  explicit PrefixSlabs(Stream& stream) : stream_(stream) {}

  // The slab as the stream's operations read it; null: it is on the host.
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

// K (half 0) or V.
std::byte* HalfOf(const BufferRef& kv, int half) {
  return kv->data<std::byte>() + half * (kv->size_bytes() / 2);
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
        prefix_slots_(run.plan.kv_layout().ChunkTokens(run.rank) - chunk_tokens_),
        slice_tokens_(SliceTokens(run.plan, run.rank, run.plan.slice_tokens)),
        gated_(Gated(run)),
        communicator_(gated_.has_value() ? *gated_ : run.communicator),
        exchange_(run.plan, shape_, run.rank, run.stream, communicator_, run.wait_timeout, output_.stats,
                  run.recorder),
        executor_(run.plan, shape_, run.rank, run.stream, communicator_, run.wait_timeout, output_.stats,
                  run.recorder) {}

  absl::StatusOr<RankOutput> Run() {
    RETURN_IF_ERROR(CheckRun());
    RETURN_IF_ERROR(ProbeLinks());
    const auto start = std::chrono::steady_clock::now();
    if (run_.recorder != nullptr) run_.recorder->set_stream(stream_);
    RETURN_IF_ERROR(Prepare());
    RETURN_IF_ERROR(ComputeTokens(-1));
    for (int layer = 0; layer < shape_.layers; ++layer) {
      RETURN_IF_ERROR(Attend(layer));
      RETURN_IF_ERROR(ComputeTokens(layer));
    }
    SetRecordedLayer(-1);
    RETURN_IF_ERROR(LmHead());
    RETURN_IF_ERROR(EndKeeping());
    RETURN_IF_ERROR(ReadTokensPerExpert());
    RETURN_IF_ERROR(stream_.Finish());
    if (run_.recorder != nullptr) run_.recorder->Settle();
    output_.stats.total_seconds = SecondsSince(start);
    if (run_.reader == 0) output_.stats.sent[Traffic::kGather] = run_.weights.sent_bytes();
    return std::move(output_);
  }

 private:
  static std::optional<GatedCommunicator> Gated(const RankRun& run) {
    if (run.gate == nullptr) return std::nullopt;
    return std::optional<GatedCommunicator>(std::in_place, run.communicator, *run.gate, run.gate_rank,
                                            [&stream = run.stream] { return stream.Finish(); });
  }

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
    if (exchange_.slices() > 1 && run_.weights.mode() != WeightMode::kResident) {
      return absl::InternalError(absl::StrCat("rank ", run_.rank, ": a plan in ", exchange_.slices(),
                                              " exchanges needs two layers' weights at once"));
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

  // Slice buffers, counters, the residual stream from the embedding, and the RoPE tables of this chunk's
  // positions.
  absl::Status Prepare() {
    SpanTimer timer(nullptr, run_.recorder, {.what = "embed"});
    ASSIGN_OR_RETURN(x_, Elements(chunk_tokens_ * shape_.hidden, DType::kF32));
    ASSIGN_OR_RETURN(buffers_,
                     LayerBuffers::Make(stream_, SliceWidthsOf(shape_), shape_.dtype, slice_tokens_));
    if (shape_.experts.count > 0) {
      const std::vector<int32_t> zeros(shape_.layers * shape_.experts.count);
      const size_t bytes = zeros.size() * sizeof(int32_t);
      ASSIGN_OR_RETURN(tokens_per_expert_, stream_.Allocate(bytes));
      RETURN_IF_ERROR(stream_.Upload(zeros.data(), bytes, tokens_per_expert_->data()));
    }
    for (const LayerForm& form : config_.layers) {
      RopeTables& tables = ropes_[form.rope];
      if (tables.cos == nullptr) {
        ASSIGN_OR_RETURN(tables, PlaceRopeTables(config_.RopeOf(form.rope)));
      }
    }
    return run_.model.Embed(stream_, run_.ids, Residual(0));
  }

  // Tables of one rotary embedding.
  struct RopeTables {
    std::unique_ptr<float[]> host;  // cos, then sin; goes after them
    BufferRef cos, sin;             // [chunk_tokens, rotated_dim/2], f32
  };

  absl::StatusOr<RopeTables> PlaceRopeTables(const RopeConfig& rope) {
    const size_t elements = static_cast<size_t>(chunk_tokens_ * shape_.rotated_dim() / 2);
    RopeTables tables;
    tables.host.reset(new float[2 * elements]);
    const int64_t prompt_tokens = run_.plan.cached_tokens + run_.plan.layout.tokens() + run_.tokens_ahead;
    FillRopeTables(rope, shape_.rotated_dim(), prompt_tokens, run_.plan.cached_tokens,
                   run_.plan.layout.Positions(run_.rank), chunk_tokens_, tables.host.get(),
                   tables.host.get() + elements, stream_.device().grain().host_threads);
    ASSIGN_OR_RETURN(BufferRef placed, stream_.Place(tables.host.get(), 2 * elements * sizeof(float)));
    tables.cos = PartOf(placed, 0, elements * sizeof(float));
    tables.sin = PartOf(placed, elements * sizeof(float), elements * sizeof(float));
    return tables;
  }

  // A layer whose products are being computed.
  struct CurrentLayer {
    CurrentLayer(const LayerShape& shape, const LayerWeights& weights, float norm_eps,
                 const LayerBuffers& buffers, Stream& stream, int32_t* tokens_per_expert)
        : shape(shape),
          ops(this->shape, weights, norm_eps, buffers, stream),
          sinks(weights.sinks.data()),
          tokens_per_expert(tokens_per_expert) {}
    const LayerShape shape;
    const Layer ops;
    const float* const sinks;          // [q_heads]; null: none
    int32_t* const tokens_per_expert;  // [experts], on the device; null: no layer has experts
  };

  // All that is local to a token between the attention of `layer` (-1: the embedding) and that of the next
  // one (none behind the last), a slice of the exchange at a time.
  absl::Status ComputeTokens(int layer) {
    const int next = layer + 1;
    const bool begins_layer = next < shape_.layers;
    if (begins_layer && run_.prefix != nullptr && exchange_.slices() > 1) {
      RETURN_IF_ERROR(SendPrefix(next));
    }
    for (int slice = 0; slice < exchange_.slices(); ++slice) {
      if (layer >= 0) {
        SetRecordedLayer(layer);
        RETURN_IF_ERROR(EndLayer(slice));
        if (slice == exchange_.slices() - 1) run_.on_layer_done(layer);
      }
      if (begins_layer) {
        SetRecordedLayer(next);
        if (slice == 0) {
          RETURN_IF_ERROR(TakeLayer(next));
        }
        RETURN_IF_ERROR(BeginLayer(next, slice));
      }
    }
    current_ = std::move(next_);
    return absl::OkStatus();
  }

  // Attention of a layer that has been begun in all slices.
  absl::Status Attend(int layer) {
    SetRecordedLayer(layer);
    ASSIGN_OR_RETURN(LayerChunks chunks, exchange_.FinishToHeads());
    ASSIGN_OR_RETURN(BufferRef output,
                     executor_.Run(std::move(chunks), current_->shape.window, current_->sinks));
    return exchange_.StartToTokens(std::move(output));
  }

  absl::Status TakeLayer(int layer) {
    ASSIGN_OR_RETURN(const WeightPart* const weights, TakeWeights(layer));
    next_ = std::make_unique<CurrentLayer>(LayerShapeOf(config_, layer), weights->layer, config_.norm_eps,
                                           buffers_, stream_, TokensPerExpert(layer));
    return EndKeeping();  // the layer before's: one layer's K and V are kept at a time (peak_bytes.h)
  }

  absl::StatusOr<const WeightPart*> TakeWeights(int part) {
    if (run_.weights.mode() == WeightMode::kResident) {
      return run_.weights.Take(run_.reader, part, run_.wait_timeout);
    }
    // The part before is given back by this. A device may still be at it.
    RETURN_IF_ERROR(stream_.Finish());
    double* const wait =
        run_.weights.mode() == WeightMode::kSharded ? &output_.stats.wait_seconds[Traffic::kGather] : nullptr;
    SpanTimer timer(wait, run_.recorder, {.kind = SpanKind::kWait, .what = "weights"});
    return run_.weights.Take(run_.reader, part, run_.wait_timeout);
  }

  // Calls `body` for each of the plan's slices of `slots`. The tokens are computed into buffers of their own.
  template <typename Body>
  absl::Status ForEachSlice(const SlotRange& slots, const Body& body) const {
    for (int64_t begin = 0; begin < slots.slots(); begin += slice_tokens_) {
      RETURN_IF_ERROR(body(ChunkSlice{.begin = begin,
                                      .tokens = std::min(slice_tokens_, slots.slots() - begin),
                                      .chunk_tokens = slots.slots()}));
    }
    return absl::OkStatus();
  }

  // Computes a slice's layer up to attention: its chunks leave.
  absl::Status BeginLayer(int layer, int slice) {
    const SlotRange slots = exchange_.OwnSlots(slice);
    ASSIGN_OR_RETURN(LayerChunks chunks, Project(*next_, slots));
    if (run_.kv != nullptr) {
      RETURN_IF_ERROR(KeepKv(chunks.kv, slots));
      if (slice == exchange_.slices() - 1) {
        RETURN_IF_ERROR(BeginKeeping(layer));
      }
    }
    if (run_.prefix != nullptr && exchange_.slices() == 1) {
      ASSIGN_OR_RETURN(chunks.kv, BehindPrefix(std::move(chunks.kv), layer));
    }
    return exchange_.StartToHeads(slice, std::move(chunks));
  }

  // The chunks that move, of these tokens.
  absl::StatusOr<LayerChunks> Project(const CurrentLayer& layer, const SlotRange& slots) {
    SpanTimer timer(nullptr, run_.recorder, {.what = "projections"});
    ASSIGN_OR_RETURN(BufferRef q, Elements(shape_.q_elements(slots.slots()), shape_.dtype));
    ASSIGN_OR_RETURN(BufferRef kv, Elements(shape_.kv_elements(slots.slots()), shape_.dtype));
    const RopeTables& rope = ropes_.at(layer.shape.rope);
    const int64_t first_angle = slots.begin * shape_.rotated_dim() / 2;
    const Layer::Heads heads = {.rope_cos = rope.cos->data<float>() + first_angle,
                                .rope_sin = rope.sin->data<float>() + first_angle,
                                .q = q->data(),
                                .k = kv->data(),
                                .v = kv->data<std::byte>() + kv->size_bytes() / 2};
    RETURN_IF_ERROR(ForEachSlice(slots, [&](const ChunkSlice& slice) {
      return layer.ops.Project(Residual(slots.begin + slice.begin), slice, heads);
    }));
    return LayerChunks{.q = std::move(q), .kv = std::move(kv)};
  }

  // Computes a slice's layer behind attention.
  absl::Status EndLayer(int slice) {
    ASSIGN_OR_RETURN(const LayerOutput attended, exchange_.FinishToTokens(slice));
    const SlotRange slots = exchange_.OwnSlots(slice);
    return ForEachSlice(slots, [&](const ChunkSlice& part) {
      return OutputAndMlp(*current_, attended, part, Residual(slots.begin + part.begin));
    });
  }

  // The keys and values that queries see: those of the prefix that the rank has, then its own.
  absl::StatusOr<BufferRef> BehindPrefix(BufferRef own, int layer) {
    SpanTimer timer(nullptr, run_.recorder, {.what = "read prefix"});
    const int64_t slots = prefix_slots_ + chunk_tokens_;
    ASSIGN_OR_RETURN(BufferRef all, Elements(shape_.kv_elements(slots), shape_.dtype));
    for (int half = 0; half < 2; ++half) {
      RETURN_IF_ERROR(stream_.CopyHeads({.from = HalfOf(own, half),
                                         .from_rows = HeadsOutermost(chunk_tokens_),
                                         .to = HalfOf(all, half),
                                         .to_rows = HeadsOutermost(slots, prefix_slots_),
                                         .heads = shape_.kv_heads,
                                         .tokens = chunk_tokens_,
                                         .head_dim = shape_.head_dim}));
    }
    RETURN_IF_ERROR(ReadPrefix(layer, all, slots));
    return all;
  }

  // Sends the prefix to the members of the head group, apart from the rank's own keys and values.
  absl::Status SendPrefix(int layer) {
    ASSIGN_OR_RETURN(BufferRef prefix, Elements(shape_.kv_elements(prefix_slots_), shape_.dtype));
    {
      SpanTimer timer(nullptr, run_.recorder, {.what = "read prefix"});
      RETURN_IF_ERROR(ReadPrefix(layer, prefix, prefix_slots_));
    }
    return exchange_.StartPrefix(prefix);
  }

  // Reads the prefix into the first slots of K and of V, each [kv_heads, slots, head_dim].
  absl::Status ReadPrefix(int layer, const BufferRef& kv, int64_t slots) {
    const TokenLayout layout = run_.plan.kv_layout();
    const auto copy = [&](int half, const std::byte* from, const HeadRows& from_rows, int64_t slot,
                          int64_t tokens) {
      return stream_.CopyHeads({.from = from,
                                .from_rows = from_rows,
                                .to = HalfOf(kv, half),
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
                            : copy(half, HalfOf(kept, half),
                                   HeadsOutermost(rows.slab->shape().tokens, rows.first_slot), slot,
                                   rows.slots));
      }
      slot += rows.slots;
    }
    return absl::OkStatus();
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

  absl::Status OutputAndMlp(const CurrentLayer& layer, const LayerOutput& attended, const ChunkSlice& slice,
                            float* residual) {
    std::vector<const void*> parts;
    for (const BufferRef& part : attended.parts) parts.push_back(part->data());
    {
      SpanTimer timer(nullptr, run_.recorder, {.what = "output projection"});
      RETURN_IF_ERROR(layer.ops.AddAttention({.parts = parts, .dtype = attended.dtype}, slice, residual));
    }
    SpanTimer timer(nullptr, run_.recorder, {.what = "mlp"});
    return layer.ops.AddMlp(slice.tokens, residual, layer.tokens_per_expert);
  }

  // Gathers the K and V of all slices that are to be kept: the one slice's as they are.
  absl::Status KeepKv(const BufferRef& kv, const SlotRange& slots) {
    if (slots.slots() == chunk_tokens_) {
      kept_ = kv;
      return absl::OkStatus();
    }
    SpanTimer timer(nullptr, run_.recorder, {.what = "keep kv"});
    if (slots.begin == 0) {
      ASSIGN_OR_RETURN(kept_, Elements(shape_.kv_elements(chunk_tokens_), shape_.dtype));
    }
    for (int half = 0; half < 2; ++half) {
      RETURN_IF_ERROR(stream_.CopyHeads({.from = HalfOf(kv, half),
                                         .from_rows = HeadsOutermost(slots.slots()),
                                         .to = HalfOf(kept_, half),
                                         .to_rows = HeadsOutermost(chunk_tokens_, slots.begin),
                                         .heads = shape_.kv_heads,
                                         .tokens = slots.slots(),
                                         .head_dim = shape_.head_dim}));
    }
    return absl::OkStatus();
  }

  // Hands the layer's K and V to the sink.
  absl::Status BeginKeeping(int layer) {
    SpanTimer timer(nullptr, run_.recorder, {.what = "keep kv"});
    ASSIGN_OR_RETURN(keeping_, run_.kv->Keep(run_.rank, layer, std::exchange(kept_, nullptr), stream_));
    return absl::OkStatus();
  }

  absl::Status EndKeeping() {
    const std::unique_ptr<KvKeeping> keeping = std::move(keeping_);
    return keeping == nullptr ? absl::OkStatus() : keeping->Finish();
  }

  // Computes the logits, on the last token's rank.
  absl::Status LmHead() {
    if (!ReadsHead(run_.plan, run_.rank, run_.tokens_ahead == 0)) return absl::OkStatus();
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

  // Where a layer's experts count their tokens; null: no layer has experts.
  int32_t* TokensPerExpert(int layer) const {
    if (tokens_per_expert_ == nullptr) return nullptr;
    return tokens_per_expert_->data<int32_t>() + layer * shape_.experts.count;
  }

  absl::Status ReadTokensPerExpert() {
    if (tokens_per_expert_ == nullptr) return absl::OkStatus();
    std::vector<int32_t> counts(shape_.layers * shape_.experts.count);
    RETURN_IF_ERROR(
        stream_.Download(tokens_per_expert_->data(), tokens_per_expert_->size_bytes(), counts.data()));
    output_.stats.tokens_per_expert.assign(counts.begin(), counts.end());
    return absl::OkStatus();
  }

  const RankRun& run_;
  const ModelShape& shape_;
  const ModelConfig& config_;
  Stream& stream_;
  const int64_t chunk_tokens_;
  const int64_t prefix_slots_;  // slots of cached keys, before those of the rank's chunk
  const int64_t slice_tokens_;
  RankOutput output_;
  std::optional<GatedCommunicator> gated_;  // none: the run has no gate
  Communicator& communicator_;              // of the layers
  HeadExchange exchange_;
  AttentionExecutor executor_;
  BufferRef x_;  // [chunk_tokens, hidden], f32: the residual stream
  std::map<LayerRope, RopeTables> ropes_;
  LayerBuffers buffers_;         // buffers of one slice
  BufferRef tokens_per_expert_;  // [layers, experts], i32; of dense layers 0; null: no layer has experts
  std::unique_ptr<CurrentLayer> current_;  // the layer that is in attention, or whose tokens are behind it
  std::unique_ptr<CurrentLayer> next_;     // the layer whose tokens are on their way to attention
  BufferRef kept_;                         // K and V of a layer's chunk, while slices come
  std::unique_ptr<KvKeeping> keeping_;     // goes on beside the layer; null: nothing does
};

}  // namespace

bool ReadsHead(const Plan& plan, int rank, bool wants_logits) {
  return wants_logits && plan.layout.RankOf(plan.layout.tokens() - 1) == rank;
}

absl::StatusOr<RankOutput> RunRank(const RankRun& run) {
  absl::StatusOr<RankOutput> output = Runner(run).Run();
  // What an error has left queued may read the last part, which stays as long as the feed does, then.
  if (output.ok()) run.weights.Leave(run.reader);
  return output;
}

}  // namespace meshfill
