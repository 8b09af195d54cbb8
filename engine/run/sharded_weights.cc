#include "engine/run/sharded_weights.h"

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/return_if_error.h"

namespace meshfill {

// Counts the bytes of the buffers that are given to it, until they go.
class ShardedWeights::Tally : public std::enable_shared_from_this<Tally> {
 public:
  BufferRef Count(BufferRef buffer) {
    const auto size = static_cast<int64_t>(buffer->size_bytes());
    const int64_t now = bytes_.fetch_add(size) + size;
    int64_t most = most_bytes_;
    while (now > most && !most_bytes_.compare_exchange_weak(most, now)) {
    }
    void* const data = buffer->data();
    return std::make_shared<Buffer>(
        data, static_cast<size_t>(size),
        [tally = shared_from_this(), buffer](void*, size_t) { tally->bytes_ -= buffer->size_bytes(); });
  }
  WeightMemory memory() const { return {bytes_, most_bytes_}; }

 private:
  std::atomic<int64_t> bytes_{0};
  std::atomic<int64_t> most_bytes_{0};
};

// The bytes of one share, packed part by part. Thread-safe.
class ShardedWeights::Share {
 public:
  Share(const ShardedWeights& weights, const WeightShare& share)
      : weights_(weights), share_(share), parts_(weights.parts()) {}

  const WeightShare& index() const { return share_; }

  // Null where the share has nothing of the part.
  absl::StatusOr<BufferRef> Bytes(int part, const BeforeRead& before_read) {
    if (weights_.parts_->BytesOf(part, share_) == 0) return BufferRef();
    const MutexLock lock(mu_);
    if (parts_[part] == nullptr) {
      ASSIGN_OR_RETURN(BufferRef packed, weights_.parts_->PackShare(part, share_, before_read));
      parts_[part] = weights_.tally_->Count(std::move(packed));
    }
    return parts_[part];
  }

 private:
  const ShardedWeights& weights_;
  const WeightShare share_;
  Mutex mu_;  // held while a part is packed
  std::vector<BufferRef> parts_ ABSL_GUARDED_BY(mu_);
};

// Gathers the parts of one run.
class ShardedWeights::Maker final : public PartMaker {
 public:
  Maker(const ShardedWeights& weights, std::shared_ptr<Share> share, Gathering gathering)
      : weights_(weights),
        share_(std::move(share)),
        gathering_(std::move(gathering)),
        rooms_([&weights]() -> absl::StatusOr<BufferRef> {
          const WeightParts& parts = *weights.parts_;
          ASSIGN_OR_RETURN(BufferRef room, parts.device().Allocate(static_cast<size_t>(parts.most_bytes())));
          return weights.tally_->Count(std::move(room));
        }) {}

  absl::StatusOr<std::shared_ptr<const WeightPart>> Load(int part, const BeforeRead& before_read) override {
    if (part >= layers() && !gathering_.head.has_value()) return std::shared_ptr<const WeightPart>();
    const WeightShare& me = gathering_.share;
    ASSIGN_OR_RETURN(const BufferRef mine, share_->Bytes(part, before_read));
    BufferRef whole;
    if (part < layers() || me.index == gathering_.head) {
      // Messages to the next worker use a part, too, until it has all of it; it does once its share of the
      // part after has come.
      ASSIGN_OR_RETURN(const BufferRef room, rooms_.Take());
      whole = PartOf(room, 0, static_cast<size_t>(parts().image(part).bytes));
      if (mine != nullptr) {
        const BufferCopy copy = {.from = mine, .to = parts().ShareOf(part, whole, me)};
        RETURN_IF_ERROR(parts().device().Copy({&copy, 1}));
      }
    }
    int64_t most_bytes = 0;
    for (int i = 0; i < me.of; ++i) most_bytes = std::max(most_bytes, BytesOf(part, i));
    const std::vector<ShareSwap> swaps =
        part < layers() ? RoundTheRing(part, whole) : ToTheHead(part, mine, whole);
    RETURN_IF_ERROR(gathering_.exchange->Exchange(swaps, most_bytes, before_read));
    if (whole == nullptr) return std::shared_ptr<const WeightPart>();
    return parts().PartOfBytes(part, whole, before_read);
  }

  void Quit() override { gathering_.exchange->End(); }
  bool serves_others() const override { return true; }
  WeightMode mode() const override { return WeightMode::kSharded; }

  int64_t sent_bytes() const override {
    const auto [me, of] = gathering_.share;
    int64_t bytes = 0;
    for (int part = 0; part < weights_.parts(); ++part) {
      if (part < layers()) {  // all shares but the next worker's own
        bytes += parts().image(part).bytes - BytesOf(part, (me + 1) % of);
      } else if (gathering_.head.has_value() && me != gathering_.head) {
        bytes += BytesOf(part, me);
      }
    }
    return bytes;
  }

  std::string PartName(int part) const override {
    return absl::StrCat("share ", gathering_.share.index, " of ", gathering_.share.of,
                        " of the weights: ", parts().PartName(part));
  }
  const char* advice() const override { return "see whether the other workers get on, and the disk"; }

 private:
  const WeightParts& parts() const { return *weights_.parts_; }
  int layers() const { return parts().layers(); }
  int64_t BytesOf(int part, int share) const {
    return parts().BytesOf(part, {.index = share, .of = gathering_.share.of});
  }

  // A share's place in the whole part; null where it has nothing of it, or there is no whole.
  BufferRef PlaceOf(int part, const BufferRef& whole, int share) const {
    if (whole == nullptr || BytesOf(part, share) == 0) return nullptr;
    return parts().ShareOf(part, whole, {.index = share, .of = gathering_.share.of});
  }

  // Step s sends to the next worker what step s − 1 received from the one before, at first the own share.
  // Each link has one flow, whatever the workers' paces.
  std::vector<ShareSwap> RoundTheRing(int part, const BufferRef& whole) const {
    const auto [me, of] = gathering_.share;
    std::vector<ShareSwap> swaps;
    for (int step = 1; step < of; ++step) {
      swaps.push_back({.to = (me + 1) % of,
                       .mine = PlaceOf(part, whole, (me - step + 1 + of) % of),
                       .from = (me - 1 + of) % of,
                       .theirs = PlaceOf(part, whole, (me - step + of) % of)});
    }
    return swaps;
  }

  // Step s sends to worker i + s. Where that one does not read the LM head, nothing.
  std::vector<ShareSwap> ToTheHead(int part, const BufferRef& mine, const BufferRef& whole) const {
    const auto [me, of] = gathering_.share;
    std::vector<ShareSwap> swaps;
    for (int step = 1; step < of; ++step) {
      const int to = (me + step) % of, from = (me - step + of) % of;
      swaps.push_back({.to = to,
                       .mine = to == gathering_.head ? mine : nullptr,
                       .from = from,
                       .theirs = PlaceOf(part, whole, from)});
    }
    return swaps;
  }

  const ShardedWeights& weights_;
  const std::shared_ptr<Share> share_;
  const Gathering gathering_;
  PartRooms rooms_;
};

ShardedWeights::ShardedWeights(std::unique_ptr<const WeightParts> parts)
    : parts_(std::move(parts)), tally_(std::make_shared<Tally>()) {}

ShardedWeights::~ShardedWeights() = default;

absl::StatusOr<std::unique_ptr<ShardedWeights>> ShardedWeights::Make(const ModelTensors& tensors,
                                                                     Device& device) {
  ASSIGN_OR_RETURN(std::unique_ptr<const WeightParts> parts, WeightParts::Make(tensors, device));
  return std::unique_ptr<ShardedWeights>(new ShardedWeights(std::move(parts)));
}

WeightMemory ShardedWeights::memory() const { return tally_->memory(); }

std::shared_ptr<ShardedWeights::Share> ShardedWeights::ShareOf(const WeightShare& share) {
  const MutexLock lock(mu_);
  if (share_ == nullptr || share_->index() != share) share_ = std::make_shared<Share>(*this, share);
  return share_;
}

void ShardedWeights::DropUnused() {
  const MutexLock lock(mu_);
  if (share_.use_count() == 1) share_ = nullptr;  // nobody else can take it meanwhile
}

std::unique_ptr<WeightFeed> ShardedWeights::Open(Gathering gathering, int readers, const StopToken* stop) {
  std::shared_ptr<Share> share = ShareOf(gathering.share);
  const bool at_once = gathering.at_once;
  return MakeAhead(std::make_unique<Maker>(*this, std::move(share), std::move(gathering)), readers, parts(),
                   at_once, stop);
}

}  // namespace meshfill
