// Random histories of the account beside its definition: what each worker is charged, and what of it nobody
// but the cache holds.
#include "server/pool/held_runs.h"

#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <new>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "engine/kv/block_hash.h"
#include "gtest/gtest.h"
#include "tests/engine/random_seed.h"

namespace {
int64_t allocations = 0;
}

void* operator new(size_t size) {
  ++allocations;
  if (void* const at = std::malloc(size)) return at;
  std::abort();
}
void operator delete(void* at) noexcept { std::free(at); }
void operator delete(void* at, size_t) noexcept { std::free(at); }

namespace meshfill {
namespace {

const KvShape kShape = {.layers = 2, .kv_heads = 1, .head_dim = 2, .dtype = DType::kF32};
constexpr int kBlock = 2;  // tokens

KvBlockNames NamesOf(const std::vector<uint32_t>& tokens) {
  BlockHasher hasher(kBlock, "");
  hasher.Append(tokens);
  return {.tenant = "", .block_tokens = kBlock, .hashes = hasher.hashes()};
}

class HeldRunsTest : public testing::Test {
 protected:
  using Connection = HeldRuns::Connection;
  struct Prompt {
    KvBlockNames names;
    KvSlabs slabs;
  };
  struct Known {
    std::weak_ptr<const KvCharge> charge;  // gone with the run
    std::map<Connection, int64_t> bytes;
  };

  void AddWorkers(int workers, int64_t offered_bytes) {
    for (int i = 1; i <= workers; ++i) {
      Membership::Worker& worker = workers_[i];
      worker.connection = i;
      worker.offer.set_ranks(1);
      worker.offer.set_kv_memory_bytes(offered_bytes);
    }
  }

  HeldRuns::Workers all() const {
    HeldRuns::Workers all;
    for (const auto& [connection, worker] : workers_) all.push_back(&worker);
    return all;
  }

  // A run on the first workers computes a prompt behind what is cached of it, if they can follow that.
  Prompt Run(const std::vector<uint32_t>& tokens) {
    Prompt prompt = {.names = NamesOf(tokens), .slabs = {}};
    prompt.slabs = runs_.Find(prompt.names);
    if (!prompt.slabs.pieces.empty() && !runs_.CanFollow(*prompt.slabs.pieces.front().run, all())) {
      prompt.slabs = {};
    }
    const int64_t first = prompt.slabs.tokens();
    const int64_t rest = std::ssize(tokens) - first;
    if (rest == 0) return prompt;
    const TokenLayout layout =
        TokenLayout::Make(LayoutKind::kStriped, static_cast<int>(workers_.size()), rest, 1).value();
    std::vector<HeldRuns::Holder> holders;
    for (const auto& [connection, worker] : workers_) {
      const int rank = static_cast<int>(holders.size());
      holders.push_back({.worker = connection,
                         .name = "",
                         .address = "",
                         .ranks = {rank},
                         .bytes = kShape.layers * kShape.LayerBytes(layout.ChunkTokens(rank))});
    }
    prompt.slabs.shape = kShape;
    prompt.slabs.pieces.push_back(
        {.first_token = first, .tokens = rest, .run = runs_.Hold(++last_run_, layout, holders)});
    const KvRunSlabs* const run = prompt.slabs.pieces.back().run.get();
    runs_.OnKept(*run);
    Known& known = known_[run];
    known = {.charge = run->charges.front(), .bytes = {}};
    for (const HeldRuns::Holder& holder : holders) known.bytes[holder.worker] = holder.bytes;
    return prompt;
  }

  // By counting: a run that somebody holds takes room, and one that the cache alone has can be given up.
  void CheckAccount() {
    std::set<const KvRunSlabs*> used;
    for (const Prompt& prompt : held_) {
      for (const KvPiece& piece : prompt.slabs.pieces) used.insert(piece.run.get());
    }
    const KvSlabs look = entered_.empty() ? KvSlabs() : runs_.Look(entered_.back());  // holds nothing
    for (const auto& [connection, worker] : workers_) {
      int64_t in_use = 0, idle = 0;
      for (const auto& [run, known] : known_) {
        const auto bytes = known.bytes.find(connection);
        if (known.charge.expired() || bytes == known.bytes.end()) continue;
        (used.contains(run) ? in_use : idle) += bytes->second;
      }
      const auto offered = static_cast<int64_t>(worker.offer.kv_memory_bytes());
      ASSERT_EQ(runs_.Room(worker), offered - in_use);
      ASSERT_EQ(runs_.charged(worker), std::max(in_use, std::min(in_use + idle, offered)));
    }
  }

  LeaderActions actions_;
  HeldRuns runs_{kShape, actions_};
  std::map<Connection, Membership::Worker> workers_;
  std::map<const KvRunSlabs*, Known> known_;
  std::vector<Prompt> held_;           // in use
  std::vector<KvBlockNames> entered_;  // into the cache
  uint64_t last_run_ = 0;
};

TEST_F(HeldRunsTest, WhatTheCacheAloneHasIsRoom) {
  std::mt19937_64 random(TestSeed());
  AddWorkers(4, 40 * kShape.layers * kShape.LayerBytes(1));
  std::vector<std::vector<uint32_t>> prompts;
  uint32_t last_token = 0;
  for (int step = 0; step < 600; ++step) {
    SCOPED_TRACE(step);
    const int what = Draw<int>(random, 0, 9);
    if (what < 4) {
      std::vector<uint32_t> tokens;
      if (!prompts.empty() && what > 0) {  // as one before it, for a while
        const auto& other = prompts[Draw<size_t>(random, 0, prompts.size() - 1)];
        tokens.assign(other.begin(),
                      other.begin() + Draw<int>(random, 0, std::ssize(other) / kBlock) * kBlock);
      }
      if (what < 3) tokens.resize(tokens.size() + kBlock * Draw<size_t>(random, 1, 5), ++last_token);
      if (tokens.empty()) continue;
      held_.push_back(Run(tokens));
      runs_.MakeRoom(all());
      prompts.push_back(std::move(tokens));
    } else if (what < 8 && !held_.empty()) {
      const auto one = held_.begin() + Draw<int>(random, 0, static_cast<int>(held_.size()) - 1);
      if (what < 7) {
        runs_.Enter(one->names, one->slabs, all());
        entered_.push_back(one->names);
      }
      held_.erase(one);
      runs_.MakeRoom(all());
    } else if (what == 9 && step % 100 == 0 && workers_.size() > 1) {
      const Connection lost = workers_.begin()->first;
      runs_.OnWorkerLost(lost);
      workers_.erase(lost);
      runs_.OnWorkersChanged(all());
    }
    CheckAccount();
    if (HasFatalFailure()) return;
  }
}

TEST_F(HeldRunsTest, ACachedPrefixStaysWhereAllFits) {
  const int64_t bytes = kShape.layers * kShape.LayerBytes(8);
  AddWorkers(1, 2 * bytes);
  {
    const Prompt cached = Run({1, 1, 1, 1, 1, 1, 1, 1});
    runs_.Enter(cached.names, cached.slabs, all());
  }
  const Prompt leased = Run({2, 2, 2, 2, 2, 2, 2, 2});
  runs_.MakeRoom(all());
  EXPECT_EQ(runs_.cached_bytes(), bytes);
  EXPECT_EQ(runs_.evictions(), 0u);
  workers_[1].offer.set_kv_memory_bytes(static_cast<uint64_t>(2 * bytes - 1));
  runs_.MakeRoom(all());
  EXPECT_EQ(runs_.cached_bytes(), 0);
  EXPECT_EQ(runs_.evictions(), 1u);
}

// What thousands of small prompts leave costs the leader nothing at each message of a worker.
TEST_F(HeldRunsTest, AsksForRoomWithoutAWalkThroughTheCache) {
  AddWorkers(8, int64_t{1} << 40);
  for (uint32_t i = 0; i < 2000; ++i) {
    const Prompt prompt = Run({i, i, i, i, i, i, i, i});
    runs_.Enter(prompt.names, prompt.slabs, all());
  }
  const int64_t before = allocations;
  int64_t sum = 0;
  for (const auto& [connection, worker] : workers_) {
    sum += runs_.Room(worker) + runs_.charged(worker);
  }
  EXPECT_EQ(allocations, before);
  EXPECT_EQ(sum, 8 * (int64_t{1} << 40) + 2000 * 8 * kShape.layers * kShape.LayerBytes(1));
}

}  // namespace
}  // namespace meshfill
