// What a worker's seats make of its data plane.
#include "engine/comm/gloo/gloo_data_plane.h"

#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "engine/comm/gloo/gloo_rendezvous.h"
#include "kernels/monotonic_time.h"
#include "kernels/stop_token.h"
#include "tests/engine/comm/gloo/gloo_ranks.h"

namespace meshfill {
namespace {

TEST(GlooDataPlane, ListensForItsSeat) {
  for (const bool encrypt : {false, true}) {
    const auto endpoint =
        MakeGlooDataPlane({.encrypt = encrypt})->Listen({.local_rank = 3, .rank = 1, .ranks = 2, .run = 7});
    ASSERT_TRUE(endpoint.ok()) << endpoint.status();
    const absl::Status good = CheckGlooAddress((*endpoint)->address(), 7, 1, encrypt);
    EXPECT_TRUE(good.ok()) << good;
  }
  ExpectStatus(MakeGlooDataPlane({.listen = "0.0.0.0"})->Listen({}).status(),
               absl::StatusCode::kInvalidArgument, {"every interface"});
}

TEST(GlooDataPlane, AWaitDoesNotCountThePausesOfItsSeatsRun) {
  const auto plane = MakeGlooDataPlane({});
  StopToken run;
  std::vector<std::unique_ptr<Endpoint>> endpoints;
  std::vector<std::string> addresses;
  for (int rank : {0, 1}) {
    endpoints.push_back(plane->Listen({.rank = rank, .ranks = 2, .run = 7, .stop = &run}).value());
    addresses.push_back(endpoints.back()->address());
  }
  const LoneStream streams[] = {ReferenceStream(DType::kF32), ReferenceStream(DType::kF32)};
  std::vector<std::unique_ptr<Communicator>> ranks(2);
  RunRanks(2, [&](int rank) {
    ranks[rank] = endpoints[rank]->Connect(addresses, *streams[rank], Soon()).value();
  });
  auto receive = ranks[0]->SendReceive(Traffic::kKv, 1, PatternBuffer(8, 0), 1, 8).value();
  constexpr absl::Duration kDeadline = absl::Milliseconds(250);  // so that this thread is in time
  run.Pause();
  std::thread peer([&] {
    absl::SleepFor(2 * kDeadline);  // longer than the wait would last
    EXPECT_TRUE(ranks[1]->SendReceive(Traffic::kKv, 0, PatternBuffer(8, 1), 0, 8).ok());
  });
  const absl::StatusOr<BufferRef> received = receive->Wait(MonotonicNow() + kDeadline);
  peer.join();
  EXPECT_TRUE(received.ok()) << received.status();
}

}  // namespace
}  // namespace meshfill
