// Named so because log_test is a test of the processes.
#include <string>

#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "server/observe/log.h"

namespace meshfill {
namespace {

TEST(LogTest, WhatIsQuotedBreaksNoLine) {
  EXPECT_EQ(LogQuote("plain"), "\"plain\"");
  EXPECT_EQ(LogQuote("a\nb\"c\\d\x01"), "\"a\\nb\\\"c\\\\d\\001\"");
  EXPECT_EQ(LogQuote("é漢"), "\"é漢\"") << "as it is read";
}

TEST(LogTest, OneRankIsOne) {
  EXPECT_EQ(RanksText(0), "0 ranks");
  EXPECT_EQ(RanksText(1), "1 rank");
  EXPECT_EQ(RanksText(2), "2 ranks");
}

TEST(LogTest, LinesAreInTheChosenFormat) {
  SetLogFormat(LogFormat::kJson);
  EXPECT_EQ(GetLogFormat(), LogFormat::kJson);
  testing::internal::CaptureStderr();
  {
    const LogFlush flush;
    Log("begun", {.level = LogLevel::kWarning, .request_id = "7"});
    LogLimited("refusals", "refused", {.tenant = "a"});
  }
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_TRUE(absl::StrContains(log, R"("level":"warning","message":"begun","request_id":"7"})")) << log;
  EXPECT_TRUE(absl::StrContains(log, R"("level":"info","message":"refused","tenant":"a"})")) << log;
}

}  // namespace
}  // namespace meshfill
