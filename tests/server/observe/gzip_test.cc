#include "server/observe/gzip.h"

#include <random>
#include <string>

#include "gtest/gtest.h"
#include "tests/engine/random_seed.h"
#include "tests/server/observe/gunzip.h"

namespace meshfill {
namespace {

TEST(GzipTest, GivesTheTextBack) {
  std::mt19937_64 random(TestSeed());
  for (int round = 0; round < 50; ++round) {
    std::string text(Draw<size_t>(random, 0, 200'000), 'x');
    const bool noise = round % 2 == 0;
    for (char& each : text) each = static_cast<char>(noise ? random() : 'a' + random() % 3);
    const std::string packed = Gzip(text);
    EXPECT_EQ(Gunzip(packed), text);
    if (!noise && text.size() > 1000) EXPECT_LT(packed.size(), text.size() / 2);
  }
  EXPECT_EQ(Gunzip(Gzip("")), "");
}

TEST(GzipTest, AsksTheHeader) {
  for (const char* yes : {"gzip", "GZip", "deflate, gzip", "gzip;q=0.5", "gzip ; q=1.0", "*",
                          "br;q=1, *;q=0.1", " gzip ,identity", "gzip;x=1;q=0.001"}) {
    EXPECT_TRUE(AcceptsGzip(yes)) << yes;
  }
  for (const char* no : {"", "identity", "gzip;q=0", "gzip;q=0.000", "*;q=0", "*, gzip;q=0", "gzip;q=0, *",
                         "br", "gzipped", "x-gzip-y", "gzip;q=", "gzip;q=often", ",,;;", "q=1"}) {
    EXPECT_FALSE(AcceptsGzip(no)) << no;
  }
}

}  // namespace
}  // namespace meshfill
