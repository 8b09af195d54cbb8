// A decoder that knows nothing of Meshfill but a model's folder, in double precision, goes on from fetched K
// and V as from a prefill of the longer prompt.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "engine/embedded_engine.h"
#include "engine/kv/block_hash.h"
#include "engine/model/make_model.h"
#include "engine/model/safetensors_folder.h"
#include "tests/engine/kept_kv.h"
#include "tests/engine/random_seed.h"

namespace meshfill {
namespace {

constexpr int kLayers = 2, kHidden = 32, kIntermediate = 48, kQHeads = 4, kKvHeads = 2, kHeadDim = 8,
              kVocab = 60;
constexpr double kTheta = 10000, kNormEps = 1e-6;
constexpr int64_t kTokens = 300;

using Vector = std::vector<double>;

// A Llama, one token at a time.
class Decoder {
 public:
  explicit Decoder(const std::string& folder) : weights_(SafetensorsFolder::Open(folder).value()) {}

  void TakeKv(const KeptKv& kv) {
    for (const KeptKv::Layer& layer : kv.layers) {
      keys_.push_back(Floats(layer.k.data(), layer.k.size() / sizeof(float)));
      values_.push_back(Floats(layer.v.data(), layer.v.size() / sizeof(float)));
    }
  }

  // The logits behind one more token.
  Vector Step(uint32_t token, int64_t position) {
    const Vector embedding = Weight("model.embed_tokens");
    Vector x(embedding.begin() + int64_t{token} * kHidden,
             embedding.begin() + (int64_t{token} + 1) * kHidden);
    for (int layer = 0; layer < kLayers; ++layer) {
      const std::string prefix = "model.layers." + std::to_string(layer) + ".";
      const Vector normed = Norm(x, Weight(prefix + "input_layernorm"));
      Vector q = Times(Weight(prefix + "self_attn.q_proj"), normed);
      Vector k = Times(Weight(prefix + "self_attn.k_proj"), normed);
      const Vector v = Times(Weight(prefix + "self_attn.v_proj"), normed);
      Rotate(q, kQHeads, position);
      Rotate(k, kKvHeads, position);
      keys_[layer].insert(keys_[layer].end(), k.begin(), k.end());
      values_[layer].insert(values_[layer].end(), v.begin(), v.end());
      Add(Times(Weight(prefix + "self_attn.o_proj"), Attend(layer, q)), x);
      const Vector mlp_in = Norm(x, Weight(prefix + "post_attention_layernorm"));
      Vector gate = Times(Weight(prefix + "mlp.gate_proj"), mlp_in);
      const Vector up = Times(Weight(prefix + "mlp.up_proj"), mlp_in);
      for (size_t i = 0; i < gate.size(); ++i) gate[i] *= up[i] / (1 + std::exp(-gate[i]));
      Add(Times(Weight(prefix + "mlp.down_proj"), gate), x);
    }
    return Times(Weight("lm_head"), Norm(x, Weight("model.norm")));
  }

 private:
  static Vector Floats(const std::byte* bytes, size_t count) {
    std::vector<float> floats(count);
    std::memcpy(floats.data(), bytes, count * sizeof(float));
    return {floats.begin(), floats.end()};
  }

  Vector Weight(const std::string& name) const {
    const TensorView& tensor = weights_.Find(name + ".weight")->tensor;
    return Floats(tensor.bytes.data(), tensor.bytes.size() / sizeof(float));
  }

  static Vector Times(const Vector& matrix, const Vector& x) {
    Vector y(matrix.size() / x.size(), 0);
    for (size_t row = 0; row < y.size(); ++row) {
      for (size_t i = 0; i < x.size(); ++i) y[row] += matrix[row * x.size() + i] * x[i];
    }
    return y;
  }

  static void Add(const Vector& y, Vector& x) {
    for (size_t i = 0; i < x.size(); ++i) x[i] += y[i];
  }

  static Vector Norm(const Vector& x, const Vector& weight) {
    double squares = 0;
    for (const double value : x) squares += value * value;
    Vector y(x.size());
    const double scale = 1 / std::sqrt(squares / static_cast<double>(x.size()) + kNormEps);
    for (size_t i = 0; i < x.size(); ++i) y[i] = x[i] * scale * weight[i];
    return y;
  }

  static void Rotate(Vector& heads, int count, int64_t position) {
    for (int head = 0; head < count; ++head) {
      for (int i = 0; i < kHeadDim / 2; ++i) {
        const double angle = static_cast<double>(position) * std::pow(kTheta, -2.0 * i / kHeadDim);
        double& low = heads[head * kHeadDim + i];
        double& high = heads[head * kHeadDim + i + kHeadDim / 2];
        const double rotated = low * std::cos(angle) - high * std::sin(angle);
        high = high * std::cos(angle) + low * std::sin(angle);
        low = rotated;
      }
    }
  }

  Vector Attend(int layer, const Vector& q) const {
    const int64_t tokens = std::ssize(keys_[layer]) / (kKvHeads * kHeadDim);
    Vector attended(q.size(), 0);
    for (int head = 0; head < kQHeads; ++head) {
      const int kv_head = head / (kQHeads / kKvHeads);
      Vector scores(tokens);
      for (int64_t token = 0; token < tokens; ++token) {
        const double* const k = &keys_[layer][(token * kKvHeads + kv_head) * kHeadDim];
        for (int i = 0; i < kHeadDim; ++i)
          scores[token] += q[head * kHeadDim + i] * k[i] / std::sqrt(kHeadDim);
      }
      const double most = *std::max_element(scores.begin(), scores.end());
      double sum = 0;
      for (double& score : scores) sum += score = std::exp(score - most);
      for (int64_t token = 0; token < tokens; ++token) {
        const double* const v = &values_[layer][(token * kKvHeads + kv_head) * kHeadDim];
        for (int i = 0; i < kHeadDim; ++i) attended[head * kHeadDim + i] += scores[token] / sum * v[i];
      }
    }
    return attended;
  }

  const SafetensorsFolder weights_;
  std::vector<Vector> keys_;  // by layer: [tokens, kKvHeads, kHeadDim]
  std::vector<Vector> values_;
};

TEST(DecoderTest, GoesOnFromKeptKvAsFromAPrefillOfTheLongerPrompt) {
  const std::string folder = testing::TempDir() + "/decoder_model";
  std::filesystem::remove_all(folder);
  ASSERT_TRUE(MakeModel({.family = ModelFamily::kLlama,
                         .layers = kLayers,
                         .hidden = kHidden,
                         .intermediate = kIntermediate,
                         .q_heads = kQHeads,
                         .kv_heads = kKvHeads,
                         .head_dim = kHeadDim,
                         .vocab = kVocab,
                         .context_tokens = 4096,
                         .rope_theta = kTheta,
                         .dtype = DType::kF32,
                         .seed = 3},
                        folder)
                  .ok());
  const auto engine = LoadEmbeddedEngine({.model_path = folder,
                                          .ranks = 3,
                                          .device = "cpu",
                                          .stripe = 16,
                                          .peak_flops = 1e12,
                                          .kv_memory_bytes = 1 << 20});
  ASSERT_TRUE(engine.ok()) << engine.status();
  std::mt19937_64 random(TestSeed());
  std::vector<uint32_t> tokens(kTokens);
  for (uint32_t& token : tokens) token = Draw<uint32_t>(random, 0, kVocab - 1);
  const auto with_cache = [](std::span<const uint32_t> prompt) {
    BlockHasher hasher(16, "");
    hasher.Append(prompt);
    PrefillOptions options;
    options.block_names = std::make_shared<const KvBlockNames>(
        KvBlockNames{.tenant = "", .block_tokens = 16, .hashes = hasher.hashes()});
    return options;
  };
  // Behind a cached prefix, so that what is fetched was computed in two runs.
  const auto prefix = std::span<const uint32_t>(tokens).first(200);
  ASSERT_TRUE(RunPrefill(**engine, {prefix, with_cache(prefix)}).ok());
  const auto kept = PrefillKeepingKv(**engine, tokens, with_cache(tokens));
  ASSERT_TRUE(kept.ok()) << kept.status();
  EXPECT_EQ(kept->cached_tokens, 192);

  Decoder decoder(folder);
  decoder.TakeKv(kept->kv);
  uint32_t next = kept->top.front().token;
  for (int step = 0; step < 32; ++step) {
    tokens.push_back(next);
    const Vector decoded = decoder.Step(next, std::ssize(tokens) - 1);
    const auto prefilled = RunPrefill(**engine, {tokens, {}});
    ASSERT_TRUE(prefilled.ok()) << prefilled.status();
    ASSERT_EQ(std::ssize(decoded), kVocab);
    for (int id = 0; id < kVocab; ++id)
      ASSERT_NEAR(decoded[id], prefilled->logits[id], 1e-4) << "step " << step;
    next = prefilled->top.front().token;
    const auto best = std::max_element(decoded.begin(), decoded.end()) - decoded.begin();
    EXPECT_NEAR(decoded[best], decoded[next], 1e-4) << "step " << step;
  }
}

}  // namespace
}  // namespace meshfill
