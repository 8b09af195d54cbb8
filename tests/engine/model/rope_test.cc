#include "engine/model/rope.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <random>
#include <vector>

#include "engine/model/model_config.h"
#include "engine/model/safetensors.h"
#include "tests/engine/random_seed.h"
#include "tests/engine/temp_folder.h"

namespace meshfill {
namespace {

template <typename T>
std::vector<T> Read(const SafetensorsFile& file, const std::string& name) {
  const TensorView& tensor = *file.Find(name);
  std::vector<T> values(tensor.bytes.size() / sizeof(T));
  std::memcpy(values.data(), tensor.bytes.data(), tensor.bytes.size());
  return values;
}

// Tables that transformers computed with the parameters of published models, up to position 4,194,303.
TEST(RopeTest, AgreesWithTransformers) {
  int cases = 0;
  for (const auto& entry :
       std::filesystem::directory_iterator(std::filesystem::path(MESHFILL_PARITY_DIR) / "rope")) {
    SCOPED_TRACE(entry.path());
    const std::string config_path = entry.path() / "config.json";
    const auto config = ModelConfig::Parse(ReadWholeFile(config_path), config_path);
    ASSERT_TRUE(config.ok()) << config.status();
    const auto file = SafetensorsFile::Open(entry.path() / "rope.safetensors");
    ASSERT_TRUE(file.ok()) << file.status();
    const std::vector<float> inv_freq = Read<float>(**file, "inv_freq");
    const std::vector<float> cos = Read<float>(**file, "cos");
    const std::vector<float> sin = Read<float>(**file, "sin");
    const std::vector<int64_t> positions = Read<int64_t>(**file, "positions");
    const int64_t prompt_tokens = positions.back() + 1;

    const int head_dim = config->shape.head_dim;
    const size_t half = static_cast<size_t>(head_dim) / 2;
    const std::vector<float> ours = RopeInverseFrequencies(config->rope, head_dim, prompt_tokens);
    ASSERT_EQ(ours.size(), inv_freq.size());
    ASSERT_EQ(ours.size(), half);
    for (size_t i = 0; i < half; ++i) EXPECT_FLOAT_EQ(ours[i], inv_freq[i]) << "frequency " << i;

    for (size_t p = 0; p < positions.size(); ++p) {
      std::vector<float> our_cos(half), our_sin(half);
      FillRopeTables(config->rope, head_dim, prompt_tokens, 0, {.base = positions[p]}, 1, our_cos.data(),
                     our_sin.data());
      for (size_t i = 0; i < half; ++i) {
        // Frequencies may differ in the last place, and a position multiplies that.
        const double tolerance =
            3e-7 + static_cast<double>(positions[p]) * std::abs(double{ours[i]} - inv_freq[i]) * 1.5;
        EXPECT_NEAR(our_cos[i], cos[p * half + i], tolerance)
            << "position " << positions[p] << ", frequency " << i;
        EXPECT_NEAR(our_sin[i], sin[p * half + i], tolerance)
            << "position " << positions[p] << ", frequency " << i;
      }
    }
    ++cases;
  }
  EXPECT_GE(cases, 8);
}

// Up to the original context a prompt has longrope's short factors, and beyond it the long ones: all of its
// positions, whichever a chunk has.
TEST(RopeTest, LongRopeGoesByThePromptsLength) {
  std::mt19937_64 random(TestSeed());
  for (int round = 0; round < 20; ++round) {
    const int half = Draw(random, 1, 8);
    RopeConfig rope = {.theta = static_cast<double>(Draw(random, 100, 1000000)),
                       .scaling = RopeScaling::kLongRope};
    rope.original_context_tokens = Draw(random, 2, 100);
    for (int i = 0; i < half; ++i) {
      rope.short_factors.push_back(static_cast<float>(Draw(random, 50, 200)) / 100);
      rope.long_factors.push_back(static_cast<float>(Draw(random, 250, 6000)) / 100);
    }
    const auto original = static_cast<int64_t>(rope.original_context_tokens);
    const std::vector<float> plain = RopeInverseFrequencies({.theta = rope.theta}, 2 * half, 1);
    for (const int64_t prompt :
         {int64_t{1}, original, original + 1, Draw(random, original + 1, 10 * original)}) {
      const std::vector<float>& factors = prompt > original ? rope.long_factors : rope.short_factors;
      const std::vector<float> frequencies = RopeInverseFrequencies(rope, 2 * half, prompt);
      std::vector<float> cos(half), sin(half);
      FillRopeTables(rope, 2 * half, prompt, 0, {.base = 1}, 1, cos.data(), sin.data());
      for (int i = 0; i < half; ++i) {
        EXPECT_NEAR(frequencies[i] * factors[i] / plain[i], 1, 1e-6) << prompt << " of " << original;
        EXPECT_NEAR(cos[i], std::cos(frequencies[i]), 1e-6);
      }
    }
  }
}

// YaRN §3.2, in double: dimensions that turn more than beta_fast times in the original context are kept,
// those that turn less than beta_slow times are stretched. Ranges within the 8 frequencies, before and behind
// them, and of one dimension.
TEST(RopeTest, YarnIsTheFormula) {
  constexpr int kDim = 16;
  struct Case {
    double theta, context, beta_fast, beta_slow;
  };
  for (const Case& c :
       {Case{100, 4096, 32, 1}, Case{1e4, 4096, 32, 1}, Case{1e4, 100, 32, 1}, Case{10, 4096, 32, 1},
        Case{1e6, 32768, 4, 4}, Case{1e4, 3, 32, 1}, Case{2, 1e6, 8, 1}}) {
    for (const bool truncate : {true, false}) {
      SCOPED_TRACE(testing::Message()
                   << "theta " << c.theta << ", context " << c.context << ", beta " << c.beta_fast << " and "
                   << c.beta_slow << (truncate ? ", truncated" : ""));
      RopeConfig rope = {.theta = c.theta, .scaling = RopeScaling::kYarn, .factor = 8};
      rope.original_context_tokens = c.context;
      rope.beta_fast = c.beta_fast;
      rope.beta_slow = c.beta_slow;
      rope.truncate = truncate;
      const auto dimension = [&](double turns) {  // of the frequency that turns so often
        return kDim * std::log(c.context / (turns * 2 * M_PI)) / (2 * std::log(c.theta));
      };
      double low = dimension(c.beta_fast), high = dimension(c.beta_slow);
      if (truncate) low = std::floor(low), high = std::ceil(high);
      low = std::max(low, 0.0);
      high = std::min(high, kDim - 1.0);
      if (low == high) high += 0.001;
      const std::vector<float> frequencies = RopeInverseFrequencies(rope, kDim, 1);
      ASSERT_EQ(frequencies.size(), kDim / 2);
      for (int i = 0; i < kDim / 2; ++i) {
        const double stretched = std::clamp((i - low) / (high - low), 0.0, 1.0);
        const double plain = std::pow(c.theta, -2.0 * i / kDim);
        EXPECT_NEAR(frequencies[i] / (plain * (1 - stretched) + plain / 8 * stretched), 1, 1e-5)
            << "frequency " << i;
      }
    }
  }
}

TEST(RopeTest, PositionsCountFromTheFirst) {
  const int64_t tokens = 40;
  std::vector<float> after(2 * tokens * 4, NAN), whole(2 * (tokens + 1000) * 4, NAN);
  FillRopeTables({}, 8, tokens + 1000, 1000, {}, tokens, after.data(), after.data() + tokens * 4);
  FillRopeTables({}, 8, tokens + 1000, 0, {}, tokens + 1000, whole.data(),
                 whole.data() + (tokens + 1000) * 4);
  for (int64_t i = 0; i < tokens * 4; ++i) {
    EXPECT_EQ(after[i], whole[1000 * 4 + i]);
    EXPECT_EQ(after[tokens * 4 + i], whole[(tokens + 1000) * 4 + 1000 * 4 + i]);
  }
}

TEST(RopeTest, ThreadsFillTheSameTables) {
  const SlotPositions positions{.base = 3, .stride = 5, .width = 64};
  const int64_t tokens = 5000;
  std::vector<float> tables[2];
  for (int i = 0; i < 2; ++i) {
    tables[i].assign(2 * tokens * 4, NAN);
    FillRopeTables({}, 8, tokens, 0, positions, tokens, tables[i].data(), tables[i].data() + tokens * 4,
                   i == 0 ? 1 : 3);
  }
  EXPECT_EQ(tables[0], tables[1]);
}

// Row s of a chunk's table is the table of the token at its position, for the positions of any layout.
TEST(RopeTest, TablesFollowTheLayout) {
  std::mt19937_64 random(TestSeed());
  for (int round = 0; round < 50; ++round) {
    const int head_dim = 2 * Draw(random, 1, 32);
    const int64_t tokens = Draw<int64_t>(random, 0, 40);
    const SlotPositions positions{.base = Draw<int64_t>(random, 0, 1000),
                                  .stride = Draw<int64_t>(random, 1, 9),
                                  .width = Draw<int64_t>(random, 1, 16)};
    RopeConfig rope;
    rope.theta = Draw(random, 100, 1000000);
    rope.attention_factor = Draw(random, 1, 3) / 2.0;
    const size_t half = static_cast<size_t>(head_dim) / 2;
    std::vector<float> cos(tokens * half, NAN), sin(tokens * half, NAN);
    FillRopeTables(rope, head_dim, tokens, 0, positions, tokens, cos.data(), sin.data());
    for (int64_t slot = 0; slot < tokens; ++slot) {
      for (size_t i = 0; i < half; ++i) {
        const double angle =
            static_cast<double>(positions.At(slot)) * std::pow(rope.theta, -2.0 * i / head_dim);
        // Exponent, frequency and angle are rounded to f32, by contract.
        const double tolerance = (1e-6 + 2e-6 * angle) * rope.attention_factor;
        ASSERT_NEAR(cos[slot * half + i], rope.attention_factor * std::cos(angle), tolerance);
        ASSERT_NEAR(sin[slot * half + i], rope.attention_factor * std::sin(angle), tolerance);
      }
    }
  }
}

}  // namespace
}  // namespace meshfill
