// Clients against a server that is made up: what it is sent, and when.
#include "server/cli/bench/load_clients.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "tests/server/cli/bench/made_up_server.h"

namespace meshfill {
namespace {

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

// Its client waited in the queue: that is no refusal that took so long.
TEST(SendLoad, WhatWasAcceptedAndLostItsPlaceIsSentAgainAndNotRefused) {
  MadeUpServer server;
  server.drops = [](int tries) { return tries == 1; };
  const std::vector<LoadOutcome> outcomes = Send(server, {{.tokens = 2}}, {.vocab = 7});
  ASSERT_EQ(outcomes.size(), 1u);
  EXPECT_TRUE(outcomes[0].status.ok()) << outcomes[0].status;
  EXPECT_TRUE(outcomes[0].refusal_seconds.empty());
  EXPECT_EQ(server.prompts().size(), 2u);
}

TEST(SendLoad, KeepsWhatFails) {
  MadeUpServer server;
  server.fails = [](const std::string&, int) { return true; };
  const std::vector<LoadOutcome> outcomes = Send(server, {{.tokens = 2}}, {.vocab = 7});
  ASSERT_EQ(outcomes.size(), 1u);
  EXPECT_EQ(outcomes[0].status.code(), absl::StatusCode::kInternal);
  EXPECT_TRUE(outcomes[0].refusal_seconds.empty());
  EXPECT_TRUE(Send(server, {}, {}).empty());
}

}  // namespace
}  // namespace meshfill
