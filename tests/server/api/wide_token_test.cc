#include "server/api/wide_token.h"

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "grpcpp/support/slice.h"
#include "gtest/gtest.h"

namespace meshfill {
namespace {

// As many bytes as the value needs, and `more` that say nothing, 10 at most.
std::string Varint(uint64_t value, int more = 0) {
  std::string bytes;
  for (; value >= 0x80; value >>= 7) bytes += static_cast<char>(value | 0x80);
  bytes += static_cast<char>(value);
  for (; more > 0 && bytes.size() < 10; --more) {
    bytes.back() = static_cast<char>(bytes.back() | 0x80);
    bytes += '\0';
  }
  return bytes;
}

std::string Field(int number, const std::string& bytes) {
  return Varint(static_cast<uint64_t>(number) << 3 | 2) + Varint(bytes.size()) + bytes;
}

std::optional<WideToken> Find(const std::string& bytes) {
  v1::PrefillRequest message;
  if (!message.ParseFromString(bytes)) return std::nullopt;
  const grpc::Slice slice(bytes);
  return FindWideToken(grpc::ByteBuffer(&slice, 1), message);
}

// Ids in every encoding that protobuf takes: packed or not, in several chunks, with bytes and fields that say
// nothing.
TEST(WideTokenTest, IsFoundWhateverTheEncoding) {
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  for (int round = 0; round < 2000; ++round) {
    std::optional<WideToken> expected;
    int64_t index = 0;
    std::string message;
    for (size_t chunks = random() % 4; chunks > 0; --chunks) {
      std::string chunk;
      for (size_t runs = random() % 4; runs > 0; --runs) {
        std::string packed;
        const bool is_packed = random() % 2 == 0;
        for (size_t ids = random() % 6; ids > 0; --ids, ++index) {
          const uint64_t id = random() % 40 == 0 ? random() : random() >> (32 + random() % 32);
          if (id > UINT32_MAX && !expected.has_value()) expected = WideToken{index, id};
          const std::string bytes = Varint(id, random() % 8 == 0 ? static_cast<int>(random() % 4) : 0);
          is_packed ? packed += bytes : chunk += "\x08" + bytes;
        }
        if (is_packed) chunk += Field(1, packed);
        if (random() % 8 == 0) chunk += Field(7, "nobody knows this field");
      }
      message += Field(2, chunk);
      if (random() % 8 == 0) message += Field(9, "nor this one");
    }
    EXPECT_EQ(Find(message), expected) << "round " << round;
  }
}

TEST(WideTokenTest, TheLargestIdOf32BitsIsNone) {
  EXPECT_EQ(Find(Field(2, Field(1, Varint(UINT32_MAX)))), std::nullopt);
  EXPECT_EQ(Find(Field(2, Field(1, Varint(uint64_t{1} << 32)))), (WideToken{0, uint64_t{1} << 32}));
  EXPECT_EQ(Find(Field(2, Field(1, Varint(UINT64_MAX)))), (WideToken{0, UINT64_MAX}));
}

TEST(WideTokenTest, HeadersHaveNone) {
  v1::PrefillRequest request;
  request.mutable_header()->set_token_count(UINT64_MAX);
  EXPECT_EQ(Find(request.SerializeAsString()), std::nullopt);
}

}  // namespace
}  // namespace meshfill
