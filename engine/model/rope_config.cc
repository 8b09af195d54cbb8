#include "engine/model/rope_config.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "absl/strings/str_cat.h"
#include "engine/model/strict_json.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

using nlohmann::json;

constexpr const char* kOriginalContext = "original_max_position_embeddings";
constexpr double kLeastTheta = 1.001;
constexpr double kMaxTheta = 1e18;
constexpr double kMaxRopeFactor = 1e6;
constexpr double kLeastLongRopeFactor = 1e-3;

// A number that may stand at the top of the config, in its rope object, or in both if they agree.
std::optional<double> EitherNumber(JsonKeys& top, JsonKeys& rope, const char* key, double least,
                                   double most) {
  const std::optional<double> outer = top.OptionalNumber(key, least, most);
  const std::optional<double> inner = rope.OptionalNumber(key, least, most);
  if (outer && inner && *outer != *inner) {
    rope.Reject(key, absl::StrCat("the config's own ", key, " is another"));
  }
  return inner ? inner : outer;
}

double RequiredNumber(JsonKeys& keys, const char* key, double least, double most) {
  if (keys.FindValue(key) == nullptr) keys.RejectMissing(key, "this kind of RoPE needs it");
  return keys.OptionalNumber(key, least, most).value_or(least);
}

// The attention factor that YaRN derives where the config states none (YaRN §3.4; DeepSeek's mscale).
double YarnAttentionFactor(double factor, std::optional<double> mscale,
                           std::optional<double> mscale_all_dim) {
  const auto scale = [factor](double m) { return factor <= 1 ? 1.0 : 0.1 * m * std::log(factor) + 1.0; };
  if (mscale.value_or(0) != 0 && mscale_all_dim.value_or(0) != 0) {
    return scale(*mscale) / scale(*mscale_all_dim);
  }
  return scale(1);
}

void ParseYarn(JsonKeys& keys, int64_t max_position, RopeConfig& rope) {
  rope.scaling = RopeScaling::kYarn;
  rope.factor = keys.OptionalNumber("factor", 1, kMaxRopeFactor)
                    .value_or(static_cast<double>(max_position) / rope.original_context_tokens);
  const auto non_zero_or = [&keys](const char* key, double fallback) {  // 0 is taken for absent, as published
    const double value = keys.OptionalNumber(key, 0, 1e9).value_or(0);
    return value == 0 ? fallback : value;
  };
  rope.beta_fast = non_zero_or("beta_fast", 32);
  rope.beta_slow = non_zero_or("beta_slow", 1);
  if (rope.beta_fast < rope.beta_slow) {
    keys.Reject("beta_fast", absl::StrCat("it must not be below beta_slow"));
  }
  const std::optional<double> mscale = keys.OptionalNumber("mscale", 0, 1e3);
  const std::optional<double> mscale_all_dim = keys.OptionalNumber("mscale_all_dim", 0, 1e3);
  rope.attention_factor = keys.OptionalNumber("attention_factor", 1e-3, 1e3)
                              .value_or(YarnAttentionFactor(rope.factor, mscale, mscale_all_dim));
  rope.truncate = keys.Flag("truncate", true);
}

void ParseLlama3(JsonKeys& keys, RopeConfig& rope) {
  rope.scaling = RopeScaling::kLlama3;
  rope.factor = RequiredNumber(keys, "factor", 1, kMaxRopeFactor);
  rope.low_freq_factor = RequiredNumber(keys, "low_freq_factor", 1e-6, kMaxRopeFactor);
  rope.high_freq_factor = RequiredNumber(keys, "high_freq_factor", 1e-6, kMaxRopeFactor);
  if (rope.high_freq_factor <= rope.low_freq_factor) {
    keys.Reject("high_freq_factor", "it must be above low_freq_factor");
  }
}

// The factors at `key`, one for each two rotated dimensions.
std::vector<float> RopeFactors(JsonKeys& keys, const char* key, int rotated_dim) {
  const json* values = keys.FindValue(key);
  if (values == nullptr) {
    keys.RejectMissing(key, "longrope needs it");
    return {};
  }
  std::vector<float> factors;
  for (const json& value : *values) {
    if (!values->is_array() || !value.is_number()) break;
    const auto factor = value.get<double>();
    if (!(factor >= kLeastLongRopeFactor && factor <= kMaxRopeFactor)) {
      keys.Reject(key, absl::StrCat("number ", factors.size(), " is ", factor, "; factors are from ",
                                    kLeastLongRopeFactor, " to ", kMaxRopeFactor));
      return {};
    }
    factors.push_back(static_cast<float>(factor));
  }
  if (std::ssize(factors) != rotated_dim / 2 || factors.size() != values->size()) {
    keys.Reject(key,
                absl::StrCat("it must be a list of ", rotated_dim / 2, " numbers, one for each two of the ",
                             rotated_dim, " dimensions that are rotated"));
  }
  return factors;
}

// LongRoPE (Ding et al. 2024), as Phi-3 has it: which factors count goes by the prompt's length.
void ParseLongRope(JsonKeys& top, JsonKeys& keys, int rotated_dim, int64_t max_position, RopeConfig& rope) {
  constexpr double kLeastOriginal = 2;  // the attention factor divides by its logarithm
  const std::optional<double> original =
      EitherNumber(top, keys, kOriginalContext, kLeastOriginal, kMaxPosition);
  rope.scaling = RopeScaling::kLongRope;
  if (!original) {
    return keys.RejectMissing(kOriginalContext,
                              "longrope needs it, here or beside this object: longer prompts have the long "
                              "factors");
  }
  rope.short_factors = RopeFactors(keys, "short_factor", rotated_dim);
  rope.long_factors = RopeFactors(keys, "long_factor", rotated_dim);
  rope.factor = keys.OptionalNumber("factor", 1e-3, kMaxRopeFactor)
                    .value_or(static_cast<double>(max_position) / *original);
  const double derived = rope.factor <= 1 ? 1 : std::sqrt(1 + std::log(rope.factor) / std::log(*original));
  rope.attention_factor = keys.OptionalNumber("attention_factor", 1e-3, 1e3).value_or(derived);
}

// The name of the rope object: `rope_parameters` (transformers 5) or `rope_scaling` (before); null: there is
// none.
const char* RopeObjectKey(JsonKeys& top) {
  const char* found = nullptr;
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    const json* value = top.FindValue(key);
    if (value == nullptr || (value->is_object() && value->empty())) continue;
    if (!value->is_object()) {
      top.Reject(key, "it must be an object or null");
      return nullptr;
    }
    if (found != nullptr && *top.FindValue(found) != *value) {
      top.Reject(key, absl::StrCat(found, " says something else; remove one of them"));
      return nullptr;
    }
    found = key;
  }
  return found;
}

// Rejects longrope for models whose layers do not all have the same embedding.
absl::Status RejectLongRope(JsonKeys& keys) {
  for (const char* type : {"rope_type", "type"}) {
    const json* value = keys.FindValue(type);
    if (value == nullptr || (*value != "longrope" && *value != "su")) continue;
    keys.Reject(type, "longrope is for models whose layers all have the same embedding");
  }
  return keys.status();
}

const json& NoObject() {
  static const json no_object = json::object();
  return no_object;
}

// Reads one embedding's object, and the keys that may stand at the top instead.
absl::Status ParseRopeObject(JsonKeys& top, JsonKeys& keys, bool partial, int head_dim,
                             int64_t& context_tokens, RopeConfig& rope) {
  rope.theta = EitherNumber(top, keys, "rope_theta", kLeastTheta, kMaxTheta).value_or(rope.theta);
  if (partial) {
    rope.share = EitherNumber(top, keys, "partial_rotary_factor", 1e-3, 1).value_or(rope.share);
  } else {
    top.Expect("partial_rotary_factor", 1);
    keys.Expect("partial_rotary_factor", 1);
  }
  const std::optional<double> original = EitherNumber(top, keys, kOriginalContext, 1, kMaxPosition);

  const json* type = keys.FindValue("rope_type");
  const json* old_type = keys.FindValue("type");
  if (type != nullptr && old_type != nullptr && *type != *old_type) {
    keys.Reject("type", "rope_type says another");
  }
  if (type == nullptr) type = old_type;
  if (type == nullptr || *type == "default") return keys.Finish();

  rope.original_context_tokens = original.value_or(static_cast<double>(context_tokens));
  if (*type == "linear") {
    rope.scaling = RopeScaling::kLinear;
    rope.factor = RequiredNumber(keys, "factor", 1, kMaxRopeFactor);
  } else if (*type == "llama3") {
    ParseLlama3(keys, rope);
  } else if (*type == "yarn") {
    ParseYarn(keys, context_tokens, rope);
    const double extended = rope.factor * rope.original_context_tokens;
    if (extended > static_cast<double>(kMaxPosition)) {
      keys.Reject("factor", "the context it makes is too long");
    }
    context_tokens = std::max(context_tokens, static_cast<int64_t>(std::min(extended, double{kMaxPosition})));
  } else if (*type == "longrope" || *type == "su") {  // su: in the first folders of Phi-3
    ParseLongRope(top, keys, static_cast<int>(head_dim * rope.share), context_tokens, rope);
  } else {
    keys.Reject(old_type == type ? "type" : "rope_type",
                "implemented are default, linear, llama3, yarn and longrope");
  }
  return keys.Finish();
}

// `rope_parameters`, which has an object for each kind of layer; null: there is none.
const json* RopeByLayerType(JsonKeys& top) {
  const json* value = top.FindValue("rope_parameters");
  if (value == nullptr || !value->is_object() || value->empty()) return nullptr;
  if (value->contains("full_attention") || value->contains("sliding_attention")) return value;
  top.Reject("rope_parameters",
             "in this architecture it must have an object for full_attention and one for sliding_attention");
  return nullptr;
}

absl::Status ParseRopesByLayerType(JsonKeys& top, const json& by_type, const std::string& path, bool partial,
                                   int head_dim, int64_t& context_tokens, RopeConfig& rope,
                                   RopeConfig& local) {
  const std::string prefix = "rope_parameters.";
  JsonKeys types(by_type, path, prefix);
  top.Expect("rope_scaling", nullptr);
  int64_t local_context_tokens = context_tokens;
  const struct {
    const char* type;
    int64_t& context_tokens;
    RopeConfig& rope;
  } ropes[] = {{"full_attention", context_tokens, rope}, {"sliding_attention", local_context_tokens, local}};
  for (const auto& [type, tokens, parsed] : ropes) {
    const json* value = types.FindValue(type);
    if (value != nullptr && !value->is_object()) types.Reject(type, "it must be an object");
    RETURN_IF_ERROR(types.status());
    JsonKeys keys(value == nullptr ? NoObject() : *value, path, absl::StrCat(prefix, type, "."));
    JsonKeys no_keys(NoObject(), path);
    RETURN_IF_ERROR(RejectLongRope(keys));
    RETURN_IF_ERROR(ParseRopeObject(no_keys, keys, partial, head_dim, tokens, parsed));
  }
  return types.Finish();
}

}  // namespace

absl::Status ParseRope(JsonKeys& top, const std::string& path, bool partial, int head_dim,
                       int64_t& context_tokens, RopeConfig& rope, RopeConfig* local) {
  if (local != nullptr) {
    local->theta = top.OptionalNumber("rope_local_base_freq", kLeastTheta, kMaxTheta).value_or(local->theta);
    if (const json* by_type = RopeByLayerType(top); by_type != nullptr) {
      rope.theta = top.OptionalNumber("rope_theta", kLeastTheta, kMaxTheta).value_or(rope.theta);
      return ParseRopesByLayerType(top, *by_type, path, partial, head_dim, context_tokens, rope, *local);
    }
  }
  const char* object_key = RopeObjectKey(top);
  JsonKeys keys(object_key == nullptr ? NoObject() : *top.FindValue(object_key), path,
                absl::StrCat(object_key == nullptr ? "rope_parameters" : object_key, "."));
  if (local != nullptr) {
    RETURN_IF_ERROR(RejectLongRope(keys));
  }
  return ParseRopeObject(top, keys, partial, head_dim, context_tokens, rope);
}

}  // namespace meshfill
