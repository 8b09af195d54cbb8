// Passes that runs of a pack share on a rank of a node, as RankPack has them: they begin, stand still and end
// together.
#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/server/pool/simulation/pool_simulation.h"
#include "tests/server/pool/simulation/simulated_pool.h"

namespace meshfill {

void PoolSimulation::JoinPass(Node& node, Host& host) {
  const WorkerMachine::RunPart& part = host.part;
  if (!part.pack.has_value()) return;
  if (part.plan.ranks() != 1 || part.local_rank >= node.ranks || part.plan.cached_tokens > 0) {
    return Fail(absl::StrCat(node.name, " is to share a pass that it cannot compute"));
  }
  std::erase_if(node.passes, [](const auto& each) { return each.second.expired(); });
  std::weak_ptr<Pass>& held = node.passes[{part.pack->number, part.local_rank}];
  host.pass = held.lock();
  if (host.pass == nullptr) held = host.pass = std::make_shared<Pass>(Pass{.runs = part.pack->runs});
  if (host.pass->runs != part.pack->runs) Fail("runs of a pass count it otherwise");
}

int PoolSimulation::LivesOn(const Node& node) {
  std::set<uint64_t> packs;
  return static_cast<int>(std::count_if(node.hosts.begin(), node.hosts.end(), [&](const auto& entry) {
    const auto& pack = entry.second.part.pack;
    return !pack.has_value() || packs.insert(pack->number).second;
  }));
}

std::vector<std::pair<const uint64_t, PoolSimulation::Host>*> PoolSimulation::MembersOf(Node& node,
                                                                                        const Pass& pass) {
  std::vector<std::pair<const uint64_t, Host>*> members;
  for (auto& entry : node.hosts) {
    if (entry.second.pass.get() == &pass && !entry.second.ranks.empty()) members.push_back(&entry);
  }
  return members;
}

void PoolSimulation::StartInPass(int index, uint64_t run) {
  Node& node = nodes_[index];
  const std::shared_ptr<Pass> pass = node.hosts.at(run).pass;
  if (pass->failed) return FailInPass(index, run);
  if (++pass->started > pass->runs) return Fail("more runs share a pass than were to");
  if (pass->started == pass->runs) BeginPassOperation(index, pass);
}

bool PoolSimulation::PassPaused(const Node& node, const Pass& pass) {
  return std::any_of(node.hosts.begin(), node.hosts.end(), [&](const auto& entry) {
    return entry.second.pass.get() == &pass && entry.second.paused;
  });
}

void PoolSimulation::ResumePass(int index, const std::shared_ptr<Pass>& pass) {
  if (PassPaused(nodes_[index], *pass) || !std::exchange(pass->held, false)) return;
  for (auto* member : MembersOf(nodes_[index], *pass)) {
    for (HostRank& rank : member->second.ranks) rank.computing_since = now_;
  }
  After(DrawMs(0, 20), index, [this, index, pass, incarnation = nodes_[index].incarnation] {
    if (nodes_[index].incarnation == incarnation) EndPassOperation(index, pass);
  });
}

void PoolSimulation::BeginPassOperation(int index, const std::shared_ptr<Pass>& pass) {
  Node& node = nodes_[index];
  for (auto* member : MembersOf(node, *pass)) {
    member->second.ranks.front().computing = true;
    member->second.ranks.front().computing_since = now_;
  }
  const absl::Time when =
      std::max(now_ + (Chance(0.01) ? DrawMs(100, 900) : DrawMs(1, 40)), node.compute_frozen_until);
  At(when, index, [this, index, pass, incarnation = node.incarnation] {
    if (nodes_[index].incarnation == incarnation) EndPassOperation(index, pass);
  });
}

void PoolSimulation::EndPassOperation(int index, const std::shared_ptr<Pass>& pass) {
  Node& node = nodes_[index];
  if (node.machine == nullptr || pass->failed) return;
  if (PassPaused(node, *pass)) {
    pass->held = true;
    return;
  }
  if (node.compute_frozen_until > now_) {  // frozen in the middle
    At(node.compute_frozen_until, index, [this, index, pass, incarnation = node.incarnation] {
      if (nodes_[index].incarnation == incarnation) EndPassOperation(index, pass);
    });
    return;
  }
  const std::vector<std::pair<const uint64_t, Host>*> members = MembersOf(node, *pass);
  if (std::ssize(members) != pass->runs) return Fail("a pass goes on without one of its runs");
  int poisonous = 0;
  for (const auto* member : members) {
    const HostRank& rank = member->second.ranks.front();
    if (rank.operations == 1 && IsPoisonous(member->second, rank.seat)) {
      ++poisonous;
      CountDeath(member->second);
    }
  }
  if (poisonous > 0) {
    ++poison_deaths_;
    return CrashNode(index, false);
  }
  if (MayCrashAt(index, Step::kCompute)) return;
  if (!healed_ && !quiet_ && Chance(0.01)) {
    Note(absl::StrCat("a pass fails on ", node.name));
    Fault(absl::ZeroDuration());
    return FailPass(index, pass, /*but_for=*/0);
  }
  for (auto* member : members) {
    HostRank& rank = member->second.ranks.front();
    rank.computing = false;
    ++rank.operations;
  }
  if (members.front()->second.ranks.front().operations < kOperations) return BeginPassOperation(index, pass);
  pass->over = true;
  for (const auto* member : members) FinishRank(index, member->first, member->second.ranks.front().seat);
}

void PoolSimulation::FailPass(int index, const std::shared_ptr<Pass>& pass, uint64_t but_for) {
  if (std::exchange(pass->failed, true)) return;
  for (const auto* member : MembersOf(nodes_[index], *pass)) {
    if (member->first != but_for) FailInPass(index, member->first);
  }
}

void PoolSimulation::FailInPass(int index, uint64_t run) {
  const Node& node = nodes_[index];
  At(std::max(now_ + DrawMs(0, 30), node.compute_frozen_until), index,
     [this, index, mesh = node.hosts.at(run).mesh, incarnation = node.incarnation] {
       Host* const host = HostOfMesh(index, incarnation, mesh);
       if (host == nullptr) return;
       HostRank& rank = host->ranks.front();
       rank.over = true;
       rank.computing = false;
       nodes_[index].machine->OnRankDone(mesh->run, rank.seat, absl::AbortedError("its pass has failed"));
       DoNodeActions(index);
     });
}

}  // namespace meshfill
