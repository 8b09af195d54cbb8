// Shares that workers pass on: whatever the sizes, each gets all of them, also in more pieces than are under
// way.
#include "engine/run/weight_exchange.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "engine/comm/in_process.h"
#include "tests/engine/random_seed.h"
#include "tests/engine/run/ready_endpoint.h"
#include "tests/kernels/lone_stream.h"

namespace meshfill {
namespace {

constexpr absl::Duration kLong = absl::Minutes(1);

class WeightExchangeTest : public testing::Test {
 protected:
  void Connect(int workers, absl::Duration wait) {
    exchanges_.clear();
    endpoints_.clear();
    for (std::unique_ptr<Communicator>& communicator : MakeInProcessCommunicators(workers)) {
      endpoints_.push_back(std::make_unique<ReadyEndpoint>(std::move(communicator)));
      exchanges_.push_back(
          MakeWeightExchange(*endpoints_.back(), {}, *stream_, {.connect = kLong, .piece = wait}));
    }
  }

  const LoneStream stream_ = ReferenceStream(DType::kF32);
  std::vector<std::unique_ptr<ReadyEndpoint>> endpoints_;
  std::vector<std::unique_ptr<ShareExchange>> exchanges_;
};

TEST_F(WeightExchangeTest, PassesOnWhatTheStepBeforeReceived) {
  std::mt19937_64 random(TestSeed());
  for (int draw = 0; draw < 12; ++draw) {
    const int workers = Draw(random, 2, 5);
    Connect(workers, kLong);
    // Empty, of a few bytes, and of more than four of the largest pieces.
    const int64_t most = Draw(random, 0, 1) == 1 ? 9 : 6 * kWeightPieceBytes;
    std::vector<std::vector<uint8_t>> shares(workers);
    int64_t most_bytes = 0;
    for (std::vector<uint8_t>& share : shares) {
      share.resize(Draw<int64_t>(random, 0, 3) == 0 ? 0 : Draw<int64_t>(random, 1, most));
      for (uint8_t& byte : share) byte = static_cast<uint8_t>(random());
      most_bytes = std::max(most_bytes, std::ssize(share));
    }
    std::vector<std::thread> threads;
    for (int me = 0; me < workers; ++me) {
      threads.emplace_back([&, me] {
        std::vector<BufferRef> all;
        for (int share = 0; share < workers; ++share) {
          all.push_back(shares[share].empty() ? nullptr : stream_->Allocate(shares[share].size()).value());
        }
        if (all[me] != nullptr) std::memcpy(all[me]->data(), shares[me].data(), shares[me].size());
        std::vector<ShareSwap> swaps;
        for (int step = 1; step < workers; ++step) {
          swaps.push_back({.to = (me + 1) % workers,
                           .mine = all[(me - step + 1 + workers) % workers],
                           .from = (me - 1 + workers) % workers,
                           .theirs = all[(me - step + workers) % workers]});
        }
        int64_t pieces = 0;
        const absl::Status status = exchanges_[me]->Exchange(swaps, most_bytes, [&] {
          ++pieces;
          return PageCache::kFill;
        });
        EXPECT_TRUE(status.ok()) << status;
        EXPECT_GE(pieces * kWeightPieceBytes, (workers - 1) * most_bytes) << "a piece is larger";
        for (int share = 0; share < workers; ++share) {
          if (all[share] == nullptr) continue;
          EXPECT_EQ(std::memcmp(all[share]->data(), shares[share].data(), shares[share].size()), 0)
              << "share " << share << " of " << workers << " on worker " << me;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

TEST_F(WeightExchangeTest, APieceThatDoesNotComeNamesItsPeer) {
  Connect(2, absl::Milliseconds(10));
  const BufferRef place = stream_->Allocate(8).value();
  const std::vector<ShareSwap> swaps = {{.to = 1, .mine = nullptr, .from = 1, .theirs = place}};
  const absl::Status status = exchanges_[0]->Exchange(swaps, 8, [] { return PageCache::kFill; });
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  EXPECT_NE(status.message().find("gather from rank 1"), std::string::npos) << status;
}

TEST_F(WeightExchangeTest, EndsWhereThePieceBeforeSaysSo) {
  Connect(2, kLong);
  const BufferRef share = stream_->Allocate(8).value();
  std::thread peer([&] {
    const std::vector<ShareSwap> swaps = {{.to = 0, .mine = share, .from = 0, .theirs = nullptr}};
    (void)exchanges_[1]->Exchange(swaps, 8, [] { return PageCache::kFill; });
  });
  const std::vector<ShareSwap> swaps = {
      {.to = 1, .mine = nullptr, .from = 1, .theirs = stream_->Allocate(8).value()}};
  const absl::Status status =
      exchanges_[0]->Exchange(swaps, 8, [] { return absl::CancelledError("nobody waits for it"); });
  EXPECT_EQ(status, absl::CancelledError("nobody waits for it"));
  exchanges_[0]->End();
  peer.join();
}

}  // namespace
}  // namespace meshfill
