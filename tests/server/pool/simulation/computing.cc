// What runs compute: their parts on the workers, operation by operation, and the digests that make up a
// result.
#include <algorithm>
#include <cstring>
#include <iterator>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "tests/server/pool/simulation/pool_simulation.h"
#include "tests/server/pool/simulation/simulated_pool.h"

namespace meshfill {
namespace {

constexpr int kMostAttempts = 6;  // leader.cc
constexpr double kProbeSeconds = 0.02;

}  // namespace

uint64_t PoolSimulation::Mix(uint64_t token, uint64_t id) {
  uint64_t hash = token * 0x9E3779B97F4A7C15u + id + 1;
  hash = (hash ^ (hash >> 30)) * 0xBF58476D1CE4E5B9u;
  return hash ^ (hash >> 31);
}

uint64_t PoolSimulation::Digest(const Host& host, int seat) const {
  const WorkerMachine::RunPart& part = host.part;
  const Plan& plan = part.plan;
  const int rank = plan.RankAt(seat);
  const SlotPositions positions = plan.layout.Positions(rank);
  const std::vector<uint32_t>& shard = part.shards[seat - part.first_rank];
  uint64_t sum = 0;
  for (size_t slot = 0; slot < shard.size(); ++slot) {
    sum += Mix(static_cast<uint64_t>(plan.cached_tokens) + positions.At(slot), shard[slot]);
  }
  const TokenLayout layout = plan.kv_layout();
  const int64_t prefix_slots = layout.ChunkTokens(rank) - plan.layout.ChunkTokens(rank);
  for (int64_t slot = 0; slot < prefix_slots; ++slot) {
    uint64_t of_id = 0;
    const KvRows rows = KvRowsOf(*host.prefix, 0, layout, rank, slot, 1);
    std::memcpy(&of_id, rows.slab->Row(0, rows.first_slot) + sizeof of_id, sizeof of_id);
    sum += of_id;
  }
  return sum;
}

void PoolSimulation::PrepareHost(int index, WorkerMachine::RunPart part) {
  if (MayCrashAt(index, Step::kHostPrepare)) return;
  Node& node = nodes_[index];
  auto prefix = node.kv->PrefixOf(part.prefix);
  if (!prefix.ok()) return Fail(absl::StrCat(node.name, " lacks a prefix: ", prefix.status().message()));
  CheckWeights(node, part);
  const uint64_t run = part.number;
  Host& prepared = node.hosts.emplace(run, Host{.part = std::move(part)}).first->second;
  prepared.prefix = *std::move(prefix);
  JoinPass(node, prepared);
  if (IsMember(node) && LivesOn(node) > runs_at_once_) {
    Fail(absl::StrCat(node.name, " has more runs than may live at once"));
  }
  census_.most_at_once = std::max(census_.most_at_once, LivesOn(node));
  node.host_free_at = std::max(now_ + DrawMs(0, 30), node.host_free_at);
  At(node.host_free_at, index, [this, index, run, incarnation = node.incarnation] {
    Node& node = nodes_[index];
    if (node.machine == nullptr || node.incarnation != incarnation || !node.hosts.contains(run)) return;
    Host& host = node.hosts.at(run);
    if (!healed_ && !quiet_ && Chance(0.005)) {
      Fault(absl::ZeroDuration());
      node.machine->OnRunPrepared(run, absl::ResourceExhaustedError("no memory"));
      return DoNodeActions(index);
    }
    const WorkerMachine::RunPart& part = host.part;
    if (part.keep_kv.has_value()) {
      std::vector<int> ranks;
      for (size_t i = 0; i < part.shards.size(); ++i) {
        ranks.push_back(part.plan.RankAt(part.first_rank + static_cast<int>(i)));
      }
      auto kv = node.kv->Begin(run, *part.keep_kv, host.prefix, part.plan.layout, ranks);
      if (!kv.ok()) return Fail(absl::StrCat(node.name, " was promised too much: ", kv.status().message()));
      host.kv = *std::move(kv);
    }
    const size_t listening = part.shards.size() + (part.weights.share.of > 0 ? 1 : 0);
    for (size_t i = 0; host.pass == nullptr && i < listening; ++i) {
      host.addresses.push_back(absl::StrCat(node.name, "#", incarnation, "#", ++last_order_));
    }
    node.machine->OnRunPrepared(run, host.addresses);
    DoNodeActions(index);
  });
}

// Who may not share does not, and the share with the LM head is of the worker that has the last token.
void PoolSimulation::CheckWeights(const Node& node, const WorkerMachine::RunPart& part) {
  const WorkerMachine::RunWeights& weights = part.weights;
  if (weight_bytes_ > 0) ++(weights.share.of > 0 ? census_.shared : census_.streamed);
  if (weights.share.of == 0) return;
  if (!node.may_share) Fail(absl::StrCat(node.name, " is to share weights that it cannot share"));
  const int seat = part.plan.SeatOf(part.plan.layout.RankOf(part.plan.layout.tokens() - 1)) - part.first_rank;
  const bool has_last = seat >= 0 && seat < std::ssize(part.shards);
  if (has_last != (weights.share.index == weights.head)) Fail("the LM head is gathered by the wrong worker");
}

void PoolSimulation::StartHost(int index, const WorkerMachine::StartRun& start) {
  Node& node = nodes_[index];
  if (!node.hosts.contains(start.run)) return Fail("starts a run that is not prepared");
  Host& host = node.hosts.at(start.run);
  const int first = host.part.first_rank;
  const int ranks = host.part.plan.ranks();
  const WeightShare& share = host.part.weights.share;
  if (static_cast<int>(start.addresses.size()) != ranks + share.of) {
    return Fail("not every rank, and every share of the weights, has an address");
  }
  for (size_t i = 0; i < host.addresses.size(); ++i) {
    const bool of_rank = i < host.part.shards.size();
    const int at = of_rank ? host.part.plan.RankAt(first + static_cast<int>(i)) : ranks + share.index;
    if (start.addresses[at] != host.addresses[i]) return Fail("a run with an address of another run");
  }
  CheckAlone(node, start.run);
  std::shared_ptr<Mesh> mesh = host.pass == nullptr ? meshes_[absl::StrJoin(start.addresses, ",")] : nullptr;
  if (mesh == nullptr) {
    mesh = std::make_shared<Mesh>();
    mesh->run = start.run;
    mesh->members.resize(ranks);
    if (host.pass == nullptr) meshes_[absl::StrJoin(start.addresses, ",")] = mesh;
  }
  host.mesh = mesh;
  CheckProbes(start.probes, host.part);
  host.probes = start.probes;
  for (size_t i = 0; i < host.part.shards.size(); ++i) {
    const int seat = first + static_cast<int>(i);
    mesh->members[host.part.plan.RankAt(seat)] = {.node = index,
                                                  .seat = seat,
                                                  .incarnation = node.incarnation,
                                                  .done = 0,
                                                  .digest = Digest(host, seat)};
    host.ranks.push_back({.seat = seat});
  }
  if (host.pass != nullptr) return StartInPass(index, start.run);
  const auto begin = [this, index, first, mesh, incarnation = node.incarnation] {
    const Host* host = HostOfMesh(index, incarnation, mesh);
    for (size_t i = 0; host != nullptr && i < host->ranks.size(); ++i) {
      if (!host->ranks[i].over) BeginOperation(index, mesh->run, first + static_cast<int>(i));
    }
  };
  if (host.probes.empty()) return begin();
  After(absl::Seconds(kProbeSeconds * static_cast<double>(host.probes.size())), index, begin);
}

PoolSimulation::Host* PoolSimulation::HostOfMesh(int index, int incarnation,
                                                 const std::shared_ptr<Mesh>& mesh) {
  Node& node = nodes_[index];
  if (node.machine == nullptr || node.incarnation != incarnation) return nullptr;
  const auto host = node.hosts.find(mesh->run);
  return host != node.hosts.end() && host->second.mesh == mesh ? &host->second : nullptr;
}

void PoolSimulation::PauseHost(int index, const WorkerMachine::PauseRun& pause) {
  Node& node = nodes_[index];
  if (!node.hosts.contains(pause.run)) return Fail("pauses a run that is not there");
  if ((pause.number == 0) != messages_mix_) return Fail("a pause with a number, or without one");
  Host& host = node.hosts.at(pause.run);
  ++census_.pauses;
  if (messages_mix_) {
    host.paused = true;
    for (HostRank& rank : host.ranks) {
      if (rank.computing) rank.computing_since = now_;
    }
    return;
  }
  host.pause = pause.number;
  host.agreed = host.still = false;
  host.most_messages = 0;
  for (const HostRank& rank : host.ranks) {
    host.most_messages = std::max<int64_t>(host.most_messages, rank.operations);
  }
  After(DrawMs(0, 30), index,
        [this, index, pause, begun = host.most_messages, incarnation = node.incarnation] {
          Node& node = nodes_[index];
          if (node.machine == nullptr || node.incarnation != incarnation) return;
          node.machine->OnRunPaused(pause.run, pause.number, begun, /*still=*/false);
          DoNodeActions(index);
        });
}

void PoolSimulation::PauseHostAt(int index, const WorkerMachine::PauseRunAt& pause) {
  After(DrawMs(0, 30), index, [this, index, pause, incarnation = nodes_[index].incarnation] {
    Node& node = nodes_[index];
    if (node.machine == nullptr || node.incarnation != incarnation || !node.hosts.contains(pause.run)) return;
    Host& host = node.hosts.at(pause.run);
    if (host.pause != pause.number || host.agreed) return;
    host.agreed = true;
    if (pause.messages < host.most_messages) return Fail("a run is to stand still where it has been");
    host.most_messages = pause.messages;
    LetGo(index, host);
    TellStill(index, host);
  });
}

void PoolSimulation::ResumeHost(int index, uint64_t run) {
  Node& node = nodes_[index];
  if (!node.hosts.contains(run)) return Fail("resumes a run that is not there");
  CheckAlone(node, run);
  Host& host = node.hosts.at(run);
  host.paused = host.agreed = host.still = false;
  host.pause = 0;
  host.most_messages = std::numeric_limits<int64_t>::max();
  for (HostRank& rank : host.ranks) {
    if (rank.computing) rank.computing_since = now_;
  }
  host.pass != nullptr ? ResumePass(index, host.pass) : LetGo(index, host);
}

void PoolSimulation::LetGo(int index, Host& host) {
  for (HostRank& rank : host.ranks) {
    if (rank.operations >= host.most_messages || !std::exchange(rank.held, false)) continue;
    After(DrawMs(0, 20), index,
          [this, index, seat = rank.seat, mesh = host.mesh, incarnation = nodes_[index].incarnation] {
            if (HostOfMesh(index, incarnation, mesh) != nullptr) EndOperation(index, mesh->run, seat);
          });
  }
}

void PoolSimulation::TellStill(int index, Host& host) {
  const bool still = std::all_of(host.ranks.begin(), host.ranks.end(), [&](const HostRank& rank) {
    return rank.held && rank.operations == host.most_messages;
  });
  if (!host.agreed || !still || std::exchange(host.still, true)) return;
  bool everywhere = true;
  std::set<int> begun;
  for (const Mesh::Member& member : host.mesh->members) {
    const Host* other = member.node < 0 ? nullptr : HostOfMesh(member.node, member.incarnation, host.mesh);
    everywhere = everywhere && other != nullptr && other->still && other->pause == host.pause;
    begun.insert(member.done);
  }
  if (everywhere) ++census_.agreements;
  if (everywhere && begun.size() > 1) Fail("ranks of a run stand still before different messages");
  const uint64_t run = host.mesh->run, pause = host.pause;
  After(DrawMs(0, 10), index, [this, index, run, pause, incarnation = nodes_[index].incarnation] {
    Node& node = nodes_[index];
    if (node.machine == nullptr || node.incarnation != incarnation) return;
    node.machine->OnRunPaused(run, pause, 0, /*still=*/true);
    DoNodeActions(index);
  });
}

void PoolSimulation::CheckAlone(const Node& node, uint64_t run) {
  if (messages_mix_) return;
  for (const auto& [number, host] : node.hosts) {
    const bool over =
        std::all_of(host.ranks.begin(), host.ranks.end(), [](const HostRank& r) { return r.over; });
    if (number == run || over || host.still) continue;
    Fail(absl::StrCat("messages of runs ", number, " and ", run, " mix on ", node.name));
  }
}

void PoolSimulation::StopHost(int index, uint64_t run) {
  Node& node = nodes_[index];
  if (!node.hosts.contains(run)) return Fail("stops a run that is not there");
  if (const std::shared_ptr<Pass> pass = node.hosts.at(run).pass; pass != nullptr && !pass->over) {
    FailPass(index, pass, run);
  }
  node.host_free_at = std::max({now_ + DrawMs(0, 60), node.compute_frozen_until, node.host_free_at});
  At(node.host_free_at, index, [this, index, run, incarnation = node.incarnation] {
    Node& node = nodes_[index];
    if (node.machine == nullptr || node.incarnation != incarnation) return;
    if (node.hosts.erase(run) == 0) return Fail("a run that was stopped is gone");
    node.kv->Drop(run);
    node.machine->OnRunStopped(run, now_);
    DoNodeActions(index);
  });
}

void PoolSimulation::BeginOperation(int index, uint64_t run, int seat) {
  Node& node = nodes_[index];
  Host& host = node.hosts.at(run);
  HostRank& state = host.ranks[seat - host.part.first_rank];
  state.computing = true;
  state.computing_since = now_;
  const absl::Time when =
      std::max(now_ + (Chance(0.01) ? DrawMs(100, 900) : DrawMs(1, 40)), node.compute_frozen_until);
  At(when, index, [this, index, seat, mesh = host.mesh, incarnation = node.incarnation] {
    if (HostOfMesh(index, incarnation, mesh) != nullptr) EndOperation(index, mesh->run, seat);
  });
}

void PoolSimulation::EndOperation(int index, uint64_t run, int seat) {
  Node& node = nodes_[index];
  Host& host = node.hosts.at(run);
  HostRank& state = host.ranks[seat - host.part.first_rank];
  if (host.paused) {
    state.held = true;
    return;
  }
  if (state.operations >= host.most_messages) {
    state.held = true;
    state.computing = false;
    return TellStill(index, host);
  }
  if (node.compute_frozen_until > now_) {  // frozen in the middle
    At(node.compute_frozen_until, index,
       [this, index, seat, mesh = host.mesh, incarnation = node.incarnation] {
         if (HostOfMesh(index, incarnation, mesh) != nullptr) EndOperation(index, mesh->run, seat);
       });
    return;
  }
  if (state.operations == 1 && IsPoisonous(host, seat)) {
    ++poison_deaths_;
    CountDeath(host);
    return CrashNode(index, false);
  }
  if (MayCrashAt(index, Step::kCompute)) return;
  state.computing = false;
  ++state.operations;
  const std::shared_ptr<Mesh> mesh = host.mesh;
  mesh->members[host.part.plan.RankAt(seat)].done = state.operations;
  PassBarrier(mesh, state.operations);
}

bool PoolSimulation::IsPoisonous(const Host& host, int seat) {
  const auto& shard = host.part.shards[seat - host.part.first_rank];
  return std::find(shard.begin(), shard.end(), kPoison) != shard.end();
}

// Whether it did so alone nobody can tell where others may have computed just before.
void PoolSimulation::CountDeath(const Host& host) {
  ClientRequest* request = RequestOf(host.part);
  if (request == nullptr) return;
  const int most = runs_at_once_ == 1 && request->pack == 0 ? 2 : kMostAttempts;
  if (++request->deaths > most) Fail("a poisonous request ends epoch after epoch");
}

// Each operation needs what every rank did in the one before.
void PoolSimulation::PassBarrier(const std::shared_ptr<Mesh>& mesh, int operation) {
  absl::Time apart_until = absl::InfinitePast();
  for (const Mesh::Member& member : mesh->members) {
    if (member.node < 0 || member.done < operation) return;
    apart_until = std::max(apart_until, nodes_[member.node].data_partitioned_until);
  }
  if (mesh->broken) return;
  if (apart_until > now_ && mesh->members.size() > 1) {
    At(apart_until, -1, [this, mesh, operation] { PassBarrier(mesh, operation); });
    return;
  }
  if (small_ && !healed_ && !quiet_ && Chance(0.01)) {  // its workers stay, and what they keep
    Note(absl::StrCat("a connection breaks in run ", mesh->run));
    Fault(absl::ZeroDuration());
    const int rank = Draw(0, static_cast<int>(mesh->members.size()) - 1);
    return At(now_, mesh->members[rank].node, [this, mesh, rank] { RankFails(mesh, rank); });
  }
  const std::vector<Mesh::Member> members = mesh->members;
  for (const Mesh::Member& member : members) {
    if (HostOfMesh(member.node, member.incarnation, mesh) == nullptr) continue;
    if (operation < kOperations) {
      BeginOperation(member.node, mesh->run, member.seat);
    } else {
      FinishRank(member.node, mesh->run, member.seat);
    }
  }
}

void PoolSimulation::FinishRank(int index, uint64_t run, int seat) {
  const std::shared_ptr<Mesh> mesh = nodes_[index].hosts.at(run).mesh;
  After(DrawMs(0, 30), index, [this, index, seat, mesh, incarnation = nodes_[index].incarnation] {
    Host* const host = HostOfMesh(index, incarnation, mesh);
    if (host == nullptr) return;
    Node& node = nodes_[index];
    const WorkerMachine::RunPart& part = host->part;
    host->ranks[seat - part.first_rank].over = true;
    KeepLayers(*host, seat);
    const int rank = part.plan.RankAt(seat);
    RankOutput output;
    output.stats.blocks = static_cast<int64_t>(part.number);
    for (const LinkProbe& probe : host->probes) output.links.push_back(MeasuredLink(probe, *mesh, rank));
    output.probe_seconds = kProbeSeconds * static_cast<double>(host->probes.size());
    if (part.tokens_ahead == 0 && part.plan.layout.RankOf(part.plan.layout.tokens() - 1) == rank) {
      uint64_t sum = 0;
      for (const Mesh::Member& member : mesh->members) sum += member.digest;
      output.logits = {static_cast<float>(sum & 0xFFFFF), static_cast<float>(sum >> 20 & 0xFFFFF),
                       static_cast<float>(sum >> 40 & 0xFFFFF), static_cast<float>(part.number)};
    }
    node.machine->OnRankDone(part.number, seat, std::move(output));
    DoNodeActions(index);
  });
}

void PoolSimulation::RankFails(const std::shared_ptr<Mesh>& mesh, int rank) {
  const Mesh::Member& member = mesh->members[rank];
  Host* const host = HostOfMesh(member.node, member.incarnation, mesh);
  if (host == nullptr) return;
  HostRank& state = host->ranks[member.seat - host->part.first_rank];
  if (std::exchange(state.over, true)) return;
  state.computing = false;
  nodes_[member.node].machine->OnRankDone(mesh->run, member.seat, absl::UnavailableError("a peer is gone"));
  DoNodeActions(member.node);
}

}  // namespace meshfill
