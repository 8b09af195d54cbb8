// What tests of a worker's ranks share: a small model, parts of runs, and a listener that waits.
#ifndef MESHFILL_TESTS_SERVER_POOL_WORKER_RANK_HOST_FIXTURE_H_
#define MESHFILL_TESTS_SERVER_POOL_WORKER_RANK_HOST_FIXTURE_H_

#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "engine/model/make_model.h"
#include "engine/plan/planner.h"
#include "gtest/gtest.h"
#include "server/pool/worker/rank_host.h"

namespace meshfill {

// Waits for what the host says. A wait of a minute fails the test.
class HostListener final : public RankHost::Listener {
 public:
  absl::StatusOr<std::vector<std::string>> Prepared(uint64_t run) {
    std::unique_lock<std::mutex> lock(mutex_);
    Wait(lock, [&] { return prepared_.count(run) != 0; });
    return prepared_.count(run) != 0 ? prepared_.at(run) : absl::DeadlineExceededError("not prepared");
  }
  std::vector<std::string> Addresses(uint64_t run) {
    auto addresses = Prepared(run);
    EXPECT_TRUE(addresses.ok()) << addresses.status();
    return addresses.ok() ? *std::move(addresses) : std::vector<std::string>();
  }
  // What the run's ranks gave, in the order of their ends, once `ranks` have ended.
  std::vector<absl::StatusOr<RankOutput>> Outputs(uint64_t run, size_t ranks) {
    std::unique_lock<std::mutex> lock(mutex_);
    Wait(lock, [&] { return outputs_[run].size() == ranks; });
    return outputs_[run];
  }
  // Of the rank on that seat, which has ended.
  absl::StatusOr<RankOutput> OutputOf(uint64_t run, int seat) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto output = by_seat_.find({run, seat});
    return output != by_seat_.end() ? output->second : absl::NotFoundError("that seat has said nothing");
  }
  size_t EndedRanks(uint64_t run) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return outputs_[run].size();
  }
  // The first failure of the run's ranks, once all have ended.
  absl::Status Ended(uint64_t run, size_t ranks) {
    for (const auto& output : Outputs(run, ranks)) {
      if (!output.ok()) return output.status();
    }
    return absl::OkStatus();
  }
  // Messages that the run's furthest rank had begun, once the pause of that number is answered.
  int64_t Messages(uint64_t run, uint64_t pause) {
    std::unique_lock<std::mutex> lock(mutex_);
    Wait(lock, [&] { return messages_.count({run, pause}) != 0; });
    return messages_[{run, pause}];
  }
  void Still(uint64_t run, uint64_t pause) {
    std::unique_lock<std::mutex> lock(mutex_);
    Wait(lock, [&] { return still_.count({run, pause}) != 0; });
  }
  bool HasAnswered(uint64_t run, uint64_t pause) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return messages_.count({run, pause}) != 0;
  }
  bool IsStill(uint64_t run, uint64_t pause) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return still_.count({run, pause}) != 0;
  }
  void Stopped(uint64_t run) {
    std::unique_lock<std::mutex> lock(mutex_);
    Wait(lock, [&] { return stopped_.count(run) != 0; });
  }

 private:
  void OnRunPrepared(uint64_t run, absl::StatusOr<std::vector<std::string>> addresses) override {
    Set([&] { prepared_.emplace(run, std::move(addresses)); });
  }
  void OnRankDone(uint64_t run, int seat, absl::StatusOr<RankOutput> output) override {
    Set([&] {
      by_seat_.emplace(std::pair(run, seat), output);
      outputs_[run].push_back(std::move(output));
    });
  }
  void OnRunPaused(uint64_t run, uint64_t pause, int64_t messages, bool still) override {
    Set([&] {
      if (still) {
        still_.insert({run, pause});
      } else {
        messages_[{run, pause}] = messages;
      }
    });
  }
  void OnRunStopped(uint64_t run) override {
    Set([&] { stopped_.insert(run); });
  }

  template <typename Change>
  void Set(Change change) {
    const std::lock_guard<std::mutex> lock(mutex_);
    change();
    changed_.notify_all();
  }
  template <typename Condition>
  void Wait(std::unique_lock<std::mutex>& lock, Condition condition) {
    EXPECT_TRUE(changed_.wait_for(lock, std::chrono::minutes(1), condition));
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<uint64_t, absl::StatusOr<std::vector<std::string>>> prepared_;
  std::map<uint64_t, std::vector<absl::StatusOr<RankOutput>>> outputs_;
  std::map<std::pair<uint64_t, int>, absl::StatusOr<RankOutput>> by_seat_;
  std::map<std::pair<uint64_t, uint64_t>, int64_t> messages_;  // by run and pause
  std::set<std::pair<uint64_t, uint64_t>> still_;
  std::set<uint64_t> stopped_;
};

class RankHostFixture : public testing::Test {
 protected:
  static constexpr int kRanks = 2;  // of a host
  static constexpr int64_t kTokens = 300;

  void MakeTestModel(const std::string& name, DType dtype, ModelFamily family = ModelFamily::kLlama) {
    shape_.dtype = dtype;
    options_.model_path = testing::TempDir() + "/" + name;
    std::filesystem::remove_all(options_.model_path);
    const absl::Status made = MakeModel({.family = family,
                                         .layers = shape_.layers,
                                         .hidden = shape_.hidden,
                                         .intermediate = shape_.intermediate,
                                         .q_heads = shape_.q_heads,
                                         .kv_heads = shape_.kv_heads,
                                         .head_dim = shape_.head_dim,
                                         .vocab = shape_.vocab,
                                         .context_tokens = shape_.context_tokens,
                                         .dtype = shape_.dtype},
                                        options_.model_path);
    ASSERT_TRUE(made.ok()) << made;
    options_.ranks = kRanks;
    options_.peak_flops = 1e12;
  }

  Plan PlanOver(int ranks) const {
    const auto choice =
        MakePlan(shape_, PoolSpeed{}, {.tokens = kTokens, .ranks = ranks, .tile = Tile{1, ranks}});
    EXPECT_TRUE(choice.ok()) << choice.status();
    return choice->plan;
  }
  // A host's part of a new run over so many ranks.
  WorkerMachine::RunPart Part(int ranks = kRanks, int first_rank = 0) {
    WorkerMachine::RunPart part{.number = ++run_,
                                .epoch = epoch_,
                                .plan = PlanOver(ranks),
                                .first_rank = first_rank,
                                .reserve_bytes = 1000,
                                .shards = {}};
    for (int seat = first_rank; seat < first_rank + kRanks; ++seat) {
      part.shards.emplace_back(part.plan.layout.ChunkTokens(part.plan.RankAt(seat)), 7u);
    }
    return part;
  }

  ModelShape shape_ = {.layers = 2,
                       .hidden = 64,
                       .intermediate = 64,
                       .q_heads = 4,
                       .kv_heads = 2,
                       .head_dim = 16,
                       .vocab = 100,
                       .context_tokens = 4096};
  RankHost::Options options_;
  uint64_t run_ = 0;  // the newest
  uint64_t epoch_ = 1;
};

}  // namespace meshfill

#endif  // MESHFILL_TESTS_SERVER_POOL_WORKER_RANK_HOST_FIXTURE_H_
