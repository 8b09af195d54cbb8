#include "engine/run/weight_exchange.h"

#include <algorithm>
#include <deque>
#include <utility>

#include "engine/mesh/traffic.h"
#include "kernels/monotonic_time.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

// Messages: while one is waited for, the next one, of the same step or another, is on its way.
constexpr int64_t kUnderWay = 2;
// Pieces of a share, at least. What a step passes on came a share before, and is none of what is under way.
constexpr int64_t kLeastPieces = 4;
static_assert(kLeastPieces >= kUnderWay);

int64_t CeilDivide(int64_t a, int64_t b) { return (a + b - 1) / b; }

class WeightExchange final : public ShareExchange {
 public:
  WeightExchange(Endpoint& endpoint, std::vector<std::string> addresses, Stream& stream,
                 const ExchangeTimeouts& timeouts)
      : endpoint_(endpoint), addresses_(std::move(addresses)), stream_(stream), timeouts_(timeouts) {}

  absl::Status Exchange(std::span<const ShareSwap> swaps, int64_t most_bytes,
                        const BeforeRead& before_piece) override {
    RETURN_IF_ERROR(Connect());
    const int64_t pieces = std::max(kLeastPieces, CeilDivide(most_bytes, kWeightPieceBytes));
    const int64_t piece_bytes = CeilDivide(most_bytes, pieces);
    std::deque<std::unique_ptr<PendingReceive>> under_way;
    for (const ShareSwap& swap : swaps) {
      for (int64_t piece = 0; piece < pieces; ++piece) {
        ASSIGN_OR_RETURN(BufferRef message, PieceOf(swap.mine, piece * piece_bytes, piece_bytes));
        ASSIGN_OR_RETURN(BufferRef into, PieceOf(swap.theirs, piece * piece_bytes, piece_bytes));
        ASSIGN_OR_RETURN(std::unique_ptr<PendingReceive> receive,
                         communicator_->SendReceiveInto(Traffic::kGather, swap.to, std::move(message),
                                                        swap.from, std::move(into)));
        under_way.push_back(std::move(receive));
        if (std::ssize(under_way) == kUnderWay) {
          RETURN_IF_ERROR(WaitForFirst(under_way, before_piece));
        }
      }
    }
    while (!under_way.empty()) RETURN_IF_ERROR(WaitForFirst(under_way, before_piece));
    return absl::OkStatus();
  }

  void End() override { endpoint_.Abort(absl::CancelledError("the run needs no more weights")); }

 private:
  // The piece that begins there; empty where nothing does.
  absl::StatusOr<BufferRef> PieceOf(const BufferRef& share, int64_t begin, int64_t piece_bytes) const {
    const int64_t bytes = share == nullptr ? 0 : static_cast<int64_t>(share->size_bytes()) - begin;
    if (bytes <= 0) return stream_.Allocate(0);
    return PartOf(share, static_cast<size_t>(begin), static_cast<size_t>(std::min(bytes, piece_bytes)));
  }

  absl::Status Connect() {
    if (communicator_ != nullptr) return absl::OkStatus();
    ASSIGN_OR_RETURN(communicator_,
                     endpoint_.Connect(addresses_, stream_, MonotonicNow() + timeouts_.connect));
    return absl::OkStatus();
  }

  absl::Status WaitForFirst(std::deque<std::unique_ptr<PendingReceive>>& under_way,
                            const BeforeRead& before_piece) const {
    const std::unique_ptr<PendingReceive> first = std::move(under_way.front());
    under_way.pop_front();
    RETURN_IF_ERROR(first->Wait(MonotonicNow() + timeouts_.piece).status());
    return before_piece().status();
  }

  Endpoint& endpoint_;
  const std::vector<std::string> addresses_;
  Stream& stream_;
  const ExchangeTimeouts timeouts_;
  std::unique_ptr<Communicator> communicator_;  // null: not connected yet
};

}  // namespace

std::unique_ptr<ShareExchange> MakeWeightExchange(Endpoint& endpoint, std::vector<std::string> addresses,
                                                  Stream& stream, const ExchangeTimeouts& timeouts) {
  return std::make_unique<WeightExchange>(endpoint, std::move(addresses), stream, timeouts);
}

}  // namespace meshfill
