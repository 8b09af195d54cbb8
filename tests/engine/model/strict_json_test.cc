#include "engine/model/strict_json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "tests/engine/temp_folder.h"

namespace meshfill {
namespace {

using nlohmann::json;
using testing::HasSubstr;

std::string Nested(int levels) {  // an object around arrays
  const auto brackets = static_cast<size_t>(levels - 1);
  return "{\"a\":" + std::string(brackets, '[') + std::string(brackets, ']') + "}";
}

TEST(ParseJsonObject, ReadsWhatIsThere) {
  const std::string text = R"({"a": [1, -2, 3.5, "x", true, null, {"b": []}], "c": 18446744073709551615})";
  const auto parsed = ParseJsonObject(text, "p");
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(*parsed, json::parse(text));
  EXPECT_TRUE(ParseJsonObject(Nested(kMaxJsonDepth), "p").ok());
}

TEST(ParseJsonObject, RefusesByName) {
  const struct {
    std::string text, named;
  } kCases[] = {
      {Nested(kMaxJsonDepth + 1), "deeper than 32"},
      {R"({"a": 1, "b": {"a": 2, "a": 3}})", "\"a\" appears twice"},
      {R"({"a": 1} {})", "no valid JSON at byte"},
      {"[1]", "holds [1] where"},
      {"7", "holds 7 where"},
  };
  for (const auto& [text, named] : kCases) {
    const absl::Status status = ParseJsonObject(text, "some/path").status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), testing::AllOf(HasSubstr("some/path: "), HasSubstr(named)));
  }
}

TEST(ReadJsonText, ReadsUpToItsBound) {
  const TempFolder folder;
  EXPECT_EQ(*ReadJsonText(folder.Write("text", "a\n\r\n b")), "a\n\r\n b");
  EXPECT_EQ(*ReadJsonText(folder.Write("empty", "")), "");
  EXPECT_TRUE(absl::IsNotFound(ReadJsonText(folder / "none").status()));
  EXPECT_TRUE(absl::IsInvalidArgument(ReadJsonText(folder.path()).status())) << "it is a folder";
  EXPECT_TRUE(absl::IsInvalidArgument(ReadJsonText(folder / "text/none").status())) << "beneath a file";
  std::filesystem::resize_file(folder / "empty", kMaxJsonBytes + 1);
  const absl::Status large = ReadJsonText(folder / "empty").status();
  EXPECT_TRUE(absl::IsInvalidArgument(large)) << large;
  EXPECT_THAT(std::string(large.message()), HasSubstr("100000001 bytes"));
}

TEST(ReadJsonText, RefusesAPipe) {
  const TempFolder folder;
  ASSERT_EQ(mkfifo((folder / "pipe").c_str(), 0600), 0);
  const absl::Status pipe = ReadJsonText(folder / "pipe").status();
  EXPECT_TRUE(absl::IsInvalidArgument(pipe)) << pipe;
  EXPECT_THAT(std::string(pipe.message()), HasSubstr("pipe: is no regular file"));
}

TEST(Excerpt, IsShortAndOneLineOfUtf8) {
  EXPECT_EQ(Excerpt("a\nb\xff"), "\"a\\nb\\ufffd\"");
  EXPECT_EQ(Excerpt(std::string(158, 'x')), "\"" + std::string(158, 'x') + "\"");
  EXPECT_EQ(Excerpt(std::string(161, 'x')), "\"" + std::string(80, 'x') + "\"…");
  const json list(100, 1);
  EXPECT_EQ(Excerpt(list), list.dump().substr(0, 80) + "…");
}

TEST(JsonKeys, AreTypedAndBounded) {
  const json object = {{"i", 5}, {"d", 0.5}, {"f", true}, {"n", nullptr}, {"s", "x"}, {"u", UINT64_MAX}};
  const auto keys = [&] { return JsonKeys(object, "path", "outer."); };
  JsonKeys good = keys();
  EXPECT_EQ(good.Integer("i", 1, 5, 5), 5);
  EXPECT_EQ(good.Integer("absent", 1, 5, 5), 1);
  EXPECT_EQ(good.Number("i", 1, 5, 5), 5);
  EXPECT_EQ(good.Number("d", 1, 0.5, 0.5), 0.5);
  EXPECT_EQ(good.Number("absent", 1, 0.5, 0.5), 1);
  EXPECT_TRUE(good.Flag("f", false));
  EXPECT_TRUE(good.Flag("absent", true));
  EXPECT_EQ(good.OptionalInteger("i", std::nullopt, 5, 5), 5);
  EXPECT_EQ(good.OptionalInteger("absent", 3, 5, 5), 3);
  EXPECT_FALSE(good.OptionalInteger("n", 3, 5, 5).has_value());
  EXPECT_EQ(good.OptionalNumber("d", 0, 1), 0.5);
  EXPECT_FALSE(good.OptionalNumber("n", 0, 1).has_value());
  EXPECT_FALSE(good.OptionalNumber("absent", 0, 1).has_value());
  EXPECT_NE(good.Find("n"), nullptr);
  EXPECT_EQ(good.FindValue("n"), nullptr);
  good.Expect("s", "x");
  good.Expect("n", "x");
  good.Expect("absent", "x");
  EXPECT_TRUE(good.status().ok()) << good.status();
  const char* const ignored[] = {"u"};
  EXPECT_TRUE(good.Finish(ignored).ok()) << good.status();
  EXPECT_THAT(std::string(good.Finish().message()), HasSubstr("\"outer.u\" is 18446744073709551615"));

  const struct {
    const char* key;
    void (*read)(JsonKeys&);
  } kBad[] = {
      {"i", [](JsonKeys& k) { EXPECT_EQ(k.Integer("i", 9, 6, 7), 9); }},
      {"i", [](JsonKeys& k) { EXPECT_EQ(k.Integer("i", 9, 3, 4), 9); }},
      {"d", [](JsonKeys& k) { EXPECT_EQ(k.Integer("d", 9, 0, 1), 9); }},
      {"u", [](JsonKeys& k) { EXPECT_EQ(k.Integer("u", 9, INT64_MIN, INT64_MAX), 9); }},
      {"n", [](JsonKeys& k) { EXPECT_EQ(k.Integer("n", 9, 0, 9), 9); }},
      {"d", [](JsonKeys& k) { EXPECT_EQ(k.Number("d", 9, 0.6, 1), 9); }},
      {"d", [](JsonKeys& k) { EXPECT_EQ(k.Number("d", 9, 0, 0.4), 9); }},
      {"s", [](JsonKeys& k) { EXPECT_EQ(k.Number("s", 9, 0, 1), 9); }},
      {"i", [](JsonKeys& k) { EXPECT_TRUE(k.Flag("i", true)); }},
      {"s", [](JsonKeys& k) { k.OptionalInteger("s", 3, 0, 9); }},
      {"s", [](JsonKeys& k) { k.OptionalNumber("s", 0, 9); }},
      {"s", [](JsonKeys& k) { k.Expect("s", "y"); }},
      {"absent", [](JsonKeys& k) { k.RejectMissing("absent", "state it"); }},
  };
  for (const auto& [key, read] : kBad) {
    JsonKeys bad = keys();
    read(bad);
    bad.Reject("later", "the first error counts");
    EXPECT_TRUE(absl::IsInvalidArgument(bad.status())) << key;
    EXPECT_THAT(std::string(bad.status().message()),
                HasSubstr("path: key \"outer." + std::string(key) + "\""));
    EXPECT_EQ(bad.Finish(), bad.status());
  }
}

}  // namespace
}  // namespace meshfill
