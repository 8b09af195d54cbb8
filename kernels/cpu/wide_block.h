// A part of a linear layer's weight in one of oneDNN's layouts, in the dtype of the multiplication.
#ifndef MESHFILL_KERNELS_CPU_WIDE_BLOCK_H_
#define MESHFILL_KERNELS_CPU_WIDE_BLOCK_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/cpu/onednn.h"
#include "kernels/dtype.h"

namespace meshfill {

// A multiple of the columns that oneDNN's layouts keep together.
inline constexpr int64_t kGroupColumns = 64;

// A view.
struct WideBlock {
  const dnnl::memory::desc* layout;  // [in_features, columns]; the process's, as large as many blocks
  DType dtype;                       // MultiplyDType(compute dtype)
  int64_t first_in;                  // the first of its input features in the weight
  void* elements;                    // not const, as oneDNN's handles are not, though it reads only

  int64_t in_features() const { return layout->data.dims[0]; }
  int64_t columns() const { return layout->data.dims[1]; }

  // Columns [begin, begin + columns): their layout, and their first element. `begin` is a multiple of
  // kGroupColumns; `columns` is too, or reaches the last column.
  struct Columns {
    dnnl::memory::desc layout;
    void* elements;
  };
  Columns ColumnsFrom(int64_t begin, int64_t columns) const;
};

// Where the elements of a layout lie. Layouts in blocks keep the two dimensions apart: element (in, out) is
// in[in] + out[out] elements from the first.
struct BlockPlaces {
  explicit BlockPlaces(const dnnl::memory::desc& layout);

  std::vector<int64_t> in;   // by input feature, with those that fill up the layout
  std::vector<int64_t> out;  // by output feature, with those that fill up the layout

  // Whether output features [first, first + count) lie `step` elements apart.
  bool InSteps(int64_t first, int64_t count, int64_t step) const;
};

// Writes columns [first, first + columns) of a block, with what fills up its layout behind its last ones.
// `rows` [columns, row_elements], of the block's dtype, has the block's input features from row_elements'
// first_in-th on. `places` are the block's. `first` is a multiple of kGroupColumns; `columns` is too, or
// reaches the last column.
void PackColumns(const void* rows, int64_t row_elements, int64_t first, int64_t columns,
                 const BlockPlaces& places, const WideBlock& to);

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CPU_WIDE_BLOCK_H_
