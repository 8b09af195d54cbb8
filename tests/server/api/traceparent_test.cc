#include "server/api/traceparent.h"

#include <random>
#include <regex>
#include <string>

#include "gtest/gtest.h"
#include "tests/engine/random_seed.h"

namespace meshfill {
namespace {

const std::string kGood = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

TEST(TraceparentTest, TakesWhatTheStandardTakes) {
  EXPECT_EQ(ParseTraceparent(kGood), kGood);
  const std::string later = "cc" + kGood.substr(2);
  EXPECT_EQ(ParseTraceparent(later), later);
  EXPECT_EQ(ParseTraceparent(later + "-what-the-future-will-be-like"), later);
}

TEST(TraceparentTest, IgnoresTheRest) {
  const std::string zeros(32, '0');
  for (const std::string& bad :
       {std::string(), std::string("00"), kGood.substr(0, 54), kGood + "-", kGood + "0",
        "ff" + kGood.substr(2), "cc" + kGood.substr(2) + ".what", "00-" + zeros + kGood.substr(35),
        kGood.substr(0, 36) + zeros.substr(0, 16) + "-01", "00-0AF" + kGood.substr(6), " " + kGood,
        std::string(1 << 20, 'a'), std::string(55, '\0')}) {
    EXPECT_EQ(ParseTraceparent(bad), "") << bad.substr(0, 100);
  }
}

TEST(TraceparentTest, AgreesWithTheGrammar) {
  const std::regex grammar("(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}");
  const std::string characters = "0af-gAF 9\"\n";
  std::mt19937_64 random(TestSeed());
  int good = 0;
  for (int round = 0; round < 3000; ++round) {
    std::string value = kGood;
    for (int i = random() % 3; i > 0; --i)
      value[random() % value.size()] = characters[random() % characters.size()];
    const bool matches = std::regex_match(value, grammar);
    good += matches ? 1 : 0;
    EXPECT_EQ(ParseTraceparent(value), matches ? value : "") << value;
  }
  EXPECT_GT(good, 0);
  EXPECT_LT(good, 3000);
}

}  // namespace
}  // namespace meshfill
