#include "tests/server/pool/simulation/queue_clients.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "meshfill/v1/config.pb.h"
#include "server/config/tenants.h"
#include "server/queue/refusal.h"
#include "tests/server/pool/simulation/pool_simulation.h"
#include "tests/server/pool/simulation/queue.h"
#include "tests/server/pool/simulation/simulated_pool.h"

namespace meshfill {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(240);  // within which every client has ended
constexpr int kMostRefusals = 30;      // of one that comes as it is told, in a queue without overload
constexpr int64_t kPackedTokens = 40;  // longest prompt that shares a pass

}  // namespace

QueueRoom::Limits QueueClients::DrawLimits() {
  QueueRoom::Limits limits;
  limits.max_age = story_.Chance(0.7) ? story_.DrawMs(100, 2000) : absl::Hours(1);
  limits.max_wait = story_.Chance(0.3) ? story_.DrawMs(300, 3000) : absl::InfiniteDuration();
  if (story_.Chance(0.8)) limits.max_requests = story_.Draw(1, 5);
  if (story_.Chance(0.5)) limits.max_tokens = story_.Draw(10, 30) * kLongestPrompt * kTokensOfOne / 10;
  v1::Config config;
  if (story_.Chance(0.3)) config.mutable_tenant_limits()->set_max_requests(story_.Draw(1, 3));
  if (story_.Chance(0.5)) {
    (*config.mutable_tenants())["a"].set_weight(story_.Draw(1, 4));
    (*config.mutable_tenants())["b"].set_max_priority(story_.Draw(-1, 1));
    (*config.mutable_tenants())["c"].set_max_tokens(story_.Draw(2, 15) * kLongestPrompt * kTokensOfOne / 10);
  }
  limits.tenants = Tenants(config);
  return limits;
}

int64_t QueueClients::TokensOf(const Client& client) const {
  return std::ssize(client.drawn.client.tokens) * kTokensOfOne;
}

bool QueueClients::IsCalm(const Client& client) const {
  return story_.quiet_ && story_.leader_ != nullptr &&
         client.leader_incarnation == story_.leader_incarnation_ &&
         story_.leader_->counters().losses == client.losses;
}

void QueueClients::Add(story::DrawnRequest drawn, bool last) {
  const uint64_t id = ++last_client_;
  Client client = {.drawn = std::move(drawn), .last = last, .came_at = story_.now_};
  const double seconds = 0.1 + 0.004 * static_cast<double>(client.drawn.client.tokens.size());
  client.run.work_seconds = seconds * std::exp2(story_.Draw(-10, 10) / 10.0);
  client.run.tenant = last ? "the last" : std::string(1, static_cast<char>('a' + story_.Draw(0, 2)));
  if (!last) {
    if (story_.Chance(story_.packs_ ? 0.15 : 0.4)) client.run.priority = story_.Draw(-2, 2);
    if (story_.Chance(0.15)) client.run.deadline = story_.now_ + story_.DrawMs(100, 4000);
    if (story_.Chance(0.2)) client.run.may_save_seconds = client.run.work_seconds * story_.Draw(1, 9) / 10;
    client.cancels = story_.Chance(0.15);
  }
  client.losses = story_.leader_->counters().losses;
  client.leader_incarnation = story_.leader_incarnation_;
  ++story_.census_.came;
  clients_.emplace(id, std::move(client));
  Come(id);
}

void QueueClients::Come(uint64_t id) {
  const auto found = clients_.find(id);
  if (found == clients_.end()) return;
  Client& client = found->second;
  if (story_.leader_ == nullptr) return story_.After(story_.DrawMs(50, 300), -1, [this, id] { Come(id); });
  StoryQueue& queue = *story_.queue_;
  client.run.weight = queue.limits().tenants.LimitsOf(client.run.tenant).weight;
  if (!client.last && story_.Chance(0.95)) {
    const std::string lease = story_.AdmitKv(std::ssize(client.drawn.client.tokens));
    client.drawn.client.lease = client.drawn.options.kv_lease = lease;
  }
  const absl::StatusOr<RunOrder::Ticket> ticket = queue.Reserve(id, client.run, TokensOf(client));
  if (!ticket.ok()) return OnRefused(id, ticket.status());
  ++story_.census_.entered;
  if (std::exchange(client.again, false)) ++story_.census_.entered_again;
  client.ticket = *ticket;
  client.refusals = 0;
  Predict(client);
  if (client.run.deadline < absl::InfiniteFuture()) {
    story_.At(client.run.deadline, -1, [this, id, ticket = *ticket] { Leave(id, ticket); });
  }
  if (client.cancels)
    story_.After(story_.DrawMs(0, 900), -1, [this, id, ticket = *ticket] { Leave(id, ticket); });
  Upload(id, *ticket, 0);
}

// As the front end does it once a request has a place: what the engine says of it.
void QueueClients::Predict(const Client& client) {
  const Leader& leader = *story_.leader_;
  const int64_t tokens = std::ssize(client.drawn.client.tokens);
  const double seconds = client.run.work_seconds;
  std::vector<SubmeshSeconds> submeshes;
  PackShare pack;
  for (const int of : {2, 4}) {
    if (client.last || !story_.side_by_side_ || !leader.SubmeshCapacity(of).has_value()) break;
    submeshes.push_back({of, seconds * std::pow(of, story_.Draw(1, 9) / 10.0)});
  }
  if (!client.last && story_.packs_ && tokens <= kPackedTokens) {
    pack = {.tokens = tokens, .bytes = tokens, .pass_seconds = seconds / 2, .added_seconds = seconds / 10};
  }
  story_.queue_->SetPredictedSeconds(client.ticket, seconds, std::move(submeshes), pack);
}

void QueueClients::Upload(uint64_t id, RunOrder::Ticket ticket, int64_t tokens_so_far) {
  const auto found = clients_.find(id);
  if (found == clients_.end() || found->second.ticket != ticket) return;
  StoryQueue& queue = *story_.queue_;
  const int64_t tokens = TokensOf(found->second);
  absl::Status status;
  if (tokens_so_far > 0) status = queue.Pay(ticket, tokens_so_far);
  if (status.ok() && tokens_so_far == tokens) status = queue.Submit(ticket);
  if (!status.ok()) {
    queue.Withdraw(ticket);
    return OnRefused(id, status);
  }
  if (tokens_so_far == tokens) return;
  const bool stops = tokens_so_far < tokens / 4 && story_.Chance(0.1);
  const int64_t next =
      story_.Chance(0.6) ? tokens : std::min(tokens, tokens_so_far + tokens / story_.Draw(2, 6) + 1);
  story_.After(stops ? story_.DrawMs(1200, 4000) : story_.DrawMs(0, story_.Chance(0.5) ? 5 : 200), -1,
               [this, id, ticket, next, incarnation = story_.leader_incarnation_] {
                 if (story_.leader_ != nullptr && story_.leader_incarnation_ == incarnation)
                   Upload(id, ticket, next);
               });
}

void QueueClients::Leave(uint64_t id, RunOrder::Ticket ticket) {
  const auto found = clients_.find(id);
  if (found == clients_.end() || found->second.ticket != ticket || story_.leader_ == nullptr) return;
  found->second.gone = true;
  story_.queue_->Withdraw(ticket);
  // What has begun ends with its run.
  if (!story_.queue_->Has(ticket)) End(id, absl::CancelledError("its client has left"));
}

void QueueClients::OnRefused(uint64_t id, const absl::Status& refused) {
  Client& client = clients_.at(id);
  client.ticket = 0;
  story_.OnPrefillEnded(std::exchange(client.drawn.client.lease, ""), /*done=*/false);
  client.drawn.options.kv_lease = "";
  ++story_.census_.refused_by_queue;
  if (client.last) return story_.Fail(absl::StrCat("the last request is refused: ", refused.ToString()));
  const std::optional<absl::Duration> retry = RetryAfter(refused);
  const bool gives_up = client.gone || !retry.has_value() || story_.Chance(0.05);
  if (gives_up) return End(id, refused);
  // Where many more come than have places, others may be there first, however often.
  const bool overload = count() > 2 * story_.queue_->limits().max_requests;
  if (!overload && ++client.refusals > kMostRefusals && IsCalm(client)) {
    story_.Fail(absl::StrCat("a request came again ", client.refusals,
                             " times as it was told: ", refused.ToString()));
  }
  client.again = true;
  story_.After(*retry + story_.DrawMs(0, 20), -1, [this, id] { Come(id); });
}

void QueueClients::OnEnd(uint64_t id, const absl::Status& status) {
  const auto found = clients_.find(id);
  if (found == clients_.end()) return story_.Fail("a client hears twice of an end");
  Client& client = found->second;
  if (absl::IsResourceExhausted(status) && RetryAfter(status).has_value()) return OnRefused(id, status);
  if (!client.gone && absl::IsCancelled(status)) story_.Fail("a request is stopped, but not by its client");
  if (absl::IsDeadlineExceeded(status) && story_.now_ < client.run.deadline) {
    story_.Fail("a deadline has passed that has not");
  }
  // Too few workers had come by then for a prompt in pieces.
  const bool too_small = story_.small_ && absl::IsFailedPrecondition(status);
  // What others keep may have taken the room of its lease, admitted while other workers were there, or of its
  // pieces.
  const bool no_kv_room = absl::IsResourceExhausted(status) && absl::StrContains(status.message(), "K and V");
  const bool good = status.ok() || client.gone || client.drawn.client.poisonous || too_small || no_kv_room ||
                    absl::IsDeadlineExceeded(status);
  if (!good && IsCalm(client)) {
    story_.Fail(absl::StrCat("a request has no result, and nothing has failed: ", status.ToString()));
  }
  End(id, status);
}

void QueueClients::End(uint64_t id, const absl::Status& status) {
  const Client& client = clients_.at(id);
  if (!client.drawn.client.lease.empty()) story_.OnPrefillEnded(client.drawn.client.lease, status.ok());
  if (!status.ok()) ++story_.census_.ended_without_result;
  clients_.erase(id);
}

int QueueClients::OnLeaderGone() {
  return static_cast<int>(
      std::erase_if(clients_, [](const auto& entry) { return entry.second.ticket != 0; }));
}

void QueueClients::CheckPatience() {
  for (const auto& [id, client] : clients_) {
    if (story_.now_ - client.came_at > kPatience) story_.Fail("a client has not ended");
  }
}

}  // namespace meshfill
