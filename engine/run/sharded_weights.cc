#include "engine/run/sharded_weights.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/model/streamed_weights.h"
#include "kernels/return_if_error.h"
#include "kernels/word_hash.h"

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
  int64_t bytes_of(int part) const { return weights_.BytesOf(part, share_.index, share_.of); }

  // Null where the share has nothing of the part.
  absl::StatusOr<BufferRef> Bytes(int part, const BeforeRead& before_read) {
    if (bytes_of(part) == 0) return BufferRef();
    const MutexLock lock(mu_);
    if (parts_[part] == nullptr) {
      ASSIGN_OR_RETURN(BufferRef packed, Pack(part, before_read));
      parts_[part] = weights_.tally_->Count(std::move(packed));
    }
    return parts_[part];
  }

 private:
  absl::StatusOr<BufferRef> Pack(int part, const BeforeRead& before_read) const {
    const ModelTensors& tensors = weights_.tensors_;
    const WeightImage& image = weights_.images_[part];
    const int layers = tensors.config().shape.layers;
    const int64_t begin = image.Cut(share_.index, share_.of), end = image.Cut(share_.index + 1, share_.of);
    if (part < layers) {
      return tensors.PackLayerBytes(weights_.device_, part, image, begin, end, before_read);
    }
    return tensors.PackHeadBytes(weights_.device_, (part - layers) * weights_.head_rows_, image, begin, end,
                                 before_read);
  }

  const ShardedWeights& weights_;
  const WeightShare share_;
  Mutex mu_;  // held while a part is packed
  std::vector<BufferRef> parts_ ABSL_GUARDED_BY(mu_);
};

// Gathers the parts of one run.
class ShardedWeights::Maker final : public PartMaker {
 public:
  Maker(const ShardedWeights& weights, std::shared_ptr<Share> share, Gathering gathering)
      : weights_(weights), share_(std::move(share)), gathering_(std::move(gathering)) {}

  absl::StatusOr<std::shared_ptr<const WeightPart>> Load(int part, const BeforeRead& before_read) override {
    if (part >= layers() && !gathering_.head.has_value()) return std::shared_ptr<const WeightPart>();
    const auto [me, of] = gathering_.share;
    const WeightImage& image = weights_.images_[part];
    ASSIGN_OR_RETURN(const BufferRef mine, share_->Bytes(part, before_read));
    BufferRef whole;
    if (part < layers() || me == gathering_.head) {
      ASSIGN_OR_RETURN(const BufferRef room, Room());
      whole = PartOf(room, 0, static_cast<size_t>(image.bytes));
      if (mine != nullptr) {
        std::memcpy(whole->data<std::byte>() + image.Cut(me, of), mine->data(), mine->size_bytes());
      }
    }
    int64_t most_bytes = 0;
    for (int i = 0; i < of; ++i) most_bytes = std::max(most_bytes, weights_.BytesOf(part, i, of));
    const std::vector<ShareSwap> swaps =
        part < layers() ? RoundTheRing(part, whole) : ToTheHead(part, mine, whole);
    RETURN_IF_ERROR(gathering_.exchange->Exchange(swaps, most_bytes, before_read));
    if (whole == nullptr) return std::shared_ptr<const WeightPart>();
    return PartOfBytes(part, whole, before_read);
  }

  void Quit() override { gathering_.exchange->End(); }
  bool serves_others() const override { return true; }

  int64_t sent_bytes() const override {
    const auto [me, of] = gathering_.share;
    int64_t bytes = 0;
    for (int part = 0; part < weights_.parts(); ++part) {
      if (part < layers()) {  // all shares but the next worker's own
        bytes += weights_.images_[part].bytes - weights_.BytesOf(part, (me + 1) % of, of);
      } else if (gathering_.head.has_value() && me != gathering_.head) {
        bytes += share_->bytes_of(part);
      }
    }
    return bytes;
  }

  std::string PartName(int part) const override {
    return absl::StrCat("share ", gathering_.share.index, " of ", gathering_.share.of,
                        " of the weights: ", part < layers() ? absl::StrCat("layer ", part) : "the LM head");
  }
  const char* advice() const override { return "see whether the other workers get on, and the disk"; }

 private:
  int layers() const { return weights_.tensors_.config().shape.layers; }

  // A share's place in the whole part; null where it has nothing of it, or there is no whole.
  BufferRef PlaceOf(int part, const BufferRef& whole, int share) const {
    const int of = gathering_.share.of;
    const int64_t bytes = weights_.BytesOf(part, share, of);
    if (whole == nullptr || bytes == 0) return nullptr;
    return PartOf(whole, static_cast<size_t>(weights_.images_[part].Cut(share, of)),
                  static_cast<size_t>(bytes));
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

  // Memory for any part, which no part has: it is written again and again, not mapped anew for each. The feed
  // frees parts on this thread, so that nobody uses what this finds unused. Messages to the next worker use a
  // part, too, until it has all of it; it does once its share of the part after has come.
  absl::StatusOr<BufferRef> Room() {
    for (const BufferRef& room : rooms_) {
      if (room.use_count() == 1) return room;
    }
    int64_t most_bytes = 0;
    for (const WeightImage& image : weights_.images_) most_bytes = std::max(most_bytes, image.bytes);
    ASSIGN_OR_RETURN(BufferRef room, weights_.device_.Allocate(static_cast<size_t>(most_bytes)));
    return rooms_.emplace_back(weights_.tally_->Count(std::move(room)));
  }

  absl::StatusOr<std::shared_ptr<const WeightPart>> PartOfBytes(int part, const BufferRef& whole,
                                                                const BeforeRead& before_read) const {
    const WeightImage& image = weights_.images_[part];
    auto made = std::make_shared<WeightPart>();
    if (part < layers()) {
      ASSIGN_OR_RETURN(made->layer,
                       weights_.tensors_.LayerOf(weights_.device_, part, image, whole, before_read));
    } else {
      const WeightImage::Matrix& head = image.matrices.front();
      ASSIGN_OR_RETURN(made->head,
                       weights_.device_.WeightOf(head.out_features, head.in_features, head.kind, whole, {}));
    }
    return made;
  }

  const ShardedWeights& weights_;
  const std::shared_ptr<Share> share_;
  const Gathering gathering_;
  std::vector<BufferRef> rooms_;  // kPartsAhead of them take turns
};

ShardedWeights::ShardedWeights(const ModelTensors& tensors, Device& device)
    : tensors_(tensors),
      device_(device),
      head_rows_(RowsOfHeadPart(tensors.config().shape)),
      tally_(std::make_shared<Tally>()) {}

ShardedWeights::~ShardedWeights() = default;

absl::StatusOr<std::unique_ptr<ShardedWeights>> ShardedWeights::Make(const ModelTensors& tensors,
                                                                     Device& device) {
  std::unique_ptr<ShardedWeights> weights(new ShardedWeights(tensors, device));
  const ModelShape& shape = tensors.config().shape;
  for (int layer = 0; layer < shape.layers; ++layer) {
    ASSIGN_OR_RETURN(WeightImage image, tensors.LayerImage(device, layer));
    weights->images_.push_back(std::move(image));
  }
  for (int64_t first = 0; first < shape.vocab; first += weights->head_rows_) {
    ASSIGN_OR_RETURN(WeightImage image,
                     tensors.HeadImage(device, std::min(weights->head_rows_, shape.vocab - first)));
    weights->images_.push_back(std::move(image));
  }
  return weights;
}

int64_t ShardedWeights::BytesOf(int part, int share, int of) const {
  return images_[part].Cut(share + 1, of) - images_[part].Cut(share, of);
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

uint64_t ShardedWeights::layout() const {
  WordHash hash;
  for (const WeightImage& image : images_) {
    for (const WeightImage::Matrix& matrix : image.matrices) {
      for (const auto word : {static_cast<uint64_t>(matrix.begin), static_cast<uint64_t>(matrix.form.bytes),
                              static_cast<uint64_t>(matrix.form.panel_bytes), matrix.form.layout}) {
        hash.Add(word);
      }
    }
  }
  return hash.Finish();
}

std::unique_ptr<WeightFeed> ShardedWeights::Open(Gathering gathering, int readers, const StopToken* stop) {
  std::shared_ptr<Share> share = ShareOf(gathering.share);
  const bool at_once = gathering.at_once;
  return MakeAhead(std::make_unique<Maker>(*this, std::move(share), std::move(gathering)), readers, parts(),
                   at_once, stop);
}

}  // namespace meshfill
