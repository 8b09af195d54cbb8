#include "engine/run/weight_exchange.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <utility>

#include "engine/mesh/traffic.h"
#include "kernels/monotonic_time.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

constexpr size_t kUnderWay = 2;

class WeightExchange final : public ShareExchange {
 public:
  WeightExchange(Endpoint& endpoint, std::vector<std::string> addresses, Stream& stream,
                 absl::Duration connect_timeout, absl::Duration wait_timeout)
      : endpoint_(endpoint),
        addresses_(std::move(addresses)),
        stream_(stream),
        connect_timeout_(connect_timeout),
        wait_timeout_(wait_timeout) {}

  absl::Status Exchange(int to, const BufferRef& mine, int from, std::span<std::byte> theirs,
                        int64_t most_bytes, const BeforeRead& before_piece) override {
    RETURN_IF_ERROR(Connect());
    const int64_t mine_bytes = mine == nullptr ? 0 : static_cast<int64_t>(mine->size_bytes());
    std::deque<Receive> under_way;
    for (int64_t begin = 0; begin < most_bytes; begin += kWeightPieceBytes) {
      const int64_t out = PieceBytes(begin, mine_bytes), in = PieceBytes(begin, std::ssize(theirs));
      ASSIGN_OR_RETURN(BufferRef message, out == 0 ? stream_.Allocate(0) : PartOf(mine, begin, out));
      ASSIGN_OR_RETURN(std::unique_ptr<PendingReceive> receive,
                       communicator_->SendReceive(Traffic::kGather, to, std::move(message), from,
                                                  static_cast<size_t>(in)));
      under_way.push_back({std::move(receive), in == 0 ? nullptr : theirs.data() + begin});
      if (under_way.size() < kUnderWay) continue;
      RETURN_IF_ERROR(TakeFirst(under_way, before_piece));
    }
    while (!under_way.empty()) RETURN_IF_ERROR(TakeFirst(under_way, before_piece));
    return absl::OkStatus();
  }

  void End() override { endpoint_.Abort(absl::CancelledError("the run needs no more weights")); }

 private:
  struct Receive {
    std::unique_ptr<PendingReceive> pending;
    std::byte* to;  // null: it is empty
  };

  static int64_t PieceBytes(int64_t begin, int64_t bytes) {
    return std::clamp<int64_t>(bytes - begin, 0, kWeightPieceBytes);
  }

  absl::Status Connect() {
    if (communicator_ != nullptr) return absl::OkStatus();
    ASSIGN_OR_RETURN(communicator_,
                     endpoint_.Connect(addresses_, stream_, MonotonicNow() + connect_timeout_));
    return absl::OkStatus();
  }

  absl::Status TakeFirst(std::deque<Receive>& under_way, const BeforeRead& before_piece) const {
    const Receive first = std::move(under_way.front());
    under_way.pop_front();
    ASSIGN_OR_RETURN(const BufferRef message, first.pending->Wait(MonotonicNow() + wait_timeout_));
    RETURN_IF_ERROR(before_piece());
    if (first.to != nullptr) std::memcpy(first.to, message->data(), message->size_bytes());
    return absl::OkStatus();
  }

  Endpoint& endpoint_;
  const std::vector<std::string> addresses_;
  Stream& stream_;
  const absl::Duration connect_timeout_;
  const absl::Duration wait_timeout_;
  std::unique_ptr<Communicator> communicator_;  // null: not connected yet
};

}  // namespace

std::unique_ptr<ShareExchange> MakeWeightExchange(Endpoint& endpoint, std::vector<std::string> addresses,
                                                  Stream& stream, absl::Duration connect_timeout,
                                                  absl::Duration wait_timeout) {
  return std::make_unique<WeightExchange>(endpoint, std::move(addresses), stream, connect_timeout,
                                          wait_timeout);
}

}  // namespace meshfill
