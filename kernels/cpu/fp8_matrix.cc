#include "kernels/cpu/fp8_matrix.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "kernels/cpu/host_memory.h"
#include "kernels/return_if_error.h"

// Compiled once for each instruction set below, and chosen at run time.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/fp8_matrix.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace meshfill {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

constexpr int64_t kColumns = Fp8Matrix::kTileColumns;

// Fp8ToFloat in vectors.
template <class D>
HWY_INLINE hn::Vec<D> LoadFp8(D d, const uint8_t* from) {
  const hn::Rebind<uint8_t, D> d8;
  const hn::RebindToUnsigned<D> d32;
  const hn::RebindToSigned<D> di32;
  const auto bits = hn::PromoteTo(d32, hn::LoadU(d8, from));
  const auto sign = hn::ShiftLeft<24>(hn::And(bits, hn::Set(d32, 0x80)));
  const auto magnitude = hn::And(bits, hn::Set(d32, 0x7f));
  const auto normal = hn::Add(hn::ShiftLeft<20>(magnitude), hn::Set(d32, 120u << 23));
  const auto subnormal = hn::Mul(hn::ConvertTo(d, hn::BitCast(di32, magnitude)), hn::Set(d, 0x1p-9f));
  const auto finite = hn::IfThenElse(hn::Lt(magnitude, hn::Set(d32, 8)), hn::BitCast(d32, subnormal), normal);
  const auto value = hn::IfThenElse(hn::Eq(magnitude, hn::Set(d32, 0x7f)), hn::Set(d32, 0x7fc00000), finite);
  return hn::BitCast(d, hn::Or(sign, value));
}

// The bits of BFloat16::FromFloat, one to 32 bits.
template <class D>
HWY_INLINE hn::Vec<hn::RebindToUnsigned<D>> Bf16Bits(D d, hn::Vec<D> value) {
  const hn::RebindToUnsigned<D> d32;
  const auto bits = hn::BitCast(d32, value);
  const auto upper = hn::ShiftRight<16>(bits);
  const auto odd = hn::And(upper, hn::Set(d32, 1));
  const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(d32, 0x7fff))));
  return hn::IfThenElse(hn::RebindMask(d32, hn::IsNaN(value)), hn::Or(upper, hn::Set(d32, 0x40)), rounded);
}

// 64 elements times their scales, rounded to bf16 where the compute dtype is.
void ScaleRow(const uint8_t* from, const float* scales, bool round, float* to) {
  const hn::CappedTag<float, kColumns> d;
  for (int64_t i = 0; i < kColumns; i += static_cast<int64_t>(hn::Lanes(d))) {
    auto value = hn::Mul(LoadFp8(d, from + i), hn::LoadU(d, scales + i));
    if (round) value = hn::BitCast(d, hn::ShiftLeft<16>(Bf16Bits(d, value)));
    hn::StoreU(value, d, to + i);
  }
}

// The same, to bf16.
void ScaleRowToBf16(const uint8_t* from, const float* scales, uint16_t* to) {
  const hn::CappedTag<float, kColumns> d;
  const hn::Rebind<uint16_t, decltype(d)> d16;
  for (int64_t i = 0; i < kColumns; i += static_cast<int64_t>(hn::Lanes(d))) {
    const auto value = hn::Mul(LoadFp8(d, from + i), hn::LoadU(d, scales + i));
    hn::StoreU(hn::TruncateTo(d16, Bf16Bits(d, value)), d16, to + i);
  }
}

// Two rows to bf16, an element of the one beside that of the other.
void ScalePairToBf16(const uint8_t* even, const float* even_scales, const uint8_t* odd,
                     const float* odd_scales, uint16_t* to) {
  const hn::CappedTag<float, kColumns> d;
  const hn::RebindToUnsigned<decltype(d)> d32;
  for (int64_t i = 0; i < kColumns; i += static_cast<int64_t>(hn::Lanes(d))) {
    const auto low = Bf16Bits(d, hn::Mul(LoadFp8(d, even + i), hn::LoadU(d, even_scales + i)));
    const auto high = Bf16Bits(d, hn::Mul(LoadFp8(d, odd + i), hn::LoadU(d, odd_scales + i)));
    hn::StoreU(hn::Or(low, hn::ShiftLeft<16>(high)), d32, reinterpret_cast<uint32_t*>(to + 2 * i));
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace meshfill
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace meshfill {
namespace {

HWY_EXPORT(ScaleRow);
HWY_EXPORT(ScaleRowToBf16);
HWY_EXPORT(ScalePairToBf16);

// By index along one dimension of a blocked layout, how many elements lie between it and the first.
std::vector<int64_t> PlacesAlong(const dnnl_memory_desc_t& layout, int dimension) {
  const dnnl_blocking_desc_t& blocking = layout.format_desc.blocking;
  std::vector<int64_t> places(layout.padded_dims[dimension]);
  for (int64_t index = 0; index < std::ssize(places); ++index) {
    int64_t rest = index, stride = 1;
    for (int block = blocking.inner_nblks - 1; block >= 0; --block) {
      const int64_t length = blocking.inner_blks[block];
      if (blocking.inner_idxs[block] == dimension) {
        places[index] += rest % length * stride;
        rest /= length;
      }
      stride *= length;
    }
    places[index] += rest * blocking.strides[dimension];
  }
  return places;
}

// Whether the tile's places from `first` on are `step` apart.
bool InSteps(std::span<const int64_t> places, int64_t first, int64_t step) {
  if (first + Fp8Matrix::kTileColumns > std::ssize(places)) return false;
  for (int64_t i = 0; i < Fp8Matrix::kTileColumns; ++i) {
    if (places[first + i] != places[first] + i * step) return false;
  }
  return true;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Fp8Matrix>> Fp8Matrix::Pack(std::span<const WeightRows> rows,
                                                           int64_t in_features, DType compute_dtype,
                                                           ThreadPool& pool) {
  int64_t out_features = 0;
  for (const WeightRows& source : rows) out_features += source.rows;
  std::unique_ptr<Fp8Matrix> packed(new Fp8Matrix(out_features, in_features, StackBias(rows), compute_dtype));
  const int64_t tiles = (out_features + kTileColumns - 1) / kTileColumns;
  packed->block_ = std::min(rows.front().scale_columns, in_features);
  packed->blocks_ = (in_features + packed->block_ - 1) / packed->block_;
  packed->scales_.assign(tiles * packed->blocks_ * kTileColumns, 0.0f);
  ASSIGN_OR_RETURN(packed->elements_, AllocateHostMemory(tiles * in_features * kTileColumns));
  std::vector<std::vector<uint8_t>> staging(pool.threads(), std::vector<uint8_t>(kTileColumns * in_features));
  std::vector<absl::Status> statuses(pool.threads());
  pool.ParallelFor(tiles, [&](int64_t tile, int worker) {
    if (!statuses[worker].ok()) return;
    statuses[worker] = packed->PackTile(rows, tile, staging[worker]);
  });
  for (const absl::Status& status : statuses) {
    RETURN_IF_ERROR(status);
  }
  return packed;
}

absl::Status Fp8Matrix::PackTile(std::span<const WeightRows> rows, int64_t tile,
                                 std::vector<uint8_t>& staging) {
  const int64_t begin = tile * kTileColumns, end = std::min(begin + kTileColumns, out_features());
  std::fill(staging.begin(), staging.end(), uint8_t{0});
  int64_t first = 0;  // row of the stack at which the source begins
  for (const WeightRows& source : rows) {
    const int64_t from = std::max(begin, first), until = std::min(end, first + source.rows);
    uint8_t* const to = staging.data() + (from - begin) * in_features();
    if (from < until && source.data == nullptr) {
      RETURN_IF_ERROR(source.source->Read(from - first, until - from, reinterpret_cast<std::byte*>(to)));
    } else if (from < until) {
      std::memcpy(to, static_cast<const uint8_t*>(source.data) + (from - first) * in_features(),
                  (until - from) * in_features());
    }
    for (int64_t row = from; row < until; ++row) {
      for (int64_t block = 0; block < blocks_; ++block) {
        scales_[(tile * blocks_ + block) * kTileColumns + row - begin] =
            source.ScaleOf(row - first, block * block_, in_features());
      }
    }
    first += source.rows;
  }
  uint8_t* to = elements_->data<uint8_t>() + tile * in_features() * kTileColumns;
  for (int64_t in = 0; in < in_features(); ++in) {
    for (int64_t column = 0; column < kTileColumns; ++column) *to++ = staging[column * in_features() + in];
  }
  return absl::OkStatus();
}

Fp8Matrix::Places Fp8Matrix::PlacesIn(const WideMatrix& to) {
  return {.in = PlacesAlong(to.layout.data, 0), .out = PlacesAlong(to.layout.data, 1)};
}

void Fp8Matrix::WidenTile(int64_t column, int64_t tile, const Places& places, const WideMatrix& to) const {
  static constexpr uint8_t kZeros[kTileColumns] = {};
  const int64_t source = column / kTileColumns + tile, first = tile * kTileColumns;
  const uint8_t* const elements = elements_->data<uint8_t>() + source * in_features() * kTileColumns;
  const float* const scales = scales_.data() + source * blocks_ * kTileColumns;
  const auto row = [&](int64_t in) { return in < in_features() ? elements + in * kTileColumns : kZeros; };
  const auto row_scales = [&](int64_t in) {
    return scales + std::min(in / block_, blocks_ - 1) * kTileColumns;
  };
  const bool bf16 = to.dtype == DType::kBf16, round = compute_dtype_ == DType::kBf16;
  const auto at = [&](int64_t in, int64_t out) { return places.in[in] + places.out[out]; };
  const bool contiguous = InSteps(places.out, first, 1), in_pairs = bf16 && InSteps(places.out, first, 2);
  const int64_t rows = std::ssize(places.in),
                columns = std::min(kTileColumns, std::ssize(places.out) - first);
  for (int64_t in = 0; in < rows; ++in) {
    if (in_pairs && in + 1 < rows && places.in[in + 1] == places.in[in] + 1) {
      HWY_DYNAMIC_DISPATCH(ScalePairToBf16)
      (row(in), row_scales(in), row(in + 1), row_scales(in + 1),
       static_cast<uint16_t*>(to.elements) + at(in, first));
      ++in;
    } else if (contiguous && bf16) {
      HWY_DYNAMIC_DISPATCH(ScaleRowToBf16)
      (row(in), row_scales(in), static_cast<uint16_t*>(to.elements) + at(in, first));
    } else if (contiguous) {
      HWY_DYNAMIC_DISPATCH(ScaleRow)
      (row(in), row_scales(in), round, static_cast<float*>(to.elements) + at(in, first));
    } else {
      float scaled[kTileColumns];
      HWY_DYNAMIC_DISPATCH(ScaleRow)(row(in), row_scales(in), round, scaled);
      for (int64_t i = 0; i < columns; ++i) {
        const int64_t place = at(in, first + i);
        if (bf16) {
          static_cast<BFloat16*>(to.elements)[place] = BFloat16::FromFloat(scaled[i]);
        } else {
          static_cast<float*>(to.elements)[place] = scaled[i];
        }
      }
    }
  }
}

}  // namespace meshfill
#endif  // HWY_ONCE
