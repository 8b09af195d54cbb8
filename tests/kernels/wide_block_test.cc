// Weights in the layouts of the multiplication, against what oneDNN's reorder makes of the same rows.
#include "kernels/cpu/wide_block.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels/cpu/host_memory.h"
#include "kernels/cpu/packed_matrix.h"

namespace meshfill {
namespace {

using dnnl::memory;

BufferRef Allocate(size_t size_bytes) {
  auto buffer = AllocateHostMemory(size_bytes);
  EXPECT_TRUE(buffer.ok()) << buffer.status();
  std::memset((*buffer)->data(), 0xa5, size_bytes);
  return *buffer;
}

// Layouts that oneDNN has for weights on one machine or another, and plain ones.
std::vector<memory::format_tag> Tags(DType dtype) {
  using Tag = memory::format_tag;
  std::vector<Tag> tags = {Tag::ab, Tag::ba, Tag::any, Tag::BA16a16b, Tag::BA16a32b, Tag::BA16a64b};
  if (dtype == DType::kBf16) {
    tags.insert(tags.end(), {Tag::BA16a16b2a, Tag::BA16a32b2a, Tag::BA16a64b2a});
  }
  return tags;
}

memory::desc LayoutOf(int64_t in_features, int64_t columns, DType dtype, memory::format_tag tag) {
  if (tag != memory::format_tag::any) return {{in_features, columns}, OneDnnType(dtype), tag};
  const dnnl::matmul::desc operation(RowMajor(128, in_features, dtype),
                                     memory::desc({in_features, columns}, OneDnnType(dtype), tag),
                                     RowMajor(128, columns, DType::kF32));
  return dnnl::matmul::primitive_desc(operation, CpuEngine()).weights_desc();
}

class WideBlockTest : public testing::TestWithParam<DType> {
 protected:
  void SetUp() override {
    KeepOneDnnSingleThreaded();
    if (MultiplyDType(GetParam()) != GetParam()) GTEST_SKIP() << "this machine multiplies no bf16";
  }
};

TEST_P(WideBlockTest, PacksWhatOneDnnReorders) {
  const DType dtype = GetParam();
  const int64_t width = DTypeBytes(dtype);
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  const auto draw = [&](int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random);
  };
  for (int round = 0; round < 60; ++round) {
    const int64_t in_features = draw(0, 2) == 0 ? 32 * draw(1, 8) : draw(1, 300);
    const int64_t columns = draw(0, 2) == 0 ? kGroupColumns * draw(1, 5) : draw(1, 300);
    // The rows of a weight, of which the block has some input features.
    const int64_t first_in = draw(0, 2), row_elements = first_in + in_features + draw(0, 2);
    std::vector<std::byte> rows(columns * row_elements * width);
    std::generate(rows.begin(), rows.end(), [&] { return static_cast<std::byte>(random()); });
    // Every second element is no pair.
    std::vector<memory::desc> layouts = {
        {{in_features, columns}, OneDnnType(dtype), memory::dims{2 * columns, 2}}};
    for (const auto tag : Tags(dtype)) layouts.push_back(LayoutOf(in_features, columns, dtype, tag));
    for (const memory::desc& layout : layouts) {
      SCOPED_TRACE(testing::Message() << in_features << " x " << columns << " of " << row_elements << " from "
                                      << first_in << ", layout " << &layout - layouts.data());
      const BufferRef expected = Allocate(layout.get_size()), packed = Allocate(layout.get_size());
      memory from({{in_features, columns}, OneDnnType(dtype), memory::dims{1, row_elements}}, CpuEngine(),
                  rows.data() + first_in * width);
      memory to(layout, CpuEngine(), expected->data());
      dnnl::stream stream(CpuEngine());
      dnnl::reorder(from, to).execute(stream, from, to);

      const WideBlock block = {&layout, dtype, first_in, packed->data()};
      const BlockPlaces places(layout);
      for (int64_t first = 0; first < columns;) {
        const int64_t count = std::min(columns - first, kGroupColumns * draw(1, 3));
        PackColumns(rows.data() + first * row_elements * width, row_elements, first, count, places, block);
        first += count;
      }
      ASSERT_EQ(std::memcmp(packed->data(), expected->data(), layout.get_size()), 0);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, WideBlockTest, testing::Values(DType::kF32, DType::kBf16),
                         [](const auto& info) { return std::string(DTypeName(info.param)); });

}  // namespace
}  // namespace meshfill
