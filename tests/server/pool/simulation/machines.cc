// The machines of a story: the leader and the workers start, tick, do what their state machines say, and die.
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "server/pool/offered_speed.h"
#include "tests/server/pool/simulation/pool_simulation.h"
#include "tests/server/pool/simulation/simulated_pool.h"

namespace meshfill {
namespace {

constexpr absl::Duration kTick = absl::Milliseconds(250);

}  // namespace

// Of a rank, at least.
int64_t PoolSimulation::RankBytes() const {
  int ranks = 0;
  for (const Node& node : nodes_) ranks += node.ranks;
  return small_ ? SmallRankBytes(ranks) : MostRunBytes();
}

void PoolSimulation::StartLeader() {
  Leader::Options options;
  options.build = "simulated";
  options.model = SimulatedModel();
  if (Chance(0.5)) options.model.set_weights_hash(0);
  options.kv = KvShapeOf(SimulatedShape());
  options.vocab = kVocab;
  options.first_epoch = kEpochsOfALeader * ++leader_incarnation_;
  options.least_memory_bytes = 1;
  options.heartbeat_interval = 2 * kTick;
  if (quiet_)
    options.hang_timeout = absl::Milliseconds(1300);  // whatever stands still that long does so for others
  options.runs_at_once = runs_at_once_ = Chance(0.2) ? 1 : Draw(2, 8);
  leader_measures_links_ = Chance(0.5);
  options.links.links.same_node = leader_measures_links_ ? kAssumed : kOnHost;
  options.links.links.between_nodes = leader_measures_links_ ? kAssumed : kBetweenHosts;
  options.links.measure.fill(leader_measures_links_);
  options.least_kept_out = kKeptOut / 4;
  options.most_kept_out = kKeptOut;
  if (Chance(0.2)) options.kv_cache = false;
  leader_ = std::make_unique<Leader>(options, RememberedPlan);
  leader_->LeaveToShort(short_rank_bytes_);
  if (queued_) queue_ = std::make_unique<StoryQueue>(*this, queue_clients_.DrawLimits(), runs_at_once_);
  runs_told_.clear();
  Note("leader starts");
  After(DrawMs(0, 250), -1, [this, incarnation = leader_incarnation_] { TickLeader(incarnation); });
}

void PoolSimulation::CrashLeader() {
  if (leader_ == nullptr) return;
  Note("leader crashes");
  leader_.reset();
  queue_.reset();
  for (auto& [id, link] : links_) {
    if (link.open_at_leader) CutLink(id, false, Chance(0.8));
  }
  for (auto& [name, lease] : leases_) lease.ended = true;  // the next leader knows of none
  const int gone = queued_ ? queue_clients_.OnLeaderGone() : static_cast<int>(requests_.size());
  census_.answers += gone;  // clients see their connections break
  census_.errors += gone;
  requests_.clear();
  turn_ = 0;
  After(DrawMs(100, 2000), -1, [this] { StartLeader(); });
}

void PoolSimulation::StartNode(int index) {
  Node& node = nodes_[index];
  if (node.machine != nullptr) return;
  ++node.incarnation;
  WorkerMachine::Options options;
  options.progress_interval = 2 * kTick;
  v1::Join& offer = options.offer;
  offer.set_protocol(kControlProtocol);
  offer.set_build("simulated");
  offer.set_name(node.name);
  offer.set_host(absl::StrCat("host", HostOf(index)));
  offer.set_ranks(static_cast<uint32_t>(node.ranks));
  offer.set_messages_mix(messages_mix_);
  offer.set_many_messages(messages_mix_);
  offer.set_rows_independent(packs_);
  node.memory_bytes = RankBytes() * node.ranks * (small_ || Chance(0.5) ? 1 : 4);
  offer.set_memory_bytes(static_cast<uint64_t>(node.memory_bytes));
  offer.set_peak_flops(1e12);
  *offer.mutable_model() = SimulatedModel();
  *offer.mutable_speed() = SimulatedSpeed();
  node.may_share = weight_bytes_ > 0 && Chance(0.95);
  if (node.may_share) {
    *offer.mutable_weights() =
        ToProto(PlanWeights{.mode = WeightMode::kStreamed, .layer_seconds = Chance(0.7) ? 1.0 : 0.0});
    *offer.mutable_shared_weights() = ToProto(PlanWeights{.mode = WeightMode::kSharded,
                                                          .loaded_bytes = weight_bytes_,
                                                          .layer_bytes = weight_bytes_ / 4,
                                                          .head_bytes = weight_bytes_ / 4});
  }
  // For pieces, what the longest prompt needs even where this rank is alone.
  const int64_t least_kv_bytes = small_ ? kLongestPrompt * kTokenBytes * node.ranks : 0;
  const int64_t kv_bytes = Chance(0.3) ? least_kv_bytes + Draw(0, 60'000) : 1 << 20;
  offer.set_kv_memory_bytes(static_cast<uint64_t>(kv_bytes));
  offer.set_kv_address(node.name);
  node.kv = std::make_unique<HeldKv>(KvShapeOf(SimulatedShape()), kv_bytes, [this] { return now_; });
  node.machine =
      std::make_unique<WorkerMachine>(options, [this, index] { return ProgressOf(nodes_[index]); });
  node.machine->Start(now_);
  node.host_free_at = now_;
  Note(absl::StrCat(node.name, " starts"));
  After(DrawMs(0, 250), index,
        [this, index, incarnation = node.incarnation] { TickNode(index, incarnation); });
}

void PoolSimulation::CrashNode(int index, bool half_open) {
  Node& node = nodes_[index];
  if (node.machine == nullptr) return;
  Note(absl::StrCat(node.name, " dies", half_open ? " without a word" : ""));
  node.machine.reset();
  node.frozen_until = node.compute_frozen_until = absl::InfinitePast();
  if (node.link != 0) CutLink(std::exchange(node.link, 0), !half_open, false);
  for (const auto& [run, host] : std::exchange(node.hosts, {})) {
    const std::shared_ptr<Mesh> mesh = host.mesh;
    if (mesh == nullptr) continue;
    mesh->broken = true;
    for (size_t rank = 0; rank < mesh->members.size(); ++rank) {
      const Mesh::Member& member = mesh->members[rank];
      if (member.node < 0 || member.node == index || Chance(0.5)) continue;
      After(DrawMs(1, 20), member.node, [this, mesh, rank] { RankFails(mesh, static_cast<int>(rank)); });
    }
  }
  node.passes.clear();
  node.kv.reset();
  After(healed_ ? DrawMs(10, 500) : DrawMs(10, 3000), -1, [this, index] { StartNode(index); });
}

bool PoolSimulation::MayCrashAt(int index, Step step) {
  const auto plan = crash_plan_.find({index, step});
  if (plan == crash_plan_.end() || healed_ || --plan->second > 0) return false;
  crash_plan_.erase(plan);
  Fault(absl::ZeroDuration());
  CrashNode(index, Chance(0.2));
  return true;
}

void PoolSimulation::TickLeader(int incarnation) {
  if (leader_ == nullptr || incarnation != leader_incarnation_) return;
  leader_->OnTick(now_);
  DoLeaderActions();
  CheckHungRanksAreLost();
  CheckNobodyWaitsInVain();
  CheckUnwantedPasses();
  queue_clients_.CheckPatience();
  After(kTick, -1, [this, incarnation] { TickLeader(incarnation); });
}

// A rank that is stuck in one operation is out of the pool, however lively its process is.
void PoolSimulation::CheckHungRanksAreLost() {
  for (const Node& node : nodes_) {
    if (!IsMember(node)) continue;
    for (const auto& [run, host] : node.hosts) {
      for (const HostRank& rank : host.ranks) {
        const bool paused = host.pass != nullptr ? PassPaused(node, *host.pass) : host.paused;
        if (rank.computing && !paused && now_ - rank.computing_since > kHungBound) {
          Fail(absl::StrCat(node.name, " hangs in compute and is still in the pool"));
        }
      }
    }
  }
}

// As the leader sees it.
bool PoolSimulation::IsMember(const Node& node) {
  if (node.machine == nullptr || node.link == 0) return false;
  const Link& link = links_[node.link];
  return link.open_at_leader && link.leader_incarnation == leader_incarnation_;
}

WorkerMachine::ProgressOfRuns PoolSimulation::ProgressOf(const Node& node) {
  WorkerMachine::ProgressOfRuns progress;
  for (const auto& [run, host] : node.hosts) {
    for (const HostRank& rank : host.ranks) {
      progress[run].push_back({.rank = rank.seat,
                               .layers_done = rank.operations / 4,
                               // Begun and ended: who begins after a long wait for its peers has moved.
                               .operations = static_cast<uint64_t>(2 * rank.operations + rank.computing),
                               .computing = rank.computing,
                               .has_computed = rank.operations > 0 || rank.computing});
    }
  }
  return progress;
}

void PoolSimulation::TickNode(int index, int incarnation) {
  Node& node = nodes_[index];
  if (node.machine == nullptr || node.incarnation != incarnation) return;
  node.kv->EndLapsed();
  node.machine->OnTick(now_);
  DoNodeActions(index);
  After(kTick, index, [this, index, incarnation] { TickNode(index, incarnation); });
}

void PoolSimulation::DoLeaderActions() {
  std::set<uint64_t> begun;  // runs
  for (Leader::Action& action : leader_->TakeActions()) {
    if (auto* send = std::get_if<Leader::Send>(&action)) {
      OnTold(send->to, send->message);
      if (send->message.has_prepare()) begun.insert(send->message.prepare().run());
      DeliverToNode(send->to, std::move(send->message));
    } else if (auto* close = std::get_if<Leader::Close>(&action)) {
      CloseAtLeader(close->connection);
    } else if (auto* answer = std::get_if<Leader::Answer>(&action)) {
      OnAnswer(*answer);
    } else if (auto* done = std::get_if<Leader::LayersDone>(&action)) {
      if (queued_) queue_->OnLayersDone(*done);
    } else if (auto* line = std::get_if<Leader::LogLine>(&action)) {
      Note(absl::StrCat("leader: ", line->text));
    }
  }
  for (const uint64_t run : begun) CheckSubmesh(run);
  if (!begun.empty()) CheckLivePlaces();
  CheckToldTogether();
  std::set<std::string> names;
  for (const Leader::WorkerView& worker : leader_->workers()) {
    if (!names.insert(worker.offer->name()).second) Fail("two members of one name");
  }
  if (quiet_ && leader_->counters().losses > poison_deaths_) Fail("a worker is lost that nothing ailed");
  CheckLinks(/*all_measured=*/false);
  CheckKvBudgets();
}

void PoolSimulation::DoNodeActions(int index) {
  Node& node = nodes_[index];
  const int incarnation = node.incarnation;
  for (WorkerMachine::Action& action : node.machine->TakeActions()) {
    if (auto* connect = std::get_if<WorkerMachine::Connect>(&action)) {
      Connect(index, connect->connection);
    } else if (std::get_if<WorkerMachine::Disconnect>(&action) != nullptr) {
      if (node.link != 0) CloseAtNode(std::exchange(node.link, 0));
    } else if (auto* send = std::get_if<WorkerMachine::Send>(&action)) {
      const v1::WorkerMessage& message = send->message;
      if (message.has_join() && MayCrashAt(index, Step::kJoin)) return;
      if (message.has_prepared() && MayCrashAt(index, Step::kPrepared)) return;
      if (message.has_rank_done() && MayCrashAt(index, Step::kRankDone)) return;
      if (message.has_stopped() && MayCrashAt(index, Step::kStopped)) return;
      if (node.link != 0) DeliverToLeader(node.link, std::move(send->message));
    } else if (auto* prepare = std::get_if<WorkerMachine::PrepareRun>(&action)) {
      PrepareHost(index, std::move(prepare->part));
    } else if (auto* start = std::get_if<WorkerMachine::StartRun>(&action)) {
      StartHost(index, *start);
    } else if (auto* pause = std::get_if<WorkerMachine::PauseRun>(&action)) {
      PauseHost(index, *pause);
    } else if (auto* at = std::get_if<WorkerMachine::PauseRunAt>(&action)) {
      PauseHostAt(index, *at);
    } else if (auto* resume = std::get_if<WorkerMachine::ResumeRun>(&action)) {
      ResumeHost(index, resume->run);
    } else if (auto* stop = std::get_if<WorkerMachine::StopRun>(&action)) {
      StopHost(index, stop->run);
    } else if (auto* release = std::get_if<WorkerMachine::ReleaseRun>(&action)) {
      node.kv->Keep(release->run);
      if (node.hosts.erase(release->run) == 0) Fail("releases a run that is not there");
    } else if (auto* lasts = std::get_if<WorkerMachine::KvLasts>(&action)) {
      node.kv->Lasts(lasts->lease, lasts->lasts);
    } else if (auto* ends = std::get_if<WorkerMachine::KvEnds>(&action)) {
      node.kv->Ends(ends->lease);
      for (auto& [run, host] : node.hosts) {  // that are still being prepared
        std::optional<HeldKv::Keeping>& keep = host.part.keep_kv;
        if (host.kv != nullptr || !keep.has_value() || keep->lease != ends->lease) continue;
        if (!keep->cache) keep.reset();
        if (keep.has_value()) keep->lease.clear();
      }
    } else if (auto* run_ends = std::get_if<WorkerMachine::KvRunEnds>(&action)) {
      node.kv->RunEnds(run_ends->run);
    } else if (std::get_if<WorkerMachine::AllKvEnds>(&action) != nullptr) {
      node.kv->EndAll();
    } else if (auto* exit = std::get_if<WorkerMachine::Exit>(&action)) {
      if (!exit->status.ok()) Fail(absl::StrCat(node.name, " gave up: ", exit->status.message()));
      return CrashNode(index, false);  // drained; it is started again later
    } else if (auto* line = std::get_if<WorkerMachine::LogLine>(&action)) {
      Note(absl::StrCat(node.name, ": ", line->text));
    }
    if (node.machine == nullptr || node.incarnation != incarnation) return;
  }
  const int64_t reserved = node.machine->reserved_bytes();
  if (reserved < 0 || reserved > node.memory_bytes) Fail("reserves more memory than there is");
  int64_t held = 0;
  std::set<std::pair<int, int>> shares;  // of the weights
  for (const auto& [run, host] : node.hosts) {
    held += host.part.reserve_bytes;
    shares.emplace(host.part.weights.share.index, host.part.weights.share.of);
  }
  if (held > reserved) Fail("runs hold memory that is not reserved");
  for (const auto& [share, of] : shares) held += of > 0 ? (weight_bytes_ + of - 1) / of : 0;
  if (held > node.memory_bytes) Fail("runs and their shares of the weights hold more memory than there is");
}

}  // namespace meshfill
