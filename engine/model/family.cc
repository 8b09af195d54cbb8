#include "engine/model/family.h"

#include <algorithm>
#include <array>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/model/rope_config.h"

namespace meshfill {
namespace {

using nlohmann::json;

// This bound keeps the number of any row from overflowing (kernels/experts.h).
constexpr int64_t kMaxExperts = 4096;
constexpr int64_t kMaxUsedExperts = 256;
constexpr int64_t kMaxExpertWidth = int64_t{1} << 20;

constexpr std::array kFamilies = {&kLlamaFamily,    &kMistralFamily, &kQwen2Family,   &kQwen3Family,
                                  &kQwen3MoeFamily, &kMixtralFamily, &kGlm4MoeFamily, &kMiniMaxM2Family,
                                  &kPhi3Family,     &kGemma3Family,  &kGptOssFamily};

int ReadExpertCount(JsonKeys& keys, const ExpertKeys& names) {
  const char* other = names.other_count;
  const int64_t fallback =
      other == nullptr ? names.default_count : keys.Integer(other, names.default_count, 1, kMaxExperts);
  const int64_t count = keys.Integer(names.count, fallback, 1, kMaxExperts);
  if (other != nullptr && keys.Find(other) != nullptr && fallback != count) {
    keys.Reject(other, absl::StrCat("the config's ", names.count, " is ", count));
  }
  return static_cast<int>(count);
}

}  // namespace

std::span<const Family* const> Families() { return kFamilies; }

const Family& FamilyOf(ModelFamily family) {
  return **std::find_if(kFamilies.begin(), kFamilies.end(),
                        [&](const Family* candidate) { return candidate->family == family; });
}

std::string FamilyNames() {
  std::string names;
  for (const Family* family : kFamilies) {
    const char* between = names.empty() ? "" : family == kFamilies.back() ? " or " : ", ";
    absl::StrAppend(&names, between, family->name);
  }
  return names;
}

void SetWindows(JsonKeys& keys, const std::vector<int64_t>& windows, std::optional<int64_t> window,
                bool by_layer, ModelConfig& config) {
  std::vector<int64_t> by_type = windows;
  if (const json* types = keys.FindValue("layer_types"); types != nullptr) {
    by_type.clear();
    for (const json& type : *types) {
      if (type == "sliding_attention" && window) by_type.push_back(*window);
      if (type == "full_attention") by_type.push_back(0);
    }
    if (!types->is_array() || by_type.size() != types->size() || by_type.size() != windows.size()) {
      keys.Reject("layer_types",
                  absl::StrCat("it must name full_attention, or sliding_attention where there is a window, "
                               "for each of the ",
                               config.shape.layers, " layers"));
      return;
    }
    if (!by_layer && by_type != windows) {
      keys.Reject("layer_types",
                  "in this architecture all layers must be of the kind that sliding_window says");
      return;
    }
  }
  for (size_t layer = 0; layer < by_type.size(); ++layer) config.layers[layer].window = by_type[layer];
}

void ReadQwenWindows(JsonKeys& keys, ModelConfig& config) {
  const bool use_window = keys.Flag("use_sliding_window", false);
  const int64_t full_layers = keys.Integer("max_window_layers", 28, 0, INT32_MAX);
  keys.Find("sliding_window");  // says nothing unless use_sliding_window
  std::optional<int64_t> window;
  if (use_window) window = keys.OptionalInteger("sliding_window", kDefaultWindow, 1, kMaxPosition);
  std::vector<int64_t> windows(config.layers.size(), 0);
  for (size_t layer = full_layers; layer < windows.size(); ++layer) windows[layer] = window.value_or(0);
  SetWindows(keys, windows, window, /*by_layer=*/true, config);
}

void ReadExperts(JsonKeys& keys, const ExpertKeys& names, int64_t first, ModelConfig& config) {
  ExpertsShape& experts = config.shape.experts;
  experts.count = ReadExpertCount(keys, names);
  experts.used = static_cast<int>(keys.Integer(names.used, names.default_used, 1, kMaxUsedExperts));
  experts.width = names.width == nullptr ? config.shape.intermediate
                                         : keys.Integer(names.width, names.default_width, 1, kMaxExpertWidth);
  if (experts.used > experts.count) {
    keys.Reject(names.used,
                absl::StrCat("it must not be above the ", experts.count, " experts of ", names.count));
  }
  config.router.experts = experts.count;
  config.router.used = experts.used;
  for (size_t layer = first; layer < config.layers.size(); ++layer) {
    config.layers[layer].mlp = MlpKind::kExperts;
  }
}

void WriteExperts(const MakeModelOptions& options, const ExpertKeys& names, json& config) {
  config[names.count] = options.experts != 0 ? options.experts : 8;
  config[names.used] = options.experts_used != 0 ? options.experts_used : 2;
  if (options.expert_width != 0 || names.width != nullptr) {
    config[names.width != nullptr ? names.width : "intermediate_size"] =
        options.expert_width != 0 ? json(options.expert_width) : config["intermediate_size"];
  }
}

}  // namespace meshfill
