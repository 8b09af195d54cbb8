#include "engine/model/streamed_weights.h"

#include <algorithm>
#include <deque>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/model/layer_shape.h"
#include "kernels/monotonic_time.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

// How often a reader looks whether its run was stopped.
constexpr absl::Duration kLook = absl::Milliseconds(10);
// A device may multiply a row by so many features at a time (kPanelFeatures, kernels/cpu/packed_matrix.h):
// cut there, each has the bits that it has in the whole matrix.
constexpr int64_t kHeadGranule = 512;

int64_t RowsOfHeadPart(const ModelShape& shape) {
  int64_t most = 0;
  shape.ForEachKind([&](const LayerForm& form, int) {
    most = std::max(most, LayerMatrixElements(LayerShapeOf(shape, form)));
  });
  const int64_t rows = most / shape.hidden / kHeadGranule * kHeadGranule;
  return std::clamp(rows, std::min(kHeadGranule, shape.vocab), shape.vocab);
}

class StreamedFeed final : public WeightFeed {
 public:
  StreamedFeed(StreamedWeights& weights, int readers, int parts, const StopToken* stop)
      : weights_(weights), parts_(parts), stop_(stop), at_(readers, 0) {
    try {
      thread_ = std::thread([this] { LoadAll(); });
    } catch (const std::system_error& error) {
      const MutexLock lock(mu_);
      error_ = absl::ResourceExhaustedError(absl::StrCat("no thread could be started to read weights (",
                                                         error.what(), "); raise the limit of threads"));
    }
  }

  ~StreamedFeed() override {
    {
      const MutexLock lock(mu_);
      quit_.store(true, std::memory_order_relaxed);
      changed_.NotifyAll();
    }
    if (thread_.joinable()) thread_.join();
  }

  absl::StatusOr<const WeightPart*> Take(int reader, int part, absl::Duration timeout) override {
    MutexLock lock(mu_);
    MoveTo(reader, part);
    uint64_t seen = reads();
    absl::Time deadline = MonotonicNow() + timeout;
    while (true) {
      if (!error_.ok()) return error_;
      if (stop_ != nullptr && stop_->stopped()) return absl::CancelledError("the run was stopped");
      if (part < first_ + std::ssize(held_)) return held_[part - first_].get();
      if (std::exchange(seen, reads()) != seen) deadline = MonotonicNow() + timeout;
      if (MonotonicNow() >= deadline) {
        return absl::DeadlineExceededError(
            absl::StrCat(weights_.tensors().path(), ": ", PartName(part), " has not come, and for ",
                         absl::FormatDuration(timeout), " nothing was read; check the disk"));
      }
      changed_.WaitFor(mu_, kLook);
    }
  }

  void Leave(int reader) override {
    const MutexLock lock(mu_);
    MoveTo(reader, parts_);
  }

  uint64_t reads() const override { return reads_.load(std::memory_order_relaxed); }

 private:
  std::string PartName(int part) const {
    const int layers = weights_.tensors().config().shape.layers;
    return part < layers ? absl::StrCat("layer ", part) : "the LM head";
  }

  // Gives up what no reader will ask for any more.
  void MoveTo(int reader, int part) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    at_[reader] = part;
    const int last = *std::min_element(at_.begin(), at_.end());
    for (; first_ < last; ++first_) {
      if (held_.empty()) continue;
      given_up_.push_back(std::move(held_.front()));
      held_.pop_front();
    }
    changed_.NotifyAll();
  }

  // The next part to load, when there is room for it; parts_: there is none. Frees what was given up: that
  // takes time, which no rank should lose.
  int NextPart() {
    std::vector<std::shared_ptr<const WeightPart>> to_free;
    const MutexLock lock(mu_);
    while (!Stopping() && error_.ok() && std::ssize(held_) == kPartsAhead) changed_.WaitFor(mu_, kLook);
    to_free.swap(given_up_);
    if (Stopping() || !error_.ok()) return parts_;
    return first_ + static_cast<int>(held_.size());
  }

  bool Stopping() const {
    return quit_.load(std::memory_order_relaxed) || (stop_ != nullptr && stop_->stopped());
  }

  void LoadAll() {
    const BeforeRead before_read = [this] {
      reads_.fetch_add(1, std::memory_order_relaxed);
      return Stopping() ? absl::CancelledError("the run was stopped") : absl::OkStatus();
    };
    for (int part = NextPart(); part < parts_; part = NextPart()) {
      absl::StatusOr<std::shared_ptr<const WeightPart>> loaded = weights_.Load(part, before_read);
      const MutexLock lock(mu_);
      if (!loaded.ok()) {
        error_ = loaded.status();
      } else if (part == first_ + std::ssize(held_)) {  // else all readers have left meanwhile
        held_.push_back(*std::move(loaded));
      }
      changed_.NotifyAll();
    }
  }

  StreamedWeights& weights_;
  const int parts_;
  const StopToken* const stop_;
  std::atomic<bool> quit_{false};
  std::atomic<uint64_t> reads_{0};
  Mutex mu_;
  CondVar changed_;
  std::vector<int> at_ ABSL_GUARDED_BY(mu_);  // by reader: the part that it has or waits for
  int first_ ABSL_GUARDED_BY(mu_) = 0;        // part of held_.front(), or the next to load
  std::deque<std::shared_ptr<const WeightPart>> held_ ABSL_GUARDED_BY(mu_);
  std::vector<std::shared_ptr<const WeightPart>> given_up_ ABSL_GUARDED_BY(mu_);
  absl::Status error_ ABSL_GUARDED_BY(mu_);
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace

StreamedWeights::StreamedWeights(std::unique_ptr<const ModelTensors> tensors, Device& device)
    : tensors_(std::move(tensors)), device_(device), head_rows_(RowsOfHeadPart(tensors_->config().shape)) {
  const MutexLock lock(mu_);
  loaded_.resize(tensors_->config().shape.layers + head_parts());
}

int StreamedWeights::head_parts() const {
  return static_cast<int>((tensors_->config().shape.vocab + head_rows_ - 1) / head_rows_);
}

int StreamedWeights::held_parts() {
  const MutexLock lock(mu_);
  return static_cast<int>(
      std::count_if(loaded_.begin(), loaded_.end(), [](const auto& part) { return !part.expired(); }));
}

absl::StatusOr<std::shared_ptr<const WeightPart>> StreamedWeights::Load(int part,
                                                                        const BeforeRead& before_read) {
  const ModelShape& shape = tensors_->config().shape;
  const MutexLock lock(mu_);
  if (std::shared_ptr<const WeightPart> shared = loaded_[part].lock()) return shared;
  auto packed = std::make_shared<WeightPart>();
  if (part < shape.layers) {
    ASSIGN_OR_RETURN(packed->layer, tensors_->PackLayer(device_, part, before_read));
  } else {
    const int64_t first = (part - shape.layers) * head_rows_;
    const int64_t rows = std::min(head_rows_, shape.vocab - first);
    ASSIGN_OR_RETURN(packed->head, tensors_->PackHead(device_, first, rows, before_read));
  }
  loaded_[part] = packed;
  return packed;
}

std::unique_ptr<WeightFeed> StreamedWeights::Open(int readers, int parts, const StopToken* stop) {
  return std::make_unique<StreamedFeed>(*this, readers, parts, stop);
}

}  // namespace meshfill
