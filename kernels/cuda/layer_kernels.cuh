// A layer's element-wise kernels, written against a Machine: the device (layer_ops.cu), or an emulated CTA
// (tests).
//
// All of them move memory and little else. So each thread reads and writes vectors of kVector elements, which
// the launch has checked to be aligned; a warp takes a row where a row is summed or is a head, a CTA where it
// is a token's. Nothing but a warp's threads talk to each other, and rows are taken in strides of the grid,
// whatever its size. None divides by a number that the compiler does not know: a 64-bit division takes a warp
// as long as the row that it copies.
#ifndef MESHFILL_KERNELS_CUDA_LAYER_KERNELS_CUH_
#define MESHFILL_KERNELS_CUDA_LAYER_KERNELS_CUH_

#include <cmath>
#include <cstdint>

#include "kernels/cuda/divisor.h"
#include "kernels/cuda/fragments.h"
#include "kernels/cuda/narrow_matrix.h"
#include "kernels/dtype.h"
#include "kernels/stream.h"

namespace meshfill {

inline constexpr uint32_t kLayerThreads = 256;  // threads of a CTA; eight CTAs fill a multiprocessor
inline constexpr uint32_t kLayerWarps = kLayerThreads / 32;

struct Float16 {
  uint16_t bits;
};

MESHFILL_DEVICE float ToFloat(float value) { return value; }
MESHFILL_DEVICE float ToFloat(BFloat16 value) { return value.ToFloat(); }
MESHFILL_DEVICE float ToFloat(Float16 value) { return HalfToFloat(value.bits); }
MESHFILL_DEVICE void FromFloat(float value, float& to) { to = value; }
MESHFILL_DEVICE void FromFloat(float value, BFloat16& to) { to = BFloat16::FromFloat(value); }

template <class T, int kVector>
struct alignas(sizeof(T) * kVector) ElementVector {
  T at[kVector];
};

template <int kVector, class T>
MESHFILL_DEVICE void LoadVector(const T* from, float (&to)[kVector]) {
  const auto vector = *reinterpret_cast<const ElementVector<T, kVector>*>(from);
  for (int i = 0; i < kVector; ++i) to[i] = ToFloat(vector.at[i]);
}

template <int kVector, class T>
MESHFILL_DEVICE void StoreVector(const float (&from)[kVector], T* to) {
  ElementVector<T, kVector> vector;
  for (int i = 0; i < kVector; ++i) FromFloat(from[i], vector.at[i]);
  *reinterpret_cast<ElementVector<T, kVector>*>(to) = vector;
}

template <class Machine>
struct LayerKernels {
  static MESHFILL_DEVICE uint32_t Lane() { return Machine::Thread() % 32; }
  static MESHFILL_DEVICE int64_t FirstWarpRow() {
    return int64_t{Machine::Block()} * kLayerWarps + Machine::Thread() / 32;
  }
  static MESHFILL_DEVICE int64_t WarpRowStride() { return int64_t{Machine::Blocks()} * kLayerWarps; }
  static MESHFILL_DEVICE int64_t FirstThreadRow() {
    return int64_t{Machine::Block()} * kLayerThreads + Machine::Thread();
  }
  static MESHFILL_DEVICE int64_t ThreadRowStride() { return int64_t{Machine::Blocks()} * kLayerThreads; }
  static MESHFILL_DEVICE float WarpSum(float value) {
    for (int mask = 16; mask > 0; mask /= 2) value += Machine::ShuffleXor(value, mask);
    return value;
  }

  // A CTA a token.
  template <int kVector, class T>
  static MESHFILL_DEVICE void Embed(const uint32_t* ids, int64_t tokens, const T* table, int64_t width,
                                    float* x) {
    for (int64_t token = Machine::Block(); token < tokens; token += Machine::Blocks()) {
      const T* from = table + ids[token] * width;
      float* to = x + token * width;
      for (int64_t i = Machine::Thread() * kVector; i < width; i += kLayerThreads * kVector) {
        float values[kVector];
        LoadVector(from + i, values);
        StoreVector(values, to + i);
      }
    }
  }

  // A warp a token; the second reading is from the cache.
  template <int kVector>
  static MESHFILL_DEVICE void RmsNorm(const float* x, const float* weight, int64_t tokens, int64_t width,
                                      float eps, BFloat16* y) {
    for (int64_t token = FirstWarpRow(); token < tokens; token += WarpRowStride()) {
      const float* from = x + token * width;
      const float inverse =
          InverseRms(WarpSum(Squares<kVector>(from, width)), static_cast<float>(width), eps);
      for (int64_t i = Lane() * kVector; i < width; i += 32 * kVector) {
        float values[kVector], scales[kVector];
        LoadVector(from + i, values);
        LoadVector(weight + i, scales);
        for (int e = 0; e < kVector; ++e) values[e] = values[e] * inverse * scales[e];
        StoreVector(values, y + token * width + i);
      }
    }
  }

  // Normalises y as RmsNorm does, and adds the result to x.
  template <int kVector>
  static MESHFILL_DEVICE void AddRmsNorm(const float* y, const float* weight, int64_t tokens, int64_t width,
                                         float eps, float* x) {
    for (int64_t token = FirstWarpRow(); token < tokens; token += WarpRowStride()) {
      const float* from = y + token * width;
      const float inverse =
          InverseRms(WarpSum(Squares<kVector>(from, width)), static_cast<float>(width), eps);
      for (int64_t i = Lane() * kVector; i < width; i += 32 * kVector) {
        float values[kVector], scales[kVector], sums[kVector];
        LoadVector(from + i, values);
        LoadVector(weight + i, scales);
        LoadVector(x + token * width + i, sums);
        for (int e = 0; e < kVector; ++e) sums[e] += values[e] * inverse * scales[e];
        StoreVector(sums, x + token * width + i);
      }
    }
  }

  // `vectors` vectors.
  template <int kVector>
  static MESHFILL_DEVICE void Scale(float* x, int64_t vectors, float factor) {
    for (int64_t i = FirstThreadRow(); i < vectors; i += ThreadRowStride()) {
      float values[kVector];
      LoadVector(x + i * kVector, values);
      for (float& value : values) value *= factor;
      StoreVector(values, x + i * kVector);
    }
  }

  // A CTA a token, a warp a head of it, each thread pairs of its two halves.
  static MESHFILL_DEVICE void SplitQkv(const SplitQkvArgs& args) {
    const int token_heads = args.q_heads + 2 * args.kv_heads;
    for (int64_t token = Machine::Block(); token < args.tokens; token += Machine::Blocks()) {
      const BFloat16* heads = static_cast<const BFloat16*>(args.qkv) + token * token_heads * args.head_dim;
      for (int head = static_cast<int>(Machine::Thread() / 32); head < token_heads;
           head += static_cast<int>(kLayerWarps)) {
        const int k_head = head - args.q_heads, v_head = k_head - args.kv_heads;
        const BFloat16* from = heads + head * args.head_dim;
        if (v_head >= 0) {
          CopyHead(from, args.head_dim, HeadAt(args, args.v, v_head, token));
        } else if (k_head >= 0) {
          NormAndRotate(args, from, token, {args.k_norm, k_head, args.kv_heads},
                        HeadAt(args, args.k, k_head, token));
        } else {
          NormAndRotate(args, from, token, {args.q_norm, head, args.q_heads},
                        HeadAt(args, args.q, head, token));
        }
      }
    }
  }

  // A warp a row. All of its threads have read the LSE, in the exchange, when the first writes it.
  template <int kVector, class T>
  static MESHFILL_DEVICE void MergePartial(const MergePartialArgs& args) {
    for (int64_t row = FirstWarpRow(); row < args.rows; row += WarpRowStride()) {
      const float other_lse = args.other_lse[row];
      const float own_lse = Machine::ShuffleXor(args.lse[row], 0);
      if (other_lse == -INFINITY) continue;  // it has seen nothing
      const float larger = own_lse > other_lse ? own_lse : other_lse;
      const float smaller = own_lse > other_lse ? other_lse : own_lse;
      const float merged = larger + log1pf(expf(smaller - larger));
      const float own_share = expf(own_lse - merged), other_share = expf(other_lse - merged);
      const T* other_o = static_cast<const T*>(args.other_o) + row * args.head_dim;
      float* o = args.o + row * args.head_dim;
      for (int i = static_cast<int>(Lane()) * kVector; i < args.head_dim; i += 32 * kVector) {
        float own[kVector], other[kVector];
        LoadVector(o + i, own);
        LoadVector(other_o + i, other);
        for (int e = 0; e < kVector; ++e) own[e] = own_share * own[e] + other_share * other[e];
        StoreVector(own, o + i);
      }
      if (Lane() == 0) args.lse[row] = merged;
    }
  }

  // A warp a row. Where exp(sink − lse) is infinite, the factor is 0. `tokens`: args.tokens.
  template <int kVector>
  static MESHFILL_DEVICE void ApplySinks(const ApplySinksArgs& args, const Divisor& tokens) {
    for (int64_t row = FirstWarpRow(); row < args.heads * args.tokens; row += WarpRowStride()) {
      const uint32_t head = tokens.Quotient(static_cast<uint32_t>(row));
      const float factor = 1 / (1 + expf(args.sinks[head] - args.lse[row]));
      float* o = args.o + row * args.head_dim;
      for (int i = static_cast<int>(Lane()) * kVector; i < args.head_dim; i += 32 * kVector) {
        float values[kVector];
        LoadVector(o + i, values);
        for (float& value : values) value *= factor;
        StoreVector(values, o + i);
      }
    }
  }

  // What CopyHeads divides by.
  struct CopyHeadsDivisors {
    Divisor heads;
    Divisor from_width;  // tokens in a stripe
    Divisor to_width;
    explicit CopyHeadsDivisors(const CopyHeadsArgs& args)
        : heads(static_cast<uint32_t>(args.heads)),
          from_width(static_cast<uint32_t>(args.from_rows.slots.width)),  // positions are below 2^31
          to_width(static_cast<uint32_t>(args.to_rows.slots.width)) {}
  };

  // A warp a row, heads of one slot side by side.
  template <int kVector, class From, class To>
  static MESHFILL_DEVICE void CopyHeads(const CopyHeadsArgs& args, const CopyHeadsDivisors& divisors) {
    const auto row_at = [](const HeadRows& rows, const Divisor& width, int64_t head, uint32_t slot) {
      const int64_t stripe = rows.slots.base + rows.slots.stride * width.Quotient(slot);
      return head * rows.head_stride + (stripe * width.value() + width.Remainder(slot)) * rows.slot_stride;
    };
    for (int64_t row = FirstWarpRow(); row < args.tokens * args.heads; row += WarpRowStride()) {
      const uint32_t slot = divisors.heads.Quotient(static_cast<uint32_t>(row));
      const uint32_t head = divisors.heads.Remainder(static_cast<uint32_t>(row));
      const From* from =
          static_cast<const From*>(args.from) + row_at(args.from_rows, divisors.from_width, head, slot);
      To* to = static_cast<To*>(args.to) + row_at(args.to_rows, divisors.to_width, head, slot);
      for (int i = static_cast<int>(Lane()) * kVector; i < args.head_dim; i += 32 * kVector) {
        float values[kVector];
        LoadVector(from + i, values);
        StoreVector(values, to + i);
      }
    }
  }

  // Where exp(−gate) is infinite, the quotient is −0.
  template <int kVector>
  static MESHFILL_DEVICE void SwiGlu(const BFloat16* x, int64_t tokens, int64_t width, BFloat16* y) {
    Gate<kVector>(
        x, tokens, width, [](float gate) { return gate / (1 + expf(-gate)); }, y);
  }

  // (1 + tanh u) / 2 = 1 / (1 + exp(−2u)), which does not cancel far below 0.
  template <int kVector>
  static MESHFILL_DEVICE void GeGlu(const BFloat16* x, int64_t tokens, int64_t width, BFloat16* y) {
    constexpr float kTwiceRootTwoByPi = 1.5957691216f;
    const auto gelu = [](float gate) {
      return gate / (1 + expf(-kTwiceRootTwoByPi * (gate + 0.044715f * gate * gate * gate)));
    };
    Gate<kVector>(x, tokens, width, gelu, y);
  }

  // `vectors` vectors of kVector gates, each beside its up.
  template <int kVector>
  static MESHFILL_DEVICE void ClampedSwiGlu(const ActivateArgs& args, int64_t vectors) {
    const float alpha = args.activation.alpha, limit = args.activation.limit;
    const BFloat16* x = static_cast<const BFloat16*>(args.x);
    BFloat16* y = static_cast<BFloat16*>(args.y);
    for (int64_t i = FirstThreadRow(); i < vectors; i += ThreadRowStride()) {
      float pairs[2 * kVector], values[kVector];
      LoadVector(x + 2 * i * kVector, pairs);
      for (int e = 0; e < kVector; ++e) {
        float gate = pairs[2 * e], up = pairs[2 * e + 1];
        if (gate > limit) gate = limit;
        if (up > limit) up = limit;
        if (up < -limit) up = -limit;
        values[e] = gate / (1 + expf(-alpha * gate)) * (up + 1);
      }
      StoreVector(values, y + i * kVector);
    }
  }

  // `vectors` vectors.
  template <int kVector, class From, class To>
  static MESHFILL_DEVICE void Convert(const From* from, int64_t vectors, To* to) {
    for (int64_t i = FirstThreadRow(); i < vectors; i += ThreadRowStride()) {
      float values[kVector];
      LoadVector(from + i * kVector, values);
      StoreVector(values, to + i * kVector);
    }
  }

  // Matrices of `rows` rows and `width` columns each, one after the other, to bf16: a CTA a row. A thread
  // takes kVector elements that share a scale: one, or eight.
  template <int kVector>
  static MESHFILL_DEVICE void Widen(const NarrowMatrix* matrices, uint32_t all_rows, Divisor rows,
                                    uint32_t width, BFloat16* to) {
    for (uint32_t row = Machine::Block(); row < all_rows; row += Machine::Blocks()) {
      const uint32_t index = rows.Quotient(row), row_of_matrix = row - index * rows.value();
      const NarrowMatrix matrix = matrices[index];
      const uint8_t* elements = matrix.rows + int64_t{row_of_matrix} * matrix.row_bytes;
      const uint8_t* scales = elements + matrix.scales_at;
      for (uint32_t i = Machine::Thread() * kVector; i < width; i += kLayerThreads * kVector) {
        const uint32_t scale = matrix.scale_columns.Quotient(i);
        float values[kVector];
        if (matrix.fp4) {
          LoadFp4(elements, i, values);
          const float factor = E8M0ToFloat(scales[scale]);
          for (float& value : values) value *= factor;
        } else {
          const auto vector = *reinterpret_cast<const ElementVector<uint8_t, kVector>*>(elements + i);
          const float factor = reinterpret_cast<const float*>(scales)[scale];
          for (int e = 0; e < kVector; ++e) values[e] = Fp8ToFloat(vector.at[e]) * factor;
        }
        StoreVector(values, to + int64_t{row} * width + i);
      }
    }
  }

 private:
  // Element `first` and those behind it; of several, `first` is even.
  template <int kVector>
  static MESHFILL_DEVICE void LoadFp4(const uint8_t* elements, uint32_t first, float (&to)[kVector]) {
    if constexpr (kVector == 1) {
      to[0] = Fp4ToFloat(static_cast<uint8_t>(elements[first / 2] >> first % 2 * 4));
    } else {
      const auto bytes = *reinterpret_cast<const ElementVector<uint8_t, kVector / 2>*>(elements + first / 2);
      for (int e = 0; e < kVector; ++e) {
        to[e] = Fp4ToFloat(static_cast<uint8_t>(bytes.at[e / 2] >> e % 2 * 4));
      }
    }
  }

  // This thread's share of the sum of a row's squares.
  template <int kVector>
  static MESHFILL_DEVICE float Squares(const float* row, int64_t width) {
    float squares = 0;
    for (int64_t i = Lane() * kVector; i < width; i += 32 * kVector) {
      float values[kVector];
      LoadVector(row + i, values);
      for (const float value : values) squares += value * value;
    }
    return squares;
  }

  // y = activate(gate) · up, a CTA a token.
  template <int kVector, class Activate>
  static MESHFILL_DEVICE void Gate(const BFloat16* x, int64_t tokens, int64_t width, const Activate& activate,
                                   BFloat16* y) {
    for (int64_t token = Machine::Block(); token < tokens; token += Machine::Blocks()) {
      const BFloat16* gates = x + token * 2 * width;
      for (int64_t i = Machine::Thread() * kVector; i < width; i += kLayerThreads * kVector) {
        float gate[kVector], up[kVector];
        LoadVector(gates + i, gate);
        LoadVector(gates + width + i, up);
        for (int e = 0; e < kVector; ++e) gate[e] = activate(gate[e]) * up[e];
        StoreVector(gate, y + token * width + i);
      }
    }
  }

  static MESHFILL_DEVICE float InverseRms(float squares, float count, float eps) {
    return 1 / sqrtf(squares / count + eps);
  }

  static MESHFILL_DEVICE BFloat16* HeadAt(const SplitQkvArgs& args, void* heads, int head, int64_t token) {
    return static_cast<BFloat16*>(heads) +
           (head * args.chunk_tokens + args.slot_begin + token) * args.head_dim;
  }

  static MESHFILL_DEVICE void CopyHead(const BFloat16* from, int head_dim, BFloat16* to) {
    for (int i = static_cast<int>(Lane()) * 2; i < head_dim; i += 64) {
      float values[2];
      LoadVector(from + i, values);
      StoreVector(values, to + i);
    }
  }

  // The norm of one of `heads` heads; weight null: none.
  struct HeadNorm {
    const float* weight;
    int head;
    int heads;
  };

  // Over the head, or over all heads of the token, which then each of their warps sums.
  static MESHFILL_DEVICE float InverseHeadRms(const SplitQkvArgs& args, const BFloat16* from,
                                              const HeadNorm& norm) {
    const int width = args.norm_all_heads ? norm.heads * args.head_dim : args.head_dim;
    if (args.norm_all_heads) from -= norm.head * args.head_dim;
    float squares = 0;
    for (int i = static_cast<int>(Lane()) * 2; i < width; i += 64) {
      float values[2];
      LoadVector(from + i, values);
      squares += values[0] * values[0] + values[1] * values[1];
    }
    return InverseRms(WarpSum(squares), static_cast<float>(width), args.norm_eps);
  }

  static MESHFILL_DEVICE void NormAndRotate(const SplitQkvArgs& args, const BFloat16* from, int64_t token,
                                            const HeadNorm& norm, BFloat16* to) {
    const int half = args.rotated_dim / 2;
    const int64_t slot = args.slot_begin + token;
    const float* weight = norm.weight;
    float inverse = 1;
    if (weight != nullptr) {
      inverse = InverseHeadRms(args, from, norm);
      if (args.norm_all_heads) weight += norm.head * args.head_dim;
    }
    for (int i = static_cast<int>(Lane()) * 2; i < half; i += 64) {
      float low[2], high[2], cos[2], sin[2], rotated_low[2], rotated_high[2];
      LoadVector(from + i, low);
      LoadVector(from + half + i, high);
      LoadVector(args.rope_cos + slot * half + i, cos);
      LoadVector(args.rope_sin + slot * half + i, sin);
      for (int e = 0; e < 2; ++e) {
        if (weight != nullptr) {
          low[e] *= inverse * weight[i + e];
          high[e] *= inverse * weight[half + i + e];
        }
        rotated_low[e] = low[e] * cos[e] - high[e] * sin[e];
        rotated_high[e] = high[e] * cos[e] + low[e] * sin[e];
      }
      StoreVector(rotated_low, to + i);
      StoreVector(rotated_high, to + half + i);
    }
    for (int i = args.rotated_dim + static_cast<int>(Lane()) * 2; i < args.head_dim; i += 64) {
      float values[2];
      LoadVector(from + i, values);
      for (int e = 0; e < 2 && weight != nullptr; ++e) values[e] *= inverse * weight[i + e];
      StoreVector(values, to + i);
    }
  }
};

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CUDA_LAYER_KERNELS_CUH_
