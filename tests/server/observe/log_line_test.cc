#include "server/observe/log_line.h"

#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/engine/random_seed.h"

namespace meshfill {
namespace {

using Json = nlohmann::ordered_json;

const absl::Time kTime = absl::FromUnixMillis(1769860800123);

std::vector<std::string> Keys(const Json& object) {
  std::vector<std::string> keys;
  for (const auto& [key, value] : object.items()) keys.push_back(key);
  return keys;
}

TEST(LogLineTest, TextHasTimeMessageAndTrace) {
  EXPECT_EQ(FormatLogLine(LogFormat::kText, kTime, "listening", {}), "2026-01-31T12:00:00.123Z listening");
  EXPECT_EQ(FormatLogLine(LogFormat::kText, kTime, "request id=\"a\"",
                          {.level = LogLevel::kError, .request_id = "a", .tenant = "b"}),
            "2026-01-31T12:00:00.123Z request id=\"a\"");
  EXPECT_EQ(FormatLogLine(LogFormat::kText, kTime, "request", {.traceparent = "00-1-2-01"}),
            "2026-01-31T12:00:00.123Z request traceparent=00-1-2-01");
}

TEST(LogLineTest, JsonHasWhatThereIs) {
  EXPECT_EQ(FormatLogLine(LogFormat::kJson, kTime, "listening", {}),
            R"({"time":"2026-01-31T12:00:00.123Z","level":"info","message":"listening"})");
  EXPECT_EQ(
      FormatLogLine(LogFormat::kJson, kTime, "id=\"a\"",
                    {.level = LogLevel::kWarning, .request_id = "a", .tenant = "b", .traceparent = "c"}),
      R"({"time":"2026-01-31T12:00:00.123Z","level":"warning","message":"id=\"a\"",)"
      R"("request_id":"a","tenant":"b","traceparent":"c"})");
  EXPECT_EQ(Json::parse(FormatLogLine(LogFormat::kJson, kTime, "", {.level = LogLevel::kError}))["level"],
            "error");
}

// A text of up to `most` characters: of any kind, or bytes that are no UTF-8.
std::string RandomText(std::mt19937_64& random, size_t most, bool utf8) {
  const std::vector<std::string> characters = {"a",    "\"", "\\", "\n", std::string(1, '\0'),
                                               "\x7f", "é",  "漢", "😀",  "\xe2\x80\xa8"};
  std::string text;
  for (size_t i = random() % (most + 1); i > 0; --i) {
    text += utf8 ? characters[random() % characters.size()] : std::string(1, static_cast<char>(random()));
  }
  return text;
}

TEST(LogLineTest, AnyTextBecomesOneLineOfJson) {
  std::mt19937_64 random(TestSeed());
  for (int round = 0; round < 2000; ++round) {
    const bool utf8 = round % 2 == 0;
    const std::string message = RandomText(random, 200, utf8), id = RandomText(random, 100, utf8),
                      tenant = RandomText(random, 100, utf8);
    const std::string line =
        FormatLogLine(LogFormat::kJson, kTime, message, {.request_id = id, .tenant = tenant});
    EXPECT_EQ(line.find('\n'), std::string::npos);
    const Json read = Json::parse(line);
    std::vector<std::string> keys = {"time", "level", "message"};
    if (!id.empty()) keys.push_back("request_id");
    if (!tenant.empty()) keys.push_back("tenant");
    EXPECT_EQ(Keys(read), keys);
    if (!utf8) continue;
    EXPECT_EQ(read["message"], message);
    EXPECT_EQ(read.value("request_id", ""), id);
    EXPECT_EQ(read.value("tenant", ""), tenant);
  }
}

TEST(LogLineTest, LongTextsAreCut) {
  const std::string huge(1 << 20, '\x01');  // six bytes each in JSON
  const LogDetails details = {.request_id = huge, .tenant = huge, .traceparent = huge};
  const Json read = Json::parse(FormatLogLine(LogFormat::kJson, kTime, huge, details));
  EXPECT_EQ(read["message"].get<std::string>().size(), kMaxLogMessageBytes);
  for (const char* name : {"request_id", "tenant", "traceparent"}) {
    EXPECT_EQ(read[name].get<std::string>().size(), kMaxLogNameBytes) << name;
  }
  EXPECT_LT(FormatLogLine(LogFormat::kText, kTime, huge, details).size(),
            kMaxLogMessageBytes + kMaxLogNameBytes + 64);
  // A character that the cut splits is no error.
  std::string wide = "a";
  while (wide.size() < 2 * kMaxLogMessageBytes) wide += "漢";
  Json::parse(FormatLogLine(LogFormat::kJson, kTime, wide, {.request_id = wide}));
}

TEST(LogLineTest, LevelsOfEnds) {
  EXPECT_EQ(LevelOfEnd(absl::StatusCode::kOk), LogLevel::kInfo);
  EXPECT_EQ(LevelOfEnd(absl::StatusCode::kCancelled), LogLevel::kInfo);
  EXPECT_EQ(LevelOfEnd(absl::StatusCode::kInvalidArgument), LogLevel::kWarning);
  EXPECT_EQ(LevelOfEnd(absl::StatusCode::kUnavailable), LogLevel::kWarning);
  EXPECT_EQ(LevelOfEnd(absl::StatusCode::kUnknown), LogLevel::kError);
  EXPECT_EQ(LevelOfEnd(absl::StatusCode::kInternal), LogLevel::kError);
  EXPECT_EQ(LevelOfEnd(absl::StatusCode::kDataLoss), LogLevel::kError);
}

}  // namespace
}  // namespace meshfill
