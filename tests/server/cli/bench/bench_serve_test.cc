// Figures of a server that is made up: what is said of its answers.
#include "server/cli/bench/bench_serve.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/server/cli/bench/made_up_server.h"
#include "tests/server/cli/command_line.h"

namespace meshfill {
namespace {

using nlohmann::json;
using testing::MatchesRegex;

Ran Bench(MadeUpServer& server, const std::string& scenario, std::vector<std::string> words) {
  words.insert(words.begin(),
               {"serve", "--server", server.address(), "--scenario", scenario, "--tokens", "4"});
  return RunCommand(AddBenchServeCommand, std::move(words));
}

json BenchJson(MadeUpServer& server, const std::string& scenario, std::vector<std::string> words) {
  words.emplace_back("--json");
  const Ran ran = Bench(server, scenario, std::move(words));
  EXPECT_TRUE(ran.status.ok()) << ran.status;
  return ran.json();
}

// By name: value and bound. Whether each is met follows from both.
std::map<std::string, std::pair<double, double>> ChecksOf(const json& said) {
  std::map<std::string, std::pair<double, double>> checks;
  for (const json& check : said["checks"]) {
    const bool least = check.contains("at_least");
    EXPECT_NE(least, check.contains("at_most"));
    const double value = check["value"], bound = check[least ? "at_least" : "at_most"];
    EXPECT_EQ(check["met"], least ? value >= bound : value <= bound);
    EXPECT_EQ(least, bound > 0.4 && bound < 1) << check;
    checks[check["name"]] = {value, bound};
  }
  return checks;
}

constexpr int kWarmUps = 20, kLone = 2 * (16 + 6 + 2);

TEST(BenchServe, MixHasThreeLengthsAndTheirPredictions) {
  MadeUpServer server;
  const json said = BenchJson(server, "mix", {"--seconds", "0.1", "--load", "5", "--seed", "3"});
  EXPECT_EQ(said["scenario"], "mix");
  EXPECT_EQ(said["failed"], 0);
  EXPECT_EQ(said["refusals"], 0);
  const size_t of_load = said["requests"], asked_again = server.prompts().size() - of_load - kWarmUps - kLone;
  EXPECT_GE(asked_again, std::min<size_t>(of_load, 10));
  EXPECT_LE(asked_again, 20u);
  EXPECT_GT(said["seconds"], 0);
  ASSERT_EQ(said["lengths"].size(), 3u);
  size_t requests = 0;
  const int64_t tokens[] = {4, 64, 512};
  for (int i = 0; i < 3; ++i) {
    const json& length = said["lengths"][i];
    EXPECT_EQ(length["tokens"], tokens[i]);
    EXPECT_GT(length["lone_seconds"], 0);
    requests += length["requests"].get<size_t>();
    EXPECT_EQ(length.contains("slowdown"), length["requests"] > 0);
    if (!length.contains("slowdown")) continue;
    EXPECT_LE(length["slowdown"]["median"], length["slowdown"]["p99"]);
    EXPECT_GE(length["first_come_first_served"]["median"], 1 - 1e-9);
    for (const char* of : {"median", "p99"}) {
      EXPECT_GE(length["by_themselves"][of], 1 - 1e-9);
      EXPECT_LE(length["by_themselves"][of], length["first_come_first_served"][of].get<double>() + 1e-9);
    }
    // It takes far less than a second, but says 0.125 and 2; and predicts 0.25 and 0.5.
    const json& errors = length["prediction_error"];
    EXPECT_GT(errors["all"]["bias"], 0) << errors;
    EXPECT_GT(errors["of_wait"]["bias"], 0) << errors;
    EXPECT_LT(errors["of_wait"]["bias"], errors["all"]["bias"]) << errors;
    EXPECT_EQ(errors["of_prefill"]["bias"], -1) << errors;
  }
  EXPECT_EQ(requests, said["requests"]);
  const auto checks = ChecksOf(said);
  EXPECT_EQ(checks.at("failed"), std::pair(0.0, 0.0));
  EXPECT_EQ(checks.at("answers_that_differ"), std::pair(0.0, 0.0));
  EXPECT_EQ(checks.at("slowdown_p99_of_4").first, said["lengths"][0]["slowdown"]["p99"]);
  EXPECT_EQ(checks.at("slowdown_p99_of_4").second, 10);
  if (said["lengths"][2]["requests"] > 0) {
    EXPECT_EQ(checks.at("slowdown_p99_of_512").second, 3);
  }
  EXPECT_EQ(checks.at("prediction_median_error").second, 0.1);
  EXPECT_EQ(checks.at("prediction_p95_error").second, 0.3);
  EXPECT_EQ(checks.at("prediction_drift").second, 0.1);
}

TEST(BenchServe, MixAsText) {
  MadeUpServer server;
  const Ran good = Bench(server, "mix", {"--seconds", "0.1", "--load", "5"});
  ASSERT_TRUE(good.status.ok()) << good.status;
  EXPECT_THAT(
      good.out,
      MatchesRegex(
          "mix: [0-9]+ requests in .* m?s, 0 failed, 0 tries refused\n"
          "4 tokens, alone .* m?s: [0-9]+, slowdown median .*, 99th percentile .*; calculated: first "
          "come, first served .*, .*; by themselves .*, .*; predictions off: median .*, 95th percentile "
          ".*, bias \\+.*; by the wait: .*; by the prefill: .*\n"
          "64 tokens, alone .*\n512 tokens, alone .*\n"
          "failed +0  at most 0: met\n"
          "slowdown_p99_of_4 +.*  at most 10: .*\n"
          "(slowdown_p99_of_512 +.*  at most 3: .*\n)?"
          "answers_that_differ +0  at most 0: met\n"
          "prediction_median_error +.*  at most 0.1: NOT MET\n"
          "prediction_p95_error +.*  at most 0.3: NOT MET\n"
          "prediction_drift +.*  at most 0.1: .*\n"));
}

TEST(BenchServe, NothingIsAnsweredFromTheCache) {
  MadeUpServer server;
  server.vocab = 1 << 30;  // no two prompts begin alike by chance
  const json said = BenchJson(server, "mix", {"--seconds", "0.1", "--load", "5"});
  const auto prompts = server.prompts();
  const std::vector<bool> ignore_cache = server.ignore_cache();
  std::set<std::vector<uint32_t>> begins;
  size_t again = 0;
  for (size_t i = 0; i < prompts.size(); ++i) {
    const std::vector<uint32_t>& tokens = prompts[i].second;
    if (ignore_cache[i]) {
      ++again;
    } else {
      EXPECT_TRUE(begins.emplace(tokens.begin(), tokens.begin() + 4).second) << "try " << i;
    }
  }
  EXPECT_EQ(again, prompts.size() - said["requests"].get<size_t>() - kWarmUps - kLone);
}

TEST(BenchServe, CountsAnswersThatAreOthersUnderLoad) {
  MadeUpServer server;
  server.answers_wrong_by = [](int tries) { return static_cast<uint32_t>(tries); };  // never the same
  const json said = BenchJson(server, "mix", {"--seconds", "0.1", "--load", "5"});
  const size_t asked_again = server.prompts().size() - said["requests"].get<size_t>() - kWarmUps - kLone;
  EXPECT_GT(asked_again, 0u);
  EXPECT_EQ(ChecksOf(said).at("answers_that_differ"), std::pair(static_cast<double>(asked_again), 0.0));
}

TEST(BenchServe, CountsWhatFailed) {
  MadeUpServer server;
  server.fails = [](const std::string& tenant, int) { return tenant == "b"; };
  const json said = BenchJson(server, "mix", {"--seconds", "0.1", "--load", "5"});
  size_t failed = 0;
  for (const auto& [tenant, tokens] : server.prompts()) failed += tenant == "b" ? 1 : 0;
  EXPECT_EQ(said["failed"], failed);
  EXPECT_EQ(said["checks"][0]["met"], failed == 0);
  size_t served = 0;
  for (const json& length : said["lengths"]) served += length["requests"].get<size_t>();
  EXPECT_EQ(served + failed, said["requests"]);
}

TEST(BenchServe, FlightComparesManyAtOnceWithOneAfterTheOther) {
  MadeUpServer server, lone[2];
  const json said = BenchJson(
      server, "flight",
      {"--in-flight", "6", "--rounds", "1", "--lone", lone[0].address(), "--lone", lone[1].address()});
  EXPECT_EQ(said["scenario"], "flight");
  EXPECT_EQ(said["requests"], 6);
  EXPECT_EQ(server.prompts().size(), 20u + 6 + 6);
  EXPECT_EQ(server.most_at_once() <= 6, true);
  for (MadeUpServer& each : lone) {
    EXPECT_EQ(each.prompts().size(), 3u + 3) << "a half of them, and to warm up";
    EXPECT_LE(each.most_at_once(), 3);
  }
  const json& figures = said["figures"];
  EXPECT_NEAR(figures["tokens_per_second"].get<double>() * said["seconds"].get<double>(), 4 * 6, 1e-6);
  const auto checks = ChecksOf(said);
  EXPECT_EQ(checks.at("of_one_after_the_other").second, 0.97);
  EXPECT_NEAR(checks.at("of_one_after_the_other").first,
              figures["tokens_per_second"].get<double>() /
                  figures["one_after_the_other_tokens_per_second"].get<double>(),
              1e-9);
  EXPECT_EQ(checks.at("of_lone_workers").second, 0.9);
  EXPECT_NEAR(checks.at("of_lone_workers").first,
              figures["tokens_per_second"].get<double>() / figures["lone_tokens_per_second"].get<double>(),
              1e-9);
}

TEST(BenchServe, OverloadCountsRefusalsAndWhatGetsThrough) {
  MadeUpServer server;
  server.refuse_every = 5;
  const json said = BenchJson(server, "overload", {"--seconds", "0.02", "--in-flight", "3", "--rounds", "2"});
  EXPECT_EQ(said["scenario"], "overload");
  EXPECT_GT(said["requests"], 0);
  EXPECT_GT(said["refusals"], 0);
  EXPECT_LE(said["refusals"].get<int>(), server.refused());
  EXPECT_EQ(server.prompts().size() - server.refused(),
            said["requests"].get<size_t>() + kWarmUps + 2 * 2 * 3);
  const json& figures = said["figures"];
  EXPECT_GE(figures["most_refusals_of_one"], 1);
  const auto checks = ChecksOf(said);
  EXPECT_EQ(checks.at("of_the_best").second, 0.95);
  EXPECT_NEAR(checks.at("of_the_best").first,
              figures["tokens_per_second"].get<double>() / figures["best_tokens_per_second"].get<double>(),
              1e-9);
  EXPECT_EQ(checks.at("refusal_seconds_p99").second, 0.01);
  EXPECT_GE(checks.at("refusal_seconds_p99").first, figures["refusal_seconds_median"].get<double>());
  const double counted = 0.9 * said["requests"].get<double>();
  EXPECT_GT(figures["tokens_per_second"].get<double>() * said["seconds"].get<double>(),
            4 * counted * (1 - 1e-9))
      << "the first nine of ten prompts have ended before the last";
}

TEST(BenchServe, AFloodCountsWhatTheOtherTenantGets) {
  MadeUpServer server;
  const json said = BenchJson(server, "flood", {"--in-flight", "10"});
  EXPECT_EQ(said["scenario"], "flood");
  EXPECT_EQ(said["requests"], 90);
  EXPECT_EQ(server.prompts().size(), kWarmUps + 90u);
  const auto checks = ChecksOf(said);
  EXPECT_EQ(checks.at("failed").first, 0);
  EXPECT_EQ(checks.at("share_of_the_other").second, 0.45);
  EXPECT_GE(checks.at("share_of_the_other").first, 9.0 / 89)
      << "9 of its 10 beside at most all of the others";
  EXPECT_LE(checks.at("share_of_the_other").first, 1);
}

TEST(BenchServe, ClassesHoldTheLowestAgainstMaxAge) {
  MadeUpServer server;
  const json said = BenchJson(server, "classes", {"--in-flight", "10", "--max-age", "0.1"});
  EXPECT_EQ(said["scenario"], "classes");
  EXPECT_EQ(said["requests"].get<size_t>(), server.prompts().size() - kWarmUps - 1);
  const std::vector<int> priorities = server.priorities();
  EXPECT_EQ(std::count(priorities.begin(), priorities.end(), -2), 1);
  EXPECT_EQ(std::count(priorities.begin(), priorities.end(), 2), said["requests"].get<int>() - 1);
  EXPECT_LE(server.most_at_once(), 11);
  const auto checks = ChecksOf(said);
  EXPECT_EQ(checks.at("failed").first, 0);
  EXPECT_EQ(checks.at("wait_of_max_age"), std::pair(1.25, 1.05)) << "0.125 s, it says";
  EXPECT_EQ(checks.at("end_of_the_flood").second, 1);
  EXPECT_GE(checks.at("end_of_the_flood").first, 0.01 / said["seconds"].get<double>()) << "it comes later";

  MadeUpServer broken;
  broken.fails = [](const std::string&, int tries) { return tries > kWarmUps + 1; };
  const json failed = BenchJson(broken, "classes", {"--in-flight", "10", "--max-age", "0.01"});
  EXPECT_GT(failed["failed"], 0);
  EXPECT_EQ(ChecksOf(failed).size(), 1u);
}

TEST(BenchServe, AloneJudgesPredictions) {
  MadeUpServer server;
  const json said = BenchJson(server, "alone", {"--in-flight", "3"});
  EXPECT_EQ(said["scenario"], "alone");
  EXPECT_EQ(server.prompts().size(), kWarmUps + 3u);
  const auto checks = ChecksOf(said);
  EXPECT_EQ(checks.at("prediction_median_error").second, 0.2);
  EXPECT_GT(checks.at("prediction_median_error").first, 1) << "0.75 s of milliseconds";
}

TEST(BenchServe, RefusesAServerThatLoadsAndALoadWithoutPrompts) {
  MadeUpServer server;
  EXPECT_EQ(Bench(server, "mix", {"--seconds", "1e-12"}).status.message(),
            "no prompt comes in that time; raise --seconds");
  EXPECT_EQ(
      Bench(server, "overload", {"--seconds", "1e-12", "--rounds", "1", "--in-flight", "1"}).status.message(),
      "no prompt comes in that time; raise --seconds");
  EXPECT_THAT(std::string(Bench(server, "classes", {"--max-age", "1e12"}).status.message()),
              MatchesRegex("[0-9.e+]+ prompts would come until 4 times --max-age; lower it, .*"));
  server.vocab = 0;
  EXPECT_EQ(Bench(server, "flight", {}).status,
            absl::UnavailableError("server " + server.address() + " is loading its model; try again soon"));
}

// A server that breaks while it is measured: its error is all that there is to say.
TEST(BenchServe, EndsWithTheErrorOfAServerThatBreaks) {
  const auto broken = [](const std::string& scenario, int from_try, std::vector<std::string> words) {
    MadeUpServer server;
    server.fails = [=](const std::string&, int tries) { return tries >= from_try; };
    words.insert(words.end(), {"--seconds", "0.01"});
    const Ran ran = Bench(server, scenario, std::move(words));
    EXPECT_EQ(ran.out, "") << scenario << from_try;
    EXPECT_EQ(server.prompts().size(), static_cast<size_t>(from_try)) << scenario;
    return ran.status;
  };
  const absl::StatusCode kBroken = absl::StatusCode::kInternal;
  EXPECT_EQ(broken("flight", 1, {}).code(), kBroken) << "it warms up";
  EXPECT_EQ(broken("flight", kWarmUps + 1, {"--in-flight", "1"}).code(), kBroken) << "one after the other";
  EXPECT_EQ(broken("flight", kWarmUps + 2, {"--in-flight", "1"}).code(), kBroken) << "all at once";
  EXPECT_EQ(broken("mix", kWarmUps + 1, {}).code(), kBroken) << "alone";
  EXPECT_EQ(broken("mix", kWarmUps + 16 + 6 + 1, {}).code(), kBroken) << "the longest alone";
  EXPECT_EQ(broken("overload", kWarmUps + 2, {"--in-flight", "1"}).code(), kBroken) << "the best";
}

TEST(BenchServe, EndsWithTheErrorOfAServerThatHasBrokenUnderTheLoad) {
  MadeUpServer server;
  bool loaded = false;
  server.fails = [&](const std::string& tenant, int) {
    loaded = loaded || !tenant.empty();
    return loaded && tenant.empty();
  };
  const Ran ran = Bench(server, "mix", {"--seconds", "0.1", "--load", "5"});
  EXPECT_EQ(ran.status.code(), absl::StatusCode::kInternal);
  EXPECT_EQ(ran.out, "");
  EXPECT_TRUE(loaded);
}

TEST(BenchServe, EndsWithTheErrorOfALoneServer) {
  for (const int from_try : {1, 3}) {  // it warms up with two
    MadeUpServer server, lone[2];
    lone[1].fails = [=](const std::string&, int tries) { return tries >= from_try; };
    const Ran ran = Bench(server, "flight",
                          {"--in-flight", "4", "--lone", lone[0].address(), "--lone", lone[1].address()});
    EXPECT_EQ(ran.status.code(), absl::StatusCode::kInternal);
    EXPECT_EQ(ran.out, "");
    EXPECT_EQ(server.prompts().size(), static_cast<size_t>(from_try == 1 ? kWarmUps : kWarmUps + 4 + 4));
  }
}

// Nothing is divided by what no prompt took.
TEST(BenchServe, HasNoFiguresWhereAllFails) {
  MadeUpServer server;
  server.fails = [](const std::string& tenant, int) { return !tenant.empty(); };  // the load's have one
  const json mix = BenchJson(server, "mix", {"--seconds", "0.1", "--load", "5"});
  EXPECT_GT(mix["failed"], 0);
  EXPECT_EQ(mix["failed"], mix["requests"]);
  for (const json& length : mix["lengths"]) {
    EXPECT_EQ(length["requests"], 0);
    EXPECT_FALSE(length.contains("slowdown")) << length;
  }
  EXPECT_EQ(ChecksOf(mix).size(), 1u);
  EXPECT_EQ(mix["checks"][0]["met"], false);
  const Ran text = Bench(server, "mix", {"--seconds", "0.1", "--load", "5"});
  EXPECT_THAT(text.out,
              MatchesRegex("mix: ([0-9]+) requests in .* m?s, [0-9]+ failed, 0 tries refused\n"
                           "4 tokens, alone [0-9.]+ m?s: 0\n64 tokens, alone [0-9.]+ m?s: 0\n"
                           "512 tokens, alone [0-9.]+ m?s: 0\nfailed +[0-9]+  at most 0: NOT MET\n"));

  const json overload = BenchJson(server, "overload", {"--seconds", "0.02", "--in-flight", "2"});
  EXPECT_EQ(overload["failed"], overload["requests"]);
  EXPECT_GT(overload["figures"]["best_tokens_per_second"], 0) << "of prompts without a tenant";
  EXPECT_EQ(overload["figures"].size(), 2u) << overload["figures"];
  EXPECT_EQ(ChecksOf(overload).size(), 1u);
}

TEST(BenchServe, LoadsAsMuchAsItIsTold) {
  MadeUpServer server;
  for (const double load : {3.0, 10.0}) {  // 10 where nothing is said
    // So many rounds that a machine that stands still in a few of them does not make the server look slow.
    std::vector<std::string> words = {"--seconds", "0.1", "--in-flight", "1", "--rounds", "9"};
    if (load != 10) words.insert(words.end(), {"--load", "3"});
    const json said = BenchJson(server, "overload", words);
    // At random: some, up to a few times the square root, more or fewer come.
    const double expected = 0.1 * load * said["figures"]["best_tokens_per_second"].get<double>() / 4;
    EXPECT_NEAR(said["requests"].get<double>(), expected, 6 * std::sqrt(expected)) << said;
    EXPECT_EQ(said["refusals"], 0);
    EXPECT_FALSE(said["figures"].contains("refusal_seconds_median"));
    EXPECT_FALSE(ChecksOf(said).contains("refusal_seconds_p99"));
  }
}

TEST(BenchServe, FlightAsText) {
  MadeUpServer server, lone;
  const Ran ran = Bench(server, "flight", {"--in-flight", "3", "--rounds", "1", "--lone", lone.address()});
  ASSERT_TRUE(ran.status.ok()) << ran.status;
  EXPECT_THAT(ran.out, MatchesRegex("flight: 3 requests in [0-9.]+ m?s, 0 failed, 0 tries refused\n"
                                    "tokens_per_second [0-9.e+]+\n"
                                    "one_after_the_other_tokens_per_second [0-9.e+]+\n"
                                    "lone_tokens_per_second [0-9.e+]+\n"
                                    "of_one_after_the_other +[0-9.e+-]+  at least 0.97: (NOT MET|met)\n"
                                    "of_lone_workers +[0-9.e+-]+  at least 0.9: (NOT MET|met)\n"));
}

TEST(BenchServe, RefusesServersThatItCannotAsk) {
  MadeUpServer server;
  EXPECT_EQ(
      Bench(server, "flight", {"--ca", "nothing.pem"}).status,
      absl::InvalidArgumentError("--ca: nothing.pem cannot be read: No such file or directory; name a file "
                                 "that this user may read"));
  EXPECT_EQ(Bench(server, "flight", {"--lone", "elsewhere"}).status.message(),
            "--lone: \"elsewhere\" is no HOST:PORT; write e.g. 127.0.0.1:50051");
  EXPECT_TRUE(server.prompts().empty());
  server.Stop();
  const absl::Status status = Bench(server, "flight", {}).status;
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("server " + server.address() + ": "));
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("is `meshfill serve` listening there?"));
}

}  // namespace
}  // namespace meshfill
