#include "engine/kv/block_hash.h"

#include <numeric>
#include <random>

#include "absl/strings/escaping.h"
#include "gtest/gtest.h"
#include "tests/engine/random_seed.h"

namespace meshfill {
namespace {

std::string Hex(std::string_view bytes) {
  return absl::BytesToHexString(absl::string_view(bytes.data(), bytes.size()));
}

std::vector<uint32_t> CountFrom(uint32_t first, size_t tokens) {
  std::vector<uint32_t> ids(tokens);
  std::iota(ids.begin(), ids.end(), first);
  return ids;
}

std::string HashesOf(std::span<const uint32_t> tokens, int block_tokens = 16, std::string_view salt = "") {
  BlockHasher hasher(block_tokens, salt);
  hasher.Append(tokens);
  return hasher.hashes();
}

// By vLLM's own function, with cbor2.
TEST(BlockHashTest, AreVllms) {
  const Sha256 none = FirstBlockParent();
  EXPECT_EQ(Hex({reinterpret_cast<const char*>(none.data()), none.size()}),
            "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0");
  EXPECT_EQ(Hex(HashesOf(CountFrom(0, 32))),
            "dc918a88b139e5afe60b88eda27508d4aee16c10fdc354791efea06206ac0749"
            "c300ec275d7bf08af8fc63e76cdc0086911bbc7091e03c5cf892553bef84ef0c");
}

TEST(BlockHashTest, AreVllmsWithASaltAndWithIdsOfEveryLength) {
  EXPECT_EQ(Hex(HashesOf(CountFrom(0, 32), 16, "tenant-7")),
            "58a70cbfe3c9f655e623d7f73bc549678b1b5ec141e7e6297c1e642dcdc72b77"
            "b3cfb1d75a8e8018d7459172726d9b2cdd13b212cfc4d77ababa62f6076b5650");
  std::vector<uint32_t> tokens;
  for (int round = 0; round < 5; ++round) {
    tokens.insert(tokens.end(), {0, 23, 24, 255, 256, 65535, 65536, UINT32_MAX});
  }
  EXPECT_EQ(Hex(HashesOf(tokens, 20, std::string(130, 'x'))),
            "36947896764a19067363afc2689dcafcd3cfa2e442354e41e3973459a558571b"
            "cdb6b3abc8e07441314dcc0a1d6e22dfbfda94ece3292d787be572189e4a3c70");
}

TEST(BlockHashTest, NamesWholeBlocksAlone) {
  EXPECT_EQ(HashesOf(CountFrom(0, 15)).size(), 0u);
  EXPECT_EQ(HashesOf(CountFrom(0, 47)).size(), 2 * 32u);
  EXPECT_EQ(HashesOf(CountFrom(0, 47)), HashesOf(CountFrom(0, 32)));
}

TEST(BlockHashTest, DoNotDependOnHowTheTokensCome) {
  std::mt19937_64 random(TestSeed());
  for (int round = 0; round < 50; ++round) {
    std::vector<uint32_t> tokens(Draw<int>(random, 0, 300));
    for (uint32_t& token : tokens) token = static_cast<uint32_t>(random() >> Draw<int>(random, 32, 63));
    const int block_tokens = Draw<int>(random, 1, 40);
    BlockHasher hasher(block_tokens, "salt");
    for (size_t begin = 0; begin < tokens.size();) {
      const size_t count = std::min<size_t>(tokens.size() - begin, Draw<int>(random, 0, 60));
      hasher.Append(std::span(tokens).subspan(begin, count));
      begin += count;
    }
    EXPECT_EQ(hasher.hashes(), HashesOf(tokens, block_tokens, "salt"));
  }
}

TEST(BlockHashTest, StandForAllTokensUpToTheBlocksEndAndForTheSalt) {
  std::vector<uint32_t> tokens = CountFrom(0, 48);
  const std::string before = HashesOf(tokens);
  tokens[20] = 7;
  const std::string after = HashesOf(tokens);
  EXPECT_EQ(before.substr(0, 32), after.substr(0, 32));
  EXPECT_NE(before.substr(32, 32), after.substr(32, 32));
  EXPECT_NE(before.substr(64, 32), after.substr(64, 32));
  EXPECT_NE(HashesOf(tokens, 16, "a").substr(64, 32), after.substr(64, 32));
}

}  // namespace
}  // namespace meshfill
