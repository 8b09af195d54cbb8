#include "engine/model/rope.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numbers>
#include <system_error>
#include <thread>
#include <utility>

namespace meshfill {
namespace {

// Every step is rounded to f32 where PyTorch rounds it: at a position of 10⁶ one ulp of a frequency is 0.06
// radians. (Scalars that PyTorch holds in double are rounded where they meet a tensor.)

// theta^(2i/rotated_dim), correctly rounded.
std::vector<float> PositionPeriods(double theta, int rotated_dim) {
  std::vector<float> periods(rotated_dim / 2);
  for (int i = 0; i < rotated_dim / 2; ++i) {
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(rotated_dim);
    periods[i] =
        static_cast<float>(std::pow(static_cast<double>(static_cast<float>(theta)), double{exponent}));
  }
  return periods;
}

// Llama 3: long wavelengths are stretched, short ones kept, those between interpolated.
float Llama3Frequency(const RopeConfig& rope, float frequency) {
  const float wavelength = (1.0f / frequency) * static_cast<float>(2 * std::numbers::pi);
  const float factor = static_cast<float>(rope.factor);
  const float longest_kept = static_cast<float>(rope.original_context_tokens / rope.high_freq_factor);
  const float shortest_stretched = static_cast<float>(rope.original_context_tokens / rope.low_freq_factor);
  if (wavelength < longest_kept) return frequency;
  if (wavelength > shortest_stretched) return frequency / factor;
  const float turns = (1.0f / wavelength) * static_cast<float>(rope.original_context_tokens);
  const float smooth = (turns - static_cast<float>(rope.low_freq_factor)) /
                       static_cast<float>(rope.high_freq_factor - rope.low_freq_factor);
  return (1.0f - smooth) * frequency / factor + smooth * frequency;
}

// The dimensions between which YaRN passes from keeping frequencies to stretching them (YaRN §3.2).
std::pair<double, double> YarnCorrectionRange(const RopeConfig& rope, int rotated_dim) {
  const auto dimension_of = [&](double turns) {
    return rotated_dim * std::log(rope.original_context_tokens / (turns * 2 * std::numbers::pi)) /
           (2 * std::log(rope.theta));
  };
  double low = dimension_of(rope.beta_fast);
  double high = dimension_of(rope.beta_slow);
  if (rope.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, static_cast<double>(rotated_dim - 1));
  return {low, low == high ? high + 0.001 : high};
}

void ApplyYarn(const RopeConfig& rope, int rotated_dim, std::vector<float>& periods) {
  const auto [low, high] = YarnCorrectionRange(rope, rotated_dim);
  for (int i = 0; i < rotated_dim / 2; ++i) {
    const float ramp = std::clamp(
        (static_cast<float>(i) - static_cast<float>(low)) / static_cast<float>(high - low), 0.0f, 1.0f);
    const float keep = 1.0f - ramp;
    const float kept = 1.0f / periods[i];
    const float stretched = 1.0f / (static_cast<float>(rope.factor) * periods[i]);
    periods[i] = stretched * (1.0f - keep) + kept * keep;
  }
}

}  // namespace

std::vector<float> RopeInverseFrequencies(const RopeConfig& rope, int rotated_dim, int64_t prompt_tokens) {
  std::vector<float> frequencies = PositionPeriods(rope.theta, rotated_dim);
  if (rope.scaling == RopeScaling::kLongRope) {
    const bool is_long = static_cast<double>(prompt_tokens) > rope.original_context_tokens;
    const std::vector<float>& factors = is_long ? rope.long_factors : rope.short_factors;
    for (size_t i = 0; i < frequencies.size(); ++i) frequencies[i] *= factors[i];
  }
  if (rope.scaling == RopeScaling::kYarn) {
    ApplyYarn(rope, rotated_dim, frequencies);
    return frequencies;
  }
  for (float& frequency : frequencies) {
    frequency = 1.0f / frequency;
    if (rope.scaling == RopeScaling::kLinear) frequency /= static_cast<float>(rope.factor);
    if (rope.scaling == RopeScaling::kLlama3) frequency = Llama3Frequency(rope, frequency);
  }
  return frequencies;
}

void FillRopeTables(const RopeConfig& rope, int rotated_dim, int64_t prompt_tokens, int64_t first,
                    const SlotPositions& positions, int64_t tokens, float* cos, float* sin, int threads) {
  constexpr int64_t kTokensOfAThread = 1024;  // 2 ms, many times what a thread takes to start
  const std::vector<float> frequencies = RopeInverseFrequencies(rope, rotated_dim, prompt_tokens);
  const float scale = static_cast<float>(rope.attention_factor);
  const auto fill = [&](int64_t begin, int64_t end) {
    float* to_cos = cos + begin * std::ssize(frequencies);
    float* to_sin = sin + begin * std::ssize(frequencies);
    for (int64_t slot = begin; slot < end; ++slot) {
      const float position = static_cast<float>(first + positions.At(slot));
      for (const float frequency : frequencies) {
        const float angle = position * frequency;
        *to_cos++ = std::cos(angle) * scale;
        *to_sin++ = std::sin(angle) * scale;
      }
    }
  };
  const int64_t parts = std::clamp<int64_t>(tokens / kTokensOfAThread, 1, threads);
  std::vector<std::thread> others;
  others.reserve(parts);
  int64_t begin = 0;
  for (int64_t part = 1; part < parts; ++part) {
    const int64_t end = tokens * part / parts;
    try {
      others.emplace_back(fill, begin, end);
    } catch (const std::system_error&) {  // no thread is to be had: this one fills the rest
      break;
    }
    begin = end;
  }
  fill(begin, tokens);
  for (std::thread& other : others) other.join();
}

}  // namespace meshfill
