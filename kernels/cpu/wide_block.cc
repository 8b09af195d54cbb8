#include "kernels/cpu/wide_block.h"

#include <algorithm>
#include <cstring>
#include <utility>

// Compiled once for each instruction set below, and chosen at run time.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/wide_block.cc"
#include "hwy/cache_control.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace meshfill {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

constexpr int64_t kCacheLine = 64, kUnitBytes = 4;
constexpr int64_t kUnits = 4;  // of a vector's block, 16 bytes

#if HWY_TARGET != HWY_SCALAR
// Blocks of rows 0, 4, 8 …
template <class D>
HWY_INLINE hn::Vec<D> LoadBlocks(D d, const uint32_t* from, int64_t row_units) {
  if constexpr (hn::MaxLanes(d) <= kUnits) {
    return hn::LoadU(d, from);
  } else {
    const hn::Half<D> half;
    const int64_t rows = hn::MaxLanes(half);
    return hn::Combine(d, LoadBlocks(half, from + rows * row_units, row_units),
                       LoadBlocks(half, from, row_units));
  }
}

// Past the caches where it fills a line of theirs: nobody reads it soon.
template <class D>
HWY_INLINE void StoreColumns(hn::Vec<D> v, D d, uint32_t* to) {
  if (hn::MaxLanes(d) * kUnitBytes == kCacheLine && reinterpret_cast<uintptr_t>(to) % kCacheLine == 0) {
    hn::Stream(v, d, to);
  } else {
    hn::StoreU(v, d, to);
  }
}
#endif

// Transposes rows of `units` units of 4 bytes each, a multiple of 4. Unit u of all rows, side by side, goes
// to places[u * place_step] elements, of so many bytes, behind `to`. Returns how many rows it took, from the
// first on: what fills whole vectors.
int64_t TransposeUnits(const uint32_t* rows, int64_t count, int64_t row_units, int64_t units,
                       const int64_t* places, int64_t place_step, int64_t element_bytes, uint8_t* to) {
#if HWY_TARGET == HWY_SCALAR
  return 0;
#else
#if HWY_HAVE_SCALABLE
  const hn::FixedTag<uint32_t, kUnits> d;
#else
  const hn::CappedTag<uint32_t, kCacheLine / kUnitBytes> d;
#endif
  const hn::RepartitionToWide<decltype(d)> d64;
  constexpr int64_t kLanes = hn::MaxLanes(d);
  int64_t done = 0;
  for (; done + kLanes <= count; done += kLanes, rows += kLanes * row_units, to += kLanes * kUnitBytes) {
    for (int64_t u = 0; u < units; u += kUnits) {
      const auto row = [&](int64_t r) HWY_ATTR { return LoadBlocks(d, rows + r * row_units + u, row_units); };
      const auto r0 = row(0), r1 = row(1), r2 = row(2), r3 = row(3);
      const auto low01 = hn::BitCast(d64, hn::InterleaveLower(d, r0, r1));
      const auto high01 = hn::BitCast(d64, hn::InterleaveUpper(d, r0, r1));
      const auto low23 = hn::BitCast(d64, hn::InterleaveLower(d, r2, r3));
      const auto high23 = hn::BitCast(d64, hn::InterleaveUpper(d, r2, r3));
      const auto store = [&](int64_t unit, auto v) HWY_ATTR {
        StoreColumns(hn::BitCast(d, v), d,
                     reinterpret_cast<uint32_t*>(to + places[unit * place_step] * element_bytes));
      };
      store(u, hn::InterleaveLower(d64, low01, low23));
      store(u + 1, hn::InterleaveUpper(d64, low01, low23));
      store(u + 2, hn::InterleaveLower(d64, high01, high23));
      store(u + 3, hn::InterleaveUpper(d64, high01, high23));
    }
  }
  hwy::FlushStream();
  return done;
#endif
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace meshfill
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace meshfill {
namespace {

HWY_EXPORT(TransposeUnits);

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

// Columns [first, last), from input feature `first_in` on. What fills up the layout is 0.
template <typename Element>
void PackEach(const Element* rows, int64_t row_elements, int64_t first, int64_t last, int64_t first_in,
              const BlockPlaces& places, const WideBlock& to) {
  auto* const elements = static_cast<Element*>(to.elements);
  for (int64_t out = first; out < last; ++out, rows += row_elements) {
    for (int64_t in = first_in; in < std::ssize(places.in); ++in) {
      const bool there = in < to.in_features() && out < to.columns();
      elements[places.in[in] + places.out[out]] = there ? rows[in] : Element{0};
    }
  }
}

// Units of 4 bytes that the layout keeps together, a multiple of kUnits; 0: it does not, or the rows are not
// aligned to them.
template <typename Element>
int64_t UnitsOf(const Element* rows, int64_t row_elements, const BlockPlaces& places, const WideBlock& to) {
  constexpr int64_t kPerUnit = 4 / sizeof(Element);
  if (row_elements % kPerUnit != 0 || reinterpret_cast<uintptr_t>(rows) % 4 != 0) return 0;
  const int64_t units = to.in_features() / kPerUnit / 4 * 4;
  for (int64_t in = 0; in < units * kPerUnit; in += kPerUnit) {
    for (int64_t i = 1; i < kPerUnit; ++i) {
      if (places.in[in + i] != places.in[in] + i) return 0;
    }
  }
  return units;
}

// A group of columns, [first, last), of which the block has some or all.
template <typename Element>
void PackGroup(const Element* rows, int64_t row_elements, int64_t first, int64_t last,
               const BlockPlaces& places, const WideBlock& to) {
  constexpr int64_t kPerUnit = 4 / sizeof(Element);
  const int64_t columns = std::min(last, to.columns()) - first;
  const int64_t units =
      places.InSteps(first, columns, kPerUnit) ? UnitsOf(rows, row_elements, places, to) : 0;
  int64_t done = 0;
  if (units > 0) {
    auto* const elements = static_cast<Element*>(to.elements) + places.out[first];
    done = HWY_DYNAMIC_DISPATCH(TransposeUnits)(reinterpret_cast<const uint32_t*>(rows), columns,
                                                row_elements / kPerUnit, units, places.in.data(), kPerUnit,
                                                sizeof(Element), reinterpret_cast<uint8_t*>(elements));
  }
  PackEach(rows, row_elements, first, first + done, units * kPerUnit, places, to);
  PackEach(rows + done * row_elements, row_elements, first + done, last, 0, places, to);
}

template <typename Element>
void PackGroups(const Element* rows, int64_t row_elements, int64_t first, int64_t columns,
                const BlockPlaces& places, const WideBlock& to) {
  const int64_t last = first + columns == to.columns() ? std::ssize(places.out) : first + columns;
  for (int64_t group = first; group < last; group += kGroupColumns, rows += kGroupColumns * row_elements) {
    PackGroup(rows, row_elements, group, std::min(last, group + kGroupColumns), places, to);
  }
}

}  // namespace

WideBlock::Columns WideBlock::ColumnsFrom(int64_t begin, int64_t columns) const {
  dnnl::memory::desc part = layout->submemory_desc({in_features(), columns}, {0, begin});
  // The offset goes into the pointer, since the fast matmul takes none in the layout.
  const int64_t offset = std::exchange(part.data.offset0, 0);
  return {part, static_cast<std::byte*>(elements) + offset * DTypeBytes(dtype)};
}

BlockPlaces::BlockPlaces(const dnnl::memory::desc& layout)
    : in(PlacesAlong(layout.data, 0)), out(PlacesAlong(layout.data, 1)) {}

bool BlockPlaces::InSteps(int64_t first, int64_t count, int64_t step) const {
  if (first + count > std::ssize(out)) return false;
  for (int64_t i = 0; i < count; ++i) {
    if (out[first + i] != out[first] + i * step) return false;
  }
  return true;
}

void PackColumns(const void* rows, int64_t row_elements, int64_t first, int64_t columns,
                 const BlockPlaces& places, const WideBlock& to) {
  if (to.dtype == DType::kF32) {
    PackGroups(static_cast<const uint32_t*>(rows) + to.first_in, row_elements, first, columns, places, to);
  } else {
    PackGroups(static_cast<const uint16_t*>(rows) + to.first_in, row_elements, first, columns, places, to);
  }
}

}  // namespace meshfill
#endif  // HWY_ONCE
