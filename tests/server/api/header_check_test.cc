#include "server/api/header_check.h"

#include <random>
#include <string>

#include "gtest/gtest.h"
#include "tests/engine/random_seed.h"

namespace meshfill {
namespace {

v1::PrefillHeader GoodHeader() {
  v1::PrefillHeader header;
  header.set_token_count(1);
  return header;
}

TEST(HeaderCheckTest, NamesAreCountedInCharacters) {
  std::mt19937_64 random(TestSeed());
  const auto name = [&](int characters) {
    std::string text;
    for (int i = 0; i < characters; ++i) text += Draw(random, 0, 1) == 0 ? "a" : "\xf0\x9f\x98\x80";
    return text;
  };
  for (const char* field : {"request_id", "cache_salt"}) {
    for (const int characters : {0, 1, 128, 129, 1000}) {
      v1::PrefillHeader header = GoodHeader();
      const auto* descriptor = header.GetDescriptor()->FindFieldByName(field);
      header.GetReflection()->SetString(&header, descriptor, name(characters));
      const absl::Status status = CheckHeader(header, "m");
      if (characters <= 128) {
        EXPECT_TRUE(status.ok()) << status;
      } else {
        EXPECT_EQ(status,
                  absl::InvalidArgumentError(std::string(field) + " has " + std::to_string(characters) +
                                             " characters; at most 128 are allowed"));
      }
    }
  }
}

TEST(HeaderCheckTest, ATenantIsOneThatMetadataCanCarry) {
  v1::PrefillHeader header = GoodHeader();
  header.set_tenant("search & ads ~1");
  EXPECT_TRUE(CheckHeader(header, "m").ok());
  header.set_tenant("caf\xc3\xa9");
  const absl::Status refused = CheckHeader(header, "m");
  EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
  EXPECT_EQ(refused.message().find("tenant has a character that is not printable ASCII, at byte 3"), 0u)
      << refused;
  header.set_tenant(std::string(129, 'x'));
  EXPECT_EQ(CheckHeader(header, "m"),
            absl::InvalidArgumentError("tenant has 129 characters; at most 128 are allowed"));
}

TEST(HeaderCheckTest, AModelIsNamedOrNot) {
  v1::PrefillHeader header = GoodHeader();
  EXPECT_TRUE(CheckHeader(header, "m").ok());
  header.set_model("m");
  EXPECT_TRUE(CheckHeader(header, "m").ok());
  header.set_model("other");
  EXPECT_EQ(CheckHeader(header, "m"),
            absl::NotFoundError("model \"other\" is not served here; name \"m\" or none"));
  header.set_model(std::string(10'000, 'x'));
  EXPECT_EQ(CheckHeader(header, "m"), absl::NotFoundError("model \"" + std::string(512, 'x') +
                                                          "\" is not served here; name \"m\" or none"));
}

TEST(HeaderCheckTest, APromptHasTokens) {
  EXPECT_EQ(CheckHeader(v1::PrefillHeader(), "m"),
            absl::InvalidArgumentError("token_count is 0; a prompt needs at least one token"));
}

TEST(HeaderCheckTest, GoodNamesAreShownWhole) {
  std::string longest;
  for (int i = 0; i < 128; ++i) longest += "\xf0\x9f\x98\x80";
  EXPECT_EQ(ShownName(longest), longest);
  EXPECT_EQ(ShownName(longest + "x"), longest);
}

}  // namespace
}  // namespace meshfill
