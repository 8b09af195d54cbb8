// An engine that computes nothing: prefills end when the test lets them, and obey Stop, Pause and Resume.
// What it keeps as K and V are the values of tests/engine/kv/kv_values.h.
#ifndef MESHFILL_TESTS_SERVER_FAKE_ENGINE_H_
#define MESHFILL_TESTS_SERVER_FAKE_ENGINE_H_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <condition_variable>
#include <iterator>
#include <limits>
#include <memory>
#include <mutex>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "engine/prefill_engine.h"
#include "engine/prefill_request.h"
#include "kernels/monotonic_time.h"
#include "kernels/return_if_error.h"
#include "tests/engine/kv/kv_values.h"

namespace meshfill {

class FakeEngine final : public PrefillEngine {
 public:
  static constexpr int kRanks = 4;
  static constexpr int64_t kVocab = 256;
  static constexpr int64_t kContext = 1 << 23;
  static constexpr int64_t kMemoryTokens = 1 << 22;  // longer prompts do not fit
  static constexpr int64_t kKvBytes = 64 << 20;

  explicit FakeEngine(int layers = 4, int capacity = 1) : capacity_(capacity) {
    shape_.layers = layers;
    shape_.vocab = kVocab;
    shape_.context_tokens = kContext;
    shape_.kv_heads = 2;
    shape_.head_dim = 8;
  }

  // The answer to a prompt: what a test computes for itself.
  static uint32_t FirstToken(std::span<const uint32_t> tokens) {
    return static_cast<uint32_t>(std::accumulate(tokens.begin(), tokens.end(), uint64_t{0}) % kVocab);
  }

  // ---- Controls, from any thread.
  // From now on, prefills stand after `layers` layers until Release.
  void Hold(int layers = 1) {
    Set([&] { hold_after_ = layers; });
  }
  // From now on, prefills that are stopped live on until Release.
  void HoldStopped() {
    Set([&] { holds_stopped_ = true; });
  }
  // From now on, a prompt of a pack that begins with this id is not done with the others, until Release.
  void HoldPromptOfPack(uint32_t first_id) {
    Set([&] { held_of_pack_ = first_id; });
  }
  void Release() {
    Set([&] {
      hold_after_ = INT_MAX;
      held_of_pack_ = kNoId;
      holds_stopped_ = false;
    });
  }
  void FailNext(absl::Status status) {
    Set([&] { fail_next_ = std::move(status); });
  }
  void PredictSeconds(double seconds) {
    Set([&] { predicted_seconds_ = seconds; });
  }
  // What results say of the time that they stood still.
  void SayPaused(double seconds) {
    Set([&] { paused_seconds_ = seconds; });
  }
  // Prompts begin with so many tokens that are cached, and are predicted to take so long.
  void Cache(int64_t tokens, double predicted_seconds) {
    constexpr int kBlockTokens = 16;
    auto kept = std::make_shared<KvPrompt>(KvShapeOf(shape_), tokens);
    kv_store_.AdmitToCache(kept, kept->bytes());
    KeepAllValues(*kept, TokenLayout::Make(LayoutKind::kStriped, 1, tokens, kBlockTokens).value());
    const auto names = static_cast<size_t>(tokens / kBlockTokens) * 32;
    kv_store_.Enter({.block_tokens = kBlockTokens, .hashes = std::string(names, 'x')}, *kept);
    Set([&] {
      cached_tokens_ = tokens;
      cached_seconds_ = predicted_seconds;
    });
  }
  // From now on prompts may share a pass, and each brings so much to it; before the engine has a queue.
  void SharePasses(const PackRoom& room, const PackShare& share) {
    Set([&] {
      pack_room_ = room;
      pack_share_ = share;
    });
  }
  // Prompts may run on one of so many sub-meshes, and are predicted to take so long there.
  void OfferSubmeshes(const SubmeshSeconds& submeshes) {
    Set([&] { submeshes_ = submeshes; });
  }
  // Packs do not begin.
  void FailPacks(absl::Status status) {
    Set([&] { fail_packs_ = std::move(status); });
  }
  // The next prompt has no room, though nothing else lives.
  void RefuseNext() {
    Set([&] { refuses_next_ = true; });
  }
  // Longer prompts cannot begin while another lives.
  void RefuseBesideOthers(int64_t tokens) {
    Set([&] { most_beside_others_ = tokens; });
  }
  // All of its ranks are gone, as an embedded engine's where a device has failed.
  void Lose() { lost_ = true; }
  // Prefills say that they have this place.
  void PutAllAt(uint64_t place) {
    Set([&] { place_ = place; });
  }
  // False after 10 s.
  bool WaitForBegun(int runs) {
    return Wait([&] { return static_cast<int>(first_ids_.size()) >= runs; });
  }
  bool WaitForStopped(int runs) {
    return Wait([&] { return stopped_runs_ >= runs; });
  }
  int refusals() const {
    const std::lock_guard<std::mutex> lock(mu_);
    return refusals_;
  }
  int finished_runs() const {
    const std::lock_guard<std::mutex> lock(mu_);
    return finished_runs_;
  }
  // The first ids of the prompts of each pack, in the order of their begins.
  std::vector<std::vector<uint32_t>> packs() const {
    const std::lock_guard<std::mutex> lock(mu_);
    return packs_;
  }
  // The first id of each prompt, in the order of their runs.
  std::vector<uint32_t> first_ids() const {
    const std::lock_guard<std::mutex> lock(mu_);
    return first_ids_;
  }

  // ---- PrefillEngine.
  const ModelShape& model() const override { return shape_; }
  const std::string& model_name() const override { return model_name_; }
  const std::string& backend_name() const override { return backend_name_; }
  int ranks() const override { return lost_ ? 0 : kRanks; }
  double peak_flops() const override { return 1e12; }
  KvStore* kv_store() override { return &kv_store_; }
  std::vector<PoolLink> links() const override {
    return {{"between hosts", {.latency_seconds = 3e-6, .bytes_per_second = 5e9}, "measured"}};
  }

  absl::StatusOr<PlanChoice> MakePlan(int64_t tokens, const PrefillOptions& options) const override {
    if (tokens == 0) return absl::InvalidArgumentError("no tokens");
    RETURN_IF_ERROR(CheckPromptOptions(shape_, model_name_, tokens, options));
    if (tokens > kMemoryTokens) return absl::FailedPreconditionError("needs more memory than there is");
    const Tile tile = options.tile.value_or(Tile{2, 2});
    const int heads = options.heads.value_or(1);
    if (tile.ranks() * heads != kRanks)
      return absl::InvalidArgumentError("the tile does not multiply to 4 ranks");
    const auto layout = TokenLayout::Make(options.layout.value_or(LayoutKind::kStriped), kRanks, tokens,
                                          options.stripe.value_or(64));
    if (!layout.ok()) return layout.status();
    const std::lock_guard<std::mutex> lock(mu_);
    Plan plan{{.layout = *layout, .heads = heads, .tile = tile},
              Grain().slice_tokens,
              {},
              {tile, {{Traffic::kQ, {{0, 0}}}, {std::nullopt, {{1, 0}}}}},
              {.seconds = options.submeshes > 1 ? submeshes_.seconds
                          : Caches(options)     ? cached_seconds_
                                                : predicted_seconds_}};
    return PlanChoice{plan, {{plan, "", plan.predicted}}};
  }

  int64_t CachedTokens(int64_t tokens, const PrefillOptions& options) const override {
    const std::lock_guard<std::mutex> lock(mu_);
    return Caches(options) ? std::min(tokens, cached_tokens_) : 0;
  }

  std::vector<SubmeshSeconds> Submeshes(int64_t /*tokens*/,
                                        const PrefillOptions& /*options*/) const override {
    const std::lock_guard<std::mutex> lock(mu_);
    return submeshes_.seconds > 0 ? std::vector<SubmeshSeconds>{submeshes_} : std::vector<SubmeshSeconds>();
  }

  int capacity() const override { return capacity_; }

  // The prefill runs in Wait.
  absl::StatusOr<std::unique_ptr<Prefill>> Start(const PrefillRequest& request,
                                                 PrefillObserver* observer) override {
    auto choice = MakePlan(std::ssize(request.tokens), request.options);
    if (!choice.ok()) return choice.status();
    if (const absl::Status refusal = Refusal(std::ssize(request.tokens)); !refusal.ok()) return refusal;
    Set([&] { first_ids_.push_back(request.tokens.front()); });
    return std::make_unique<Run>(*this, request, choice->plan, observer);
  }

  PackRoom pack_room() const override {
    const std::lock_guard<std::mutex> lock(mu_);
    return pack_room_;
  }
  PackShare ShareOfPack(int64_t tokens, const PrefillOptions& /*options*/) const override {
    const std::lock_guard<std::mutex> lock(mu_);
    PackShare share = pack_share_;
    share.tokens = pack_room_.ranks > 0 ? tokens : 0;
    return share;
  }
  // The pass runs in the Wait of whoever is waited for.
  absl::StatusOr<std::vector<std::unique_ptr<Prefill>>> StartPack(
      std::span<const PrefillRequest> requests, std::span<PrefillObserver* const> observers) override {
    Pack pack(pack_room());
    std::vector<uint32_t> ids;
    for (const PrefillRequest& request : requests) {
      const PackShare share = ShareOfPack(std::ssize(request.tokens), request.options);
      if (!pack.Add(share).has_value()) return absl::InvalidArgumentError("no room in one pass");
      ids.push_back(request.tokens.front());
    }
    {
      const std::lock_guard<std::mutex> lock(mu_);
      if (!fail_packs_.ok()) return fail_packs_;
    }
    if (const absl::Status refusal = Refusal(std::ssize(requests.front().tokens)); !refusal.ok())
      return refusal;
    auto pass = std::make_shared<Pass>(*this);
    std::vector<std::unique_ptr<Prefill>> prefills;
    for (size_t i = 0; i < requests.size(); ++i) {
      auto choice = MakePlan(std::ssize(requests[i].tokens), requests[i].options);
      if (!choice.ok()) return choice.status();
      auto run = std::make_unique<PackRun>(pass, i, requests[i], choice->plan);
      pass->observers.push_back(observers[i]);
      pass->prefills.push_back(run.get());
      prefills.push_back(std::move(run));
    }
    pass->stopped = std::vector<std::atomic<bool>>(requests.size());
    Set([&] {
      packs_.push_back(ids);
      first_ids_.insert(first_ids_.end(), ids.begin(), ids.end());
    });
    return prefills;
  }

 private:
  static constexpr uint32_t kNoId = std::numeric_limits<uint32_t>::max();  // of no prompt

  class PackRun;
  // What several share: the layers that are done, and whether they stand still.
  struct Pass {
    explicit Pass(FakeEngine& engine) : engine(engine) {}
    ~Pass() {
      engine.Set([&] { --engine.live_runs_; });
    }

    FakeEngine& engine;
    std::vector<PrefillObserver*> observers;  // by prompt, as all that follows
    std::vector<PackRun*> prefills;           // null: it is gone
    std::vector<std::atomic<bool>> stopped;
    std::atomic<bool> paused{false};
    int layers_done = 0;  // by whoever is waited for
  };
  class PackRun final : public Prefill {
   public:
    PackRun(std::shared_ptr<Pass> pass, size_t index, const PrefillRequest& request, const Plan& plan)
        : pass_(std::move(pass)), index_(index), request_(request), plan_(plan) {}
    ~PackRun() override { pass_->prefills[index_] = nullptr; }

    bool done() const override {
      return pass_->stopped[index_] || (pass_->layers_done == pass_->engine.shape_.layers &&
                                        !pass_->engine.HoldsOfPack(request_.tokens.front()));
    }
    void WaitForAny() override {
      const auto any_done = [this] {
        return std::any_of(pass_->prefills.begin(), pass_->prefills.end(),
                           [](const PackRun* each) { return each != nullptr && each->done(); });
      };
      while (!any_done()) Compute();
    }
    absl::StatusOr<PrefillResult> Wait() override {
      Pass& pass = *pass_;
      while (!done()) Compute();
      if (pass.stopped[index_]) {
        pass.engine.Set([&] { ++pass.engine.stopped_runs_; });
        return absl::CancelledError("stopped");
      }
      pass.engine.Set([&] { ++pass.engine.finished_runs_; });
      PrefillResult result = Result(request_.tokens, request_.options, plan_, 0.001);
      result.pack_prompts = static_cast<int>(pass.observers.size());
      return result;
    }
    void Stop() override { pass_->stopped[index_] = true; }
    void Pause() override { pass_->paused = true; }
    void Resume() override { pass_->paused = false; }

   private:
    // A layer, where the pass does not stand.
    void Compute() {
      Pass& pass = *pass_;
      const int layers = pass.engine.shape_.layers;
      if (pass.layers_done == layers || pass.engine.Held(pass.layers_done) || pass.paused) {
        absl::SleepFor(absl::Milliseconds(1));
        return;
      }
      ++pass.layers_done;
      for (size_t i = 0; i < pass.observers.size(); ++i) {
        if (!pass.stopped[i]) pass.observers[i]->OnLayerDone(pass.layers_done, layers);
      }
    }

    const std::shared_ptr<Pass> pass_;
    const size_t index_;
    const PrefillRequest request_;
    const Plan plan_;
  };

  class Run final : public Prefill {
   public:
    Run(FakeEngine& engine, const PrefillRequest& request, const Plan& plan, PrefillObserver* observer)
        : engine_(engine), request_(request), plan_(plan), observer_(observer) {}
    ~Run() override {
      engine_.Set([&] { --engine_.live_runs_; });
    }

    absl::StatusOr<PrefillResult> Wait() override {
      const absl::Time begin = MonotonicNow();
      const int layers = engine_.shape_.layers;
      KvPrompt* const kept = request_.options.kv.get();
      if (kept != nullptr) kept->Begin(plan_.layout);
      for (int layer = 0; layer < layers; ++layer) {
        while ((engine_.Held(layer) || paused_) && !stopped_) absl::SleepFor(absl::Milliseconds(1));
        if (stopped_) {
          engine_.Set([&] { ++engine_.stopped_runs_; });
          while (engine_.HoldsStopped()) absl::SleepFor(absl::Milliseconds(1));
          return absl::CancelledError("stopped");
        }
        for (int rank = 0; kept != nullptr && rank < kRanks; ++rank) {
          KeepValues(*kept, plan_.layout, rank, layer);
        }
        if (observer_ != nullptr) observer_->OnLayerDone(layer + 1, layers);
      }
      absl::Status failure;
      engine_.Set([&] {
        ++engine_.finished_runs_;
        failure = std::exchange(engine_.fail_next_, absl::OkStatus());
      });
      if (!failure.ok()) return failure;
      PrefillResult result =
          Result(request_.tokens, request_.options, plan_, absl::ToDoubleSeconds(MonotonicNow() - begin));
      engine_.Set([&] { result.paused_seconds = engine_.paused_seconds_; });
      return result;
    }
    void Stop() override { stopped_ = true; }
    void Pause() override { paused_ = true; }
    void Resume() override { paused_ = false; }
    uint64_t place() const override {
      const std::lock_guard<std::mutex> lock(engine_.mu_);
      return engine_.place_;
    }

   private:
    FakeEngine& engine_;
    const PrefillRequest request_;
    const Plan plan_;
    PrefillObserver* const observer_;
    std::atomic<bool> stopped_{false};
    std::atomic<bool> paused_{false};
  };

  static PrefillResult Result(std::span<const uint32_t> tokens, const PrefillOptions& options,
                              const Plan& plan, double seconds) {
    PrefillResult result{.logits = std::vector<float>(kVocab, 0.5f), .top = {}, .plan = plan};
    for (int i = 0; i < options.top_k; ++i) {
      result.top.push_back({(FirstToken(tokens) + i) % static_cast<uint32_t>(kVocab), 9.0f - i});
    }
    result.prefill_seconds = seconds;
    result.attention_seconds = 0.5;
    result.comm_wait_seconds = 0.25;
    result.comm_bytes = {{Traffic::kQ, 1}, {Traffic::kKv, 2}, {Traffic::kO, 3}, {Traffic::kAllToAll, 4}};
    result.mfu = 0.5;
    result.attention_mfu = 0.25;
    for (int rank = 0; rank < kRanks; ++rank) {
      RankStats stats;
      stats.attention_seconds = 2;
      stats.block_seconds = 1;
      stats.merge_seconds = 0.25;
      stats.wait_seconds = {{Traffic::kQ, 0.125}, {Traffic::kKv, 0.25}, {Traffic::kO, 0.0625}};
      stats.total_seconds = 3 + rank;
      stats.sent = {{Traffic::kQ, 10}, {Traffic::kKv, 20}, {Traffic::kO, 30}, {Traffic::kAllToAll, 40}};
      result.ranks.push_back(stats);
    }
    return result;
  }

  bool Caches(const PrefillOptions& options) const {
    return cached_tokens_ > 0 && options.block_names != nullptr && !options.ignore_cache;
  }

  absl::Status Refusal(int64_t tokens) {
    const std::lock_guard<std::mutex> lock(mu_);
    if (std::exchange(refuses_next_, false) || live_runs_ >= capacity_ ||
        (live_runs_ > 0 && tokens > most_beside_others_)) {
      ++refusals_;
      return absl::ResourceExhaustedError("no room beside those that live");
    }
    ++live_runs_;
    return absl::OkStatus();
  }

  template <typename Change>
  void Set(Change change) {
    const std::lock_guard<std::mutex> lock(mu_);
    change();
    changed_.notify_all();
  }
  template <typename Condition>
  bool Wait(Condition condition) {
    std::unique_lock<std::mutex> lock(mu_);
    return changed_.wait_for(lock, std::chrono::seconds(10), condition);
  }
  bool Held(int layer) const {
    const std::lock_guard<std::mutex> lock(mu_);
    return layer >= hold_after_;
  }
  bool HoldsOfPack(uint32_t first_id) const {
    const std::lock_guard<std::mutex> lock(mu_);
    return first_id == held_of_pack_;
  }
  bool HoldsStopped() const {
    const std::lock_guard<std::mutex> lock(mu_);
    return holds_stopped_;
  }

  const int capacity_;
  std::atomic<bool> lost_{false};
  ModelShape shape_;
  KvStore kv_store_{kKvBytes};
  const std::string model_name_ = "fake-model";
  const std::string backend_name_ = "fake/none";
  mutable std::mutex mu_;  // ThreadSanitizer does not see through absl::Mutex
  std::condition_variable changed_;
  int hold_after_ = INT_MAX;
  bool holds_stopped_ = false;
  uint32_t held_of_pack_ = kNoId;  // the first id of a prompt
  double predicted_seconds_ = 0.001;
  double paused_seconds_ = 0;
  uint64_t place_ = 0;
  int64_t cached_tokens_ = 0;
  double cached_seconds_ = 0;
  absl::Status fail_next_;
  std::vector<uint32_t> first_ids_;
  int64_t most_beside_others_ = kContext;
  bool refuses_next_ = false;
  PackRoom pack_room_;
  PackShare pack_share_;
  SubmeshSeconds submeshes_;  // 0 seconds: there are none
  absl::Status fail_packs_;
  std::vector<std::vector<uint32_t>> packs_;
  int live_runs_ = 0;
  int refusals_ = 0;
  int stopped_runs_ = 0;
  int finished_runs_ = 0;
};

}  // namespace meshfill

#endif  // MESHFILL_TESTS_SERVER_FAKE_ENGINE_H_
