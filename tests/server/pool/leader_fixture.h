// What tests of the leader share: workers that join and answer, in virtual time, and what it wants, by kind.
#ifndef MESHFILL_TESTS_SERVER_POOL_LEADER_FIXTURE_H_
#define MESHFILL_TESTS_SERVER_POOL_LEADER_FIXTURE_H_

#include <iterator>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/engine_options.h"
#include "gtest/gtest.h"
#include "server/pool/leader.h"
#include "server/pool/offered_speed.h"
#include "server/pool/pool_planner.h"
#include "server/pool/run_plan.h"

namespace meshfill {

inline constexpr int64_t kVocab = 5;

inline ModelShape Shape() {
  return {.layers = 2,
          .hidden = 64,
          .intermediate = 128,
          .q_heads = 8,
          .kv_heads = 8,
          .head_dim = 8,
          .vocab = kVocab,
          .context_tokens = 1 << 20};
}

inline v1::Join Offer(const std::string& name, uint32_t ranks = 1) {
  v1::Join offer;
  offer.set_protocol(kControlProtocol);
  offer.set_build("b1");
  offer.set_name(name);
  offer.set_host("host");
  offer.set_ranks(ranks);
  offer.set_peak_flops(1e12);
  offer.mutable_model()->set_name("m");
  offer.mutable_model()->set_config_hash(1);
  offer.mutable_model()->set_weights_hash(2);
  offer.mutable_model()->set_dtype("f32");
  *offer.mutable_speed() = ToProto(PoolSpeed{});
  offer.set_messages_mix(true);
  return offer;
}

inline v1::Join SharingOffer(const std::string& name) {
  v1::Join offer = Offer(name);
  offer.set_memory_bytes(1 << 30);
  *offer.mutable_weights() = ToProto(PlanWeights{.mode = WeightMode::kSharded,
                                                 .loaded_bytes = 3000,
                                                 .run_bytes = 400,
                                                 .layer_seconds = 1e-6,
                                                 .layer_busy_seconds = 1e-6,
                                                 .head_seconds = 1e-6,
                                                 .layer_bytes = 200,
                                                 .head_bytes = 600});
  return offer;
}

// It streams, and could share with others.
inline v1::Join StreamingOffer(const std::string& name, int64_t memory_bytes) {
  v1::Join offer = SharingOffer(name);
  offer.set_memory_bytes(static_cast<uint64_t>(memory_bytes));
  *offer.mutable_shared_weights() = offer.weights();
  *offer.mutable_weights() =
      ToProto(PlanWeights{.mode = WeightMode::kStreamed, .run_bytes = 400, .layer_seconds = 1});
  return offer;
}

class LeaderFixture : public testing::Test {
 protected:
  explicit LeaderFixture(const Leader::Options& options = Options(1))
      : leader_(options, [this](const PoolCapacity& capacity, int64_t tokens, const PrefillOptions& options,
                                const CachedPrefix& cached) {
          planned_with_.push_back(capacity.topology);
          auto choice = PlanOnFastest(capacity, options, [&](const PoolCapacity& part) {
            return PlanForPool(Shape(), EngineOptions(), part, tokens, options, cached);
          });
          if (choice.ok() && std::ssize(placement_.seat_of_rank) == choice->plan.ranks()) {
            choice->plan.placement = placement_;
          }
          return choice;
        }) {}

  static Leader::Options Options(int runs_at_once = 1) {
    Leader::Options options;
    options.runs_at_once = runs_at_once;
    options.build = "b1";
    options.model = Offer("").model();
    options.model.set_weights_hash(0);
    options.kv = KvShapeOf(Shape());
    options.vocab = kVocab;
    options.least_memory_bytes = 500;
    return options;
  }

  void Do() {
    for (Leader::Action& action : leader_.TakeActions()) {
      if (auto* send = std::get_if<Leader::Send>(&action)) {
        if (send->message.has_heartbeat()) {
          ++heartbeats_[send->to];
        } else {
          sent_[send->to].push_back(send->message);
        }
      } else if (auto* close = std::get_if<Leader::Close>(&action)) {
        closed_.push_back(close->connection);
      } else if (auto* done = std::get_if<Leader::LayersDone>(&action)) {
        layers_done_.push_back(done->layers);
        layers_of_ = done->of;
      } else if (auto* answer = std::get_if<Leader::Answer>(&action)) {
        answers_.push_back(answer->result);
      } else if (auto* line = std::get_if<Leader::LogLine>(&action)) {
        log_.push_back(line->text);
      }
    }
  }
  void Say(Leader::Connection from, v1::WorkerMessage message) {
    leader_.OnMessage(from, message, now_);
    Do();
  }
  // The reason of the refusal; empty: welcome.
  std::string Join(Leader::Connection connection, const v1::Join& offer) {
    leader_.OnConnected(connection, now_);
    v1::WorkerMessage message;
    *message.mutable_join() = offer;
    Say(connection, message);
    return sent_[connection].back().refused().reason();
  }
  // Time passes; all workers but `silent` say that they live.
  void Pass(absl::Duration time, std::vector<Leader::Connection> alive, bool computing = false) {
    for (const absl::Time end = now_ + time; now_ < end; now_ += absl::Milliseconds(50)) {
      for (Leader::Connection connection : alive) {
        v1::WorkerMessage message = OfRun();
        v1::WorkerProgress& progress = *message.mutable_progress();
        if (computing) {
          progress.set_run(run_);
          progress.add_ranks()->set_rank(static_cast<uint32_t>(connection - 1));
          progress.mutable_ranks(0)->set_computing(true);
        }
        Say(connection, message);
      }
      leader_.OnTick(now_);
      Do();
    }
  }
  v1::WorkerMessage OfRun() const {
    v1::WorkerMessage message;
    message.set_epoch(epoch_ > 0 ? epoch_ : leader_.epoch());
    return message;
  }
  void Submit(std::vector<uint32_t> tokens, const PrefillOptions& options = {}) {
    tokens_ = std::move(tokens);
    newest_ = leader_.Submit({.id = "r7", .tokens = tokens_, .options = options}, now_);
    Do();
  }
  // The newest Prepare that the worker has heard, or that of `run`; null: none.
  const v1::Prepare* PrepareOf(Leader::Connection worker, uint64_t run = 0) {
    const v1::Prepare* prepare = nullptr;
    for (const v1::LeaderMessage& message : sent_[worker]) {
      if (message.has_prepare() && (run == 0 || message.prepare().run() == run)) prepare = &message.prepare();
    }
    return prepare;
  }
  // The good answer to a Prepare; the address of each seat is its name.
  v1::WorkerMessage GoodAnswer(const v1::Prepare& prepare) const {
    const auto plan = FromRunPlan(prepare.plan());
    EXPECT_TRUE(plan.ok()) << plan.status();
    const int first = static_cast<int>(prepare.first_rank());
    const auto computed =
        std::span<const uint32_t>(tokens_).subspan(static_cast<size_t>(plan->cached_tokens));
    v1::WorkerMessage message = OfRun();
    message.mutable_prepared()->set_run(prepare.run());
    std::vector<std::vector<uint32_t>> shards;
    for (int seat = first; seat < first + static_cast<int>(prepare.ranks()); ++seat) {
      shards.push_back(plan->layout.Deal(plan->RankAt(seat), computed));
      message.mutable_prepared()->add_addresses(absl::StrCat("seat ", seat));
    }
    message.mutable_prepared()->set_hash(RunHash(*plan, first, shards));
    return message;
  }
  // Workers answer the newest Prepare; or that of `run`.
  void Prepare(const std::vector<Leader::Connection>& workers) { PrepareRun(0, workers); }
  void PrepareRun(uint64_t run, const std::vector<Leader::Connection>& workers) {
    for (Leader::Connection connection : workers) {
      const v1::Prepare* prepare = PrepareOf(connection, run);
      ASSERT_NE(prepare, nullptr);
      run_ = prepare->run();
      Say(connection, GoodAnswer(*prepare));
    }
  }
  // What its rank in the run has done.
  void SayOperations(Leader::Connection connection, uint64_t operations, uint32_t rank = 0,
                     bool has_computed = false) {
    v1::WorkerMessage message = OfRun();
    v1::WorkerProgress& progress = *message.mutable_progress();
    progress.set_run(run_);
    progress.add_ranks()->set_rank(rank);
    progress.mutable_ranks(0)->set_operations(operations);
    progress.mutable_ranks(0)->set_has_computed(has_computed);
    Say(connection, message);
  }
  // `links`: what it measured, in the order of the probes.
  void RankDone(Leader::Connection connection, uint32_t rank, int logits,
                const std::vector<std::optional<Link>>& links = {}, double probe_seconds = 0) {
    v1::WorkerMessage message = OfRun();
    *message.mutable_rank_done()->mutable_links() = ToProto(links);
    message.mutable_rank_done()->set_probe_seconds(probe_seconds);
    message.mutable_rank_done()->set_run(run_);
    message.mutable_rank_done()->set_rank(rank);
    for (int i = 0; i < logits; ++i) message.mutable_rank_done()->add_logits(static_cast<float>(i));
    Say(connection, message);
  }
  void Stopped(Leader::Connection connection) {
    v1::WorkerMessage message = OfRun();
    message.mutable_stopped()->set_run(run_);
    Say(connection, message);
  }

  absl::Time now_ = absl::UnixEpoch();
  std::vector<Topology> planned_with_;
  Placement placement_;  // of all plans of as many ranks as it has
  Leader leader_;
  std::map<Leader::Connection, std::vector<v1::LeaderMessage>> sent_;
  std::map<Leader::Connection, int> heartbeats_;
  std::vector<Leader::Connection> closed_;
  std::vector<absl::StatusOr<Leader::Result>> answers_;
  std::vector<int> layers_done_;
  int layers_of_ = 0;
  std::vector<std::string> log_;
  std::vector<uint32_t> tokens_;
  uint64_t run_ = 0;
  uint64_t epoch_ = 0;  // of what workers say; 0: the leader's
  Leader::Ticket newest_ = 0;
};

}  // namespace meshfill

#endif  // MESHFILL_TESTS_SERVER_POOL_LEADER_FIXTURE_H_
