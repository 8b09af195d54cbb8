#include "kernels/reference/reference_device.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <limits>
#include <numbers>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/host_stream.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

double Load(const void* tensor, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::kF32:
      return static_cast<const float*>(tensor)[index];
    case DType::kBf16:
      return static_cast<const BFloat16*>(tensor)[index].ToFloat();
    case DType::kF16:
      return HalfToFloat(static_cast<const uint16_t*>(tensor)[index]);
    case DType::kF8E4M3:
      return Fp8ToFloat(static_cast<const uint8_t*>(tensor)[index]);
    case DType::kF4E2M1:
      return Fp4ToFloat(
          static_cast<uint8_t>(static_cast<const uint8_t*>(tensor)[index / 2] >> index % 2 * 4));
  }
  return std::numeric_limits<double>::quiet_NaN();
}

// f32 or bf16; rounded to f32 first, as an f32 accumulator would be.
void Store(void* tensor, DType dtype, int64_t index, double value) {
  const auto rounded = static_cast<float>(value);
  if (dtype == DType::kF32) {
    static_cast<float*>(tensor)[index] = rounded;
  } else {
    static_cast<BFloat16*>(tensor)[index] = BFloat16::FromFloat(rounded);
  }
}

class ReferenceWeight final : public PackedWeight {
 public:
  ReferenceWeight(int64_t out_features, int64_t in_features)
      : PackedWeight(out_features, in_features), w(out_features * in_features), bias(out_features, 0.0f) {}
  std::vector<float> w;     // [out, in], values of the compute dtype
  std::vector<float> bias;  // [out]
};

class ReferenceStream final : public HostStream {
 public:
  ReferenceStream(Device& device, const StopToken* stop)
      : HostStream(device), dtype_(device.dtype()), stop_(stop) {}

  absl::Status Embed(std::span<const uint32_t> ids, const void* table, DType table_dtype, int64_t width,
                     float* x) override {
    for (size_t t = 0; t < ids.size(); ++t) {
      for (int64_t i = 0; i < width; ++i) {
        Store(x, DType::kF32, t * width + i, Load(table, table_dtype, ids[t] * width + i));
      }
    }
    return Done();
  }

  absl::Status RmsNorm(const float* x, const float* weight, int64_t tokens, int64_t width, float eps,
                       void* y) override {
    for (int64_t t = 0; t < tokens; ++t) {
      const double scale = InverseRms(x, DType::kF32, t * width, width, eps);
      for (int64_t i = 0; i < width; ++i)
        Store(y, dtype_, t * width + i, x[t * width + i] * scale * weight[i]);
    }
    return Done();
  }

  absl::Status AddRmsNorm(const float* y, const float* weight, int64_t tokens, int64_t width, float eps,
                          float* x) override {
    for (int64_t t = 0; t < tokens; ++t) {
      const double scale = InverseRms(y, DType::kF32, t * width, width, eps);
      for (int64_t i = 0; i < width; ++i)
        Store(x, DType::kF32, t * width + i, x[t * width + i] + y[t * width + i] * scale * weight[i]);
    }
    return Done();
  }

  absl::Status Scale(float* x, int64_t count, float factor) override {
    for (int64_t i = 0; i < count; ++i) x[i] *= factor;
    return Done();
  }

  absl::Status Gemm(const GemmArgs& args) override {
    const auto& weight = static_cast<const ReferenceWeight&>(*args.weight);
    const int64_t in = weight.in_features(), out = weight.out_features();
    for (int64_t t = 0; t < args.tokens; ++t) {
      for (int64_t row = 0; row < out; ++row) {
        double sum = weight.bias[row];
        if (args.accumulate) sum += Load(args.y, args.y_dtype, t * out + row);
        for (int64_t i = 0; i < in; ++i) sum += Load(args.x, dtype_, t * in + i) * weight.w[row * in + i];
        Store(args.y, args.y_dtype, t * out + row, sum);
      }
    }
    return Done();
  }

  absl::Status SplitQkv(const SplitQkvArgs& args) override {
    const int64_t token_heads = args.q_heads + 2 * args.kv_heads;
    for (int64_t token = 0; token < args.tokens; ++token) {
      for (int head = 0; head < token_heads; ++head) {
        const int64_t from = (token * token_heads + head) * args.head_dim;
        const int k_head = head - args.q_heads, v_head = k_head - args.kv_heads;
        if (k_head < 0) {
          NormAndRotate(args, from, token, {args.q_norm, args.q_heads}, args.q, head);
        } else if (v_head < 0) {
          NormAndRotate(args, from, token, {args.k_norm, args.kv_heads}, args.k, k_head);
        } else {
          const int64_t to = HeadAtSlot(args, v_head, token);
          for (int i = 0; i < args.head_dim; ++i)
            Store(args.v, dtype_, to + i, Load(args.qkv, dtype_, from + i));
        }
      }
    }
    return Done();
  }

  absl::Status AttentionBlock(const AttentionBlockArgs& args) override {
    const std::vector<double> k = Read(args.k, args.kv_heads * args.k_tokens * args.head_dim);
    const std::vector<double> v = Read(args.v, args.kv_heads * args.k_tokens * args.head_dim);
    for (int head = 0; head < args.q_heads; ++head) {
      for (int64_t row = 0; row < args.q_tokens; ++row) AttendRow(args, head, row, k, v);
    }
    return Done();
  }

  absl::Status MergePartial(const MergePartialArgs& args) override {
    for (int64_t row = 0; row < args.rows; ++row) {
      std::vector<double> other(args.head_dim);
      for (int i = 0; i < args.head_dim; ++i) {
        other[i] = Load(args.other_o, args.other_dtype, row * args.head_dim + i);
      }
      MergeRow(other, args.other_lse[row], args.o + row * args.head_dim, args.lse + row);
    }
    return Done();
  }

  absl::Status ApplySinks(const ApplySinksArgs& args) override {
    for (int64_t i = 0; i < args.heads * args.tokens * args.head_dim; ++i) {
      const int64_t row = i / args.head_dim;
      const double sink = args.sinks[row / args.tokens];
      args.o[i] = static_cast<float>(args.o[i] / (1 + std::exp(sink - args.lse[row])));
    }
    return Done();
  }

  absl::Status CopyHeads(const CopyHeadsArgs& args) override {
    const auto row_at = [](const HeadRows& rows, int64_t head, int64_t slot) {
      return head * rows.head_stride + rows.slots.At(slot) * rows.slot_stride;
    };
    for (int head = 0; head < args.heads; ++head) {
      for (int64_t slot = 0; slot < args.tokens; ++slot) {
        const int64_t from = row_at(args.from_rows, head, slot), to = row_at(args.to_rows, head, slot);
        for (int i = 0; i < args.head_dim; ++i) {
          Store(args.to, args.to_rows.dtype, to + i, Load(args.from, args.from_rows.dtype, from + i));
        }
      }
    }
    return Done();
  }

  absl::Status Activate(const ActivateArgs& args) override {
    const bool pairs = args.activation.gating == Gating::kClampedSwiGlu;
    for (int64_t t = 0; t < args.tokens; ++t) {
      for (int64_t i = 0; i < args.width; ++i) {
        const int64_t gate_at = 2 * t * args.width + (pairs ? 2 * i : i);
        const double gate = Load(args.x, dtype_, gate_at);
        const double up = Load(args.x, dtype_, gate_at + (pairs ? 1 : args.width));
        Store(args.y, dtype_, t * args.width + i, Activated(args.activation, gate, up));
      }
    }
    return Done();
  }

  absl::Status Route(const RouteArgs& args) override {
    std::vector<std::vector<std::pair<int64_t, int>>> rows(
        args.rule.experts);  // token, and which of its experts
    for (int64_t t = 0; t < args.tokens; ++t) {
      const auto chosen = ChooseExperts(args.logits + t * args.rule.experts, args.correction, args.rule);
      for (int i = 0; i < args.rule.used; ++i) {
        args.rows.weight[t * args.rule.used + i] = static_cast<float>(chosen[i].second);
        rows[chosen[i].first].emplace_back(t, i);
      }
    }
    int32_t row = 0;
    for (int e = 0; e < args.rule.experts; ++e) {
      args.rows.begin[e] = row;
      if (args.tokens_per_expert != nullptr)
        args.tokens_per_expert[e] += static_cast<int32_t>(rows[e].size());
      for (const auto& [token, i] : rows[e]) {
        args.rows.token[row] = static_cast<int32_t>(token);
        args.rows.row[token * args.rule.used + i] = row++;
      }
    }
    args.rows.begin[args.rule.experts] = row;
    return Done();
  }

  absl::Status ExpertMlp(const ExpertMlpArgs& args) override {
    MultiplyByExpert(GateUpProductOf(args));
    RETURN_IF_ERROR(Activate(ActivationOf(args)));
    MultiplyByExpert(DownProductOf(args));
    return Done();
  }

  absl::Status AddExperts(const AddExpertsArgs& args) override {
    for (int64_t t = 0; t < args.tokens; ++t) {
      for (int64_t i = 0; i < args.width; ++i) {
        double sum = args.x[t * args.width + i];
        for (int64_t e = t * args.used; e < (t + 1) * args.used; ++e) {
          sum += args.rows.weight[e] * Load(args.y, dtype_, args.rows.row[e] * args.width + i);
        }
        args.x[t * args.width + i] = static_cast<float>(sum);
      }
    }
    return Done();
  }

  absl::Status Convert(const float* from, int64_t count, DType to_dtype, void* to) override {
    for (int64_t i = 0; i < count; ++i) Store(to, to_dtype, i, from[i]);
    return Done();
  }

 private:
  absl::Status Done() const {
    return stop_ == nullptr || stop_->Proceed() ? absl::OkStatus() : absl::CancelledError("stopped");
  }

  static double InverseRms(const void* x, DType dtype, int64_t from, int64_t width, double eps) {
    double squares = 0;
    for (int64_t i = 0; i < width; ++i) squares += Load(x, dtype, from + i) * Load(x, dtype, from + i);
    return 1 / std::sqrt(squares / width + eps);
  }

  static int64_t HeadAtSlot(const SplitQkvArgs& args, int head, int64_t token) {
    return (head * args.chunk_tokens + args.slot_begin + token) * args.head_dim;
  }

  struct HeadsNorm {
    const float* weight;  // null: none
    int heads;
  };

  void NormAndRotate(const SplitQkvArgs& args, int64_t from, int64_t token, const HeadsNorm& norm,
                     void* heads, int head) {
    // Elements of the heads before.
    const int64_t before = args.norm_all_heads ? int64_t{head} * args.head_dim : 0;
    const int64_t width = args.norm_all_heads ? int64_t{norm.heads} * args.head_dim : args.head_dim;
    const double scale =
        norm.weight == nullptr ? 1 : InverseRms(args.qkv, dtype_, from - before, width, args.norm_eps);
    std::vector<double> x(args.head_dim);
    for (int i = 0; i < args.head_dim; ++i) {
      x[i] =
          Load(args.qkv, dtype_, from + i) * scale * (norm.weight == nullptr ? 1 : norm.weight[before + i]);
    }
    const int64_t to = HeadAtSlot(args, head, token);
    const int half = args.rotated_dim / 2;
    for (int i = 0; i < half; ++i) {
      const double cos = args.rope_cos[(args.slot_begin + token) * half + i];
      const double sin = args.rope_sin[(args.slot_begin + token) * half + i];
      Store(heads, dtype_, to + i, x[i] * cos - x[i + half] * sin);
      Store(heads, dtype_, to + i + half, x[i + half] * cos + x[i] * sin);
    }
    for (int i = args.rotated_dim; i < args.head_dim; ++i) Store(heads, dtype_, to + i, x[i]);
  }

  static double Activated(const GatedActivation& activation, double gate, double up) {
    const double limit = activation.limit;
    switch (activation.gating) {
      case Gating::kSwiGlu:
        return gate / (1 + std::exp(-gate)) * up;
      case Gating::kGeGlu: {
        const double u = std::sqrt(2 / std::numbers::pi) * (gate + 0.044715 * gate * gate * gate);
        return gate / (1 + std::exp(-2 * u)) * up;  // (1 + tanh u) / 2, without its cancellation far below 0
      }
      case Gating::kClampedSwiGlu: {
        const double clamped = gate > limit ? limit : gate;
        const double glu = clamped / (1 + std::exp(-double{activation.alpha} * clamped));
        return glu * (1 + (up > limit ? limit : up < -limit ? -limit : up));
      }
    }
    return std::numeric_limits<double>::quiet_NaN();
  }

  void MultiplyByExpert(const ExpertGemmArgs& args) {
    for (size_t e = 0; e < args.weights.size(); ++e) {
      const auto& weight = static_cast<const ReferenceWeight&>(*args.weights[e]);
      const int64_t in = weight.in_features(), out = weight.out_features();
      for (int64_t row = args.rows.begin[e]; row < args.rows.begin[e + 1]; ++row) {
        const int64_t from = args.by_token ? args.rows.token[row] : row;
        for (int64_t y = 0; y < out; ++y) {
          double sum = weight.bias[y];
          for (int64_t i = 0; i < in; ++i) sum += Load(args.x, dtype_, from * in + i) * weight.w[y * in + i];
          Store(args.y, dtype_, row * out + y, sum);
        }
      }
    }
  }

  // The experts of one token by rising number, with their weights.
  static std::vector<std::pair<int, double>> ChooseExperts(const float* logits, const float* correction,
                                                           const RouterRule& rule) {
    std::vector<double> scores(rule.experts), choice(rule.experts);
    const double largest = *std::max_element(logits, logits + rule.experts);
    double sum = 0;
    for (int e = 0; e < rule.experts; ++e) sum += std::exp(logits[e] - largest);
    for (int e = 0; e < rule.experts; ++e) {
      scores[e] = rule.score == RouterScore::kSoftmax ? std::exp(logits[e] - largest) / sum
                                                      : 1 / (1 + std::exp(-double{logits[e]}));
      choice[e] = scores[e] + (correction == nullptr ? 0 : correction[e]);
    }
    const auto best_of = [](const std::vector<double>& values, int count) {
      std::vector<int> order(values.size());
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return values[a] > values[b]; });
      order.resize(count);
      return order;
    };
    if (rule.groups > 1) {
      const int of_group = rule.experts / rule.groups;
      std::vector<double> groups;
      for (int group = 0; group < rule.groups; ++group) {
        std::vector<double> members(choice.begin() + group * of_group,
                                    choice.begin() + (group + 1) * of_group);
        std::sort(members.begin(), members.end(), std::greater<>());
        groups.push_back(members[0] + members[1]);
      }
      std::vector<double> allowed(rule.experts, -std::numeric_limits<double>::infinity());
      for (const int group : best_of(groups, rule.used_groups)) {
        std::copy_n(choice.begin() + group * of_group, of_group, allowed.begin() + group * of_group);
      }
      choice = allowed;
    }
    std::vector<int> chosen = best_of(choice, rule.used);
    std::sort(chosen.begin(), chosen.end());
    double all = 0;
    for (const int expert : chosen) all += scores[expert];
    std::vector<std::pair<int, double>> weighted;
    for (const int expert : chosen) {
      weighted.emplace_back(expert, scores[expert] / (rule.normalised ? all : 1) * rule.scale);
    }
    return weighted;
  }

  std::vector<double> Read(const void* elements, int64_t count) const {
    std::vector<double> read(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) read[i] = Load(elements, dtype_, i);
    return read;
  }

  // The softmax of one query over the keys that it sees, in two passes, then the merge into what it carried.
  void AttendRow(const AttentionBlockArgs& args, int head, int64_t row, const std::vector<double>& k,
                 const std::vector<double>& v) {
    const int64_t q_row = head * args.q_tokens + row;
    const int64_t kv_begin = head / (args.q_heads / args.kv_heads) * args.k_tokens;
    std::vector<double> q(args.head_dim);
    for (int i = 0; i < args.head_dim; ++i) q[i] = Load(args.q, dtype_, q_row * args.head_dim + i);
    std::vector<std::pair<int64_t, double>> scores;  // key and score of each visible key
    double largest = -std::numeric_limits<double>::infinity();
    for (int64_t key = 0; key < args.k_tokens; ++key) {
      if (!args.band.Visible(row, key)) continue;
      double dot = 0;
      for (int i = 0; i < args.head_dim; ++i) dot += q[i] * k[(kv_begin + key) * args.head_dim + i];
      scores.emplace_back(key, args.scale * dot);
      largest = std::max(largest, args.scale * dot);
    }
    double sum = 0;
    std::vector<double> o(args.head_dim, 0);
    for (auto& [key, score] : scores) sum += score = std::exp(score - largest);
    for (const auto& [key, score] : scores) {
      const double share = score / sum;
      for (int i = 0; i < args.head_dim; ++i) o[i] += share * v[(kv_begin + key) * args.head_dim + i];
    }
    float* carried_o = args.o + q_row * args.head_dim;
    float* carried_lse = args.lse + q_row;
    if (!args.carry_in) {
      std::fill_n(carried_o, args.head_dim, 0.0f);
      *carried_lse = -std::numeric_limits<float>::infinity();
    }
    if (!scores.empty()) MergeRow(o, largest + std::log(sum), carried_o, carried_lse);
  }

  static void MergeRow(const std::vector<double>& other_o, double other_lse, float* o, float* lse) {
    const double larger = std::max<double>(*lse, other_lse), smaller = std::min<double>(*lse, other_lse);
    if (larger == -std::numeric_limits<double>::infinity()) return;  // neither has seen a key
    const double merged = larger + std::log1p(std::exp(smaller - larger));
    for (size_t i = 0; i < other_o.size(); ++i) {
      o[i] = static_cast<float>(std::exp(*lse - merged) * o[i] + std::exp(other_lse - merged) * other_o[i]);
    }
    *lse = static_cast<float>(merged);
  }

  const DType dtype_;
  const StopToken* const stop_;
};

class ReferenceDevice final : public Device {
 public:
  ReferenceDevice(DType dtype, const Grain& grain) : dtype_(dtype), grain_(grain) {}

  std::string name() const override { return "reference"; }
  DType dtype() const override { return dtype_; }
  Grain grain() const override { return grain_; }
  bool rows_are_independent() const override { return true; }
  bool lost() const override { return false; }

  absl::StatusOr<BufferRef> Allocate(size_t size_bytes) override {
    void* data = std::malloc(size_bytes);
    if (data == nullptr && size_bytes > 0) {
      return absl::ResourceExhaustedError(absl::StrCat("host memory: ", size_bytes, " bytes were refused"));
    }
    return std::make_shared<Buffer>(data, size_bytes, [](void* allocated, size_t) { std::free(allocated); });
  }

  absl::StatusOr<BufferRef> Place(const void* host, size_t size_bytes) override {
    return PlaceOnHost(host, size_bytes);
  }

  absl::Status Copy(std::span<const BufferCopy> copies) override { return CopyOnHost(copies); }

  absl::StatusOr<std::unique_ptr<PackedWeight>> PackWeight(std::span<const WeightRows> rows,
                                                           int64_t in_features) override {
    int64_t out_features = 0;
    for (const WeightRows& source : rows) out_features += source.rows;
    auto packed = std::make_unique<ReferenceWeight>(out_features, in_features);
    int64_t first = 0;
    for (const WeightRows& source : rows) {
      const void* data = source.data;
      std::vector<std::byte> read;
      if (data == nullptr) {
        read.resize(source.rows * ElementsBytes(source.dtype, in_features));
        RETURN_IF_ERROR(source.source->Read(0, source.rows, read.data()));
        data = read.data();
      }
      for (int64_t i = 0; i < source.rows * in_features; ++i) {
        auto value = static_cast<float>(Load(data, source.dtype, i));
        if (source.exponents != nullptr) value *= E8M0ToFloat(source.exponents[i / kMxBlock]);
        if (source.scales != nullptr) value *= source.ScaleOf(i / in_features, i % in_features, in_features);
        packed->w[first * in_features + i] =
            dtype_ == DType::kBf16 ? BFloat16::FromFloat(value).ToFloat() : value;
      }
      for (int64_t row = 0; row < source.rows && source.bias != nullptr; ++row) {
        packed->bias[first + row] = source.bias[row];
      }
      first += source.rows;
    }
    return packed;
  }

  absl::StatusOr<PackedForm> FormOf(int64_t, int64_t, const ElementKind&) override { return CannotDivide(); }
  absl::StatusOr<BufferRef> PackPanels(std::span<const WeightRows>, int64_t, int64_t, int64_t) override {
    return CannotDivide();
  }
  absl::StatusOr<std::unique_ptr<PackedWeight>> WeightOf(int64_t, int64_t, const ElementKind&, BufferRef,
                                                         std::vector<float>) override {
    return CannotDivide();
  }
  absl::StatusOr<std::unique_ptr<Stream>> NewStream(const StopToken* stop) override {
    return std::make_unique<ReferenceStream>(*this, stop);
  }

 private:
  const DType dtype_;
  const Grain grain_;
};

}  // namespace

std::unique_ptr<Device> MakeReferenceDevice(DType dtype, const Grain& grain) {
  return std::make_unique<ReferenceDevice>(dtype, grain);
}

}  // namespace meshfill
