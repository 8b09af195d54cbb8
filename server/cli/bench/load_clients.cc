#include "server/cli/bench/load_clients.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <queue>
#include <random>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "kernels/monotonic_time.h"
#include "kernels/mutex.h"
#include "server/cli/client.h"
#include "server/queue/refusal.h"

namespace meshfill {
namespace {

constexpr absl::Duration kLongestCall = absl::Hours(2);
constexpr uint32_t kTop = 4;

class AcceptedEvent final : public PrefillEvents {
 public:
  void OnAccepted(const v1::Accepted& accepted) override {
    came_ = true;
    at_ = MonotonicNow();
    accepted_ = accepted;
  }
  void OnProgress(const v1::Progress&) override {}

  bool came() const { return came_; }
  absl::Time at() const { return at_; }
  const v1::Accepted& accepted() const { return accepted_; }

 private:
  bool came_ = false;
  absl::Time at_;
  v1::Accepted accepted_;
};

class LoadRun {
 public:
  LoadRun(const ServerChannel& server, std::span<const LoadPrompt> prompts, const LoadOptions& options)
      : server_(server), prompts_(prompts), options_(options), outcomes_(prompts.size()) {
    for (size_t prompt = 0; prompt < prompts.size(); ++prompt) {
      later_.push({begin_ + absl::Seconds(prompts[prompt].due_seconds), prompt});
    }
  }

  std::vector<LoadOutcome> Run() {
    const size_t most = std::min(prompts_.size(), static_cast<size_t>(options_.most_at_once));
    std::vector<std::thread> clients;
    for (size_t i = 0; i < most; ++i) clients.emplace_back([this] { SendDue(); });
    HandOut();
    for (std::thread& client : clients) client.join();
    return std::move(outcomes_);
  }

 private:
  using Due = std::pair<absl::Time, size_t>;  // a prompt, by its place

  // Wakes one client for each prompt that is due, until all have ended.
  void HandOut() {
    MutexLock lock(mu_);
    while (ended_ < prompts_.size()) {
      if (later_.empty()) {
        changed_.Wait(mu_);
      } else if (later_.top().first > MonotonicNow()) {
        changed_.WaitUntil(mu_, later_.top().first);
      } else {
        due_.push(later_.top().second);
        later_.pop();
        comes_.NotifyOne();
      }
    }
    comes_.NotifyAll();
  }

  // Each client's thread.
  void SendDue() {
    while (true) {
      size_t prompt = 0;
      {
        MutexLock lock(mu_);
        while (due_.empty() && ended_ < prompts_.size()) comes_.Wait(mu_);
        if (due_.empty()) return;
        prompt = due_.front();
        due_.pop();
      }
      const std::optional<absl::Duration> again = Send(prompt);
      const MutexLock lock(mu_);
      if (again.has_value()) {
        later_.push({MonotonicNow() + *again, prompt});
      } else {
        ++ended_;
      }
      changed_.NotifyOne();
    }
  }

  // When to try again; nothing: it has ended.
  std::optional<absl::Duration> Send(size_t prompt) {
    LoadOutcome& outcome = outcomes_[prompt];
    std::mt19937_64 random(options_.seed + prompt);
    std::vector<uint32_t> tokens(static_cast<size_t>(prompts_[prompt].tokens));
    for (uint32_t& token : tokens) token = static_cast<uint32_t>(random() % options_.vocab);
    v1::PrefillHeader header;
    header.set_tenant(prompts_[prompt].tenant);
    header.set_priority(prompts_[prompt].priority);
    header.set_top_k(kTop);
    header.mutable_kv()->set_ignore_cache(options_.ignore_cache);
    AcceptedEvent accepted;
    PrefillClient client;
    const absl::Time sent_at = MonotonicNow();
    const absl::StatusOr<v1::PrefillResult> result =
        client.Prefill(server_, std::move(header), tokens, sent_at + kLongestCall, accepted);
    outcome.status = result.status();
    const absl::Time now = MonotonicNow();
    if (const auto again = RetryAfter(outcome.status); again.has_value()) {
      // What was accepted may still lose its place to another tenant: by then it has waited.
      if (!accepted.came()) outcome.refusal_seconds.push_back(absl::ToDoubleSeconds(now - sent_at));
      return again;
    }
    outcome.accepted_at = absl::ToDoubleSeconds(accepted.at() - begin_);
    outcome.ended_at = absl::ToDoubleSeconds(now - begin_);
    outcome.predicted_wait_seconds = accepted.accepted().predicted_queue_seconds();
    outcome.predicted_prefill_seconds = accepted.accepted().predicted_seconds();
    if (!result.ok()) return std::nullopt;
    outcome.wait_seconds = result->seconds().queue();
    outcome.prefill_seconds = result->seconds().prefill();
    for (const v1::TokenLogit& best : result->top()) outcome.top.push_back(best.token());
    return std::nullopt;
  }

  const ServerChannel& server_;
  const std::span<const LoadPrompt> prompts_;
  const LoadOptions options_;
  const absl::Time begin_ = MonotonicNow();

  Mutex mu_;
  CondVar changed_;  // for who hands out
  CondVar comes_;    // for clients
  std::priority_queue<Due, std::vector<Due>, std::greater<>> later_ ABSL_GUARDED_BY(mu_);
  std::queue<size_t> due_ ABSL_GUARDED_BY(mu_);
  size_t ended_ ABSL_GUARDED_BY(mu_) = 0;
  std::vector<LoadOutcome> outcomes_;  // each is its client's until it has ended
};

}  // namespace

std::vector<LoadOutcome> SendLoad(const ServerChannel& server, std::span<const LoadPrompt> prompts,
                                  const LoadOptions& options) {
  return LoadRun(server, prompts, options).Run();
}

}  // namespace meshfill
