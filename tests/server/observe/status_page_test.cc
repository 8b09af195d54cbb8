#include "server/observe/status_page.h"

#include <algorithm>
#include <string>

#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/server/fake_engine.h"

namespace meshfill {
namespace {

PrefillResult RunOnce(FakeEngine& engine, const PrefillOptions& options) {
  const std::vector<uint32_t> ids(1000, 1);
  auto result = RunPrefill(engine, {ids, options});
  EXPECT_TRUE(result.ok()) << result.status();
  return *std::move(result);
}

TEST(StatusJsonTest, SaysThePoolAndNoPrefillYet) {
  v1::PoolStatus pool;
  pool.set_state(v1::PoolStatus::STATE_READY);
  pool.set_ranks(4);
  pool.set_queued_tokens(1 << 20);
  pool.set_running_request_id("</script>\"\n");  // ids are the clients' choice
  const auto status = nlohmann::json::parse(StatusJson(pool, nullptr));
  EXPECT_TRUE(status.at("last_prefill").is_null());
  EXPECT_EQ(status.at("pool").at("state"), "STATE_READY");
  EXPECT_EQ(status.at("pool").at("ranks"), 4);
  EXPECT_EQ(status.at("pool").at("running_request_id"), "</script>\"\n");
  EXPECT_EQ(status.at("pool").at("queued_tokens"), 1 << 20);  // a number, not protobuf's string
}

// Programs need no defaults of their own: zeros and empty lists are there.
TEST(StatusJsonTest, HasEveryField) {
  v1::PoolStatus pool;
  pool.add_requests()->set_tokens(uint64_t{3} << 32);
  pool.add_workers()->set_first_rank(-1);
  const auto status = nlohmann::json::parse(StatusJson(pool, nullptr)).at("pool");
  const auto* type = v1::PoolStatus::descriptor();
  EXPECT_EQ(status.size(), static_cast<size_t>(type->field_count()));
  for (int i = 0; i < type->field_count(); ++i)
    EXPECT_TRUE(status.contains(std::string(type->field(i)->name())));
  EXPECT_EQ(status.at("queued_requests"), 0);
  EXPECT_EQ(status.at("running_request_id"), "");
  EXPECT_EQ(status.at("links"), nlohmann::json::array());
  EXPECT_EQ(status.at("requests")[0].at("tokens"), uint64_t{3} << 32);
  EXPECT_EQ(status.at("requests")[0].at("elapsed_seconds"), 0.0);
  EXPECT_EQ(status.at("workers")[0].at("first_rank"), -1);
}

TEST(StatusJsonTest, SaysWhereEachRanksTimeWent) {
  LastPrefill last_prefill;
  FakeEngine engine;
  engine.PredictSeconds(1.5);
  PrefillResult result = RunOnce(engine, {.tile = Tile{4, 1}});
  result.prefill_seconds = 2.5;
  result.ranks[2].wait_seconds[Traffic::kGather] = 0.5;
  last_prefill.OnPrefillDone(result);
  const auto last = nlohmann::json::parse(StatusJson({}, last_prefill.report().get())).at("last_prefill");
  EXPECT_EQ(last.at("number"), 1);
  EXPECT_EQ(last.at("tokens"), 1000);
  EXPECT_EQ(last.at("prefill_seconds"), 2.5);
  EXPECT_EQ(last.at("predicted_seconds"), 1.5);
  EXPECT_EQ(last.at("mfu"), 0.5);
  EXPECT_EQ(last.at("attention_mfu"), 0.25);
  EXPECT_EQ(last.at("plan"), nlohmann::json::parse(R"({"ranks": 4, "heads": 1, "a": 4, "b": 1,
      "layout": "striped", "stripe": 64, "partial_dtype": "f32", "placement": "row-first"})"));
  ASSERT_EQ(last.at("ranks").size(), size_t{FakeEngine::kRanks});
  EXPECT_EQ(last.at("ranks")[3].at("total_seconds"), 6);
  EXPECT_EQ(last.at("ranks")[1], nlohmann::json::parse(R"({"total_seconds": 4, "attention_seconds": 2,
      "block_seconds": 1, "merge_seconds": 0.25, "wait_seconds":
      {"recv_q": 0.125, "recv_kv": 0.25, "send_o": 0.0625, "all_to_all": 0}})"));
  EXPECT_EQ(last.at("ranks")[2].at("wait_seconds").at("gather"), 0.5) << "where weights are shared";
}

TEST(StatusJsonTest, TheTokensAreThoseOfTheWholePrompt) {
  LastPrefill last_prefill;
  FakeEngine engine;
  PrefillResult result = RunOnce(engine, {});
  const int64_t computed = result.plan.layout.tokens();
  result.plan.cached_tokens = 512;
  last_prefill.OnPrefillDone(result);
  const auto status = nlohmann::json::parse(StatusJson({}, last_prefill.report().get()));
  EXPECT_EQ(status.at("last_prefill").at("tokens"), computed + 512);
}

TEST(StatusPagesTest, HealthIsThatOfThePool) {
  const LastPrefill last_prefill;
  v1::PoolStatus pool;
  const auto pages = StatusPages([&pool] { return pool; }, last_prefill);
  const auto health =
      std::find_if(pages.begin(), pages.end(), [](const auto& each) { return each.path == "/readyz"; });
  ASSERT_NE(health, pages.end());
  for (const auto state :
       {v1::PoolStatus::STATE_LOADING, v1::PoolStatus::STATE_READY, v1::PoolStatus::STATE_DRAINING}) {
    for (const uint32_t ranks : {0u, 4u}) {
      pool.set_state(state);
      pool.set_ranks(ranks);
      EXPECT_EQ(health->healthy(), state == v1::PoolStatus::STATE_READY && ranks > 0);
    }
  }
}

TEST(StatusPagesTest, ThePageLoadsNothingFromOutside) {
  const LastPrefill last_prefill;
  const auto pages = StatusPages([] { return v1::PoolStatus(); }, last_prefill);
  ASSERT_EQ(pages.front().path, "/");
  const std::string html = pages.front().body();
  EXPECT_EQ(html.rfind("<!doctype html>", 0), 0u);
  EXPECT_NE(html.find("width=device-width"), std::string::npos);
  EXPECT_EQ(html.find("://"), std::string::npos);
  for (const HttpPage& page : pages) EXPECT_FALSE(page.body().empty()) << page.path;
}

TEST(StatusPagesTest, ThePictureIsOfTheLastPrefill) {
  LastPrefill last_prefill;
  const auto pages = StatusPages([] { return v1::PoolStatus(); }, last_prefill);
  ASSERT_EQ(pages.back().path, "/last_prefill.svg");
  EXPECT_EQ(pages.back().body().rfind("<svg ", 0), 0u) << "there is none yet";
  FakeEngine engine;
  last_prefill.OnPrefillDone(RunOnce(engine, {}));
  EXPECT_EQ(pages.back().body(), PrefillReportSvg(*last_prefill.report()));
}

}  // namespace
}  // namespace meshfill
