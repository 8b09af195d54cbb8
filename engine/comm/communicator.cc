#include "engine/comm/communicator.h"

#include <cstring>
#include <utility>

#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

class CopiedReceive final : public PendingReceive {
 public:
  CopiedReceive(std::unique_ptr<PendingReceive> receive, BufferRef into)
      : receive_(std::move(receive)), into_(std::move(into)) {}

  absl::StatusOr<BufferRef> Wait(absl::Time deadline) override {
    ASSIGN_OR_RETURN(const BufferRef message, receive_->Wait(deadline));
    if (message->size_bytes() > 0) std::memcpy(into_->data(), message->data(), message->size_bytes());
    return into_;
  }

 private:
  const std::unique_ptr<PendingReceive> receive_;
  const BufferRef into_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<PendingReceive>> Communicator::SendReceiveInto(Traffic traffic, int to,
                                                                              BufferRef message, int from,
                                                                              BufferRef into) {
  ASSIGN_OR_RETURN(std::unique_ptr<PendingReceive> receive,
                   SendReceive(traffic, to, std::move(message), from, into->size_bytes()));
  return std::make_unique<CopiedReceive>(std::move(receive), std::move(into));
}

}  // namespace meshfill
