#include "engine/run/peer_weights.h"

#include <algorithm>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/return_if_error.h"

namespace meshfill {

// Copies the parts of one run to one device.
class PeerWeights::Maker final : public PartMaker {
 public:
  Maker(const std::vector<Peer>& peers, int me)
      : peers_(peers), me_(me), rooms_([&parts = *peers[me].parts] {
          return parts.device().Allocate(static_cast<size_t>(parts.most_bytes()));
        }) {}

  absl::StatusOr<std::shared_ptr<const WeightPart>> Load(int part, const BeforeRead& before_read) override {
    RETURN_IF_ERROR(before_read().status());
    ASSIGN_OR_RETURN(const BufferRef room, rooms_.Take());
    const BufferRef whole = PartOf(room, 0, static_cast<size_t>(parts().image(part).bytes));
    const int of = static_cast<int>(peers_.size());
    std::vector<BufferCopy> copies;
    for (int step = 0; step < of; ++step) {
      const int from = (me_ + step) % of;
      const BufferRef& share = peers_[from].shares[part];
      if (share == nullptr) continue;
      copies.push_back({.from = share, .to = parts().ShareOf(part, whole, {.index = from, .of = of})});
    }
    RETURN_IF_ERROR(parts().device().Copy(copies));
    return parts().PartOfBytes(part, whole, before_read);
  }

  void Quit() override {}  // copies end by themselves
  bool serves_others() const override { return false; }
  WeightMode mode() const override { return WeightMode::kSharded; }
  int64_t sent_bytes() const override { return 0; }
  std::string PartName(int part) const override {
    return absl::StrCat(parts().tensors().path(), ": ", parts().PartName(part), " from the other devices");
  }
  const char* advice() const override { return "see whether the devices run"; }

 private:
  const WeightParts& parts() const { return *peers_[me_].parts; }

  const std::vector<Peer>& peers_;
  const int me_;
  PartRooms rooms_;
};

absl::Status PeerWeights::Pack(const StopToken& stop, int index) {
  const BeforeRead before_read = [&]() -> absl::StatusOr<PageCache> {
    if (stop.stopped()) return absl::CancelledError("another device could not load its share");
    return PageCache::kFill;  // the next start finds the files there
  };
  Peer& peer = peers_[index];
  const WeightShare share = {.index = index, .of = static_cast<int>(peers_.size())};
  for (int part = 0; part < peer.parts->parts(); ++part) {
    if (peer.parts->BytesOf(part, share) == 0) continue;
    ASSIGN_OR_RETURN(peer.shares[part], peer.parts->PackShare(part, share, before_read));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<const PeerWeights>> PeerWeights::Load(const std::vector<Place>& places) {
  std::unique_ptr<PeerWeights> weights(new PeerWeights);
  for (const Place& place : places) {
    ASSIGN_OR_RETURN(auto parts, WeightParts::Make(*place.tensors, *place.device));
    const auto count = static_cast<size_t>(parts->parts());
    weights->peers_.push_back({.parts = std::move(parts), .shares = std::vector<BufferRef>(count)});
  }
  StopToken stop;
  std::vector<absl::Status> packed(places.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < places.size(); ++i) {
    const auto pack = [&, i] {
      packed[i] = weights->Pack(stop, static_cast<int>(i));
      if (!packed[i].ok()) stop.Stop();
    };
    try {
      threads.emplace_back(pack);
    } catch (const std::system_error& error) {
      packed[i] = absl::ResourceExhaustedError(absl::StrCat("no thread could be started to load weights (",
                                                            error.what(), "); raise the limit of threads"));
      stop.Stop();
      break;
    }
  }
  for (std::thread& thread : threads) thread.join();
  const auto failed = [](const absl::Status& status) { return !status.ok() && !absl::IsCancelled(status); };
  const auto cause = std::find_if(packed.begin(), packed.end(), failed);
  if (cause != packed.end()) return *cause;
  return weights;
}

std::unique_ptr<WeightFeed> PeerWeights::Open(const ModelTensors& tensors, int readers, bool with_head,
                                              const StopToken* stop) const {
  const auto is_it = [&](const Peer& peer) { return &peer.parts->tensors() == &tensors; };
  const auto at = std::find_if(peers_.begin(), peers_.end(), is_it);
  const WeightParts& parts = *at->parts;
  return MakeAhead(std::make_unique<Maker>(peers_, static_cast<int>(at - peers_.begin())), readers,
                   with_head ? parts.parts() : parts.layers(), /*at_once=*/true, stop);
}

}  // namespace meshfill
