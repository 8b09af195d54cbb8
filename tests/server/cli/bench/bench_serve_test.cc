// Clients and figures against a server that is made up: what it is sent, and what is said of its answers.
#include "server/cli/bench/bench_serve.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/mutex.h"
#include "meshfill/v1/prefill.grpc.pb.h"
#include "server/api/status_details.h"
#include "server/cli/bench/load_clients.h"
#include "tests/server/cli/command_line.h"

namespace meshfill {
namespace {

using nlohmann::json;
using testing::MatchesRegex;

// Answers every prompt at once, with figures that stay the same.
class MadeUpServer final : public v1::PrefillService::Service {
 public:
  MadeUpServer() {
    int port = 0;
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    address_ = absl::StrCat("127.0.0.1:", port);
  }
  ~MadeUpServer() override { server_->Shutdown(); }

  const std::string& address() const { return address_; }
  uint64_t vocab = 7;
  int refuse_every = 0;              // refuses one try of so many; 0: none
  std::string fails_for = "nobody";  // this tenant's prompts fail for good
  int most_at_once() {
    const MutexLock lock(mu_);
    return most_at_once_;
  }
  int refused() {
    const MutexLock lock(mu_);
    return refused_;
  }
  std::vector<std::pair<std::string, std::vector<uint32_t>>> prompts() {  // tenant and tokens, of all tries
    const MutexLock lock(mu_);
    return prompts_;
  }

  grpc::Status GetPool(grpc::ServerContext*, const v1::GetPoolRequest*, v1::PoolStatus* status) override {
    status->set_vocab(vocab);
    return grpc::Status::OK;
  }

  grpc::Status Prefill(grpc::ServerContext*,
                       grpc::ServerReaderWriter<v1::PrefillEvent, v1::PrefillRequest>* stream) override {
    std::pair<std::string, std::vector<uint32_t>> prompt;
    v1::PrefillRequest request;
    while (stream->Read(&request)) {
      if (request.has_header()) prompt.first = request.header().tenant();
      prompt.second.insert(prompt.second.end(), request.tokens().ids().begin(), request.tokens().ids().end());
    }
    {
      const MutexLock lock(mu_);
      prompts_.push_back(std::move(prompt));
      most_at_once_ = std::max(most_at_once_, ++at_once_);
      const int tries = static_cast<int>(prompts_.size());
      if (refuse_every > 0 && tries % refuse_every == 0) {
        --at_once_;
        ++refused_;
        return ToGrpcStatus(WithRetryAfter(absl::ResourceExhaustedError("full"), absl::Microseconds(100)));
      }
      if (prompts_.back().first == fails_for) {
        --at_once_;
        return {grpc::StatusCode::INTERNAL, "broken"};
      }
    }
    v1::PrefillEvent event;
    event.mutable_accepted()->set_predicted_seconds(0.5);
    event.mutable_accepted()->set_predicted_queue_seconds(0.25);
    stream->Write(event);
    event.mutable_result()->mutable_seconds()->set_queue(0.125);
    event.mutable_result()->mutable_seconds()->set_prefill(2);
    stream->Write(event);
    const MutexLock lock(mu_);
    --at_once_;
    return grpc::Status::OK;
  }

 private:
  std::unique_ptr<grpc::Server> server_;
  std::string address_;
  Mutex mu_;
  int at_once_ = 0;
  int most_at_once_ = 0;
  int refused_ = 0;
  std::vector<std::pair<std::string, std::vector<uint32_t>>> prompts_;
};

std::vector<LoadOutcome> Send(MadeUpServer& server, const std::vector<LoadPrompt>& prompts,
                              const LoadOptions& options) {
  const auto channel = ServerChannel::Open({.address = server.address()});
  EXPECT_TRUE(channel.ok()) << channel.status();
  return SendLoad(*channel, prompts, options);
}

TEST(SendLoad, SendsEachPromptWhenItIsDueAndAgainWhereItIsRefused) {
  MadeUpServer server;
  server.refuse_every = 3;
  std::vector<LoadPrompt> prompts;
  for (int i = 0; i < 40; ++i) {
    prompts.push_back({.due_seconds = i < 20 ? 0 : 0.02, .tokens = 1 + i, .tenant = i % 2 == 0 ? "a" : "b"});
  }
  const std::vector<LoadOutcome> outcomes = Send(server, prompts, {.vocab = 7, .most_at_once = 4, .seed = 9});
  ASSERT_EQ(outcomes.size(), prompts.size());
  int refused = 0;
  for (size_t i = 0; i < prompts.size(); ++i) {
    const LoadOutcome& outcome = outcomes[i];
    EXPECT_TRUE(outcome.status.ok()) << outcome.status;
    EXPECT_GE(outcome.accepted_at, prompts[i].due_seconds);
    EXPECT_GE(outcome.ended_at, outcome.accepted_at);
    EXPECT_LT(outcome.ended_at, 600);
    EXPECT_EQ(outcome.predicted_wait_seconds, 0.25);
    EXPECT_EQ(outcome.predicted_prefill_seconds, 0.5);
    EXPECT_EQ(outcome.wait_seconds, 0.125);
    EXPECT_EQ(outcome.prefill_seconds, 2);
    for (const double seconds : outcome.refusal_seconds) EXPECT_GT(seconds, 0);
    refused += static_cast<int>(outcome.refusal_seconds.size());
  }
  EXPECT_GT(refused, 0);
  EXPECT_EQ(refused, server.refused());
  EXPECT_LE(server.most_at_once(), 4);
  std::map<size_t, std::vector<uint32_t>> by_length;
  for (const auto& [tenant, tokens] : server.prompts()) {
    EXPECT_EQ(tenant, tokens.size() % 2 == 1 ? "a" : "b");
    EXPECT_LT(*std::max_element(tokens.begin(), tokens.end()), 7u);
    const auto [first, is_new] = by_length.emplace(tokens.size(), tokens);
    EXPECT_EQ(first->second, tokens) << "each try has the same tokens";
  }
  EXPECT_EQ(by_length.size(), prompts.size());
  EXPECT_EQ(by_length.rbegin()->first, 40u);
  const std::vector<uint32_t> last = by_length[40], before = by_length[39];
  EXPECT_FALSE(std::equal(before.begin(), before.end(), last.begin())) << "prompts differ";
}

TEST(SendLoad, KeepsWhatFails) {
  MadeUpServer server;
  server.fails_for = "";
  const std::vector<LoadOutcome> outcomes = Send(server, {{.tokens = 2}}, {.vocab = 7});
  ASSERT_EQ(outcomes.size(), 1u);
  EXPECT_EQ(outcomes[0].status.code(), absl::StatusCode::kInternal);
  EXPECT_TRUE(outcomes[0].refusal_seconds.empty());
  EXPECT_TRUE(Send(server, {}, {}).empty());
}

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
    EXPECT_EQ(least, bound > 0.5 && bound < 1) << check;
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
  EXPECT_EQ(server.prompts().size(), said["requests"].get<size_t>() + kWarmUps + kLone);
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
  EXPECT_EQ(checks.at("slowdown_p99_of_4").first, said["lengths"][0]["slowdown"]["p99"]);
  EXPECT_EQ(checks.at("slowdown_p99_of_4").second, 10);
  if (said["lengths"][2]["requests"] > 0) EXPECT_EQ(checks.at("slowdown_p99_of_512").second, 3);
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
      MatchesRegex("mix: [0-9]+ requests in .* m?s, 0 failed, 0 tries refused\n"
                   "4 tokens, alone .* m?s: [0-9]+, slowdown median .*, 99th percentile .*; first come, "
                   "first served: .*, .* \\(calculated\\); predictions off: median .*, 95th percentile .*, "
                   "bias \\+.*; by the wait: .*; by the prefill: .*\n"
                   "64 tokens, alone .*\n512 tokens, alone .*\n"
                   "failed +0  at most 0: met\n"
                   "slowdown_p99_of_4 +.*  at most 10: .*\n"
                   "(slowdown_p99_of_512 +.*  at most 3: .*\n)?"
                   "prediction_median_error +.*  at most 0.1: NOT MET\n"
                   "prediction_p95_error +.*  at most 0.3: NOT MET\n"
                   "prediction_drift +.*  at most 0.1: .*\n"));
}

TEST(BenchServe, CountsWhatFailed) {
  MadeUpServer server;
  server.fails_for = "b";
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

TEST(BenchServe, RefusesAServerThatLoadsAndALoadWithoutPrompts) {
  MadeUpServer server;
  EXPECT_EQ(Bench(server, "mix", {"--seconds", "1e-12"}).status.message(),
            "no prompt comes in that time; raise --seconds");
  EXPECT_EQ(
      Bench(server, "overload", {"--seconds", "1e-12", "--rounds", "1", "--in-flight", "1"}).status.message(),
      "no prompt comes in that time; raise --seconds");
  server.vocab = 0;
  EXPECT_EQ(Bench(server, "flight", {}).status,
            absl::UnavailableError("server " + server.address() + " is loading its model; try again soon"));
  server.vocab = 7;
  server.fails_for = "";
  EXPECT_EQ(Bench(server, "flight", {}).status.code(), absl::StatusCode::kInternal);
}

}  // namespace
}  // namespace meshfill
