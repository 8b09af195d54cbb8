#include "engine/run/rank_runner.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <limits>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/model/layer.h"
#include "engine/run/timeline_recorder.h"
#include "kernels/monotonic_time.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

// Runs one rank; members are what all layers share.
class Runner {
 public:
  explicit Runner(const RankRun& run)
      : run_(run),
        shape_(run.model.shape()),
        config_(run.model.config()),
        stream_(run.stream),
        gated_(Gated(run)),
        communicator_(gated_.has_value() ? *gated_ : run.communicator) {
    for (const RankPrompt& prompt : run.prompts) {
      prompts_.push_back(std::make_unique<PromptAttention>(prompt, config_, run.rank, run.stream,
                                                           communicator_, run.wait_timeout, output_.stats,
                                                           run.recorder));
      tokens_ += prompts_.back()->tokens();
      slice_tokens_ = std::max(slice_tokens_, SliceTokens(prompt.plan, run.rank, prompt.plan.slice_tokens));
      most_slice_tokens_ = std::min(most_slice_tokens_, prompt.plan.slice_tokens);
    }
    // The tokens of several fill slices together.
    slice_tokens_ = std::min(most_slice_tokens_, std::max(slice_tokens_, tokens_));
  }

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
    for (const auto& prompt : prompts_) RETURN_IF_ERROR(prompt->Check());
    if (slices() > 1 && run_.weights.mode() != WeightMode::kResident) {
      return absl::InternalError(absl::StrCat("rank ", run_.rank, ": a plan in ", slices(),
                                              " exchanges needs two layers' weights at once"));
    }
    const bool whole = std::all_of(prompts_.begin(), prompts_.end(), [](const auto& prompt) {
      return prompt->prompt().plan.ranks() == 1 && prompt->prompt().tokens_ahead == 0;
    });
    if (prompts_.size() == 1 || whole) return absl::OkStatus();
    return absl::InternalError(absl::StrCat("rank ", run_.rank, ": ", prompts_.size(),
                                            " prompts share a pass that are not all whole on one rank"));
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

  // Slice buffers, counters, the residual stream from the embedding, and what each prompt prepares.
  absl::Status Prepare() {
    SpanTimer timer(nullptr, run_.recorder, {.what = "embed"});
    ASSIGN_OR_RETURN(x_, Elements(tokens_ * shape_.hidden, DType::kF32));
    ASSIGN_OR_RETURN(buffers_,
                     LayerBuffers::Make(stream_, SliceWidthsOf(shape_), shape_.dtype, slice_tokens_));
    if (shape_.experts.count > 0) {
      const std::vector<int32_t> zeros(shape_.layers * shape_.experts.count);
      const size_t bytes = zeros.size() * sizeof(int32_t);
      ASSIGN_OR_RETURN(tokens_per_expert_, stream_.Allocate(bytes));
      RETURN_IF_ERROR(stream_.Upload(zeros.data(), bytes, tokens_per_expert_->data()));
    }
    for (const auto& prompt : prompts_) {
      RETURN_IF_ERROR(prompt->Prepare(buffers_.wide, slice_tokens_));
    }
    int64_t first_token = 0;
    for (const RankPrompt& prompt : run_.prompts) {
      RETURN_IF_ERROR(run_.model.Embed(stream_, prompt.ids, Residual(first_token)));
      first_token += std::ssize(prompt.ids);
    }
    return absl::OkStatus();
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
    if (begins_layer) {
      for (const auto& prompt : prompts_) RETURN_IF_ERROR(prompt->SendPrefix(next));
    }
    for (int slice = 0; slice < slices(); ++slice) {
      if (layer >= 0) {
        SetRecordedLayer(layer);
        RETURN_IF_ERROR(EndLayer(slice));
        if (slice == slices() - 1) run_.on_layer_done(layer);
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
    for (const auto& prompt : prompts_) {
      RETURN_IF_ERROR(prompt->Attend(current_->shape.window, current_->sinks));
    }
    return absl::OkStatus();
  }

  absl::Status TakeLayer(int layer) {
    ASSIGN_OR_RETURN(const WeightPart* const weights, TakeWeights(layer));
    next_ = std::make_unique<CurrentLayer>(LayerShapeOf(config_, layer), weights->layer, config_.norm_eps,
                                           buffers_, stream_, TokensPerExpert(layer));
    return EndKeeping();  // the layer before's
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
      RETURN_IF_ERROR(
          body(ChunkSlice{.begin = begin, .tokens = std::min(slice_tokens_, slots.slots() - begin)}));
    }
    return absl::OkStatus();
  }

  // Slices of the exchange: of one prompt's tokens. All prompts that share a pass exchange nothing.
  int slices() const { return prompts_.front()->slices(); }
  SlotRange OwnSlots(int slice) const {
    if (prompts_.size() == 1) return prompts_.front()->OwnSlots(slice);
    return {.begin = 0, .end = tokens_};
  }

  // Computes a slice's layer up to attention: its chunks leave.
  absl::Status BeginLayer(int layer, int slice) {
    std::vector<LayerChunks> chunks;
    std::vector<Layer::Heads> heads;
    {
      SpanTimer timer(nullptr, run_.recorder, {.what = "projections"});
      for (const auto& prompt : prompts_) {
        const SlotRange slots = prompt->OwnSlots(slice);
        ASSIGN_OR_RETURN(LayerChunks own, prompt->NewChunks(slots));
        heads.push_back(prompt->HeadsOf(own, slots, next_->shape.rope));
        chunks.push_back(std::move(own));
      }
      const SlotRange slots = OwnSlots(slice);
      RETURN_IF_ERROR(ForEachSlice(slots, [&](const ChunkSlice& part) {
        return next_->ops.Project(Residual(slots.begin + part.begin), part, heads);
      }));
    }
    for (size_t i = 0; i < prompts_.size(); ++i) {
      RETURN_IF_ERROR(prompts_[i]->Begin(layer, slice, std::move(chunks[i])));
    }
    return absl::OkStatus();
  }

  // Computes a slice's layer behind attention.
  absl::Status EndLayer(int slice) {
    std::vector<LayerOutput> outputs;
    std::vector<std::vector<const void*>> parts;
    std::vector<Layer::Attended> attended;
    for (const auto& prompt : prompts_) {
      ASSIGN_OR_RETURN(LayerOutput output, prompt->FinishToTokens(slice));
      std::vector<const void*>& of_prompt = parts.emplace_back();
      for (const BufferRef& part : output.parts) of_prompt.push_back(part->data());
      attended.push_back(
          {.tokens = prompt->OwnSlots(slice).slots(), .parts = of_prompt, .dtype = output.dtype});
      outputs.push_back(std::move(output));
    }
    const SlotRange slots = OwnSlots(slice);
    return ForEachSlice(slots, [&](const ChunkSlice& part) {
      return OutputAndMlp(*current_, attended, part, Residual(slots.begin + part.begin));
    });
  }

  absl::Status OutputAndMlp(const CurrentLayer& layer, std::span<const Layer::Attended> attended,
                            const ChunkSlice& slice, float* residual) {
    {
      SpanTimer timer(nullptr, run_.recorder, {.what = "output projection"});
      RETURN_IF_ERROR(layer.ops.AddAttention(attended, slice, residual));
    }
    SpanTimer timer(nullptr, run_.recorder, {.what = "mlp"});
    return layer.ops.AddMlp(slice.tokens, residual, layer.tokens_per_expert);
  }

  absl::Status EndKeeping() {
    for (const auto& prompt : prompts_) RETURN_IF_ERROR(prompt->EndKeeping());
    return absl::OkStatus();
  }

  // Computes the logits of the prompts whose last tokens are here.
  absl::Status LmHead() {
    std::vector<const float*> last_tokens;
    int64_t first_token = 0;
    for (const auto& prompt : prompts_) {
      const auto& [plan, ids, kv, prefix, tokens_ahead] = prompt->prompt();
      if (ReadsHead(plan, run_.rank, tokens_ahead == 0)) {
        last_tokens.push_back(Residual(first_token + plan.layout.SlotOf(plan.layout.tokens() - 1)));
      }
      first_token += prompt->tokens();
    }
    if (last_tokens.empty()) return absl::OkStatus();
    SpanTimer timer(nullptr, run_.recorder, {.what = "lm head"});
    const int64_t rows = std::ssize(last_tokens);
    ASSIGN_OR_RETURN(const BufferRef normed, Elements(rows * shape_.hidden, shape_.dtype));
    for (int64_t row = 0; row < rows; ++row) {
      const size_t before = static_cast<size_t>(row * shape_.hidden) * DTypeBytes(shape_.dtype);
      RETURN_IF_ERROR(stream_.RmsNorm(last_tokens[row], run_.model.final_norm().data(), 1, shape_.hidden,
                                      config_.norm_eps, normed->data<std::byte>() + before));
    }
    ASSIGN_OR_RETURN(const BufferRef logits, Elements(rows * shape_.vocab, DType::kF32));
    std::vector<int64_t> widths;  // of the parts' [rows, width], one after the other in `logits`
    auto* piece = logits->data<float>();
    for (int part = shape_.layers; part < run_.model.parts(); ++part) {
      ASSIGN_OR_RETURN(const WeightPart* const weights, TakeWeights(part));
      widths.push_back(weights->head->out_features());
      RETURN_IF_ERROR(stream_.Gemm({.weight = weights->head.get(),
                                    .x = normed->data(),
                                    .tokens = rows,
                                    .y = piece,
                                    .y_dtype = DType::kF32}));
      piece += rows * widths.back();
    }
    std::vector<float> by_part(static_cast<size_t>(rows * shape_.vocab));
    RETURN_IF_ERROR(stream_.Download(logits->data(), logits->size_bytes(), by_part.data()));
    output_.logits.reserve(by_part.size());
    for (int64_t row = 0; row < rows; ++row) {
      auto part = by_part.begin();
      for (const int64_t width : widths) {
        output_.logits.insert(output_.logits.end(), part + row * width, part + (row + 1) * width);
        part += rows * width;
      }
    }
    return absl::OkStatus();
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
  int64_t tokens_ = 0;  // of the rank's chunks
  int64_t slice_tokens_ = 0;
  int64_t most_slice_tokens_ = std::numeric_limits<int64_t>::max();
  RankOutput output_;
  std::optional<GatedCommunicator> gated_;  // none: the run has no gate
  Communicator& communicator_;              // of the layers
  std::vector<std::unique_ptr<PromptAttention>> prompts_;
  BufferRef x_;                  // [tokens, hidden], f32: the residual stream
  LayerBuffers buffers_;         // buffers of one slice
  BufferRef tokens_per_expert_;  // [layers, experts], i32; of dense layers 0; null: no layer has experts
  std::unique_ptr<CurrentLayer> current_;  // the layer that is in attention, or whose tokens are behind it
  std::unique_ptr<CurrentLayer> next_;     // the layer whose tokens are on their way to attention
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
