#include "kernels/cpu/narrow_matrix.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/host_memory.h"
#include "kernels/return_if_error.h"

// Compiled once for each instruction set below, and chosen at run time.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/narrow_matrix.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace meshfill {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

constexpr int64_t kColumns = NarrowMatrix::kTileColumns, kHalf = kColumns / 2;

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

// Fp4ToFloat in vectors, of elements from i on of a tile's row.
template <class D>
HWY_INLINE hn::Vec<D> LoadFp4(D d, const uint8_t* row, int64_t i) {
  const hn::Rebind<uint8_t, D> d8;
  const hn::RebindToUnsigned<D> d32;
  const auto bytes = hn::PromoteTo(d32, hn::LoadU(d8, row + i % kHalf));
  const auto bits = i < kHalf ? bytes : hn::ShiftRight<4>(bytes);
  const auto sign = hn::ShiftLeft<28>(hn::And(bits, hn::Set(d32, 8)));
  const auto magnitude = hn::And(bits, hn::Set(d32, 7));
  const auto one_and_more = hn::Add(hn::ShiftLeft<22>(magnitude), hn::Set(d32, 126u << 23));
  const auto zero_or_half = hn::And(hn::Sub(hn::Zero(d32), magnitude), hn::Set(d32, 126u << 23));
  const auto value = hn::IfThenElse(hn::Lt(magnitude, hn::Set(d32, 2)), zero_or_half, one_and_more);
  return hn::BitCast(d, hn::Or(sign, value));
}

// A tile's row for one input feature: 64 elements and their scales.
struct Fp8Row {
  const uint8_t* elements;
  const float* scales;

  template <class D>
  HWY_INLINE hn::Vec<D> Scaled(D d, int64_t i) const {
    return hn::Mul(LoadFp8(d, elements + i), hn::LoadU(d, scales + i));
  }
};
struct Fp4Row {
  const uint8_t* elements;
  const float* scales;

  template <class D>
  HWY_INLINE hn::Vec<D> Scaled(D d, int64_t i) const {
    return hn::Mul(LoadFp4(d, elements, i), hn::LoadU(d, scales + i));
  }
};

// Rounded to bf16 where the compute dtype is.
template <class Row>
void ScaleRowOf(const Row& row, bool round, float* to) {
  const hn::CappedTag<float, kHalf> d;
  for (int64_t i = 0; i < kColumns; i += static_cast<int64_t>(hn::Lanes(d))) {
    auto value = row.Scaled(d, i);
    if (round) value = hn::BitCast(d, hn::ShiftLeft<16>(Bf16Bits(d, value)));
    hn::StoreU(value, d, to + i);
  }
}

void ScaleRow(const uint8_t* from, const float* scales, bool fp4, bool round, float* to) {
  if (fp4) {
    ScaleRowOf(Fp4Row{from, scales}, round, to);
  } else {
    ScaleRowOf(Fp8Row{from, scales}, round, to);
  }
}

// Scales a row as ScaleRowOf does, to bf16.
template <class Row>
void ScaleRowToBf16Of(const Row& row, uint16_t* to) {
  const hn::CappedTag<float, kHalf> d;
  const hn::Rebind<uint16_t, decltype(d)> d16;
  for (int64_t i = 0; i < kColumns; i += static_cast<int64_t>(hn::Lanes(d))) {
    hn::StoreU(hn::TruncateTo(d16, Bf16Bits(d, row.Scaled(d, i))), d16, to + i);
  }
}

void ScaleRowToBf16(const uint8_t* from, const float* scales, bool fp4, uint16_t* to) {
  if (fp4) {
    ScaleRowToBf16Of(Fp4Row{from, scales}, to);
  } else {
    ScaleRowToBf16Of(Fp8Row{from, scales}, to);
  }
}

// Two rows to bf16, an element of the one beside that of the other.
template <class Row>
void ScalePairToBf16Of(const Row& even, const Row& odd, uint16_t* to) {
  const hn::CappedTag<float, kHalf> d;
  const hn::RebindToUnsigned<decltype(d)> d32;
  for (int64_t i = 0; i < kColumns; i += static_cast<int64_t>(hn::Lanes(d))) {
    const auto low = Bf16Bits(d, even.Scaled(d, i)), high = Bf16Bits(d, odd.Scaled(d, i));
    hn::StoreU(hn::Or(low, hn::ShiftLeft<16>(high)), d32, reinterpret_cast<uint32_t*>(to + 2 * i));
  }
}

void ScalePairToBf16(const uint8_t* even, const float* even_scales, const uint8_t* odd,
                     const float* odd_scales, bool fp4, uint16_t* to) {
  if (fp4) {
    ScalePairToBf16Of(Fp4Row{even, even_scales}, Fp4Row{odd, odd_scales}, to);
  } else {
    ScalePairToBf16Of(Fp8Row{even, even_scales}, Fp8Row{odd, odd_scales}, to);
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

}  // namespace

NarrowMatrix::TileForm::TileForm(int64_t in_features, const ElementKind& kind)
    : dtype(kind.dtype),
      block(std::min(kind.scale_columns, in_features)),
      blocks((in_features + block - 1) / block),
      element_bytes(ElementsBytes(dtype, kTileColumns * in_features)),
      bytes(element_bytes + kTileColumns * blocks * (fp4() ? 1 : static_cast<int64_t>(sizeof(float)))) {}

ElementKind NarrowMatrix::KindOf(const WeightRows& rows) {
  return {.dtype = rows.dtype, .scale_columns = rows.dtype == DType::kF4E2M1 ? kMxBlock : rows.scale_columns};
}

PackedForm NarrowMatrix::FormOf(int64_t in_features, int64_t out_features, const ElementKind& kind) {
  const int64_t tiles = (out_features + kTileColumns - 1) / kTileColumns;
  const int64_t tile_bytes = TileForm(in_features, kind).bytes;
  return {.bytes = tiles * tile_bytes, .panel_rows = kTileColumns, .panel_bytes = tile_bytes};
}

absl::StatusOr<std::unique_ptr<NarrowMatrix>> NarrowMatrix::Pack(std::span<const WeightRows> rows,
                                                                 int64_t in_features, DType compute_dtype,
                                                                 ThreadPool& pool) {
  const int64_t out_features = RowsOf(rows);
  const ElementKind kind = KindOf(rows.front());
  const int64_t panels = FormOf(in_features, out_features, kind).panels();
  ASSIGN_OR_RETURN(BufferRef tiles, PackTiles(rows, in_features, 0, panels, pool));
  return OfTiles(in_features, out_features, kind, compute_dtype, std::move(tiles), StackBias(rows));
}

absl::StatusOr<BufferRef> NarrowMatrix::PackTiles(std::span<const WeightRows> rows, int64_t in_features,
                                                  int64_t first, int64_t tiles, ThreadPool& pool) {
  const TileForm form(in_features, KindOf(rows.front()));
  ASSIGN_OR_RETURN(BufferRef packed, AllocateHostMemory(tiles * form.bytes));
  std::vector<std::vector<uint8_t>> staging(pool.threads(), std::vector<uint8_t>(form.element_bytes));
  std::vector<absl::Status> statuses(pool.threads());
  pool.ParallelFor(tiles, [&](int64_t tile, int worker) {
    if (!statuses[worker].ok()) return;
    statuses[worker] = PackTile(rows, in_features, form, first + tile, staging[worker],
                                packed->data<uint8_t>() + tile * form.bytes);
  });
  for (const absl::Status& status : statuses) {
    RETURN_IF_ERROR(status);
  }
  return packed;
}

absl::StatusOr<std::unique_ptr<NarrowMatrix>> NarrowMatrix::OfTiles(int64_t in_features, int64_t out_features,
                                                                    const ElementKind& kind,
                                                                    DType compute_dtype, BufferRef tiles,
                                                                    std::vector<float> bias) {
  const int64_t bytes = FormOf(in_features, out_features, kind).bytes;
  if (static_cast<int64_t>(tiles->size_bytes()) != bytes) {
    return absl::InternalError(absl::StrCat("a packed weight of ", tiles->size_bytes(), " bytes, where ",
                                            out_features, " x ", in_features, " in ", DTypeName(kind.dtype),
                                            " take ", bytes));
  }
  return std::unique_ptr<NarrowMatrix>(new NarrowMatrix(out_features, in_features,
                                                        TileForm(in_features, kind), compute_dtype,
                                                        std::move(tiles), std::move(bias)));
}

absl::Status NarrowMatrix::PackTile(std::span<const WeightRows> rows, int64_t in_features,
                                    const TileForm& form, int64_t tile, std::vector<uint8_t>& staging,
                                    uint8_t* to) {
  const int64_t begin = tile * kTileColumns, end = begin + kTileColumns;
  const int64_t row_bytes = ElementsBytes(form.dtype, in_features);
  std::fill(staging.begin(), staging.end(), uint8_t{0});
  uint8_t* const exponents = to + form.element_bytes;
  auto* const scales = reinterpret_cast<float*>(exponents);  // FP8's scales
  std::fill(exponents, to + form.bytes, uint8_t{0});
  int64_t first = 0;  // row of the stack at which the source begins
  for (const WeightRows& source : rows) {
    const int64_t from = std::max(begin, first), until = std::min(end, first + source.rows);
    uint8_t* const staged = staging.data() + (from - begin) * row_bytes;
    if (from < until && source.data == nullptr) {
      RETURN_IF_ERROR(source.source->Read(from - first, until - from, reinterpret_cast<std::byte*>(staged)));
    } else if (from < until) {
      std::memcpy(staged, static_cast<const uint8_t*>(source.data) + (from - first) * row_bytes,
                  (until - from) * row_bytes);
    }
    for (int64_t row = from; row < until; ++row) {
      for (int64_t block = 0; block < form.blocks; ++block) {
        const int64_t at = block * kTileColumns + row - begin;
        if (form.fp4()) {
          exponents[at] = source.exponents[(row - first) * form.blocks + block];
        } else {
          scales[at] = source.ScaleOf(row - first, block * form.block, in_features);
        }
      }
    }
    first += source.rows;
  }
  for (int64_t in = 0; in < in_features; ++in) {
    if (!form.fp4()) {
      for (int64_t column = 0; column < kTileColumns; ++column) *to++ = staging[column * row_bytes + in];
      continue;
    }
    const auto bits = [&](int64_t column) { return staging[column * row_bytes + in / 2] >> in % 2 * 4 & 15; };
    constexpr int64_t kHalf = kTileColumns / 2;
    for (int64_t column = 0; column < kHalf; ++column) {
      *to++ = static_cast<uint8_t>(bits(column) | bits(column + kHalf) << 4);
    }
  }
  return absl::OkStatus();
}

void NarrowMatrix::WidenTile(int64_t column, int64_t tile, const BlockPlaces& places,
                             const WideBlock& to) const {
  static constexpr uint8_t kZeros[kTileColumns] = {};
  const int64_t source = column / kTileColumns + tile, first = tile * kTileColumns;
  const bool fp4 = form_.fp4();
  const int64_t row_bytes = ElementsBytes(form_.dtype, kTileColumns);
  const uint8_t* const elements = tiles_->data<uint8_t>() + source * form_.bytes;
  const uint8_t* const exponents = elements + form_.element_bytes;
  // Scales of the block's features, from the first one's on.
  const int64_t last_in = to.first_in + to.in_features() - 1;
  const int64_t first_scales = to.first_in / form_.block, last_scales = last_in / form_.block;
  std::vector<float> powers;
  if (fp4) {
    powers.resize((last_scales + 1 - first_scales) * kTileColumns);
    std::transform(exponents + first_scales * kTileColumns, exponents + (last_scales + 1) * kTileColumns,
                   powers.begin(), E8M0ToFloat);
  }
  const float* const scales =
      fp4 ? powers.data() : reinterpret_cast<const float*>(exponents) + first_scales * kTileColumns;
  const auto row = [&](int64_t in) {
    return in < to.in_features() ? elements + (to.first_in + in) * row_bytes : kZeros;
  };
  const auto row_scales = [&](int64_t in) {
    return scales + (std::min(to.first_in + in, last_in) / form_.block - first_scales) * kTileColumns;
  };
  const bool bf16 = to.dtype == DType::kBf16, round = compute_dtype_ == DType::kBf16;
  const auto at = [&](int64_t in, int64_t out) { return places.in[in] + places.out[out]; };
  const bool contiguous = places.InSteps(first, kTileColumns, 1),
             in_pairs = bf16 && places.InSteps(first, kTileColumns, 2);
  const int64_t rows = std::ssize(places.in),
                columns = std::min(kTileColumns, std::ssize(places.out) - first);
  for (int64_t in = 0; in < rows; ++in) {
    if (in_pairs && in + 1 < rows && places.in[in + 1] == places.in[in] + 1) {
      HWY_DYNAMIC_DISPATCH(ScalePairToBf16)
      (row(in), row_scales(in), row(in + 1), row_scales(in + 1), fp4,
       static_cast<uint16_t*>(to.elements) + at(in, first));
      ++in;
    } else if (contiguous && bf16) {
      HWY_DYNAMIC_DISPATCH(ScaleRowToBf16)
      (row(in), row_scales(in), fp4, static_cast<uint16_t*>(to.elements) + at(in, first));
    } else if (contiguous) {
      HWY_DYNAMIC_DISPATCH(ScaleRow)
      (row(in), row_scales(in), fp4, round, static_cast<float*>(to.elements) + at(in, first));
    } else {
      float scaled[kTileColumns];
      HWY_DYNAMIC_DISPATCH(ScaleRow)(row(in), row_scales(in), fp4, round, scaled);
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
