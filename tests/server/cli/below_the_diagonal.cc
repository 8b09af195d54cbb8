// What attention could save if its blocks were placed below the causal diagonal: a search, and what it would
// be worth in the cells of a sweep. docs/simulation.md has what came out.
//
//     below_the_diagonal SCENARIO [MOVES]      (a sweep; default: 20 million moves for each node count and
//     ratio)
//
// The sequence is cut into 2n contiguous chunks for n nodes, two of which each node owns. Block (i, j) of Q
// chunk i and KV chunk j ≤ i is computed by any one node, which gets the chunks that it does not own, and
// sends a partial output to the owner of the rows. On the diagonal a block is half the work. Searched is the
// placement of blocks and chunks whose busiest node gets and sends least, where none has more than 1.05 of
// the mean work, by simulated annealing (Kirkpatrick et al. 1983). Beside it stands the best a × b tile of
// stripes: (a − 1) · ratio + (b − 1) KV chunks, with ratio = query heads of a KV head.
//
// A cell's plan is then simulated with messages of its rings cut to that share: more than a real placement
// gains, which has no rings and whose messages are not even.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "engine/sim/mesh_program.h"
#include "engine/sim/placed_mesh.h"
#include "engine/sim/simulator.h"
#include "server/cli/scenario.h"

namespace meshfill {
namespace {

constexpr int kOwned = 2;           // chunks of a node
constexpr double kMostWork = 1.05;  // of the mean
constexpr double kHot = 20, kCold = 5e-4;
constexpr double kWorthIt = 1.05;

struct NodeTraffic {
  double most = std::numeric_limits<double>::infinity();  // of the busiest node, in KV chunks of 1/n
  double mean = 0;
};

class BlockPlacement {
 public:
  // Each node owns chunks k and 2n − 1 − k, and computes all blocks of their rows.
  BlockPlacement(int nodes, double ratio)
      : nodes_(nodes),
        chunks_(kOwned * nodes),
        ratio_(ratio),
        node_of_(chunks_, std::vector<int>(chunks_)),
        owner_(chunks_),
        in_row_(nodes, std::vector<int>(chunks_)),
        in_column_(in_row_),
        work_(nodes) {
    for (int i = 0; i < chunks_; ++i) owner_[i] = i < nodes ? i : chunks_ - 1 - i;
    for (int i = 0; i < chunks_; ++i) {
      for (int j = 0; j <= i; ++j) Count(i, j, node_of_[i][j] = owner_[i], 1);
    }
    for (int node = 0; node < nodes; ++node) energy_.push_back(Energy(node));
  }

  void Anneal(int64_t moves, double hot, std::mt19937_64& random) {
    for (int64_t move = 0; move < moves; ++move) {
      const double heat = hot * std::pow(kCold / hot, static_cast<double>(move) / static_cast<double>(moves));
      Draw(random, 50) == 0 ? SwapOwners(heat, random) : MoveBlock(heat, random);
    }
  }

  // Without an end where a node has too much work.
  NodeTraffic Measure() const {
    NodeTraffic traffic{.most = 0};
    for (int node = 0; node < nodes_; ++node) {
      if (work_[node] > kMostWork * MeanWork()) return {};
      traffic.most = std::max(traffic.most, Chunks(node));
      traffic.mean += Chunks(node) / nodes_;
    }
    return traffic;
  }

 private:
  static int Draw(std::mt19937_64& random, int below) { return static_cast<int>(random() % below); }

  double MeanWork() const { return 0.5 * chunks_ * chunks_ / nodes_; }

  void Count(int i, int j, int node, int by) {
    in_row_[node][i] += by;
    in_column_[node][j] += by;
    work_[node] += by * (i == j ? 0.5 : 1);
  }

  double Chunks(int node) const {
    double chunks = 0;
    for (int c = 0; c < chunks_; ++c) {
      if (owner_[c] == node) continue;
      chunks += (in_row_[node][c] > 0 ? ratio_ : 0) + (in_column_[node][c] > 0 ? 1 : 0);
    }
    return chunks / kOwned;
  }

  // The sum of a high power is led by the busiest.
  double Energy(int node) const {
    const double over = work_[node] / MeanWork() - kMostWork;
    return 1000 * std::pow(Chunks(node) / nodes_, 6) + (over > 0 ? 5 + 400 * over : 0);
  }

  // Whether what has changed of two nodes stays.
  bool Accept(int one, int other, double heat, std::mt19937_64& random) {
    const double energy_one = Energy(one), energy_other = Energy(other);
    const double more = energy_one + energy_other - energy_[one] - energy_[other];
    if (more > 0 && std::uniform_real_distribution<double>()(random) >= std::exp(-more / heat)) return false;
    energy_[one] = energy_one;
    energy_[other] = energy_other;
    return true;
  }

  void SwapOwners(double heat, std::mt19937_64& random) {
    int& one = owner_[Draw(random, chunks_)];
    int& other = owner_[Draw(random, chunks_)];
    if (one == other) return;
    std::swap(one, other);
    if (!Accept(one, other, heat, random)) std::swap(one, other);
  }

  void MoveBlock(double heat, std::mt19937_64& random) {
    const int i = Draw(random, chunks_), j = Draw(random, i + 1);
    const int from = node_of_[i][j];
    const int to = AnotherFor(i, j, random);
    if (to == from) return;
    Count(i, j, from, -1);
    Count(i, j, to, 1);
    if (Accept(from, to, heat, random)) {
      node_of_[i][j] = to;
    } else {
      Count(i, j, to, -1);
      Count(i, j, from, 1);
    }
  }

  // The node of a block beside it or of its row, or the owner of a chunk.
  int AnotherFor(int i, int j, std::mt19937_64& random) const {
    switch (Draw(random, 6)) {
      case 0:
        return node_of_[std::min(i + 1, chunks_ - 1)][j];
      case 1:
        return node_of_[std::max(i - 1, j)][j];
      case 2:
        return node_of_[i][std::min(j + 1, i)];
      case 3:
        return node_of_[i][Draw(random, i + 1)];
      case 4:
        return owner_[i];
      default:
        return owner_[j];
    }
  }

  const int nodes_, chunks_;
  const double ratio_;
  std::vector<std::vector<int>> node_of_;             // [i][j], j ≤ i
  std::vector<int> owner_;                            // [chunk]
  std::vector<std::vector<int>> in_row_, in_column_;  // [node][chunk]: how many of its blocks are there
  std::vector<double> work_;                          // [node]
  std::vector<double> energy_;                        // [node]
};

// What stripes get at best.
double StripedTraffic(int nodes, double ratio) {
  double least = std::numeric_limits<double>::infinity();
  for (const Tile tile : TilesOf(nodes)) least = std::min(least, (tile.a - 1) * ratio + tile.b - 1);
  return least;
}

// What the best placement found gets of what stripes get, at most 1. Prints it.
double ShareOf(int nodes, double ratio, int64_t moves) {
  NodeTraffic best;
  std::mt19937_64 random(1);
  for (const double hot : {kHot, kHot / 400}) {  // from anywhere, and near the rows that it begins with
    BlockPlacement placement(nodes, ratio);
    for (const int64_t of_turn : {int64_t{0}, moves / 2}) {
      placement.Anneal(of_turn, hot, random);
      if (const NodeTraffic found = placement.Measure(); found.most < best.most) best = found;
    }
  }
  const double striped = StripedTraffic(nodes, ratio);
  std::printf("%d nodes, ratio %g: %.2f chunks in stripes, %.2f placed (%.3f), on average %.2f (%.3f)\n",
              nodes, ratio, striped, best.most, best.most / striped, best.mean, best.mean / striped);
  return std::min(1.0, best.most / striped);
}

// Seconds of the plan with messages along its rings cut to `share`.
double SecondsOf(const sim::AttentionJob& job, const Plan& plan, const sim::Cluster& cluster, double share) {
  sim::RankProgram program = sim::MeshForwardProgram(job, plan.heads, plan.schedule);
  for (sim::Action& action : program.actions) {
    if (program.channels[action.channel].traffic != Traffic::kAllToAll) action.bytes *= share;
  }
  return sim::Simulate(program, plan.placement, cluster)->seconds;
}

// The plan, or one that is made where links are as much faster.
double LeastSeconds(const sim::AttentionJob& job, int gpus, const sim::Cluster& cluster, double share) {
  sim::Cluster faster = cluster;
  for (double* speed : {&faster.same_node.bytes_per_second, &faster.between_nodes.bytes_per_second,
                        &faster.node_bytes_per_second}) {
    *speed /= share;
  }
  return std::min(SecondsOf(job, *sim::MakeForwardPlan(job, gpus, cluster), cluster, share),
                  SecondsOf(job, *sim::MakeForwardPlan(job, gpus, faster), cluster, share));
}

void Study(const sim::Sweep& sweep, int64_t moves) {
  std::map<std::pair<int, double>, double> shares;
  int cells = 0, worth_it = 0;
  for (const auto& [name, cluster] : sweep.clusters) {
    for (const sim::AttentionJob& job : sweep.jobs) {
      for (const int gpus : sweep.gpus) {
        const int nodes = gpus / cluster.gpus_per_node;
        const double ratio = static_cast<double>(job.q_heads) / job.kv_heads;
        if (nodes < 2) continue;
        if (!shares.contains({nodes, ratio})) shares[{nodes, ratio}] = ShareOf(nodes, ratio, moves);
        const double share = shares[{nodes, ratio}];
        const double gain = LeastSeconds(job, gpus, cluster, 1) / LeastSeconds(job, gpus, cluster, share);
        ++cells;
        if (gain < kWorthIt) continue;
        ++worth_it;
        std::printf("%s, %d/%d heads, %lld tokens, %d GPUs: at most %.3f times as fast\n", name.c_str(),
                    job.q_heads, job.kv_heads, static_cast<long long>(job.tokens), gpus, gain);
      }
    }
  }
  std::printf("%d of %d cells could be more than %g times as fast\n", worth_it, cells, kWorthIt);
}

}  // namespace
}  // namespace meshfill

int main(int argc, char** argv) {
  int64_t moves = 20'000'000;
  if (argc < 2 || argc > 3 || (argc == 3 && (!absl::SimpleAtoi(argv[2], &moves) || moves < 1))) {
    std::fprintf(stderr, "usage: below_the_diagonal SCENARIO [MOVES]\n");
    return 2;
  }
  const auto scenario = meshfill::LoadScenario(argv[1]);
  if (!scenario.ok() || scenario->report != meshfill::Scenario::Report::kSweep) {
    std::fprintf(stderr, "%s\n",
                 scenario.ok() ? "the scenario is no sweep" : scenario.status().ToString().c_str());
    return 1;
  }
  meshfill::Study(scenario->sweep, moves);
}
