// Where the ranks of a run stand still with no message between them under way.
//
// On a GPU, a message that waits for its peer waits on the device, in front of what is behind it in the
// device's queues. Two runs whose messages are under way at once could so wait for each other, each on
// another rank. A run gives its turn to another one only when all of its ranks have begun the same messages,
// and these are done.
//
// All ranks of a run have as many messages, in the same order: a schedule starts one on all of them or on
// none. So each rank counts its own. Where the ranks live in several processes, these agree in two rounds:
//
//     Close    no rank begins more messages than the furthest one here has. How many are these?
//     CloseAt  as many as the furthest rank anywhere has begun. The ranks that have begun fewer go on until
//              then, stand still and wait for the device: `on_still`
//     Open     they go on
//
// What is closed is numbered: what is late, of an earlier pause, changes nothing.
#ifndef MESHFILL_ENGINE_COMM_MESSAGE_GATE_H_
#define MESHFILL_ENGINE_COMM_MESSAGE_GATE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "engine/comm/communicator.h"
#include "kernels/mutex.h"

namespace meshfill {

// Of the ranks of one run in this process. Thread-safe.
class MessageGate {
 public:
  // `on_still`: all ranks here stand still in the pause of that number. Once for each, from the thread of a
  // rank or of CloseAt, without locks of the gate.
  MessageGate(int ranks, std::function<void(uint64_t pause)> on_still)
      : begun_(static_cast<size_t>(ranks)), on_still_(std::move(on_still)) {}

  // Before each message of `rank`, from its thread. Where it is to stand still, it calls `finish` first,
  // which waits for what the rank has called; fails as that does.
  absl::Status Pass(int rank, const std::function<absl::Status()>& finish);

  // The most messages that a rank here has begun. `pause` is above 0.
  int64_t Close(uint64_t pause);
  // Nothing where the gate is open, or closed for another pause.
  void CloseAt(uint64_t pause, int64_t messages);
  void Open();
  void Stop();  // for good

 private:
  static constexpr int64_t kOpen = std::numeric_limits<int64_t>::max();

  void StandStill(int rank);  // until the rank may begin another message
  // The pause that all ranks have come to; nothing: they have not. For whoever comes last.
  std::optional<uint64_t> TakeStill() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  int64_t MostBegun() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  Mutex mu_;
  CondVar changed_;
  std::vector<int64_t> begun_ ABSL_GUARDED_BY(mu_);  // messages, by rank
  int64_t limit_ ABSL_GUARDED_BY(mu_) = kOpen;       // no rank begins more
  uint64_t pause_ ABSL_GUARDED_BY(mu_) = 0;          // 0: open
  bool agreed_ ABSL_GUARDED_BY(mu_) = false;         // the limit is that of all ranks anywhere
  bool stopped_ ABSL_GUARDED_BY(mu_) = false;
  int standing_ ABSL_GUARDED_BY(mu_) = 0;
  const std::function<void(uint64_t pause)> on_still_;
};

// A rank's communicator behind the gate. Used from the rank's thread.
class GatedCommunicator final : public Communicator {
 public:
  // `finish` as MessageGate::Pass has it. All arguments outlive this; `rank` is the gate's.
  GatedCommunicator(Communicator& communicator, MessageGate& gate, int rank,
                    std::function<absl::Status()> finish)
      : communicator_(communicator), gate_(gate), gate_rank_(rank), finish_(std::move(finish)) {}

  int rank() const override { return communicator_.rank(); }
  int size() const override { return communicator_.size(); }
  absl::StatusOr<std::unique_ptr<PendingReceive>> SendReceive(Traffic traffic, int to, BufferRef message,
                                                              int from, size_t receive_bytes) override {
    if (absl::Status passed = gate_.Pass(gate_rank_, finish_); !passed.ok()) return passed;
    return communicator_.SendReceive(traffic, to, std::move(message), from, receive_bytes);
  }
  void Abort(absl::Status reason) override { communicator_.Abort(std::move(reason)); }

 private:
  Communicator& communicator_;
  MessageGate& gate_;
  const int gate_rank_;
  const std::function<absl::Status()> finish_;
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_COMM_MESSAGE_GATE_H_
