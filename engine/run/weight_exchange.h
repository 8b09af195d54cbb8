// Shares of weights between the workers of a run, over connections of their own: a chunk never waits behind a
// share. What both want of a link, the links' transports divide.
//
// Cost of a share of b bytes: b out and b in, in 4 messages or, where these were larger than
// kWeightPieceBytes, in more. Two of them are under way over all steps. They are received where they stay.
#ifndef MESHFILL_ENGINE_RUN_WEIGHT_EXCHANGE_H_
#define MESHFILL_ENGINE_RUN_WEIGHT_EXCHANGE_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "engine/comm/endpoint.h"
#include "engine/model/weight_feed.h"
#include "kernels/stream.h"

namespace meshfill {

inline constexpr int64_t kWeightPieceBytes = int64_t{1} << 20;

struct ExchangeTimeouts {
  absl::Duration connect;  // to all workers
  absl::Duration piece;    // a peer's ranks may be a layer behind
};

// Connects in the first Exchange. `addresses` are those of all workers, by share. The stream's device is in
// the host's memory, so that any thread may allocate by it; stream and endpoint outlive the exchange.
std::unique_ptr<ShareExchange> MakeWeightExchange(Endpoint& endpoint, std::vector<std::string> addresses,
                                                  Stream& stream, const ExchangeTimeouts& timeouts);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_RUN_WEIGHT_EXCHANGE_H_
