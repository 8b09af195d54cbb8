#include "engine/kv/crc32c.h"

#include <random>
#include <string>

#include "gtest/gtest.h"
#include "tests/engine/random_seed.h"

namespace meshfill {
namespace {

// Bit by bit, as the polynomial says.
uint32_t ByDefinition(std::string_view bytes) {
  uint32_t crc = ~uint32_t{0};
  for (const char byte : bytes) {
    crc ^= static_cast<uint8_t>(byte);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82f63b78u : 0);
  }
  return ~crc;
}

TEST(Crc32cTest, HasTheKnownValues) {
  EXPECT_EQ(Crc32c(""), 0u);
  EXPECT_EQ(Crc32c("123456789"), 0xe3069283u);
  EXPECT_EQ(Crc32c(std::string(32, '\0')), 0x8a9136aau);  // RFC 3720, B.4
  EXPECT_EQ(Crc32c(std::string(32, '\xff')), 0x62a8ab43u);
}

TEST(Crc32cTest, IsThePolynomialsOverAnyCut) {
  std::mt19937_64 random(TestSeed());
  for (int round = 0; round < 200; ++round) {
    std::string bytes(Draw<int>(random, 0, 3000), '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    const std::string_view all = bytes;
    const auto cut = Draw<size_t>(random, 0, bytes.size());
    EXPECT_EQ(Crc32c(all), ByDefinition(all));
    EXPECT_EQ(Crc32c(all.substr(cut), Crc32c(all.substr(0, cut))), Crc32c(all));
  }
}

}  // namespace
}  // namespace meshfill
