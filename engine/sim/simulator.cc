#include "engine/sim/simulator.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <queue>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/sim/network.h"
#include "kernels/return_if_error.h"

namespace meshfill::sim {
namespace {

class Simulator {
 public:
  Simulator(const RankProgram& program, const Placement& placement, const Cluster& cluster,
            Recording recording)
      : program_(program),
        seat_of_rank_(placement.seat_of_rank),
        cluster_(cluster),
        record_(recording == Recording::kTimeline),
        network_(cluster, program.ranks),
        ranks_(program.ranks),
        channels_(program.channels.size()),
        random_(cluster.variation.seed) {
    result_.ranks.resize(program.ranks);
    result_.timeline.ranks = program.ranks;
    for (size_t c = 0; c < channels_.size(); ++c) {
      channels_[c].pairs.resize(program.ranks);
      channels_[c].to.resize(program.ranks);
      for (int rank = 0; rank < program.ranks; ++rank) channels_[c].to[program.channels[c].from[rank]] = rank;
    }
    for (const Action& action : program.actions) {
      if (action.kind == ActionKind::kStart) channels_[action.channel].bytes.push_back(action.bytes);
    }
    DrawSlowdowns();
  }

  absl::StatusOr<Simulation> Run() && {
    for (int rank = 0; rank < program_.ranks; ++rank) Advance(rank);
    while (true) {
      network_.Settle(now_);
      const auto [flow, flow_end] = network_.Next();
      if (flow < 0 && events_.empty()) break;
      now_ = events_.empty() ? flow_end : events_.top().at;
      if (flow >= 0) now_ = std::min(now_, flow_end);
      RunInstant();
    }
    for (int rank = 0; rank < program_.ranks; ++rank) {
      if (ranks_[rank].next_action < program_.actions.size()) return Deadlock(rank);
    }
    for (const RankTimes& times : result_.ranks)
      result_.seconds = std::max(result_.seconds, times.total_seconds);
    return std::move(result_);
  }

 private:
  // One rank's messages on one channel, in order; at most one is in the network.
  struct Pair {
    int started = 0;  // messages that the rank started as a sender
    int left = 0;     // messages in the network or through it
    bool busy = false;
    Nanos left_at = 0;
    int arrived = 0;  // messages that arrived at the rank as a receiver
    int waited = 0;
  };
  struct ChannelState {
    std::vector<Pair> pairs;    // by rank
    std::vector<int> to;        // [ranks]: the inverse of Channel::from
    std::vector<double> bytes;  // [k]: bytes of message k
  };
  struct RankState {
    size_t next_action = 0;
    bool waiting = false;
    Nanos since = 0;  // when the wait began
    double slowdown = 1;
  };
  enum class EventKind { kComputed, kEnters };  // a rank has computed; a message enters the network
  struct Event {
    Nanos at;
    EventKind kind;
    int rank;
    int channel;
    bool operator>(const Event& other) const {
      return std::tie(at, kind, rank, channel) > std::tie(other.at, other.kind, other.rank, other.channel);
    }
  };

  static double Seconds(Nanos nanos) { return static_cast<double>(nanos) / kNanosPerSecond; }
  static Nanos ToNanos(double seconds) { return static_cast<Nanos>(std::llround(seconds * kNanosPerSecond)); }

  void DrawSlowdowns() {
    const Variation& variation = cluster_.variation;
    if (variation.straggler_share == 0) return;
    std::uniform_real_distribution<double> uniform;
    for (RankState& rank : ranks_) {
      if (uniform(random_) < variation.straggler_share) rank.slowdown = variation.straggler_slowdown;
    }
  }

  // How many times as long that many blocks take, each with a draw of its own: a step of many blocks varies
  // less than one of few.
  double DrawJitter(int blocks) {
    if (cluster_.variation.jitter == 0 || blocks == 0) return 1;
    double sum = 0;
    for (int block = 0; block < blocks; ++block) sum += std::abs(normal_(random_));
    return 1 + cluster_.variation.jitter * sum / blocks;
  }

  void RunInstant() {
    while (!events_.empty() && events_.top().at == now_) {
      const Event event = events_.top();
      events_.pop();
      event.kind == EventKind::kComputed ? Advance(event.rank) : Enter(event.rank, event.channel);
    }
    for (auto [flow, end] = network_.Next(); flow >= 0 && end <= now_;
         std::tie(flow, end) = network_.Next()) {
      network_.End(flow);
      Arrive(flow / static_cast<int>(channels_.size()), flow % static_cast<int>(channels_.size()));
    }
  }

  // Works through the rank's actions until it computes, waits or ends.
  void Advance(int rank) {
    RankState& state = ranks_[rank];
    while (state.next_action < program_.actions.size()) {
      const Action& action = program_.actions[state.next_action];
      switch (action.kind) {
        case ActionKind::kStart:
          Start(rank, action.channel);
          break;
        case ActionKind::kWait: {
          Pair& pair = channels_[action.channel].pairs[rank];
          if (pair.arrived == pair.waited) {
            state.waiting = true;
            state.since = now_;
            return;
          }
          ++pair.waited;
          break;
        }
        case ActionKind::kCompute:
          Compute(rank, action);
          return;
      }
      ++state.next_action;
    }
    result_.ranks[rank].total_seconds = Seconds(now_);
  }

  void Compute(int rank, const Action& action) {
    double seconds =
        action.flops / cluster_.attention_flops_per_second + action.blocks * cluster_.block_overhead_seconds;
    seconds *= ranks_[rank].slowdown * DrawJitter(action.blocks);
    const Nanos end = now_ + ToNanos(seconds);
    result_.ranks[rank].compute_seconds += Seconds(end - now_);
    Record({.rank = rank, .what = "block", .blocks = action.blocks}, now_, end);
    ++ranks_[rank].next_action;
    events_.push({.at = end, .kind = EventKind::kComputed, .rank = rank, .channel = 0});
  }

  void Start(int rank, int channel) {
    Pair& pair = channels_[channel].pairs[rank];
    ++pair.started;
    if (channels_[channel].to[rank] == rank) {
      ++pair.arrived;
    } else if (!pair.busy) {
      Leave(rank, channel);
    }
  }

  void Leave(int rank, int channel) {
    Pair& pair = channels_[channel].pairs[rank];
    pair.busy = true;
    pair.left_at = now_;
    const bool same_node = seat_of_rank_[rank] / cluster_.gpus_per_node ==
                           seat_of_rank_[channels_[channel].to[rank]] / cluster_.gpus_per_node;
    const Link& link = same_node ? cluster_.same_node : cluster_.between_nodes;
    events_.push({.at = now_ + ToNanos(link.latency_seconds),
                  .kind = EventKind::kEnters,
                  .rank = rank,
                  .channel = channel});
  }

  void Enter(int rank, int channel) {
    ChannelState& state = channels_[channel];
    const int flow = rank * static_cast<int>(channels_.size()) + channel;
    network_.Begin(flow, seat_of_rank_[rank], seat_of_rank_[state.to[rank]],
                   state.bytes[state.pairs[rank].left], now_);
  }

  // The message of `rank` on `channel` is through.
  void Arrive(int rank, int channel) {
    Pair& sent = channels_[channel].pairs[rank];
    Record({.rank = rank,
            .kind = SpanKind::kTransfer,
            .what = OperationName(program_.channels[channel].traffic)},
           sent.left_at, now_);
    sent.busy = false;
    if (++sent.left < sent.started) Leave(rank, channel);

    const int receiver = channels_[channel].to[rank];
    ++channels_[channel].pairs[receiver].arrived;
    RankState& state = ranks_[receiver];
    if (!state.waiting || program_.actions[state.next_action].channel != channel) return;
    const Traffic traffic = program_.channels[channel].traffic;
    result_.ranks[receiver].wait_seconds[traffic] += Seconds(now_ - state.since);
    Record({.rank = receiver, .kind = SpanKind::kWait, .what = OperationName(traffic)}, state.since, now_);
    state.waiting = false;
    Advance(receiver);
  }

  void Record(Span span, Nanos start, Nanos end) {
    if (!record_ || start == end) return;
    span.start_seconds = Seconds(start);
    span.end_seconds = Seconds(end);
    result_.timeline.spans.push_back(span);
  }

  absl::Status Deadlock(int rank) const {
    const Action& action = program_.actions[ranks_[rank].next_action];
    return absl::InternalError(absl::StrCat("simulated rank ", rank, " waits for ever at action ",
                                            ranks_[rank].next_action, " for ",
                                            OperationName(program_.channels[action.channel].traffic)));
  }

  const RankProgram& program_;
  const std::vector<int>& seat_of_rank_;
  const Cluster& cluster_;
  const bool record_;
  Network network_;
  std::vector<RankState> ranks_;
  std::vector<ChannelState> channels_;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  Nanos now_ = 0;
  std::mt19937_64 random_;
  std::normal_distribution<double> normal_;
  Simulation result_;
};

}  // namespace

absl::StatusOr<Simulation> Simulate(const RankProgram& program, const Placement& placement,
                                    const Cluster& cluster, Recording recording) {
  RETURN_IF_ERROR(CheckCluster(cluster));
  if (static_cast<int>(placement.seat_of_rank.size()) != program.ranks) {
    return absl::InvalidArgumentError(absl::StrCat("a placement of ", placement.seat_of_rank.size(),
                                                   " ranks for a program of ", program.ranks));
  }
  return Simulator(program, placement, cluster, recording).Run();
}

}  // namespace meshfill::sim
