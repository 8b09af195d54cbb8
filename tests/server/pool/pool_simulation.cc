#include "tests/server/pool/pool_simulation.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <mutex>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/engine_options.h"
#include "engine/kv/block_hash.h"
#include "server/pool/offered_speed.h"
#include "server/pool/pool_planner.h"

namespace meshfill {
namespace {

constexpr uint32_t kPoison = 666;            // an id that kills whoever computes with it
constexpr uint64_t kEpochsOfALeader = 1000;  // more than one has in a story
constexpr absl::Duration kTick = absl::Milliseconds(250);
constexpr absl::Duration kPatience = absl::Seconds(120);  // within which every request has its answer
constexpr absl::Duration kHungBound =
    absl::Seconds(5);  // hang_timeout, stop_timeout and the way of the messages
constexpr char kTenant[] = "tenant";
constexpr int64_t kStripe = 2;
constexpr int kLongestPrompt = 72;
constexpr int kBlockTokens = 2;
constexpr int64_t kTokenBytes = 3 * 2 * 2 * 16 * 4;  // of kept K and V: layers, K and V, heads, of f32
constexpr absl::Duration kTold = absl::Seconds(2);   // within which workers hear what the leader has said
constexpr int kMostLeaseMs = 2000;
constexpr int kMostAttempts = 6;                       // leader.cc
constexpr absl::Duration kKeptOut = absl::Seconds(1);  // whoever did not prepare, at most
// From the last fault to a pool that is whole again, kKeptOut included.
constexpr absl::Duration kSettle = absl::Seconds(10);
constexpr absl::Duration kHealed = absl::Seconds(60);  // the same beside runs that met the fault late: paused

// The network: what a flow moves, and what the flows out of a host do together.
constexpr Link kOnHost = {.latency_seconds = 5e-5, .bytes_per_second = 2e9};
constexpr Link kBetweenHosts = {.latency_seconds = 1e-3, .bytes_per_second = 1e8};
constexpr double kOutOfHost = 1.5e8;
constexpr Link kAssumed = {.latency_seconds = 2e-4, .bytes_per_second = 1e9};
constexpr double kProbeSeconds = 0.02;

int HostOf(int node) { return node / 2; }

v1::ModelId SimulatedModel() {
  v1::ModelId model;
  model.set_name("simulated");
  model.set_config_hash(7);
  model.set_weights_hash(8);
  model.set_dtype("f32");
  return model;
}

v1::Speed SimulatedSpeed() {
  return ToProto(PoolSpeed{
      .gemm_flops_per_second = 1e9, .attention_flops_per_second = 1e9, .merge_bytes_per_second = 1e9});
}

const ModelShape& SimulatedShape() {
  static const ModelShape shape{.layers = 3,
                                .hidden = 64,
                                .intermediate = 128,
                                .q_heads = 4,
                                .kv_heads = 2,
                                .head_dim = 16,
                                .vocab = 4,
                                .context_tokens = 1 << 20};
  return shape;
}

// Planning is pure: what one story has planned, the next need not plan again.
absl::StatusOr<PlanChoice> RememberedPlan(const PoolCapacity& capacity, int64_t tokens,
                                          const PrefillOptions& options, const CachedPrefix& cached) {
  EngineOptions defaults;
  defaults.stripe = kStripe;
  const int64_t cached_tokens = UsableTokensOf(cached, defaults, tokens, options);
  const PlanWeights shared = capacity.shared_weights.value_or(PlanWeights());
  using Key = std::tuple<int64_t, int64_t, int, bool, bool, std::vector<int>, int64_t, double, double, double,
                         double, double, WeightMode, double, int64_t, int64_t, std::vector<int>>;
  static std::mutex mutex;
  static std::map<Key, absl::StatusOr<PlanChoice>> plans;
  const std::lock_guard<std::mutex> lock(mutex);
  const Topology& links = capacity.topology;
  auto [entry, fresh] = plans.try_emplace(
      Key{tokens, cached_tokens, cached_tokens == 0 ? 0 : cached.ranks,
          capacity.rank_kv_bytes * capacity.ranks < tokens * kTokenBytes,
          capacity.rank_kv_bytes * cached.ranks < tokens * kTokenBytes, links.node_of_seat,
          capacity.rank_memory_bytes, links.same_node.bytes_per_second, links.same_node.latency_seconds,
          links.between_nodes.bytes_per_second, links.between_nodes.latency_seconds,
          links.node_bytes_per_second, capacity.rank_weights.mode, capacity.rank_weights.layer_seconds,
          shared.loaded_bytes, capacity.shared_rank_memory_bytes,
          shared.loaded_bytes == 0 ? std::vector<int>() : capacity.first_seats},
      absl::UnknownError("not planned"));
  if (fresh) entry->second = PlanForPool(SimulatedShape(), defaults, capacity, tokens, options, cached);
  return entry->second;
}

// Of a rank, where the longest prompt runs in a few pieces on so many.
int64_t SmallRankBytes(int ranks) {
  static std::mutex mutex;
  static std::map<int, int64_t> bytes_of_rank;
  const std::lock_guard<std::mutex> lock(mutex);
  int64_t& bytes = bytes_of_rank[ranks];
  EngineOptions defaults;
  defaults.stripe = kStripe;
  PoolCapacity capacity = {.ranks = ranks, .rank_kv_bytes = kLongestPrompt * kTokenBytes};
  const auto whole = PlanForPool(SimulatedShape(), defaults, capacity, kLongestPrompt, {});
  for (int percent = 50; bytes == 0; percent += 5) {
    capacity.rank_memory_bytes = whole->plan.predicted.run_bytes * percent / 100 / ranks + 1;
    const auto choice = PlanForPool(SimulatedShape(), defaults, capacity, kLongestPrompt, {});
    if (choice.ok() && choice->pieces.size() <= 6) bytes = capacity.rank_memory_bytes;
  }
  return bytes;
}

// What the longest prompt takes on a rank that is alone.
int64_t MostRunBytes() {
  static const int64_t bytes = [] {
    EngineOptions defaults;
    defaults.stripe = kStripe;
    return PlanForPool(SimulatedShape(), defaults, {.ranks = 1}, kLongestPrompt, {})
        .value()
        .plan.predicted.run_bytes;
  }();
  return bytes;
}

}  // namespace

PoolSimulation::PoolSimulation(uint64_t seed, bool verbose) : seed_(seed), verbose_(verbose), random_(seed) {}
PoolSimulation::~PoolSimulation() = default;

std::string PoolSimulation::Run() {
  nodes_.resize(Draw(1, 8));
  many_runs_.resize(nodes_.size(), true);
  if (Chance(0.1)) many_runs_[static_cast<size_t>(Draw(0, static_cast<int>(nodes_.size()) - 1))] = false;
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
  StartLeader();
  for (size_t i = 0; i < nodes_.size(); ++i) {
    After(DrawMs(0, 300), -1, [this, i] { StartNode(static_cast<int>(i)); });
  }
  SubmitAgainAfter(DrawMs(200, 1000));
  ChangeTurns();
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

// ---- Machines.

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
  options.runs_at_once = runs_at_once_ = Chance(0.2) ? 1 : Draw(2, 8);
  leader_measures_links_ = Chance(0.5);
  options.links.links.same_node = leader_measures_links_ ? kAssumed : kOnHost;
  options.links.links.between_nodes = leader_measures_links_ ? kAssumed : kBetweenHosts;
  options.links.measure.fill(leader_measures_links_);
  options.least_kept_out = kKeptOut / 4;
  options.most_kept_out = kKeptOut;
  if (Chance(0.2)) options.kv_cache = false;
  leader_ = std::make_unique<Leader>(options, RememberedPlan);
  runs_told_.clear();
  Note("leader starts");
  After(DrawMs(0, 250), -1, [this, incarnation = leader_incarnation_] { TickLeader(incarnation); });
}

void PoolSimulation::CrashLeader() {
  if (leader_ == nullptr) return;
  Note("leader crashes");
  leader_.reset();
  for (auto& [id, link] : links_) {
    if (link.open_at_leader) CutLink(id, false, Chance(0.8));
  }
  for (auto& [name, lease] : leases_) lease.ended = true;  // the next leader knows of none
  census_.answers += static_cast<int>(requests_.size());   // clients see their connections break
  census_.errors += static_cast<int>(requests_.size());
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
  offer.set_many_runs(many_runs_[static_cast<size_t>(index)]);
  offer.set_many_messages(many_runs_[static_cast<size_t>(index)]);
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
  node.machine = std::make_unique<WorkerMachine>(options);
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
  After(kTick, -1, [this, incarnation] { TickLeader(incarnation); });
}

// A rank that is stuck in one operation is out of the pool, however lively its process is.
void PoolSimulation::CheckHungRanksAreLost() {
  for (const Node& node : nodes_) {
    if (!IsMember(node)) continue;
    for (const auto& [run, host] : node.hosts) {
      for (const HostRank& rank : host.ranks) {
        if (rank.computing && !host.paused && now_ - rank.computing_since > kHungBound) {
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

void PoolSimulation::TickNode(int index, int incarnation) {
  Node& node = nodes_[index];
  if (node.machine == nullptr || node.incarnation != incarnation) return;
  WorkerMachine::ProgressOfRuns progress;
  for (const auto& [run, host] : node.hosts) {
    for (const HostRank& rank : host.ranks) {
      progress[run].push_back({.rank = rank.seat,
                               .layers_done = rank.operations / 4,
                               // Begun and ended: who begins after a long wait for its peers has moved.
                               .operations = static_cast<uint64_t>(2 * rank.operations + rank.computing),
                               .computing = rank.computing});
    }
  }
  node.kv->EndLapsed();
  node.machine->OnTick(now_, progress);
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
    } else if (auto* line = std::get_if<Leader::LogLine>(&action)) {
      Note(absl::StrCat("leader: ", line->text));
    }
  }
  for (const uint64_t run : begun) CheckSubmesh(run);
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
      PauseHost(index, pause->run, true);
    } else if (auto* resume = std::get_if<WorkerMachine::ResumeRun>(&action)) {
      PauseHost(index, resume->run, false);
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
        if (host.kv == nullptr && keep.has_value() && keep->lease == ends->lease) keep.reset();
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

// ---- Network.

void PoolSimulation::Connect(int index, uint64_t connection) {
  Node& node = nodes_[index];
  const uint64_t id = ++last_link_;
  node.link = id;
  links_[id] = {.node = index,
                .node_incarnation = node.incarnation,
                .node_connection = connection,
                .leader_incarnation = leader_incarnation_,
                .to_leader = now_,
                .to_node = now_};
  if (leader_ == nullptr) return CutLink(id, false, true);
  Link& link = links_[id];
  link.to_leader = std::max(now_ + Latency(), node.partitioned_until);
  At(link.to_leader, -1, [this, id] {
    const Link& link = links_[id];
    if (link.cut || leader_ == nullptr || link.leader_incarnation != leader_incarnation_) return;
    leader_->OnConnected(id, now_);
  });
}

// What is under way is lost; who is not told learns it from silence.
void PoolSimulation::CutLink(uint64_t id, bool tell_leader, bool tell_node) {
  links_[id].cut = true;
  if (tell_leader) {
    After(DrawMs(0, 50), -1, [this, id] {
      Link& link = links_[id];
      if (!link.open_at_leader || leader_ == nullptr || link.leader_incarnation != leader_incarnation_)
        return;
      link.open_at_leader = false;
      leader_->OnDisconnected(id, now_);
      DoLeaderActions();
    });
  }
  if (tell_node) {
    const int index = links_[id].node;
    After(DrawMs(0, 50), index, [this, id, index] {
      Link& link = links_[id];
      Node& node = nodes_[index];
      if (!link.open_at_node || node.machine == nullptr || node.incarnation != link.node_incarnation) return;
      CloseAtNode(id);
      if (node.link == id) node.link = 0;
      node.machine->OnDisconnected(link.node_connection, absl::UnavailableError("cut"), now_);
      DoNodeActions(index);
    });
  }
}

// The other side hears of it after what was sent before, unless the link is cut.
void PoolSimulation::CloseAtNode(uint64_t id) {
  Link& link = links_[id];
  if (!link.open_at_node) return;
  link.open_at_node = false;
  if (link.cut) return;
  link.to_leader = std::max({link.to_leader, now_ + Latency(), nodes_[link.node].partitioned_until});
  At(link.to_leader, -1, [this, id] {
    Link& link = links_[id];
    if (link.cut || !link.open_at_leader || leader_ == nullptr ||
        link.leader_incarnation != leader_incarnation_)
      return;
    link.open_at_leader = false;
    leader_->OnDisconnected(id, now_);
    DoLeaderActions();
  });
}

void PoolSimulation::CloseAtLeader(uint64_t id) {
  Link& link = links_[id];
  if (!link.open_at_leader) return;
  link.open_at_leader = false;
  if (link.cut) return;
  link.to_node = std::max({link.to_node, now_ + Latency(), nodes_[link.node].partitioned_until});
  const int index = link.node;
  At(link.to_node, index, [this, id, index] {
    Link& link = links_[id];
    Node& node = nodes_[index];
    if (link.cut || !link.open_at_node || node.machine == nullptr ||
        node.incarnation != link.node_incarnation)
      return;
    link.open_at_node = false;
    if (node.link == id) node.link = 0;
    node.machine->OnDisconnected(link.node_connection, absl::UnavailableError("closed by the leader"), now_);
    DoNodeActions(index);
  });
}

void PoolSimulation::DeliverToNode(uint64_t id, v1::LeaderMessage message) {
  Link& link = links_[id];
  if (link.cut || !link.open_at_leader) return;
  const int index = link.node;
  // An old one of these would count for the present one.
  const bool once = message.has_kv_lasts() || message.has_pause() || message.has_resume();
  const bool twice = !once && Chance(0.02);
  if (message.has_shard() && message.shard().ids_size() > 0 && !healed_ && !quiet_ && Chance(0.003)) {
    Note("a shard is corrupted");
    Fault(absl::ZeroDuration());
    message.mutable_shard()->set_ids(0, message.shard().ids(0) ^ 1);
  }
  for (int copy = 0; copy < (twice ? 2 : 1); ++copy) {
    const absl::Duration delay = copy == 0 ? Latency() : DrawMs(1, 300);
    const absl::Time arrival = std::max(now_ + delay, nodes_[index].partitioned_until);
    // A late copy does not hold up what comes after the first.
    const absl::Time when =
        copy == 0 ? (link.to_node = std::max(link.to_node, arrival)) : std::max(link.to_node, arrival);
    At(when, index, [this, id, index, message] {
      Link& link = links_[id];
      Node& node = nodes_[index];
      if (link.cut || !link.open_at_node || node.machine == nullptr ||
          node.incarnation != link.node_incarnation)
        return;
      if (message.has_prepare() && MayCrashAt(index, Step::kPrepare)) return;
      if (message.has_shard() && MayCrashAt(index, Step::kShard)) return;
      if (message.has_run() && MayCrashAt(index, Step::kRun)) return;
      if (message.has_finish() && MayCrashAt(index, Step::kFinish)) return;
      if (message.has_abort() && MayCrashAt(index, Step::kAbort)) return;
      node.machine->OnMessage(link.node_connection, message, now_);
      DoNodeActions(index);
    });
  }
}

void PoolSimulation::DeliverToLeader(uint64_t id, v1::WorkerMessage message) {
  Link& link = links_[id];
  if (link.cut || !link.open_at_node) return;
  const bool twice = Chance(0.02);
  for (int copy = 0; copy < (twice ? 2 : 1); ++copy) {
    const absl::Duration delay = copy == 0 ? Latency() : DrawMs(1, 300);
    const absl::Time arrival = std::max(now_ + delay, nodes_[link.node].partitioned_until);
    const absl::Time when =
        copy == 0 ? (link.to_leader = std::max(link.to_leader, arrival)) : std::max(link.to_leader, arrival);
    At(when, -1, [this, id, message] {
      Link& link = links_[id];
      if (link.cut || !link.open_at_leader || leader_ == nullptr ||
          link.leader_incarnation != leader_incarnation_)
        return;
      leader_->OnMessage(id, message, now_);
      DoLeaderActions();
    });
  }
}

// ---- Computing.

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
  if (IsMember(node) &&
      std::ssize(node.hosts) > (many_runs_[static_cast<size_t>(index)] ? runs_at_once_ : 1)) {
    Fail(absl::StrCat(node.name, " has more runs than may live at once"));
  }
  census_.most_at_once = std::max(census_.most_at_once, static_cast<int>(node.hosts.size()));
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
    for (size_t i = 0; i < part.shards.size() + (part.weights.share.of > 0 ? 1 : 0); ++i) {
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
  std::shared_ptr<Mesh>& mesh = meshes_[absl::StrJoin(start.addresses, ",")];
  if (mesh == nullptr) {
    mesh = std::make_shared<Mesh>();
    mesh->run = start.run;
    mesh->members.resize(ranks);
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
  const auto begin = [this, index, first, mesh, incarnation = node.incarnation] {
    const Host* host = HostOfMesh(index, incarnation, mesh);
    for (size_t i = 0; host != nullptr && i < host->ranks.size(); ++i) {
      if (!host->ranks[i].over) BeginOperation(index, mesh->run, first + static_cast<int>(i));
    }
  };
  if (host.probes.empty()) return begin();
  After(absl::Seconds(kProbeSeconds * static_cast<double>(host.probes.size())), index, begin);
}

// Only what the leader does not know is measured, by ranks that have such a link.
void PoolSimulation::CheckProbes(const std::vector<LinkProbe>& probes, const WorkerMachine::RunPart& part) {
  const bool of_this_leader = part.epoch >= kEpochsOfALeader * leader_incarnation_;
  if (!probes.empty() && of_this_leader && !leader_measures_links_) Fail("links that are given are measured");
  const int ranks = part.plan.ranks();
  for (const LinkProbe& probe : probes) {
    int alone = 0;
    for (size_t rank = 0; rank < probe.peer_of_rank.size(); ++rank) {
      alone += probe.peer_of_rank[rank] == static_cast<int>(rank) ? 1 : 0;
    }
    if (!IsPairing(probe, ranks) || alone == ranks) Fail("a probe without pairs of ranks");
  }
}

// By the virtual network; or nonsense, as long as there are faults.
std::optional<meshfill::Link> PoolSimulation::MeasuredLink(const LinkProbe& probe, const Mesh& mesh,
                                                           int rank) {
  const auto leaves_host = [&](int of) {
    return HostOf(mesh.members[of].node) != HostOf(mesh.members[probe.peer_of_rank[of]].node);
  };
  if (probe.peer_of_rank[rank] == rank) return std::nullopt;
  if (!healed_ && Chance(0.1)) {
    constexpr double kNonsense[] = {0, -1, std::numeric_limits<double>::quiet_NaN(),
                                    std::numeric_limits<double>::infinity(), 1e300};
    return meshfill::Link{.latency_seconds = kNonsense[Draw(1, 4)],
                          .bytes_per_second = kNonsense[Draw(0, 4)]};
  }
  if (!leaves_host(rank)) return kOnHost;
  int flows = 0;
  for (size_t other = 0; other < mesh.members.size(); ++other) {
    const bool same_host = HostOf(mesh.members[other].node) == HostOf(mesh.members[rank].node);
    flows += same_host && leaves_host(static_cast<int>(other)) ? 1 : 0;
  }
  return meshfill::Link{.latency_seconds = kBetweenHosts.latency_seconds,
                        .bytes_per_second = std::min(kBetweenHosts.bytes_per_second, kOutOfHost / flows)};
}

// The leader plans with what is so, or with what it began with; with the former after a run on all ranks.
void PoolSimulation::CheckLinks(bool all_measured) {
  const Topology links = leader_->capacity().topology;
  const auto is = [](double value, double either, double other) {
    return value == other || std::abs(value / either - 1) < 1e-9;
  };
  constexpr double kNothingShared = std::numeric_limits<double>::infinity();
  if (!is(links.same_node.bytes_per_second, kOnHost.bytes_per_second, kAssumed.bytes_per_second) ||
      !is(links.same_node.latency_seconds, kOnHost.latency_seconds, kAssumed.latency_seconds) ||
      !is(links.between_nodes.bytes_per_second, kBetweenHosts.bytes_per_second, kAssumed.bytes_per_second) ||
      !is(links.between_nodes.latency_seconds, kBetweenHosts.latency_seconds, kAssumed.latency_seconds) ||
      !is(links.node_bytes_per_second, kOutOfHost, kNothingShared)) {
    Fail("plans with links that nobody has");
  }
  for (const PoolLink& link : leader_->links()) {
    const bool known = link.source == (leader_measures_links_ ? "measured" : "given");
    if (all_measured && !known) Fail(absl::StrCat("the link ", link.where, " is ", link.source));
  }
}

PoolSimulation::Host* PoolSimulation::HostOfMesh(int index, int incarnation,
                                                 const std::shared_ptr<Mesh>& mesh) {
  Node& node = nodes_[index];
  if (node.machine == nullptr || node.incarnation != incarnation) return nullptr;
  const auto host = node.hosts.find(mesh->run);
  return host != node.hosts.end() && host->second.mesh == mesh ? &host->second : nullptr;
}

// What is at the end of its operation goes on, each rank in its own time.
void PoolSimulation::PauseHost(int index, uint64_t run, bool paused) {
  Node& node = nodes_[index];
  if (!node.hosts.contains(run)) return Fail("pauses a run that is not there");
  Host& host = node.hosts.at(run);
  if (paused) ++census_.pauses;
  host.paused = paused;
  for (HostRank& rank : host.ranks) {
    if (rank.computing) rank.computing_since = now_;
    if (paused || !std::exchange(rank.held, false)) continue;
    After(DrawMs(0, 20), index,
          [this, index, seat = rank.seat, mesh = host.mesh, incarnation = node.incarnation] {
            if (HostOfMesh(index, incarnation, mesh) != nullptr) EndOperation(index, mesh->run, seat);
          });
  }
}

void PoolSimulation::StopHost(int index, uint64_t run) {
  Node& node = nodes_[index];
  if (!node.hosts.contains(run)) return Fail("stops a run that is not there");
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
  if (node.compute_frozen_until > now_) {  // frozen in the middle
    At(node.compute_frozen_until, index,
       [this, index, seat, mesh = host.mesh, incarnation = node.incarnation] {
         if (HostOfMesh(index, incarnation, mesh) != nullptr) EndOperation(index, mesh->run, seat);
       });
    return;
  }
  const auto& shard = host.part.shards[seat - host.part.first_rank];
  if (state.operations == 1 && std::find(shard.begin(), shard.end(), kPoison) != shard.end()) {
    ++poison_deaths_;
    // Whether it did so alone nobody can tell where others may have computed just before.
    ClientRequest* request = RequestOf(host.part);
    const int most = runs_at_once_ == 1 ? 2 : kMostAttempts;
    if (request != nullptr && ++request->deaths > most) Fail("a poisonous request ends epoch after epoch");
    return CrashNode(index, false);
  }
  if (MayCrashAt(index, Step::kCompute)) return;
  state.computing = false;
  ++state.operations;
  const std::shared_ptr<Mesh> mesh = host.mesh;
  mesh->members[host.part.plan.RankAt(seat)].done = state.operations;
  PassBarrier(mesh, state.operations);
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

// ---- K and V.

std::string PoolSimulation::AdmitKv(int64_t tokens) {
  const absl::StatusOr<PlanChoice> choice = RememberedPlan(leader_->capacity(), tokens, {}, {});
  if (!choice.ok()) return "";
  const std::string name = absl::StrCat("lease", ++last_order_);
  const absl::Status admitted = leader_->AdmitKv(
      {.lease = name, .tenant = kTenant, .tokens = tokens, .lasts = DrawMs(100, kMostLeaseMs)}, choice->plan);
  if (!admitted.ok()) {
    ++census_.refused;
    if (!absl::IsResourceExhausted(admitted)) Fail(absl::StrCat("a lease is refused: ", admitted.message()));
    return "";
  }
  ++census_.leases;
  leases_[name] = {
      .leader_incarnation = leader_incarnation_, .tokens = tokens, .expires = now_, .changed_at = now_};
  for (int i = Draw(0, 2); i > 0; --i) After(DrawMs(0, 1500), -1, [this, name] { ReadLease(name); });
  if (Chance(0.05)) After(DrawMs(0, 800), -1, [this, name] { EndLease(name); });
  return name;
}

// A row's first bytes say who computed it, the next ones from which id.
void PoolSimulation::KeepLayers(const Host& host, int seat) {
  if (host.kv == nullptr) return;
  const KvShape shape = KvShapeOf(SimulatedShape());
  const WorkerMachine::RunPart& part = host.part;
  const TokenLayout& layout = part.plan.layout;
  const int rank = part.plan.RankAt(seat);
  const int64_t row_bytes = shape.kv_heads * shape.head_bytes();
  for (int layer = 0; layer < shape.layers; ++layer) {
    std::byte* const slab = host.kv->Place(rank, layer).value();
    if (slab == nullptr) return;  // the lease has ended
    for (int64_t slot = 0; slot < layout.ChunkTokens(rank); ++slot) {
      const uint64_t token = static_cast<uint64_t>(part.plan.cached_tokens + layout.TokenAt(rank, slot));
      const uint64_t values[] = {Mix(token, part.number * shape.layers + layer),
                                 Mix(token, part.shards[seat - part.first_rank][slot])};
      std::memcpy(slab + slot * row_bytes, values, sizeof values);
    }
    host.kv->OnLayerKept(rank, layer);
  }
}

void PoolSimulation::OnTold(uint64_t link, const v1::LeaderMessage& message) {
  if (message.has_prepare()) {
    OnRunTold(message.prepare());
    const Link& to = links_.at(link);  // perhaps of a worker that has died since, and is back
    runs_told_.at(message.prepare().run()).nodes[to.node] = to.node_incarnation;
  }
  if (message.has_run()) runs_told_.at(message.run().run()).begun = true;
  if (message.has_pause()) runs_told_.at(message.pause().run()).paused_since = now_;
  if (message.has_resume()) runs_told_.at(message.resume().run()).paused_since = absl::InfiniteFuture();
  if (message.has_finish()) {
    runs_told_.at(message.finish().run()).finished = true;
    runs_told_.at(message.finish().run()).losses = leader_->counters().losses;
  }
  if (message.has_cancel()) {
    RunTold& told = runs_told_.at(message.cancel().run());
    told.stopped = true;
    told.stopped_at = now_;
  }
  if (!message.has_abort()) return;
  RunTold& told = runs_told_.at(message.abort().run());
  told.stopped = true;
  told.stopped_at = now_;
  CheckWorkersLost(told);
  told.innocent = told.paused_since < now_ - Leader::Options().silence_timeout;
}

// In quiet stories nothing else stops a run.
void PoolSimulation::CheckWorkersLost(const RunTold& told) {
  const bool lost = std::any_of(told.nodes.begin(), told.nodes.end(), [this](const auto& entry) {
    const auto& [node, incarnation] = entry;
    return nodes_[node].machine == nullptr || nodes_[node].incarnation != incarnation;
  });
  if (quiet_ && !lost) Fail("a run is stopped that lost none of its workers");
}

// A run on a sub-mesh takes its share of the workers. It takes none on which others compute while nothing
// lives on another sub-mesh, and there is room for K and V.
void PoolSimulation::CheckSubmesh(uint64_t run) {
  const RunTold& told = runs_told_.at(run);
  const auto request = requests_.find(told.ticket);
  if (request == requests_.end() || request->second.submeshes == 1) return;
  std::vector<int> members;  // by place
  for (const Leader::WorkerView& worker : leader_->workers()) {
    const auto node = std::find_if(nodes_.begin(), nodes_.end(),
                                   [&](const Node& each) { return each.name == worker.offer->name(); });
    if (worker.state != Leader::WorkerState::kDraining) {
      members.push_back(static_cast<int>(node - nodes_.begin()));
    }
  }
  const int count = std::min(request->second.submeshes, static_cast<int>(members.size()));
  if (count == 0 || count * std::ssize(told.nodes) >= std::ssize(members) + count) return;  // on all of them
  ++census_.on_submeshes;
  std::map<int, int> live, computing;  // runs, by node
  for (const auto& [number, other] : runs_told_) {
    // What begins after it, in the same moment, takes what it has left.
    if (number >= run || other.finished || now_ - other.stopped_at > kHungBound) continue;
    const auto owner = requests_.find(other.ticket);
    const bool computes = !other.stopped && owner != requests_.end() && !owner->second.paused &&
                          leader_->run_of(other.ticket) == number;  // else all its workers are lost
    for (const auto& [node, incarnation] : other.nodes) {
      ++live[node];
      if (computes) ++computing[node];
    }
  }
  if (computing.empty()) return;
  const bool beside = std::none_of(told.nodes.begin(), told.nodes.end(),
                                   [&](const auto& entry) { return computing[entry.first] > 0; });
  if (beside) {
    ++census_.side_by_side;
    return;
  }
  const auto kv = leader_->kv_by_worker();
  for (int i = 0; i < count; ++i) {
    const size_t begin = members.size() * static_cast<size_t>(i) / static_cast<size_t>(count);
    const size_t end = members.size() * static_cast<size_t>(i + 1) / static_cast<size_t>(count);
    const bool idle = std::all_of(members.begin() + static_cast<std::ptrdiff_t>(begin),
                                  members.begin() + static_cast<std::ptrdiff_t>(end), [&](int node) {
                                    const KvDirectory::WorkerKv& of = kv.at(nodes_[node].name);
                                    const int64_t most = kLongestPrompt * kTokenBytes;
                                    return live[node] == 0 && of.bytes + most <= of.max_bytes;
                                  });
    if (!idle || small_) continue;
    std::vector<std::string> taken, free;
    for (const auto& [node, incarnation] : told.nodes) taken.push_back(nodes_[node].name);
    for (size_t at = begin; at < end; ++at) free.push_back(nodes_[members[at]].name);
    return Fail(absl::StrCat("run ", run, " takes ", absl::StrJoin(taken, ", "),
                             ", on which others compute, and ", absl::StrJoin(free, ", "), " are idle"));
  }
}

// A run whose workers are all lost is told of nothing.
int PoolSimulation::EpochsEnded(const ClientRequest& request) const {
  return static_cast<int>(std::count_if(request.runs.begin(), request.runs.end(), [this](uint64_t run) {
    const RunTold& told = runs_told_.at(run);
    return told.begun && !told.innocent;
  }));
}

// What a run is told to follow was computed from the same tokens, for the same tenant, by runs that are over.
void PoolSimulation::OnRunTold(const v1::Prepare& prepare) {
  const auto [entry, fresh] = runs_told_.try_emplace(prepare.run());
  if (!fresh) return;
  const auto owner = std::find_if(requests_.begin(), requests_.end(), [&](const auto& request) {
    return leader_->run_of(request.first) == prepare.run();
  });
  if (owner == requests_.end()) return;  // it was stopped in the moment in which it began
  ClientRequest& request = owner->second;
  const uint64_t last = request.runs.empty() ? 0 : *request.runs.rbegin();
  bool goes_on = false, begun = false;
  RunTold& told = entry->second;
  told = {
      .tokens = request.tokens, .cache_tenant = request.cache_tenant, .computed_by = {}, .stopped = false};
  told.ticket = owner->first;
  for (const v1::RunTokens& piece : prepare.prefix()) {
    const auto found = runs_told_.find(piece.run());
    if (found == runs_told_.end()) return Fail("a prefix of a run that never was");
    const RunTold& before = found->second;
    const bool own = request.runs.contains(piece.run());
    if (!own && (begun || request.ignores_cache)) Fail("the cache is not ignored, or comes between pieces");
    if (!before.finished || before.stopped) Fail("a prefix of a run that was not done");
    begun = begun || own;
    goes_on = goes_on || piece.run() == last;
    const size_t end = told.computed_by.size() + piece.tokens();
    if (before.cache_tenant != told.cache_tenant) Fail("a prefix of another tenant");
    if (end >= told.tokens.size() || end > before.computed_by.size() ||
        !std::equal(told.tokens.begin(), told.tokens.begin() + static_cast<std::ptrdiff_t>(end),
                    before.tokens.begin())) {
      return Fail("a prefix of other tokens");
    }
    told.computed_by.resize(end, piece.run());
  }
  if (told.computed_by.size() != prepare.plan().cached_tokens()) Fail("a prefix of another length");
  if (prepare.prefix_size() > 0 && !begun) ++census_.behind_a_prefix;
  told.computed_by.resize(prepare.plan().cached_tokens() + prepare.plan().tokens(), prepare.run());
  const bool is_last = told.computed_by.size() == told.tokens.size();
  if (prepare.more_pieces() == is_last) Fail("a piece that does not know whether more come");
  if (told.computed_by.size() + prepare.tokens_ahead() != told.tokens.size()) {
    Fail("a run that takes its prompt for another length");
  }
  if (prepare.more_pieces() && !prepare.keep_kv().cache()) Fail("a piece that no other can follow");
  if (prepare.more_pieces() && !prepare.keep_kv().lease().empty()) Fail("a lease of a piece");
  if (last != 0 && begun && !goes_on) ++census_.pieces_again;
  if (last != 0 && !begun && runs_told_.at(last).finished) ++census_.pieces_lost;
  request.attempts += goes_on ? 0 : 1;
  request.runs.insert(prepare.run());
}

void PoolSimulation::OnPrefillEnded(const std::string& name, bool done) {
  if (name.empty()) return;
  KvClient& lease = leases_.at(name);
  lease.held = false;
  lease.changed_at = now_;
  if (lease.ended) {  // released while it ran, or its leader is gone
    if (leader_ != nullptr && leader_->kv().Keep(name, now_).ok()) Fail("a lease that has ended is kept");
    return;
  }
  if (!done) {
    lease.ended = true;
    leader_->kv().End(name);
    return DoLeaderActions();
  }
  const absl::StatusOr<absl::Duration> rest = leader_->kv().Keep(name, now_);
  if (!rest.ok()) return Fail("a lease of a prefill that is done is gone");
  lease.expires = now_ + *rest;
  DoLeaderActions();
  UseLease(name);
}

void PoolSimulation::UseLease(const std::string& name) {
  for (int i = Draw(1, 4); i > 0; --i) {
    After(DrawMs(0, 2 * kMostLeaseMs), -1, [this, name] { ReadLease(name); });
  }
  if (Chance(0.3)) {
    After(DrawMs(0, kMostLeaseMs), -1, [this, name] {
      KvClient& lease = leases_.at(name);
      if (leader_ == nullptr || lease.leader_incarnation != leader_incarnation_) return;
      const auto lasts = leader_->kv().Renew(name, kTenant, DrawMs(100, kMostLeaseMs), now_);
      DoLeaderActions();
      if (absl::IsUnavailable(lasts.status())) return;  // lost
      const bool live = !lease.ended && now_ < lease.expires;
      if (lasts.ok() != live) Fail("a lease is renewed that has ended, or not one that lives");
      if (!lasts.ok()) return;
      ++census_.renewals;
      lease.expires = now_ + *lasts;
      lease.changed_at = now_;
    });
  }
  if (Chance(0.3)) After(DrawMs(0, kMostLeaseMs), -1, [this, name] { EndLease(name); });
}

void PoolSimulation::EndLease(const std::string& name) {
  KvClient& lease = leases_.at(name);
  if (leader_ == nullptr || lease.leader_incarnation != leader_incarnation_) return;
  leader_->kv().Release(name, "another", now_);  // does nothing
  leader_->kv().Release(name, kTenant, now_);
  DoLeaderActions();
  if (!lease.ended && (lease.held || now_ < lease.expires)) ++census_.releases;
  lease.ended = true;
}

void PoolSimulation::ReadLease(const std::string& name) {
  const KvClient& lease = leases_.at(name);
  if (leader_ == nullptr || lease.leader_incarnation != leader_incarnation_) return;
  if (leader_->kv().Find(name, "another", now_).ok()) Fail("another tenant finds a lease");
  const absl::StatusOr<KvDirectory::View> view = leader_->kv().Find(name, kTenant, now_);
  const bool live = !lease.ended && (lease.held || now_ < lease.expires);
  if (!live) {
    if (!lease.ended) ++census_.lapses;
    if (!absl::IsNotFound(view.status())) Fail("a lease is found after its end");
    return;
  }
  if (absl::IsUnavailable(view.status())) {
    ++census_.lost_reads;
    return;
  }
  if (!view.ok()) return Fail(absl::StrCat("a live lease: ", view.status().ToString()));
  if (view->run != 0 && runs_told_.at(view->run).stopped) return Fail("a run that was stopped can be read");
  if (view->run == 0 || view->layers_done < kLayers) return;  // a reader waits
  const std::string missed = ReadHolders(name, leader_->kv().PlaceOf(name), view->run);
  if (missed.empty()) {
    ++census_.reads;
    return;
  }
  ++census_.missed_reads;
  Note(absl::StrCat("a read of ", name, " misses: ", missed));
  const bool told = now_ - lease.changed_at > kTold && lease.expires - now_ > kTold / 4;
  if (!lease.held && told && CalmSince(now_ - kTold)) Fail(absl::StrCat("a lease without K and V: ", missed));
}

std::string PoolSimulation::ReadHolders(const std::string& name, const KvDirectory::Place& place,
                                        uint64_t run) {
  v1::FetchKvRequest request;
  request.set_lease(name);
  int64_t tokens = 0;
  for (const KvDirectory::Holder& holder : place.holders) {
    const auto node = std::find_if(nodes_.begin(), nodes_.end(),
                                   [&](const Node& each) { return each.name == holder.address; });
    if (node->machine == nullptr || node->frozen_until > now_) return absl::StrCat(holder.name, " is away");
    if (node->kv->Open(request, "another", 1 << 20, nullptr).ok()) Fail("another tenant reads from a holder");
    auto reader = node->kv->Open(request, kTenant, 1 << 20, nullptr);
    if (!reader.ok()) return absl::StrCat(holder.name, ": ", reader.status().message());
    v1::KvPart part;
    while (true) {
      const absl::StatusOr<KvReader::Next> next = (*reader)->Take(part);
      if (!next.ok()) return absl::StrCat(holder.name, ": ", next.status().message());
      if (*next == KvReader::Next::kNotYet) return absl::StrCat(holder.name, " has not all layers");
      if (*next == KvReader::Next::kEnd) break;
      const size_t row_bytes = part.k().size() / part.tokens();
      for (uint64_t i = 0; i < part.tokens(); ++i) {
        const uint64_t token = part.first_token() + i;
        uint64_t values[2] = {};
        std::memcpy(values, part.k().data() + i * row_bytes, sizeof values);
        const RunTold& told = runs_told_.at(run);
        if (values[0] != Mix(token, told.computed_by[token] * kLayers + part.layer())) {
          Fail("K of another run, token or layer");
        }
        if (values[1] != Mix(token, told.tokens[token])) Fail("K of another prompt");
      }
      tokens += static_cast<int64_t>(part.tokens());
    }
  }
  if (tokens != kLayers * place.layout.tokens()) Fail("the holders do not have each token once");
  return "";
}

void PoolSimulation::CheckKvBudgets() {
  for (const auto& [name, kv] : leader_->kv_by_worker()) {
    if (kv.bytes > kv.max_bytes) Fail(absl::StrCat(name, " is charged more K and V than it has room for"));
  }
  for (const Node& node : nodes_) {
    if (node.kv != nullptr && node.kv->counts().bytes > node.kv->budget_bytes()) {
      Fail(absl::StrCat(node.name, " keeps more than its budget"));
    }
  }
}

// ---- Clients and chaos.

void PoolSimulation::SubmitNext() {
  if (leader_ == nullptr || std::ssize(requests_) >= most_requests_) return SubmitAgainAfter(DrawMs(20, 200));
  if (requests_left_ <= 0 && !healed_) return SubmitAgainAfter(DrawMs(100, 300));
  const bool last = requests_left_ <= 0;  // alone, in a pool that is whole
  const bool alone = requests_.empty() && (!small_ || leader_->kv_counts().leases == 0);
  if (last && (!alone || !CalmSince(now_ - kSettle))) return SubmitAgainAfter(DrawMs(100, 1000));
  if (const std::string missing = last ? Missing() : ""; !missing.empty()) {
    if (CalmSince(now_ - kHealed)) Fail(absl::StrCat("the pool did not heal: without", missing));
    return SubmitAgainAfter(DrawMs(100, 1000));
  }
  --requests_left_;
  ClientRequest request;
  request.tokens = DrawPrompt();
  request.poisonous = !last && !healed_ && Chance(quiet_ ? 0.25 : 0.1);
  if (request.poisonous) request.tokens[Draw(0, static_cast<int>(request.tokens.size()) - 1)] = kPoison;
  if (request.poisonous) last_fault_end_ = std::max(last_fault_end_, now_);
  request.calm = last;
  request.losses = leader_->counters().losses;
  request.submitted_at = now_;
  Note(absl::StrCat("submit ", request.tokens.size(), " tokens", request.poisonous ? ", poisonous" : "",
                    last ? ", the last" : ""));
  PrefillOptions options;
  if (Chance(0.9)) {
    request.cache_tenant = Chance(0.8) ? kTenant : "another";
    options.ignore_cache = request.ignores_cache = Chance(0.1);
    BlockHasher hasher(kBlockTokens, "");
    hasher.Append(request.tokens);
    options.block_names = std::make_shared<const KvBlockNames>(KvBlockNames{
        .tenant = request.cache_tenant, .block_tokens = kBlockTokens, .hashes = hasher.hashes()});
  }
  if (!last && side_by_side_ && Chance(0.7)) options.submeshes = request.submeshes = Draw(1, 2) * 2;
  if (!last && Chance(0.95)) options.kv_lease = AdmitKv(std::ssize(request.tokens));
  request.lease = options.kv_lease;
  const Leader::Ticket ticket =
      leader_->Submit({.id = "r", .tokens = request.tokens, .options = options}, now_);
  if (leader_->CrowdedOut(ticket)) ++census_.crowded_out;
  requests_.emplace(ticket, std::move(request));  // its tokens stay where they are
  DoLeaderActions();
  if (Chance(0.6)) GiveTurn(ticket);
  if (last) return;
  SubmitAgainAfter(DrawMs(1, 600));
  if (!requests_.contains(ticket) || !Chance(0.15)) return;
  After(DrawMs(0, 600), -1, [this, ticket, incarnation = leader_incarnation_] {
    if (leader_ == nullptr || incarnation != leader_incarnation_) return;
    const bool lives = requests_.contains(ticket);
    if (lives) requests_.at(ticket).cancelled = true;
    leader_->CancelRequest(ticket, absl::CancelledError("client"), now_);
    if (lives && requests_.size() == 1) CheckNothingRuns();
    DoLeaderActions();
  });
}

std::string PoolSimulation::Missing() {
  std::string missing;
  std::set<std::string> members;
  for (const Leader::WorkerView& worker : leader_->workers()) members.insert(worker.offer->name());
  for (const Node& node : nodes_) {
    if (!members.contains(node.name)) absl::StrAppend(&missing, " ", node.name);
  }
  return missing;
}

// As a queue does it: one goes on, or those on sub-meshes like its own, and the others stand still.
void PoolSimulation::GiveTurn(Leader::Ticket ticket) {
  if (leader_ == nullptr || requests_.empty()) return;
  if (ticket == 0)
    ticket = std::next(requests_.begin(), Draw(0, static_cast<int>(requests_.size()) - 1))->first;
  const bool for_all = Chance(0.1);
  turn_ = for_all ? 0 : ticket;
  const auto own = requests_.find(ticket);  // it may have its answer already
  const int submeshes = own == requests_.end() ? 1 : own->second.submeshes;
  const auto set_paused = [this](Leader::Ticket of, ClientRequest& request, bool paused) {
    request.paused = paused;
    leader_->SetPaused(of, paused, now_);
  };
  for (auto& [other, request] : requests_) {
    const bool beside = submeshes > 1 && request.submeshes == submeshes;
    if (other != ticket) set_paused(other, request, !for_all && !beside);
  }
  if (own != requests_.end()) set_paused(ticket, own->second, false);
  DoLeaderActions();
}

void PoolSimulation::ChangeTurns() {
  const bool gone = turn_ != 0 && !requests_.contains(turn_);
  if (gone || (!sticky_ && Chance(0.1))) GiveTurn(0);
  After(DrawMs(10, 400), -1, [this] { ChangeTurns(); });
}

// One request lived: once it is cancelled, no run goes on.
void PoolSimulation::CheckNothingRuns() {
  for (const Leader::WorkerView& worker : leader_->workers()) {
    const bool runs =
        worker.state == Leader::WorkerState::kPreparing || worker.state == Leader::WorkerState::kRunning;
    if (runs) Fail("the run of a cancelled request goes on");
  }
}

PoolSimulation::ClientRequest* PoolSimulation::RequestOf(const WorkerMachine::RunPart& part) {
  if (part.epoch < kEpochsOfALeader * leader_incarnation_) return nullptr;
  for (auto& [ticket, request] : requests_) {
    if (request.runs.contains(part.number)) return &request;
  }
  return nullptr;
}

std::vector<uint32_t> PoolSimulation::DrawPrompt() {
  constexpr int kLengths[] = {1, 3, 8, 17, 40, kLongestPrompt};
  constexpr int kInCommon[] = {7, 16, 33, 64};
  std::vector<uint32_t> prompt;
  const size_t length = static_cast<size_t>(kLengths[Draw(0, 5)]);
  if (!prompts_.empty() && Chance(0.7)) {
    prompt = prompts_[static_cast<size_t>(Draw(0, static_cast<int>(prompts_.size()) - 1))];
    prompt.resize(std::min({prompt.size(), length, static_cast<size_t>(kInCommon[Draw(0, 3)])}));
  }
  if (!prompt.empty() && Chance(0.2)) {  // blocks behind it are of another prompt
    prompt[static_cast<size_t>(Draw(0, static_cast<int>(prompt.size()) - 1))] =
        static_cast<uint32_t>(Draw(0, 255));
  }
  while (prompt.size() < length) prompt.push_back(static_cast<uint32_t>(Draw(0, 255)));
  prompts_.push_back(prompt);
  return prompt;
}

void PoolSimulation::OnAnswer(const Leader::Answer& answer) {
  auto entry = requests_.extract(answer.ticket);
  if (entry.empty()) return Fail("an answer to nobody, or a second one");
  ++census_.answers;
  const ClientRequest request = std::move(entry.mapped());
  After(absl::ZeroDuration(), -1,
        [this, lease = request.lease, done = answer.result.ok()] { OnPrefillEnded(lease, done); });
  if (answer.result.ok()) {
    ++census_.results;
    const Leader::Result& result = *answer.result;
    Note(absl::StrCat("result of run ", static_cast<int>(result.logits[3]), " on ", result.plan.ranks(),
                      " ranks"));
    uint64_t sum = 0;
    for (size_t token = 0; token < request.tokens.size(); ++token) sum += Mix(token, request.tokens[token]);
    const uint64_t run = request.runs.empty() ? 0 : *request.runs.rbegin();
    const std::vector<float> expected = {static_cast<float>(sum & 0xFFFFF),
                                         static_cast<float>(sum >> 20 & 0xFFFFF),
                                         static_cast<float>(sum >> 40 & 0xFFFFF), static_cast<float>(run)};
    if (result.logits != expected) Fail("a wrong result, or one of an old run");
    if (result.ranks.size() != static_cast<size_t>(result.plan.ranks())) Fail("a partial result");
    std::set<uint64_t> pieces;
    int64_t cached = 0, run_numbers = 0;
    for (const uint64_t by : runs_told_.at(run).computed_by) {
      if (request.runs.contains(by)) pieces.insert(by);
      cached += request.runs.contains(by) ? 0 : 1;
    }
    for (const uint64_t piece : pieces) run_numbers += static_cast<int64_t>(piece);
    if (pieces.size() > 1) ++census_.in_pieces;
    if (result.pieces != std::ssize(pieces) || result.cached_tokens != cached)
      Fail("a result of other pieces");
    for (const RankStats& stats : result.ranks) {
      if (stats.blocks != run_numbers) Fail("a result put together from other runs than its own");
    }
    if (request.poisonous) Fail("a poisonous request has a result");
    if (result.attempts < request.attempts) Fail("a result with another number of attempts");
    const auto losses = static_cast<int64_t>(leader_->counters().losses - request.losses);
    if (request.calm && result.attempts > 1 + losses) Fail("a pool that lost nobody begins a request again");
    if (result.attempts > 1 && quiet_) ++census_.attempts_of_innocents;
    const double seconds = absl::ToDoubleSeconds(now_ - request.submitted_at);
    if (result.seconds < 0 || result.lost_seconds < 0 ||
        result.seconds + result.lost_seconds > seconds + 1e-6 || result.paused_seconds < 0 ||
        result.paused_seconds > seconds + 1e-6) {
      Fail("a result that took longer than its request");
    }
    if (request.calm && result.plan.ranks() == leader_->capacity().ranks) CheckLinks(/*all_measured=*/true);
  } else {
    ++census_.errors;
    Note(absl::StrCat("error: ", answer.result.status().ToString()));
    const absl::StatusCode code = answer.result.status().code();
    if (code == absl::StatusCode::kCancelled) ++census_.cancelled;
    if (code == absl::StatusCode::kCancelled && !request.cancelled) Fail("cancelled, but not by its client");
    if (code == absl::StatusCode::kInternal) ++census_.poisoned;
    if (code == absl::StatusCode::kInternal && EpochsEnded(request) < 2) {
      Fail("a request is refused as poisonous that did not end two epochs");
    }
    if (code == absl::StatusCode::kInternal && !request.poisonous && quiet_) {
      Fail("a request is refused as poisonous that only lived beside one");
    }
    // Too few workers were left for a prompt in pieces.
    const bool too_small = small_ && code == absl::StatusCode::kFailedPrecondition;
    const RunTold* last = request.runs.empty() ? nullptr : &runs_told_.at(*request.runs.rbegin());
    if (code == absl::StatusCode::kResourceExhausted && last != nullptr && last->finished &&
        last->losses == leader_->counters().losses) {
      Fail("a piece has no room beside what came after its prompt");
    }
    const bool known = too_small || code == absl::StatusCode::kCancelled ||
                       code == absl::StatusCode::kInternal || code == absl::StatusCode::kUnavailable ||
                       code == absl::StatusCode::kResourceExhausted;
    if (!known) Fail(absl::StrCat("an error that nothing explains: ", answer.result.status().ToString()));
    if (request.calm) Fail(absl::StrCat("an error in a healthy pool: ", answer.result.status().ToString()));
  }
  if (answer.ticket == turn_ || turn_ == 0) After(DrawMs(0, 20), -1, [this] { GiveTurn(0); });
  if (!request.calm) return;
  census_.losses += static_cast<int>(leader_->counters().losses);
  census_.retries += static_cast<int>(leader_->counters().retries);
  std::vector<std::string> names;
  for (const auto& [name, lease] : leases_) names.push_back(name);
  for (const std::string& name : names) EndLease(name);
  After(absl::Seconds(2), -1, [this] { CheckEnd(); });
}

void PoolSimulation::Fault(absl::Duration duration) {
  last_fault_end_ = std::max(last_fault_end_, now_ + duration);
}

void PoolSimulation::Chaos() {
  if (healed_) return;
  const int index = Draw(0, static_cast<int>(nodes_.size()) - 1);
  Node& node = nodes_[index];
  const absl::Duration duration = Chance(0.5) ? DrawMs(50, 800) : DrawMs(800, 6000);
  const absl::Time until = now_ + duration;
  switch (Draw(0, 11)) {
    case 0:
    case 1:
      CrashNode(index, Chance(0.3));
      break;
    case 2:
      Note(absl::StrCat(node.name, " is stopped"));
      // A shorter fault does not end a longer one: a process that thaws too early would read its messages out
      // of order.
      node.frozen_until = std::max(node.frozen_until, until);
      break;
    case 3:
      Note(absl::StrCat(node.name, " freezes in compute"));
      node.compute_frozen_until = std::max(node.compute_frozen_until, until + DrawMs(0, 4000));
      break;
    case 4:
      Note(absl::StrCat(node.name, " is cut off"));
      node.partitioned_until = std::max(node.partitioned_until, until);
      break;
    case 5:
      Note(absl::StrCat(node.name, " is cut off from its peers"));
      node.data_partitioned_until = std::max(node.data_partitioned_until, until);
      break;
    case 6:
      if (node.link != 0) {
        Note(absl::StrCat(node.name, "'s stream is cut"));
        const int told = Draw(0, 3);
        CutLink(node.link, (told & 1) != 0, (told & 2) != 0);
      }
      break;
    case 7:
      if (Chance(0.3)) CrashLeader();
      break;
    case 8:
      if (node.machine != nullptr) {
        Note(absl::StrCat(node.name, " drains"));
        Fault(absl::Seconds(6));  // it stays for its leases
        node.machine->Drain(now_);
        DoNodeActions(index);
      }
      break;
    case 9: {  // another worker of this name knocks
      const uint64_t id = ++last_link_;
      links_[id] = {.node = index,
                    .node_incarnation = -1,
                    .leader_incarnation = leader_incarnation_,
                    .open_at_node = false,
                    .to_leader = now_,
                    .to_node = now_};
      if (leader_ == nullptr) break;
      v1::WorkerMessage message;
      v1::Join& offer = *message.mutable_join();
      offer.set_protocol(kControlProtocol);
      offer.set_build("simulated");
      offer.set_name(node.name);
      offer.set_ranks(1);
      offer.set_many_runs(true);
      *offer.mutable_model() = SimulatedModel();
      *offer.mutable_speed() = SimulatedSpeed();
      leader_->OnConnected(id, now_);
      leader_->OnMessage(id, message, now_);
      DoLeaderActions();
      After(DrawMs(0, 500), -1, [this, id, incarnation = leader_incarnation_] {
        if (leader_ == nullptr || incarnation != leader_incarnation_) return;
        links_[id].open_at_leader = false;
        leader_->OnDisconnected(id, now_);
        DoLeaderActions();
      });
      break;
    }
    default:
      break;  // a quiet while
  }
  Fault(duration);
  After(DrawMs(20, 1500), -1, [this] { Chaos(); });
}

void PoolSimulation::Heal() {
  healed_ = true;
  Note("no faults from now on");
  for (Node& node : nodes_) {
    for (absl::Time* until : {&node.frozen_until, &node.compute_frozen_until, &node.partitioned_until,
                              &node.data_partitioned_until}) {
      if (*until > now_) Fault(*until - now_);
    }
  }
  Fault(absl::ZeroDuration());
}

void PoolSimulation::CheckEnd() {
  if (!leader_->idle()) Fail("the leader is busy with nothing");
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
