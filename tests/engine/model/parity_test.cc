// Our logits and KV against Hugging Face transformers' (tests/parity/make_goldens.py), through the whole
// engine.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "engine/embedded_engine.h"
#include "engine/model/safetensors.h"
#include "engine/model/safetensors_folder.h"
#include "engine/prefill_engine.h"
#include "tests/engine/kept_kv.h"
#include "tests/engine/test_device.h"

namespace meshfill {
namespace {

namespace fs = std::filesystem;

// The tree where the test was built, or, on another machine, the one that it is run in.
fs::path Goldens() {
  const char* folder = std::getenv("MESHFILL_PARITY_DIR");
  return fs::path(folder == nullptr ? MESHFILL_PARITY_DIR : folder) / "goldens";
}
const fs::path kGoldens = Goldens();

std::vector<std::string> CaseNames() {
  std::vector<std::string> names;
  for (const fs::directory_entry& entry : fs::directory_iterator(kGoldens)) {
    names.push_back(entry.path().filename());
  }
  std::sort(names.begin(), names.end());
  return names;
}

template <typename T>
std::vector<T> Read(const SafetensorsFile& file, const std::string& name) {
  const TensorView* tensor = file.Find(name);
  if (tensor == nullptr || ElementTypeBytes(tensor->type) != sizeof(T)) {
    ADD_FAILURE() << file.path() << ": no tensor " << name << " of elements of " << sizeof(T) << " bytes";
    return {};
  }
  std::vector<T> values(tensor->bytes.size() / sizeof(T));
  std::memcpy(values.data(), tensor->bytes.data(), tensor->bytes.size());
  return values;
}

// What transformers answered to one prompt.
struct Golden {
  std::string name;
  std::vector<uint32_t> tokens;
  std::vector<float> logits;
  std::vector<int64_t> rows;             // tokens whose K and V are kept
  std::vector<std::vector<float>> k, v;  // by layer, [rows, kv_heads, head_dim]
  std::vector<float> k_norms, v_norms;   // [layers, kv_heads], over all tokens
  double bf16_error = 0;                 // of the logits where transformers computes in bf16
};

// By case and number of tokens.
const nlohmann::json& Bf16Errors() {
  static const nlohmann::json errors = [] {
    std::ifstream file(kGoldens.parent_path() / "bf16_errors.json");
    return nlohmann::json::parse(file);
  }();
  return errors;
}

Golden ReadGolden(const fs::path& path, int layers) {
  Golden golden;
  golden.name = path.filename();
  const auto file = SafetensorsFile::Open(path.string());
  if (!file.ok()) {
    ADD_FAILURE() << file.status();
    return golden;
  }
  golden.tokens = Read<uint32_t>(**file, "tokens");
  const nlohmann::json& errors = Bf16Errors();
  golden.bf16_error =
      errors.at(path.parent_path().filename()).at(std::to_string(golden.tokens.size())).get<double>();
  golden.logits = Read<float>(**file, "logits");
  golden.rows = Read<int64_t>(**file, "rows");
  golden.k_norms = Read<float>(**file, "k_norms");
  golden.v_norms = Read<float>(**file, "v_norms");
  for (int layer = 0; layer < layers; ++layer) {
    const std::string prefix = "layers." + std::to_string(layer);
    golden.k.push_back(Read<float>(**file, prefix + ".k"));
    golden.v.push_back(Read<float>(**file, prefix + ".v"));
  }
  return golden;
}

double Norm(std::span<const float> values) {
  double sum = 0;
  for (const float value : values) sum += double{value} * value;
  return std::sqrt(sum);
}

double Deviation(std::span<const float> values) {
  double sum = 0;
  for (const float value : values) sum += value;
  const double mean = sum / static_cast<double>(values.size());
  double squares = 0;
  for (const float value : values) squares += (value - mean) * (value - mean);
  return std::sqrt(squares / static_cast<double>(values.size()));
}

// ‖ours − theirs‖ / ‖theirs‖.
double RelativeError(std::span<const float> ours, std::span<const float> theirs) {
  if (ours.size() != theirs.size()) return INFINITY;
  std::vector<float> difference(ours.size());
  for (size_t i = 0; i < ours.size(); ++i) difference[i] = ours[i] - theirs[i];
  return Norm(difference) / Norm(theirs);
}

double LargestError(std::span<const float> ours, std::span<const float> theirs) {
  if (ours.size() != theirs.size()) return INFINITY;
  double largest = 0;
  for (size_t i = 0; i < ours.size(); ++i) {
    const double error = std::abs(double{ours[i]} - theirs[i]);
    if (!std::isfinite(error)) return INFINITY;
    largest = std::max(largest, error);
  }
  return largest;
}

std::vector<float> AsFloats(std::span<const std::byte> bytes, DType dtype) {
  std::vector<float> floats(bytes.size() / DTypeBytes(dtype));
  for (size_t i = 0; i < floats.size(); ++i) {
    const std::byte* element = bytes.data() + i * DTypeBytes(dtype);
    if (dtype == DType::kF32) {
      std::memcpy(&floats[i], element, sizeof(float));
    } else {
      BFloat16 half;
      std::memcpy(&half, element, sizeof(half));
      floats[i] = half.ToFloat();
    }
  }
  return floats;
}

// K or V of one layer: the kept rows, and the norm of each head over all tokens.
void CompareKv(const KvShape& kv, std::span<const std::byte> bytes, const Golden& golden,
               std::span<const float> kept, std::span<const float> norms, double tolerance,
               const std::string& what) {
  const std::vector<float> ours = AsFloats(bytes, kv.dtype);
  const size_t row_width = static_cast<size_t>(kv.kv_heads) * kv.head_dim;
  ASSERT_EQ(ours.size(), golden.tokens.size() * row_width) << what;
  std::vector<float> rows;
  for (const int64_t row : golden.rows) {
    rows.insert(rows.end(), &ours[row * row_width], &ours[row * row_width] + row_width);
  }
  EXPECT_LT(RelativeError(rows, kept), tolerance) << what << ", kept rows";

  for (int head = 0; head < kv.kv_heads; ++head) {
    double squares = 0;
    for (size_t token = 0; token < golden.tokens.size(); ++token) {
      const float* row = &ours[token * row_width + static_cast<size_t>(head) * kv.head_dim];
      for (int i = 0; i < kv.head_dim; ++i) squares += double{row[i]} * row[i];
    }
    EXPECT_NEAR(std::sqrt(squares) / norms[head], 1, tolerance) << what << ", norm of head " << head;
  }
}

// Prompts that take most of the time: each runs on one rank, and on one of the pools.
constexpr size_t kLongPrompt = 1024;  // tokens
constexpr size_t kPools = 3;

// How an engine spreads a prompt: `ranks` = heads · a · b.
struct Shape {
  int ranks = 1;
  std::optional<Tile> tile = std::nullopt;
  std::optional<int> heads = std::nullopt;
  std::optional<size_t> pool = std::nullopt;  // which of the pools it is
};

constexpr double kMostBf16Error = 2e-2;

// Sums of squares over the prompts of a case, computed in bf16.
struct SquaredErrors {
  double ours = 0;
  double theirs = 0;
};

// Adds to `errors` where the engine computes in bf16.
void ComparePrefill(PrefillEngine& engine, const Shape& shape, const Golden& golden, SquaredErrors& errors) {
  const bool f32 = engine.model().dtype == DType::kF32;
  PrefillOptions options;
  options.tile = shape.tile;
  options.heads = shape.heads;
  const auto result = PrefillKeepingKv(engine, golden.tokens, options);
  ASSERT_TRUE(result.ok()) << result.status();
  if (f32) {
    EXPECT_LT(LargestError(result->logits, golden.logits), 1e-3 * Deviation(golden.logits));
  } else {
    const double error = RelativeError(result->logits, golden.logits);
    const double theirs = std::min(golden.bf16_error, kMostBf16Error);
    EXPECT_LT(error, kMostBf16Error);
    errors.ours += error * error;
    errors.theirs += theirs * theirs;
  }
  ASSERT_EQ(result->kv.layers.size(), golden.k.size());
  const double tolerance = f32 ? 1e-4 : 2e-2;
  for (size_t layer = 0; layer < golden.k.size(); ++layer) {
    const std::string name = "layer " + std::to_string(layer);
    const size_t heads = static_cast<size_t>(result->kv.shape.kv_heads);
    const KeptKv::Layer& ours = result->kv.layers[layer];
    CompareKv(result->kv.shape, ours.k, golden, golden.k[layer],
              std::span(golden.k_norms).subspan(layer * heads, heads), tolerance, name + " K");
    CompareKv(result->kv.shape, ours.v, golden, golden.v[layer],
              std::span(golden.v_norms).subspan(layer * heads, heads), tolerance, name + " V");
  }
}

class ParityTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (TestsOnCuda() &&
        std::string(testing::UnitTest::GetInstance()->current_test_info()->name()).starts_with("F32")) {
      GTEST_SKIP() << "a GPU computes in bf16";
    }
  }

  // Every prompt of the case. `dtype`: of the computation, or what the model's weights call for.
  void CompareCase(std::optional<DType> dtype, const Shape& shape) {
    const fs::path folder = kGoldens / GetParam();
    EngineOptions options;
    options.model_path = folder;
    options.ranks = shape.ranks;
    options.device = TestDevice();
    options.dtype = dtype;
    options.threads = shape.ranks;
    options.peak_flops = 1e9;  // not measured: no figure of merit here
    options.speed = PoolSpeed();
    const auto engine = LoadEmbeddedEngine(options);
    for (const char* refused :
         {"rotated, of which it computes multiples of 4", "of which it computes multiples of 8"}) {
      if (TestsOnCuda() && absl::StrContains(engine.status().message(), refused)) {
        GTEST_SKIP() << engine.status().message();
      }
    }
    ASSERT_TRUE(engine.ok()) << engine.status();
    int prompts = 0;
    SquaredErrors errors;
    for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
      if (!entry.path().filename().string().starts_with("prompt_")) continue;
      SCOPED_TRACE(entry.path().filename());
      const Golden golden = ReadGolden(entry.path(), (*engine)->model().layers);
      const bool elsewhere = shape.pool.has_value() && PoolOfLongPrompts() != *shape.pool;
      if (golden.tokens.size() > kLongPrompt && elsewhere) continue;
      ComparePrefill(**engine, shape, golden, errors);
      ++prompts;
    }
    EXPECT_GT(prompts, 0);
    EXPECT_LE(std::sqrt(errors.ours), 1.2 * std::sqrt(errors.theirs)) << "the root of the squares' sum";
  }

 private:
  static size_t PoolOfLongPrompts() {
    const std::vector<std::string> names = CaseNames();
    return static_cast<size_t>(std::find(names.begin(), names.end(), GetParam()) - names.begin()) % kPools;
  }
};

// Models that are computed in bf16 unless f32 is asked for: those with bf16 or f16 weights.
std::vector<std::string> HalfWeightCaseNames() {
  std::vector<std::string> names = CaseNames();
  std::erase_if(names, [](const std::string& name) {
    const auto folder = SafetensorsFolder::Open(kGoldens / name);
    return folder.ok() &&
           std::any_of(folder->entries().begin(), folder->entries().end(), [](const auto& entry) {
             return absl::EndsWith(entry.first, "model.norm.weight") &&
                    entry.second.tensor.type == ElementType::kF32;
           });
  });
  return names;
}

using HalfWeightParityTest = ParityTest;

TEST_P(ParityTest, F32OnOneRank) { CompareCase(DType::kF32, {.ranks = 1}); }

TEST_P(ParityTest, F32OnFourRanksAs2x2) {
  CompareCase(DType::kF32, {.ranks = 4, .tile = Tile{2, 2}, .pool = 0});
}

// Every golden's heads can be split in two; with one KV head, it is replicated.
TEST_P(ParityTest, F32OnTwoHeadGroupsOfRings) {
  CompareCase(DType::kF32, {.ranks = 6, .tile = Tile{1, 3}, .heads = 2, .pool = 1});
}

TEST_P(ParityTest, F32OnThreeRanks) { CompareCase(DType::kF32, {.ranks = 3, .pool = 2}); }

TEST_P(HalfWeightParityTest, Bf16OnOneAndFourRanks) {
  CompareCase(std::nullopt, {.ranks = 1});
  CompareCase(std::nullopt, {.ranks = 4, .tile = Tile{2, 2}, .pool = 0});
}

TEST_P(HalfWeightParityTest, Bf16OnHeadGroupsAndOnThreeRanks) {
  CompareCase(std::nullopt, {.ranks = 4, .tile = Tile{2, 1}, .heads = 2, .pool = 1});
  CompareCase(std::nullopt, {.ranks = 3, .pool = 2});
}

INSTANTIATE_TEST_SUITE_P(Goldens, ParityTest, testing::ValuesIn(CaseNames()),
                         [](const testing::TestParamInfo<std::string>& info) { return info.param; });
INSTANTIATE_TEST_SUITE_P(Goldens, HalfWeightParityTest, testing::ValuesIn(HalfWeightCaseNames()),
                         [](const testing::TestParamInfo<std::string>& info) { return info.param; });

}  // namespace
}  // namespace meshfill
