#include "engine/model/weight_feed.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "engine/model/layer_shape.h"
#include "kernels/monotonic_time.h"
#include "kernels/mutex.h"
#include "kernels/run_deadline.h"

namespace meshfill {
namespace {

// How often the thread looks whether its run was stopped.
constexpr absl::Duration kLook = absl::Milliseconds(10);

class AheadFeed final : public WeightFeed {
 public:
  AheadFeed(std::unique_ptr<PartMaker> maker, int readers, int parts, bool at_once, const StopToken* stop)
      : maker_(std::move(maker)), parts_(parts), stop_(stop), begun_(at_once), at_(readers, 0) {
    try {
      thread_ = std::thread([this] { MakeAll(); });
    } catch (const std::system_error& error) {
      const MutexLock lock(mu_);
      error_ = absl::ResourceExhaustedError(absl::StrCat("no thread could be started to read weights (",
                                                         error.what(), "); raise the limit of threads"));
    }
  }

  ~AheadFeed() override {
    {
      const MutexLock lock(mu_);
      quit_.store(true, std::memory_order_relaxed);
      changed_.NotifyAll();
    }
    maker_->Quit();
    if (thread_.joinable()) thread_.join();
  }

  absl::StatusOr<const WeightPart*> Take(int reader, int part, absl::Duration timeout) override {
    MutexLock lock(mu_);
    MoveTo(reader, part);
    uint64_t seen = reads();
    std::optional<RunDeadline> deadline;  // while the run stands still, the others take no part either
    const auto begin_anew = [&] { deadline.emplace(stop_, MonotonicNow() + timeout); };
    begin_anew();
    while (true) {
      if (!error_.ok()) return error_;
      if (stop_ != nullptr && stop_->stopped()) return absl::CancelledError("the run was stopped");
      if (part < first_ + std::ssize(held_)) return held_[part - first_].get();
      if (std::exchange(seen, reads()) != seen) begin_anew();
      if (MonotonicNow() >= deadline->Now()) {
        return absl::DeadlineExceededError(absl::StrCat(maker_->PartName(part), " has not come, and for ",
                                                        absl::FormatDuration(timeout), " nothing was read; ",
                                                        maker_->advice()));
      }
      changed_.WaitFor(mu_, kLook);
    }
  }

  void Leave(int reader) override {
    const MutexLock lock(mu_);
    MoveTo(reader, parts_);
  }

  uint64_t reads() const override { return reads_.load(std::memory_order_relaxed); }
  WeightMode mode() const override { return maker_->mode(); }
  int64_t sent_bytes() const override { return maker_->sent_bytes(); }

 private:
  // Gives up what no reader will ask for any more.
  void MoveTo(int reader, int part) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    begun_ = true;
    at_[reader] = part;
    const int last = *std::min_element(at_.begin(), at_.end());
    for (; first_ < last; ++first_) {
      if (held_.empty()) continue;
      given_up_.push_back(std::move(held_.front()));
      held_.pop_front();
    }
    changed_.NotifyAll();
  }

  // Once there is room for the part: whether to make it. Frees what was given up: that takes time, which no
  // rank should lose.
  bool Await(int part) {
    std::vector<std::shared_ptr<const WeightPart>> to_free;
    const MutexLock lock(mu_);
    while (!Stopping() && (!begun_ || part >= first_ + kPartsAhead)) changed_.WaitFor(mu_, kLook);
    to_free.swap(given_up_);
    return part >= first_ || maker_->serves_others();
  }

  bool Stopping() const {
    return quit_.load(std::memory_order_relaxed) || (stop_ != nullptr && stop_->stopped());
  }

  void MakeAll() {
    int part = 0;
    // What readers wait for is kept for the next run, too; what computing hides need not be.
    const BeforeRead before_read = [&]() -> absl::StatusOr<PageCache> {
      reads_.fetch_add(1, std::memory_order_relaxed);
      if (Stopping()) return absl::CancelledError("the run was stopped");
      const MutexLock lock(mu_);
      return *std::max_element(at_.begin(), at_.end()) >= part ? PageCache::kFill : PageCache::kPass;
    };
    for (; part < parts_; ++part) {
      const bool wanted = Await(part);
      if (Stopping()) return;
      if (!wanted) continue;
      absl::StatusOr<std::shared_ptr<const WeightPart>> made = maker_->Load(part, before_read);
      const MutexLock lock(mu_);
      if (!made.ok()) {
        error_ = made.status();
        changed_.NotifyAll();
        return;
      }
      if (part >= first_) held_.push_back(*std::move(made));  // else all readers have left meanwhile
      changed_.NotifyAll();
    }
  }

  const std::unique_ptr<PartMaker> maker_;
  const int parts_;
  const StopToken* const stop_;
  std::atomic<bool> quit_{false};
  std::atomic<uint64_t> reads_{0};
  Mutex mu_;
  CondVar changed_;
  bool begun_ ABSL_GUARDED_BY(mu_);           // may make the first part
  std::vector<int> at_ ABSL_GUARDED_BY(mu_);  // by reader: the part that it has or waits for
  int first_ ABSL_GUARDED_BY(mu_) = 0;        // part of held_.front(), or the next to be held
  std::deque<std::shared_ptr<const WeightPart>> held_ ABSL_GUARDED_BY(mu_);
  std::vector<std::shared_ptr<const WeightPart>> given_up_ ABSL_GUARDED_BY(mu_);
  absl::Status error_ ABSL_GUARDED_BY(mu_);
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace

std::unique_ptr<WeightFeed> MakeAhead(std::unique_ptr<PartMaker> maker, int readers, int parts, bool at_once,
                                      const StopToken* stop) {
  return std::make_unique<AheadFeed>(std::move(maker), readers, parts, at_once, stop);
}

}  // namespace meshfill
