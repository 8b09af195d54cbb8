#include "kernels/cpu/layer_ops.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "hwy/cache_control.h"

// Compiled once for each instruction set below, and chosen at run time.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/layer_ops.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// After highway.h:
#include "hwy/contrib/math/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace meshfill {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

struct Half {
  uint16_t bits;
};

// ---- Loads widen to f32 and stores round from it; a tag of one lane serves the ends of rows.

template <class D>
HWY_INLINE hn::Vec<D> LoadF32(D d, const float* from) {
  return hn::LoadU(d, from);
}

template <class D>
HWY_INLINE hn::Vec<D> LoadF32(D d, const BFloat16* from) {
  const hn::Rebind<uint16_t, D> d16;
  const hn::RebindToUnsigned<D> d32;
  const auto bits = hn::LoadU(d16, reinterpret_cast<const uint16_t*>(from));
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(d32, bits)));
}

// HalfToFloat in vectors: the exponent is moved by a multiplication, which serves subnormal numbers too.
template <class D>
HWY_INLINE hn::Vec<D> LoadF32(D d, const Half* from) {
  const hn::Rebind<uint16_t, D> d16;
  const hn::RebindToUnsigned<D> d32;
  const auto bits = hn::PromoteTo(d32, hn::LoadU(d16, reinterpret_cast<const uint16_t*>(from)));
  const auto sign = hn::ShiftLeft<16>(hn::And(bits, hn::Set(d32, 0x8000)));
  const auto magnitude = hn::ShiftLeft<13>(hn::And(bits, hn::Set(d32, 0x7fff)));
  const auto finite = hn::BitCast(d32, hn::Mul(hn::BitCast(d, magnitude), hn::Set(d, 0x1p112f)));
  const auto infinity_or_nan = hn::Or(magnitude, hn::Set(d32, 0x7f800000));
  const auto is_finite = hn::Lt(magnitude, hn::Set(d32, 0x7c00 << 13));
  return hn::BitCast(d, hn::Or(sign, hn::IfThenElse(is_finite, finite, infinity_or_nan)));
}

// Elements 2i into `even`, 2i + 1 into `odd`.
template <class D>
HWY_INLINE void LoadPairs(D d, const float* from, hn::Vec<D>& even, hn::Vec<D>& odd) {
  hn::LoadInterleaved2(d, from, even, odd);
}

template <class D>
HWY_INLINE void LoadPairs(D d, const BFloat16* from, hn::Vec<D>& even, hn::Vec<D>& odd) {
  const hn::RebindToUnsigned<D> d32;
  const auto pairs = hn::LoadU(d32, reinterpret_cast<const uint32_t*>(from));
  even = hn::BitCast(d, hn::ShiftLeft<16>(pairs));
  odd = hn::BitCast(d, hn::And(pairs, hn::Set(d32, 0xffff0000)));
}

template <class D>
HWY_INLINE void StoreF32(D d, hn::Vec<D> value, float* to) {
  hn::StoreU(value, d, to);
}

// BFloat16::FromFloat in vectors. Not the machine's own conversion, which flushes subnormal numbers.
template <class D>
HWY_INLINE hn::Vec<hn::Rebind<uint16_t, D>> RoundToBf16(D, hn::Vec<D> value) {
  const hn::Rebind<uint16_t, D> d16;
  const hn::RebindToUnsigned<D> d32;
  const auto bits = hn::BitCast(d32, value);
  const auto upper = hn::ShiftRight<16>(bits);
  const auto odd = hn::And(upper, hn::Set(d32, 1));
  const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(d32, 0x7fff))));
  const auto quiet_nan = hn::Or(upper, hn::Set(d32, 0x40));
  const auto is_nan = hn::RebindMask(d32, hn::IsNaN(value));
  return hn::TruncateTo(d16, hn::IfThenElse(is_nan, quiet_nan, rounded));
}

template <class D>
HWY_INLINE void StoreF32(D d, hn::Vec<D> value, BFloat16* to) {
  hn::StoreU(RoundToBf16(d, value), hn::Rebind<uint16_t, D>(), reinterpret_cast<uint16_t*>(to));
}

// body(d, i) for whole vectors from 0 on, then element by element to `count`.
template <class Body>
HWY_INLINE void Sweep(int64_t count, const Body& body) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = hn::Lanes(d);
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) body(d, i);
  for (; i < count; ++i) body(hn::CappedTag<float, 1>(), i);
}

template <class T>
HWY_INLINE float SumOfSquares(const T* x, int64_t count) {
  const hn::ScalableTag<float> d;
  const hn::CappedTag<float, 1> d1;
  const int64_t lanes = hn::Lanes(d);
  auto sum0 = hn::Zero(d), sum1 = hn::Zero(d);  // two chains hide half of the addition's latency
  auto rest = hn::Zero(d1);
  int64_t i = 0;
  for (; i + 2 * lanes <= count; i += 2 * lanes) {
    const auto x0 = LoadF32(d, x + i), x1 = LoadF32(d, x + i + lanes);
    sum0 = hn::MulAdd(x0, x0, sum0);
    sum1 = hn::MulAdd(x1, x1, sum1);
  }
  for (; i < count; ++i) {
    const auto x0 = LoadF32(d1, x + i);
    rest = hn::MulAdd(x0, x0, rest);
  }
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(sum0, sum1))) + hn::GetLane(rest);
}

template <class T>
HWY_INLINE float InverseRms(const T* x, int64_t count, float eps) {
  return 1.0f / std::sqrt(SumOfSquares(x, count) / static_cast<float>(count) + eps);
}

// ---- Operations.

template <class From, class To>
HWY_INLINE void ConvertRow(const From* from, int64_t count, To* to) {
  Sweep(count, [&](auto d, int64_t i) HWY_ATTR { StoreF32(d, LoadF32(d, from + i), to + i); });
}

template <class From>
void ConvertFrom(const From* from, int64_t count, DType to_dtype, void* to) {
  if (to_dtype == DType::kF32) {
    ConvertRow(from, count, static_cast<float*>(to));
  } else {
    ConvertRow(from, count, static_cast<BFloat16*>(to));
  }
}

void Convert(const void* from, DType from_dtype, int64_t count, DType to_dtype, void* to) {
  switch (from_dtype) {
    case DType::kF32:
      return ConvertFrom(static_cast<const float*>(from), count, to_dtype, to);
    case DType::kBf16:
      return ConvertFrom(static_cast<const BFloat16*>(from), count, to_dtype, to);
    case DType::kF16:
      return ConvertFrom(static_cast<const Half*>(from), count, to_dtype, to);
    case DType::kF8E4M3:
    case DType::kF4E2M1:
      return;  // have scales: NarrowMatrix
  }
}

void RoundPastCaches(const float* from, int64_t rows, int64_t columns, int64_t to_stride, BFloat16* to) {
  const hn::ScalableTag<float> d;
  const hn::Rebind<uint16_t, decltype(d)> d16;
  const int64_t lanes = hn::Lanes(d), vector_bytes = lanes * static_cast<int64_t>(sizeof(BFloat16));
  constexpr int64_t kLeastStreamed = 16;  // bytes
  for (int64_t row = 0; row < rows; ++row, from += columns, to += to_stride) {
    int64_t i = 0;
    if (vector_bytes >= kLeastStreamed && reinterpret_cast<uintptr_t>(to) % vector_bytes == 0) {
      for (; i + lanes <= columns; i += lanes) {
        hn::Stream(RoundToBf16(d, LoadF32(d, from + i)), d16, reinterpret_cast<uint16_t*>(to + i));
      }
    }
    ConvertRow(from + i, columns - i, to + i);
  }
  hwy::FlushStream();
}

template <class T>
void RmsNormRowsOf(const float* x, const float* weight, int64_t rows, int64_t width, float eps, T* y) {
  for (int64_t row = 0; row < rows; ++row, x += width, y += width) {
    const float inverse_rms = InverseRms(x, width, eps);
    Sweep(width, [&](auto d, int64_t i) HWY_ATTR {
      const auto normed = hn::Mul(LoadF32(d, x + i), hn::Set(d, inverse_rms));
      StoreF32(d, hn::Mul(normed, LoadF32(d, weight + i)), y + i);
    });
  }
}

void RmsNorm(const float* x, const float* weight, int64_t rows, int64_t width, float eps, DType dtype,
             void* y) {
  if (dtype == DType::kF32) {
    RmsNormRowsOf(x, weight, rows, width, eps, static_cast<float*>(y));
  } else {
    RmsNormRowsOf(x, weight, rows, width, eps, static_cast<BFloat16*>(y));
  }
}

void AddRmsNorm(const float* y, const float* weight, int64_t rows, int64_t width, float eps, float* x) {
  for (int64_t row = 0; row < rows; ++row, x += width, y += width) {
    const float inverse_rms = InverseRms(y, width, eps);
    Sweep(width, [&](auto d, int64_t i) HWY_ATTR {
      const auto normed = hn::Mul(LoadF32(d, y + i), hn::Set(d, inverse_rms));
      StoreF32(d, hn::MulAdd(normed, LoadF32(d, weight + i), LoadF32(d, x + i)), x + i);
    });
  }
}

void Scale(float* x, int64_t count, float factor) {
  Sweep(count, [&](auto d, int64_t i)
                   HWY_ATTR { StoreF32(d, hn::Mul(LoadF32(d, x + i), hn::Set(d, factor)), x + i); });
}

// How a head is normalised.
struct HeadNorm {
  const float* weight;  // [head_dim]; null: not at all
  float inverse_rms;
};

// `count` elements of a head times its norm; they may be rotated later.
template <class D, class T>
HWY_INLINE hn::Vec<D> LoadNormed(D d, const T* in, const HeadNorm& norm, int64_t i) {
  const auto x = LoadF32(d, in + i);
  if (norm.weight == nullptr) return x;
  return hn::Mul(hn::Mul(x, hn::Set(d, norm.inverse_rms)), LoadF32(d, norm.weight + i));
}

// One head of one token: normalised, then its first dimensions rotated.
template <class T>
HWY_INLINE void NormAndRotateHead(const T* in, const HeadNorm& norm, const float* cos, const float* sin,
                                  int head_dim, int rotated_dim, T* out) {
  const int half = rotated_dim / 2;
  Sweep(half, [&](auto d, int64_t i) HWY_ATTR {
    const auto low = LoadNormed(d, in, norm, i), high = LoadNormed(d, in, norm, half + i);
    const auto c = LoadF32(d, cos + i), s = LoadF32(d, sin + i);
    StoreF32(d, hn::NegMulAdd(high, s, hn::Mul(low, c)), out + i);
    StoreF32(d, hn::MulAdd(low, s, hn::Mul(high, c)), out + half + i);
  });
  Sweep(head_dim - rotated_dim, [&](auto d, int64_t i) HWY_ATTR {
    StoreF32(d, LoadNormed(d, in, norm, rotated_dim + i), out + rotated_dim + i);
  });
}

template <class T>
void SplitQkvTokensOf(const SplitQkvArgs& args, int64_t begin, int64_t end) {
  const int head_dim = args.head_dim, half = args.rotated_dim / 2;
  const int64_t token_width = int64_t{args.q_heads + 2 * args.kv_heads} * head_dim;
  for (int64_t token = begin; token < end; ++token) {
    const T* in = static_cast<const T*>(args.qkv) + token * token_width;
    const int64_t slot = args.slot_begin + token;
    const auto at_slot = [&](void* heads, int head) {
      return static_cast<T*>(heads) + (head * args.chunk_tokens + slot) * head_dim;
    };
    const auto norm_and_rotate = [&](const float* weight, int heads, void* out) HWY_ATTR {
      const bool each = weight != nullptr && !args.norm_all_heads;
      HeadNorm norm = {weight, 1.0f};
      if (weight != nullptr && args.norm_all_heads) {
        norm.inverse_rms = InverseRms(in, int64_t{heads} * head_dim, args.norm_eps);
      }
      for (int head = 0; head < heads; ++head, in += head_dim) {
        if (each) norm.inverse_rms = InverseRms(in, head_dim, args.norm_eps);
        NormAndRotateHead(in, norm, args.rope_cos + slot * half, args.rope_sin + slot * half, head_dim,
                          args.rotated_dim, at_slot(out, head));
        if (weight != nullptr && args.norm_all_heads) norm.weight += head_dim;
      }
    };
    norm_and_rotate(args.q_norm, args.q_heads, args.q);
    norm_and_rotate(args.k_norm, args.kv_heads, args.k);
    for (int head = 0; head < args.kv_heads; ++head, in += head_dim) {
      std::memcpy(at_slot(args.v, head), in, head_dim * sizeof(T));
    }
  }
}

void SplitQkv(const SplitQkvArgs& args, DType dtype, int64_t begin, int64_t end) {
  if (dtype == DType::kF32) {
    SplitQkvTokensOf<float>(args, begin, end);
  } else {
    SplitQkvTokensOf<BFloat16>(args, begin, end);
  }
}

template <class T>
void MergeRow(float* o, float* lse, const T* other_o, float other_lse, int head_dim) {
  constexpr float kNothingSeen = -std::numeric_limits<float>::infinity();
  if (other_lse == kNothingSeen) return;
  const float larger = std::max(*lse, other_lse), smaller = std::min(*lse, other_lse);
  const float merged = larger + std::log1p(std::exp(smaller - larger));
  const float own_share = std::exp(*lse - merged), other_share = std::exp(other_lse - merged);
  Sweep(head_dim, [&](auto d, int64_t i) HWY_ATTR {
    const auto own = hn::Mul(hn::Set(d, own_share), LoadF32(d, o + i));
    StoreF32(d, hn::MulAdd(hn::Set(d, other_share), LoadF32(d, other_o + i), own), o + i);
  });
  *lse = merged;
}

template <class T>
void MergePartialRowsOf(const MergePartialArgs& args, int64_t begin, int64_t end) {
  const T* other_o = static_cast<const T*>(args.other_o);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t at = row * args.head_dim;
    MergeRow(args.o + at, args.lse + row, other_o + at, args.other_lse[row], args.head_dim);
  }
}

void MergePartial(const MergePartialArgs& args, int64_t begin, int64_t end) {
  if (args.other_dtype == DType::kF32) {
    MergePartialRowsOf<float>(args, begin, end);
  } else {
    MergePartialRowsOf<BFloat16>(args, begin, end);
  }
}

void ApplySinks(const ApplySinksArgs& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const float share = 1.0f / (1.0f + std::exp(args.sinks[row / args.tokens] - args.lse[row]));
    float* const o = args.o + row * args.head_dim;
    Sweep(args.head_dim, [&](auto d, int64_t i)
                             HWY_ATTR { StoreF32(d, hn::Mul(LoadF32(d, o + i), hn::Set(d, share)), o + i); });
  }
}

template <class From, class To>
void CopyHeadsSlotsOf(const CopyHeadsArgs& args, int64_t begin, int64_t end) {
  const auto offset = [](const HeadRows& rows, int64_t head, int64_t slot) {
    return head * rows.head_stride + rows.slots.At(slot) * rows.slot_stride;
  };
  const auto copy_row = [&](int64_t head, int64_t slot) {
    const From* from = static_cast<const From*>(args.from) + offset(args.from_rows, head, slot);
    To* to = static_cast<To*>(args.to) + offset(args.to_rows, head, slot);
    if constexpr (std::is_same_v<From, To>) {
      std::memcpy(to, from, args.head_dim * sizeof(To));
    } else {
      ConvertRow(from, args.head_dim, to);
    }
  };
  // In the order in which they are written.
  if (args.to_rows.head_stride > args.to_rows.slot_stride) {
    for (int64_t head = 0; head < args.heads; ++head) {
      for (int64_t slot = begin; slot < end; ++slot) copy_row(head, slot);
    }
  } else {
    for (int64_t slot = begin; slot < end; ++slot) {
      for (int64_t head = 0; head < args.heads; ++head) copy_row(head, slot);
    }
  }
}

template <class From>
void CopyHeadsFrom(const CopyHeadsArgs& args, int64_t begin, int64_t end) {
  if (args.to_rows.dtype == DType::kF32) {
    CopyHeadsSlotsOf<From, float>(args, begin, end);
  } else {
    CopyHeadsSlotsOf<From, BFloat16>(args, begin, end);
  }
}

void CopyHeads(const CopyHeadsArgs& args, int64_t begin, int64_t end) {
  if (args.from_rows.dtype == DType::kF32) {
    CopyHeadsFrom<float>(args, begin, end);
  } else {
    CopyHeadsFrom<BFloat16>(args, begin, end);
  }
}

// gate · sigmoid(steepness) = gate / (1 + exp(−steepness)).
template <class D>
HWY_INLINE hn::Vec<D> TimesSigmoid(D d, hn::Vec<D> gate, hn::Vec<D> steepness) {
  // Where Exp ends (104) the quotient is already −0 in f32.
  const auto exp = hn::Exp(d, hn::Min(hn::Neg(steepness), hn::Set(d, 104.0f)));
  return hn::Div(gate, hn::Add(hn::Set(d, 1.0f), exp));
}

struct Silu {
  template <class D>
  HWY_INLINE hn::Vec<D> operator()(D d, hn::Vec<D> gate) const {
    return TimesSigmoid(d, gate, gate);
  }
};

// In its tanh form: gate/2 · (1 + tanh u) = gate · sigmoid(2u).
struct Gelu {
  template <class D>
  HWY_INLINE hn::Vec<D> operator()(D d, hn::Vec<D> gate) const {
    constexpr float kTwice = 1.5957691216057308f;  // 2·√(2/π)
    const auto cubic = hn::MulAdd(hn::Mul(gate, gate), hn::Set(d, 0.044715f * kTwice), hn::Set(d, kTwice));
    return TimesSigmoid(d, gate, hn::Mul(gate, cubic));
  }
};

// gate(g) · up.
template <class Gate, class T>
void GatedTokens(const ActivateArgs& args) {
  const T* x = static_cast<const T*>(args.x);
  T* y = static_cast<T*>(args.y);
  const int64_t width = args.width;
  for (int64_t token = 0; token < args.tokens; ++token, x += 2 * width, y += width) {
    Sweep(width, [&](auto d, int64_t i) HWY_ATTR {
      const auto gate = LoadF32(d, x + i), up = LoadF32(d, x + width + i);
      StoreF32(d, hn::Mul(Gate()(d, gate), up), y + i);
    });
  }
}

template <class T>
void ClampedSwiGluTokens(const ActivateArgs& args) {
  const T* const x = static_cast<const T*>(args.x);
  T* const y = static_cast<T*>(args.y);
  Sweep(args.tokens * args.width, [&](auto d, int64_t i) HWY_ATTR {
    hn::Vec<decltype(d)> gate, up;
    LoadPairs(d, x + 2 * i, gate, up);
    // Selects, not minima, of which a NaN would not come through.
    const auto limit = hn::Set(d, args.activation.limit), least = hn::Set(d, -args.activation.limit);
    gate = hn::IfThenElse(hn::Gt(gate, limit), limit, gate);
    up = hn::IfThenElse(hn::Gt(up, limit), limit, hn::IfThenElse(hn::Lt(up, least), least, up));
    const auto steepness = hn::Mul(hn::Set(d, args.activation.alpha), gate);
    StoreF32(d, hn::Mul(hn::Add(up, hn::Set(d, 1.0f)), TimesSigmoid(d, gate, steepness)), y + i);
  });
}

template <class T>
void ActivateTokensOf(const ActivateArgs& args) {
  switch (args.activation.gating) {
    case Gating::kSwiGlu:
      return GatedTokens<Silu, T>(args);
    case Gating::kGeGlu:
      return GatedTokens<Gelu, T>(args);
    case Gating::kClampedSwiGlu:
      return ClampedSwiGluTokens<T>(args);
  }
}

void Activate(const ActivateArgs& args, DType dtype) {
  if (dtype == DType::kF32) {
    ActivateTokensOf<float>(args);
  } else {
    ActivateTokensOf<BFloat16>(args);
  }
}

template <class T>
void AddExpertsTokensOf(const AddExpertsArgs& args, int64_t begin, int64_t end) {
  const T* y = static_cast<const T*>(args.y);
  for (int64_t token = begin; token < end; ++token) {
    float* x = args.x + token * args.width;
    const float* weights = args.rows.weight + token * args.used;
    const int32_t* rows = args.rows.row + token * args.used;
    Sweep(args.width, [&](auto d, int64_t i) HWY_ATTR {
      auto sum = LoadF32(d, x + i);
      for (int e = 0; e < args.used; ++e) {
        sum = hn::MulAdd(hn::Set(d, weights[e]), LoadF32(d, y + rows[e] * args.width + i), sum);
      }
      StoreF32(d, sum, x + i);
    });
  }
}

void AddExperts(const AddExpertsArgs& args, DType dtype, int64_t begin, int64_t end) {
  if (dtype == DType::kF32) {
    AddExpertsTokensOf<float>(args, begin, end);
  } else {
    AddExpertsTokensOf<BFloat16>(args, begin, end);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace meshfill
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace meshfill {

HWY_EXPORT(Convert);
HWY_EXPORT(RoundPastCaches);
HWY_EXPORT(RmsNorm);
HWY_EXPORT(AddRmsNorm);
HWY_EXPORT(Scale);
HWY_EXPORT(SplitQkv);
HWY_EXPORT(MergePartial);
HWY_EXPORT(ApplySinks);
HWY_EXPORT(CopyHeads);
HWY_EXPORT(Activate);
HWY_EXPORT(AddExperts);

void ConvertValues(const void* from, DType from_dtype, int64_t count, DType to_dtype, void* to) {
  if (from_dtype == to_dtype) {
    if (count > 0) std::memcpy(to, from, count * DTypeBytes(to_dtype));
    return;
  }
  HWY_DYNAMIC_DISPATCH(Convert)(from, from_dtype, count, to_dtype, to);
}

void RoundRowsPastCaches(const float* from, int64_t rows, int64_t columns, int64_t to_stride, BFloat16* to) {
  HWY_DYNAMIC_DISPATCH(RoundPastCaches)(from, rows, columns, to_stride, to);
}

void RmsNormRows(const float* x, const float* weight, int64_t rows, int64_t width, float eps, DType dtype,
                 void* y) {
  HWY_DYNAMIC_DISPATCH(RmsNorm)(x, weight, rows, width, eps, dtype, y);
}

void AddRmsNormRows(const float* y, const float* weight, int64_t rows, int64_t width, float eps, float* x) {
  HWY_DYNAMIC_DISPATCH(AddRmsNorm)(y, weight, rows, width, eps, x);
}

void ScaleValues(float* x, int64_t count, float factor) { HWY_DYNAMIC_DISPATCH(Scale)(x, count, factor); }

void SplitQkvTokens(const SplitQkvArgs& args, DType dtype, int64_t begin, int64_t end) {
  HWY_DYNAMIC_DISPATCH(SplitQkv)(args, dtype, begin, end);
}

void MergePartialRows(const MergePartialArgs& args, int64_t begin, int64_t end) {
  HWY_DYNAMIC_DISPATCH(MergePartial)(args, begin, end);
}

void ApplySinksRows(const ApplySinksArgs& args, int64_t begin, int64_t end) {
  HWY_DYNAMIC_DISPATCH(ApplySinks)(args, begin, end);
}

void CopyHeadsSlots(const CopyHeadsArgs& args, int64_t begin, int64_t end) {
  HWY_DYNAMIC_DISPATCH(CopyHeads)(args, begin, end);
}

void ActivateTokens(const ActivateArgs& args, DType dtype) { HWY_DYNAMIC_DISPATCH(Activate)(args, dtype); }

void AddExpertsTokens(const AddExpertsArgs& args, DType dtype, int64_t begin, int64_t end) {
  HWY_DYNAMIC_DISPATCH(AddExperts)(args, dtype, begin, end);
}

}  // namespace meshfill
#endif  // HWY_ONCE
