// Time in a story: how it begins, what happens next, and how it ends.
#include "tests/server/pool/simulation/pool_simulation.h"

#include <algorithm>
#include <cstdio>
#include <functional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace meshfill {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(120);  // within which every request has its answer

}  // namespace

PoolSimulation::PoolSimulation(uint64_t seed, bool verbose) : seed_(seed), verbose_(verbose), random_(seed) {}
PoolSimulation::~PoolSimulation() = default;

std::string PoolSimulation::Run() {
  nodes_.resize(Draw(1, 8));
  messages_mix_ = Chance(0.7);
  for (size_t i = 0; i < nodes_.size(); ++i) {
    nodes_[i].name = absl::StrCat("w", i);
    nodes_[i].ranks = Chance(0.3) ? 2 : 1;
  }
  quiet_ = Chance(0.15);
  sticky_ = Chance(0.3);
  side_by_side_ = Chance(0.5);
  small_ = Chance(0.3);
  if (Chance(0.3)) weight_bytes_ = RankBytes() * Draw(1, 4) / 2;
  most_requests_ = Chance(0.3) ? 1 : Draw(2, 5);
  requests_left_ = Draw(3, 8) + most_requests_;
  chaos_ends_ = now_ + DrawMs(3000, 8000);
  for (int i = quiet_ ? 0 : Draw(0, 4); i > 0; --i) {
    const auto step = static_cast<Step>(Draw(0, kSteps - 1));
    crash_plan_[{Draw(0, static_cast<int>(nodes_.size()) - 1), step}] = Draw(1, 4);
  }
  // Drawn apart: the other seeds' stories do not depend on it.
  std::mt19937_64 apart(~seed_);
  packs_ = messages_mix_ && std::bernoulli_distribution(0.5)(apart);
  if (std::bernoulli_distribution(0.5)(apart)) short_rank_bytes_ = RankBytes() / 8;
  queued_ = std::bernoulli_distribution(0.5)(apart);
  if (queued_) most_requests_ = Draw(3, 10);
  StartLeader();
  for (size_t i = 0; i < nodes_.size(); ++i) {
    After(DrawMs(0, 300), -1, [this, i] { StartNode(static_cast<int>(i)); });
  }
  SubmitAgainAfter(DrawMs(200, 1000));
  if (!queued_) ChangeTurns();
  if (!quiet_) After(DrawMs(0, 500), -1, [this] { Chaos(); });
  At(chaos_ends_, -1, [this] { Heal(); });

  const absl::Time bound = now_ + absl::Minutes(10);
  while (failure_.empty() && !final_answered_) {
    if (events_.empty() || now_ > bound) {
      Fail("the story does not end");
      break;
    }
    std::pop_heap(events_.begin(), events_.end(), Later());
    Event event = std::move(events_.back());
    events_.pop_back();
    now_ = event.when;
    if (event.node >= 0 && nodes_[event.node].frozen_until > now_) {  // a stopped process: later, in order
      event.when = nodes_[event.node].frozen_until;
      events_.push_back(std::move(event));
      std::push_heap(events_.begin(), events_.end(), Later());
      continue;
    }
    event.what();
    for (const auto& [ticket, request] : requests_) {
      if (now_ - request.submitted_at > kPatience) Fail("a request has no answer");
    }
  }
  return failure_;
}

void PoolSimulation::At(absl::Time when, int node, std::function<void()> what) {
  events_.push_back({std::max(when, now_), ++last_order_, node, std::move(what)});
  std::push_heap(events_.begin(), events_.end(), Later());
}

void PoolSimulation::Fail(const std::string& what) {
  if (failure_.empty())
    failure_ = absl::StrCat("at ", absl::FormatDuration(now_ - absl::UnixEpoch()), ": ", what);
}

void PoolSimulation::Note(const std::string& what) const {
  if (!verbose_) return;
  std::printf("%9.3f %s\n", absl::ToDoubleSeconds(now_ - absl::UnixEpoch()), what.c_str());
}

absl::Duration PoolSimulation::Latency() {
  const int kind = Draw(0, 99);
  if (kind < 90) return absl::Microseconds(Draw(100, 5000));
  // Twice as late as that, a worker is taken for silent.
  return kind < 99 || quiet_ ? DrawMs(5, 100) : DrawMs(100, 900);
}

void PoolSimulation::CheckEnd() {
  if (!leader_->idle()) Fail("the leader is busy with nothing");
  if (queued_) queue_->CheckEmpty();
  if (queue_clients_.count() > 0) Fail("clients have not ended at the end");
  const KvStore::Counts kept = leader_->kv_counts();
  if (kept.leases != 0 || kept.bytes != kept.cached_bytes) Fail("the leader has leases at the end");
  census_.evictions += static_cast<int>(kept.evictions);
  const auto by_worker = leader_->kv_by_worker();
  for (const Node& node : nodes_) {
    if (node.kv == nullptr) continue;
    const KvStore::Counts held = node.kv->counts();
    const auto known = by_worker.find(node.name);
    if (held.leases != 0 || known == by_worker.end() || held.bytes != known->second.bytes) {
      Fail(absl::StrCat(node.name, " holds ", held.bytes, " bytes, ", held.leases, " leases at the end, not ",
                        known == by_worker.end() ? 0 : known->second.bytes));
    }
  }
  for (const Node& node : nodes_) {
    if (node.machine == nullptr || !node.machine->member())
      Fail(absl::StrCat(node.name, " is no member at the end"));
    if (node.machine != nullptr && node.machine->reserved_bytes() != 0)
      Fail("memory is still reserved at the end");
    if (!node.hosts.empty()) Fail("a host still holds a run at the end");
  }
  final_answered_ = true;
}

}  // namespace meshfill
