// The file of credentials: what it may say, and whom a token or a certificate is.
#include "server/access/callers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "server/access/bearer_token.h"

namespace meshfill {
namespace {

using testing::HasSubstr;
using testing::Not;

// sha256sum of "test" and of "abc" (FIPS 180-2's example).
constexpr char kTest[] = "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08";
constexpr char kAbc[] = "sha256:BA7816BF8F01CFEA414140DE5DAE2223B00361A396177A9CB410FF61F20015AD";

std::string Problem(const std::string& text) {
  const auto callers = Callers::Parse("F", text);
  return callers.ok() ? "none" : std::string(callers.status().message());
}

TEST(Callers, AreFoundByTheirCredentials) {
  const auto callers = Callers::Parse(
      "F", absl::StrCat("# who may call\n\nalice client team-a ", kTest, " # since May\n\tpool worker - ",
                        kAbc, "\r\nops admin - certificate:ops.example"));
  ASSERT_TRUE(callers.ok()) << callers.status();
  ASSERT_NE(callers->OfToken("test"), nullptr);
  EXPECT_EQ(*callers->OfToken("test"), (Caller{"alice", Role::kClient, "team-a"}));
  ASSERT_NE(callers->OfToken("abc"), nullptr);
  EXPECT_EQ(*callers->OfToken("abc"), (Caller{"pool", Role::kWorker, ""}));
  ASSERT_NE(callers->OfCertificate("ops.example"), nullptr);
  EXPECT_EQ(*callers->OfCertificate("ops.example"), (Caller{"ops", Role::kAdmin, ""}));
  for (const char* unknown : {"", "tes", "test ", "TEST", "alice", kTest, "ops.example"}) {
    EXPECT_EQ(callers->OfToken(unknown), nullptr) << unknown;
  }
  for (const char* unknown : {"", "ops", "ops.example.org", "test", "alice"}) {
    EXPECT_EQ(callers->OfCertificate(unknown), nullptr) << unknown;
  }
}

TEST(Callers, EveryByteOfATokensHashCounts) {
  const std::string line = absl::StrCat("alice client team-a ", kTest);
  for (size_t digit = line.size() - 64; digit < line.size(); ++digit) {
    std::string other = line;
    other[digit] = line[digit] == '0' ? '1' : '0';
    const auto callers = Callers::Parse("F", other);
    ASSERT_TRUE(callers.ok()) << callers.status();
    EXPECT_EQ(callers->OfToken("test"), nullptr) << other;
  }
}

TEST(Callers, MistakesAreToldWithTheirLineAndWithoutTheCredential) {
  const std::string good = absl::StrCat("a client t ", kTest, "\n");
  EXPECT_EQ(Problem(good), "none");
  EXPECT_THAT(Problem(""), HasSubstr("F: nobody is in it"));
  EXPECT_THAT(Problem("# a comment\n\n"), HasSubstr("F: nobody is in it"));
  EXPECT_EQ(Problem(good + "b client t\n"), "F:2: 3 words; write NAME ROLE TENANT CREDENTIAL");
  EXPECT_EQ(Problem("b client t x y"), "F:1: 5 words; write NAME ROLE TENANT CREDENTIAL");
  EXPECT_THAT(Problem(absl::StrCat("b root - ", kAbc)), HasSubstr("F:1: the role"));
  EXPECT_THAT(Problem(absl::StrCat("b client - ", kAbc)), HasSubstr("a client has a tenant"));
  EXPECT_THAT(Problem(absl::StrCat("b admin t ", kAbc)), HasSubstr("workers and admins have -"));
  EXPECT_THAT(Problem(good + absl::StrCat("a admin - ", kAbc)), HasSubstr("F:2: the name a is there twice"));
  EXPECT_THAT(Problem(good + absl::StrCat("b admin - ", kTest)), HasSubstr("F:2: the same credential"));
  EXPECT_THAT(Problem("a admin - certificate:x\nb admin - certificate:x"),
              HasSubstr("F:2: the same credential"));
  for (const char* credential : {"s3cret-token", "sha256:s3cret", "certificate:", "md5:s3cret",
                                 "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"}) {
    const std::string problem = Problem(absl::StrCat("b admin - ", credential));
    EXPECT_THAT(problem, HasSubstr("F:1: the credential, the fourth word")) << credential;
    EXPECT_THAT(problem, Not(HasSubstr("s3cret")));
  }
  const std::string longest(128, 'n');
  EXPECT_EQ(Problem(absl::StrCat(longest, " client ", longest, " ", kAbc)), "none");
  EXPECT_THAT(Problem(absl::StrCat(longest, "n admin - ", kAbc)), HasSubstr("above 128 bytes"));
  EXPECT_THAT(Problem(absl::StrCat("b client ", longest, "n ", kAbc)),
              HasSubstr("the tenant, the third word, has 129 characters"));
  EXPECT_THAT(Problem(absl::StrCat("b client caf\xc3\xa9 ", kAbc)), HasSubstr("not printable ASCII"));
}

TEST(BearerToken, IsOneLineOfPrintableCharacters) {
  const std::string path = testing::TempDir() + "/bearer_token_test";
  const auto token_in = [&](const std::string& text) {
    std::ofstream(path, std::ios::binary) << text;
    return ReadBearerToken("api.token", path);
  };
  for (const char* text : {"s3cret", "s3cret\n", " \ts3cret\r\n\n"}) {
    const auto token = token_in(text);
    ASSERT_TRUE(token.ok()) << token.status();
    EXPECT_EQ(*token, "s3cret");
  }
  for (const char* text : {"\n", " ", "s3cret s3cret", "s3cret\ns3cret", "s3cret\x01", "s3cr\xc3\xa9t"}) {
    const absl::Status none = token_in(text).status();
    EXPECT_EQ(none.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(none.message()), HasSubstr("api.token: " + path + " has no token"));
    EXPECT_THAT(std::string(none.message()), Not(HasSubstr("s3cr")));
  }
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace meshfill
