#include "kernels/word_hash.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <initializer_list>

namespace meshfill {
namespace {

uint64_t HashOf(std::initializer_list<uint64_t> words) {
  WordHash hash;
  for (const uint64_t word : words) hash.Add(word);
  return hash.Finish();
}

// Workers of other builds and machines compare it.
TEST(WordHashTest, IsTheSameEverywhere) {
  EXPECT_EQ(HashOf({}), 0x89bb8622af302ce6u);
  EXPECT_EQ(HashOf({1}), 0x9934f78708dca0a6u);
  EXPECT_EQ(HashOf({1, 2}), 0xbb25563e68a997e4u);
  EXPECT_EQ(HashOf({2, 1}), 0x880d622b09bae0f8u);
}

}  // namespace
}  // namespace meshfill
