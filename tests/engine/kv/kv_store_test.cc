#include "engine/kv/kv_store.h"

#include <algorithm>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "engine/kv/lease_name.h"
#include "gtest/gtest.h"
#include "tests/engine/kv/kv_values.h"

namespace meshfill {
namespace {

const KvShape kShape = {.layers = 2, .kv_heads = 1, .head_dim = 4, .dtype = DType::kF32};
constexpr int64_t kTokenBytes = 2 * 2 * 4 * 4;  // of kShape

int64_t All(int64_t cached) { return cached; }

class KvStoreTest : public testing::Test {
 protected:
  KvStore::Clock Clock() {
    return [this] { return now_; };
  }
  static std::shared_ptr<KvPrompt> Prompt(int64_t tokens) {
    return std::make_shared<KvPrompt>(kShape, tokens);
  }

  // Prompts of 40 tokens, and what the cache calls them.
  static KvBlockNames NamesOf40(char prompt) {
    return {.tenant = "", .block_tokens = 4, .hashes = std::string(10 * 32, prompt)};
  }
  static void Finish40(KvStore& store, char name) {
    auto prompt = Prompt(40);
    ASSERT_TRUE(store.AdmitToCache(prompt, prompt->bytes()));
    store.MakeRoom();
    KeepAllValues(*prompt, TokenLayout::Make(LayoutKind::kStriped, 1, 40, 4).value());
    store.Enter(NamesOf40(name), *prompt);
  }

  absl::Time now_ = absl::UnixEpoch();
};

TEST_F(KvStoreTest, ALeaseLastsFromItsPrefillsEnd) {
  KvStore store(1000 * kTokenBytes, Clock());
  auto lease = store.Admit(Prompt(10), "tenant", absl::Seconds(30));
  ASSERT_TRUE(lease.ok()) << lease.status();
  EXPECT_EQ((*lease)->id().size(), 32u);
  EXPECT_EQ(store.EndLapsed(), absl::InfiniteFuture()) << "a lease whose prefill runs cannot lapse";
  now_ += absl::Hours(1);  // in the queue
  EXPECT_TRUE(store.Find((*lease)->id(), "tenant").ok());
  const auto rest = (*lease)->Keep();
  ASSERT_TRUE(rest.ok()) << rest.status();
  EXPECT_EQ(*rest, absl::Seconds(30));
  EXPECT_EQ(store.EndLapsed(), now_ + absl::Seconds(30));
  now_ += absl::Seconds(29);
  EXPECT_TRUE(store.Find((*lease)->id(), "tenant").ok());
  now_ += absl::Seconds(1);
  const absl::Status gone = store.Find((*lease)->id(), "tenant").status();  // before anybody sweeps
  EXPECT_TRUE(absl::IsNotFound(gone)) << gone;
  EXPECT_TRUE(absl::StrContains(gone.message(), (*lease)->id().substr(0, 8))) << gone;
  EXPECT_FALSE(absl::StrContains(gone.message(), (*lease)->id())) << gone;  // whoever knows it may read
  EXPECT_EQ(store.counts().bytes, 10 * kTokenBytes);
  EXPECT_EQ(store.EndLapsed(), absl::InfiniteFuture());
  EXPECT_EQ(store.counts().bytes, 0);
  EXPECT_EQ(store.counts().leases, 0);
  EXPECT_EQ(store.counts().lapsed, 1u);
}

TEST_F(KvStoreTest, IsRenewedAndReleased) {
  KvStore store(1000 * kTokenBytes, Clock());
  auto lease = *store.Admit(Prompt(10), "", absl::Seconds(30));
  EXPECT_EQ(*store.Renew(lease->id(), "", absl::Seconds(100)), absl::Seconds(100));  // while it runs
  now_ += absl::Seconds(10);
  EXPECT_EQ(*lease->Keep(), absl::Seconds(90));                                  // the later of the two
  EXPECT_EQ(*store.Renew(lease->id(), "", absl::Seconds(5)), absl::Seconds(5));  // sooner is possible, too
  now_ += absl::Seconds(5);
  EXPECT_TRUE(absl::IsNotFound(store.Renew(lease->id(), "", absl::Seconds(5)).status()));

  auto other = *store.Admit(Prompt(10), "", absl::Seconds(30));
  ASSERT_TRUE(other->Keep().ok());
  store.Release(other->id(), "");
  EXPECT_TRUE(absl::IsNotFound(store.Find(other->id(), "").status()));
  store.Release(other->id(), "");  // twice is fine
  store.Release("unknown", "");
  EXPECT_EQ(store.counts().bytes, 0);
}

TEST_F(KvStoreTest, ATenantHasItsOwnLeasesAlone) {
  KvStore store(1000 * kTokenBytes, Clock());
  auto lease = *store.Admit(Prompt(10), "one", absl::Seconds(30));
  ASSERT_TRUE(lease->Keep().ok());
  for (const char* tenant : {"two", "", "one "}) {
    EXPECT_TRUE(absl::IsNotFound(store.Find(lease->id(), tenant).status()));
    EXPECT_TRUE(absl::IsNotFound(store.Renew(lease->id(), tenant, absl::Seconds(1)).status()));
    store.Release(lease->id(), tenant);
  }
  EXPECT_TRUE(store.Find(lease->id(), "one").ok());
}

TEST_F(KvStoreTest, APrefillThatFailsEndsItsLeaseAndOneThatRunsOnKeepsNothingMore) {
  KvStore store(1000 * kTokenBytes, Clock());
  const TokenLayout layout = TokenLayout::Make(LayoutKind::kStriped, 1, 10, 64).value();
  auto prompt = Prompt(10);
  prompt->Begin(layout);
  auto lease = *store.Admit(prompt, "", absl::Seconds(30));
  const std::string id = lease->id();
  lease.reset();
  EXPECT_TRUE(absl::IsNotFound(store.Find(id, "").status()));
  EXPECT_FALSE(KeepValues(*prompt, layout, 0, 0));
  EXPECT_EQ(store.counts().bytes, 10 * kTokenBytes);  // the run still has them
  prompt.reset();
  EXPECT_EQ(store.counts().bytes, 0);

  auto released = *store.Admit(Prompt(10), "", absl::Seconds(30));
  store.Release(released->id(), "");
  EXPECT_TRUE(absl::IsNotFound(released->Keep().status()));
}

TEST_F(KvStoreTest, RefusesWhatHasNoRoomAndSaysWhenThereIs) {
  KvStore store(100 * kTokenBytes, Clock());
  EXPECT_EQ(store.RoomIn(101 * kTokenBytes), std::nullopt);
  const auto too_large = store.Admit(Prompt(101), "", absl::Seconds(30));
  EXPECT_TRUE(absl::IsResourceExhausted(too_large.status())) << too_large.status();
  EXPECT_TRUE(absl::StrContains(too_large.status().message(), "raise the server's kv budget"));

  auto one = *store.Admit(Prompt(40), "", absl::Seconds(30));
  auto two = *store.Admit(Prompt(60), "", absl::Seconds(50));
  EXPECT_EQ(store.RoomIn(100 * kTokenBytes), absl::ZeroDuration());  // both run, and may end at once
  ASSERT_TRUE(one->Keep().ok() && two->Keep().ok());
  const absl::Status full = store.Admit(Prompt(1), "", absl::Seconds(30)).status();
  EXPECT_TRUE(absl::IsResourceExhausted(full)) << full;
  EXPECT_TRUE(absl::StrContains(full.message(), "try again later")) << full;
  EXPECT_EQ(store.RoomIn(0), absl::ZeroDuration());
  EXPECT_EQ(store.RoomIn(40 * kTokenBytes), absl::Seconds(30));
  EXPECT_EQ(store.RoomIn(41 * kTokenBytes), absl::Seconds(50));
  EXPECT_EQ(store.counts().refused, 2u);
  now_ += absl::Seconds(30);
  EXPECT_EQ(store.RoomIn(40 * kTokenBytes), absl::ZeroDuration());
  EXPECT_TRUE(store.Admit(Prompt(40), "", absl::Seconds(30)).ok());  // lapsed ones make room by themselves
}

TEST_F(KvStoreTest, AReadersPromptIsChargedUntilItLetsGo) {
  KvStore store(100 * kTokenBytes, Clock());
  int changes = 0;
  store.SetObserver([&] { ++changes; });
  auto lease = *store.Admit(Prompt(100), "", absl::Seconds(30));
  std::shared_ptr<const KvPrompt> reader = *store.Find(lease->id(), "");
  changes = 0;
  lease.reset();
  EXPECT_GT(std::exchange(changes, 0), 0);  // though no byte is free
  EXPECT_TRUE(absl::IsResourceExhausted(store.Admit(Prompt(1), "", absl::Seconds(30)).status()));
  reader.reset();
  EXPECT_GT(changes, 0);
  EXPECT_TRUE(store.Admit(Prompt(100), "", absl::Seconds(30)).ok());
}

TEST_F(KvStoreTest, ReadersMayOutliveTheStore) {
  std::shared_ptr<const KvPrompt> reader;
  int changes = 0;
  {
    KvStore store(100 * kTokenBytes, Clock());
    store.SetObserver([&] { ++changes; });
    auto lease = *store.Admit(Prompt(100), "", absl::Seconds(30));
    reader = *store.Find(lease->id(), "");
  }
  EXPECT_EQ(reader->tokens(), 100);
  changes = 0;
  reader.reset();
  EXPECT_EQ(changes, 0) << "the observer may be gone with the store";
}

TEST_F(KvStoreTest, EachChangeIsTold) {
  KvStore store(100 * kTokenBytes, Clock());
  int changes = 0;
  store.SetObserver([&] { ++changes; });
  const auto told = [&] { return std::exchange(changes, 0) > 0; };
  auto prompt = Prompt(40);
  const auto lease = *store.Admit(prompt, "", absl::Seconds(30));
  EXPECT_TRUE(told());
  KeepAllValues(*prompt, TokenLayout::Make(LayoutKind::kStriped, 1, 40, 4).value());
  EXPECT_TRUE(told()) << "layers are there";
  store.Enter({.tenant = "", .block_tokens = 4, .hashes = std::string(10 * 32, 'x')}, *prompt);
  EXPECT_TRUE(told());
  store.CountTokens(0, 40);
  EXPECT_TRUE(told());
  ASSERT_TRUE(store.Renew(lease->id(), "", absl::Seconds(40)).ok());
  EXPECT_TRUE(told());
  ASSERT_TRUE(lease->Keep().ok());
  EXPECT_TRUE(told());
  now_ += absl::Seconds(40);
  store.EndLapsed();
  EXPECT_TRUE(told()) << "though the cache has all of its bytes";
}

TEST_F(KvStoreTest, ListsTheLiveLeasesOfATenant) {
  KvStore store(1000 * kTokenBytes, Clock());
  const auto running = *store.Admit(Prompt(10), "one", absl::Seconds(30));
  const auto kept = *store.Admit(Prompt(20), "one", absl::Seconds(30));
  const auto others = *store.Admit(Prompt(30), "two", absl::Seconds(30));
  ASSERT_TRUE(kept->Keep().ok());
  now_ += absl::Seconds(10);
  std::vector<KvStore::LeaseEnd> leases = store.LeasesOf("one");
  std::sort(leases.begin(), leases.end(),
            [](const auto& left, const auto& right) { return left.bytes < right.bytes; });
  ASSERT_EQ(leases.size(), 2u);
  EXPECT_EQ(leases[0].bytes, 10 * kTokenBytes);
  EXPECT_EQ(leases[0].ends_in, absl::ZeroDuration());  // it may end at any time
  EXPECT_EQ(leases[1].bytes, 20 * kTokenBytes);
  EXPECT_EQ(leases[1].ends_in, absl::Seconds(20));
  now_ += absl::Seconds(20);
  EXPECT_EQ(store.LeasesOf("one").size(), 1u);
  EXPECT_TRUE(store.LeasesOf("three").empty());
}

TEST_F(KvStoreTest, LeasesThatHaveLapsedMakeRoomBeforeAnybodySweeps) {
  KvStore store(100 * kTokenBytes, Clock());
  for (int turn = 0; turn < 2; ++turn) {
    auto lease = store.Admit(Prompt(100), "tenant", absl::Seconds(30));
    ASSERT_TRUE(lease.ok()) << lease.status();
    ASSERT_TRUE((*lease)->Keep().ok());
    auto prompt = Prompt(100);
    EXPECT_FALSE(store.AdmitToCache(prompt, prompt->bytes()));
    now_ += absl::Seconds(30);
    store.Release((*lease)->id(), "tenant");  // too late: it has ended by itself
    if (turn == 0) {
      EXPECT_TRUE(store.AdmitToCache(prompt, prompt->bytes()));
    }
  }
}

// What a cache holds makes room for who needs it, and not before; what a reader needs stays.
TEST_F(KvStoreTest, TheCacheHasTheRoomThatOthersLeave) {
  KvStore store(100 * kTokenBytes, Clock());
  const auto names = [](char prompt) { return NamesOf40(prompt); };
  Finish40(store, 'a');
  Finish40(store, 'b');
  EXPECT_EQ(store.PrefixTokens(names('a')), 40);
  EXPECT_EQ(store.counts().cached_bytes, 80 * kTokenBytes);
  EXPECT_EQ(store.counts().bytes, 80 * kTokenBytes);

  auto lease = *store.Admit(Prompt(60), "", absl::Seconds(30));  // a promise: nothing goes yet
  EXPECT_EQ(store.counts().cached_bytes, 80 * kTokenBytes);
  EXPECT_EQ(store.counts().bytes, 100 * kTokenBytes);
  EXPECT_TRUE(absl::IsResourceExhausted(store.Admit(Prompt(41), "", absl::Seconds(30)).status()));
  EXPECT_EQ(store.FindPrefix(names('b'), 0, All)->tokens(), 40);
  const auto reader = store.FindPrefix(names('a'), 0, All);
  EXPECT_EQ(reader->tokens(), 40);
  EXPECT_EQ(store.FindPrefix(names('b'), 0, All)->tokens(), 0);  // beside a, there is no room for both
  EXPECT_FALSE(store.AdmitToCache(Prompt(1), kTokenBytes));
  store.MakeRoom();
  EXPECT_EQ(store.PrefixTokens(names('b')), 0);
  EXPECT_EQ(store.PrefixTokens(names('a')), 40);
  EXPECT_EQ(store.counts().evictions, 1u);
  EXPECT_EQ(store.counts().evicted_bytes, 40u * kTokenBytes);
  lease.reset();
  EXPECT_EQ(store.counts().bytes, 40 * kTokenBytes);
}

TEST_F(KvStoreTest, WhatTheCacheWouldGiveUpIsRoom) {
  KvStore store(100 * kTokenBytes, Clock());
  Finish40(store, 'a');
  const auto lease = *store.Admit(Prompt(70), "", absl::Seconds(30));
  ASSERT_TRUE(lease->Keep().ok());
  EXPECT_EQ(store.RoomIn(30 * kTokenBytes), absl::ZeroDuration());
  EXPECT_EQ(store.RoomIn(31 * kTokenBytes), absl::Seconds(30));
}

TEST_F(KvStoreTest, APrefixThatAPromptBeginsWithStaysLonger) {
  KvStore store(100 * kTokenBytes, Clock());
  Finish40(store, 'a');
  Finish40(store, 'b');
  EXPECT_EQ(store.FindPrefix(NamesOf40('a'), 0, All)->tokens(), 40);
  const auto lease = *store.Admit(Prompt(60), "", absl::Seconds(30));
  store.MakeRoom();
  EXPECT_EQ(store.PrefixTokens(NamesOf40('a')), 40);
  EXPECT_EQ(store.PrefixTokens(NamesOf40('b')), 0);
}

// Of a run's K and V a follower holds all, and gives back the room of the tokens alone that it follows.
TEST_F(KvStoreTest, APrefixThatIsUsedInPartGivesBackThatPart) {
  KvStore store(100 * kTokenBytes, Clock());
  const KvBlockNames names = {.tenant = "", .block_tokens = 4, .hashes = std::string(10 * 32, 'x')};
  auto first = Prompt(40);
  ASSERT_TRUE(store.AdmitToCache(first, first->bytes()));
  KeepAllValues(*first, TokenLayout::Make(LayoutKind::kStriped, 1, 40, 4).value());
  store.Enter(names, *first);
  first.reset();
  const auto other = *store.Admit(Prompt(90), "", absl::Seconds(30));
  EXPECT_EQ(store.FindPrefix(names, kTokenBytes, All)->tokens(), 40);
  EXPECT_EQ(store.FindPrefix(names, kTokenBytes, [](int64_t) { return 32; })->tokens(), 32);
  EXPECT_EQ(store.FindPrefix(names, kTokenBytes, [](int64_t) { return 28; })->tokens(), 0);
  EXPECT_EQ(store.FindPrefix(names, 0, [](int64_t) { return 0; })->tokens(), 0);
}

// What is behind a prefix is charged once, and a lease that ends leaves what is cached.
TEST_F(KvStoreTest, APrefixIsChargedOnceAndOutlivesLeases) {
  KvStore store(100 * kTokenBytes, Clock());
  const KvBlockNames names = {.tenant = "t", .block_tokens = 4, .hashes = std::string(15 * 32, 'x')};
  KvBlockNames shorter = names;
  shorter.hashes.resize(10 * 32);
  auto first = Prompt(40);
  auto lease = *store.Admit(first, "t", absl::Seconds(30));
  KeepAllValues(*first, TokenLayout::Make(LayoutKind::kStriped, 2, 40, 4).value());
  store.Enter(shorter, *first);
  ASSERT_TRUE(lease->Keep().ok());
  first.reset();

  auto second = Prompt(60);
  auto other = *store.Admit(second, "t", absl::Seconds(30));
  EXPECT_EQ(store.counts().bytes, 100 * kTokenBytes);
  auto prefix = store.FindPrefix(names, kTokenBytes, All);
  ASSERT_EQ(prefix->tokens(), 40);
  KeepAllValues(*second, TokenLayout::Make(LayoutKind::kStriped, 2, 20, 4).value(), prefix);
  EXPECT_EQ(store.counts().bytes, 60 * kTokenBytes);
  store.Enter(names, *second);
  ASSERT_TRUE(other->Keep().ok());
  second.reset();
  prefix.reset();

  now_ += absl::Seconds(30);
  store.EndLapsed();
  EXPECT_TRUE(absl::IsNotFound(store.Find(lease->id(), "t").status()));
  EXPECT_EQ(store.counts().leases, 0);
  EXPECT_EQ(store.counts().bytes, 60 * kTokenBytes);
  EXPECT_EQ(store.PrefixTokens(names), 60);
  EXPECT_TRUE(store.Admit(Prompt(100), "t", absl::Seconds(30)).ok());  // all of it may go
}

TEST_F(KvStoreTest, WhatALeaseEndedEarlyIsNotCached) {
  KvStore store(100 * kTokenBytes, Clock());
  const KvBlockNames names = {.tenant = "", .block_tokens = 4, .hashes = std::string(2 * 32, 'x')};
  auto prompt = Prompt(10);
  auto lease = *store.Admit(prompt, "", absl::Seconds(30));
  const TokenLayout layout = TokenLayout::Make(LayoutKind::kStriped, 1, 10, 4).value();
  prompt->Begin(layout);
  KeepValues(*prompt, layout, 0, 0);
  store.Release(lease->id(), "");
  KeepValues(*prompt, layout, 0, 1);
  store.Enter(names, *prompt);
  EXPECT_EQ(store.PrefixTokens(names), 0);
}

// Prefills that wait, run, end, fail and are run again; clients that fetch, renew, release and die; readers
// that are slow: whatever the order, the budget holds, nothing is read after its lease, nothing is left.
TEST_F(KvStoreTest, TenThousandRandomLivesLeaveNothing) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  constexpr int64_t kBudgetTokens = 2000;
  KvStore store(kBudgetTokens * kTokenBytes, Clock());
  int changes = 0;
  store.SetObserver([&] { ++changes; });

  struct Life {
    std::shared_ptr<KvPrompt> prompt;  // the run's
    std::unique_ptr<KvLease> lease;    // while the prefill lives
    std::string id;
    std::string tenant;
    absl::Duration lasts;
    absl::Time expires = absl::InfiniteFuture();
    int64_t tokens = 0;
    bool ended = false;
  };
  std::vector<Life> lives;
  std::vector<std::pair<std::shared_ptr<const KvPrompt>, size_t>> readers;
  std::set<std::string> names;
  int admitted = 0, refused = 0, lapsed = 0;
  const auto check = [&] {
    int64_t held = 0;  // by whoever: leases, runs and readers
    std::set<const KvPrompt*> counted;
    for (const Life& life : lives) {
      if (life.prompt != nullptr && counted.insert(life.prompt.get()).second) held += life.prompt->bytes();
    }
    ASSERT_LE(store.counts().bytes, kBudgetTokens * kTokenBytes);
    ASSERT_GE(store.counts().bytes, held);
  };
  const auto live = [&](const Life& life) { return !life.ended && now_ < life.expires; };

  while (admitted < 10'000) {
    now_ += absl::Milliseconds(Draw<int>(random, 0, 400));
    const int what = Draw<int>(random, 0, 9);
    if (what <= 2) {
      Life life;
      life.tokens = Draw<int64_t>(random, 1, 400);
      life.tenant = Draw<int>(random, 0, 1) == 0 ? "a" : "b";
      life.lasts = absl::Milliseconds(Draw<int>(random, 100, 20'000));
      life.prompt = Prompt(life.tokens);
      auto lease = store.Admit(life.prompt, life.tenant, life.lasts);
      if (!lease.ok()) {
        ASSERT_TRUE(absl::IsResourceExhausted(lease.status()));
        ASSERT_TRUE(store.RoomIn(life.prompt->bytes()).has_value());
        ++refused;
        // Too many slow readers and long runs: the oldest of them end.
        if (!readers.empty()) readers.erase(readers.begin());
        for (Life& other : lives) {
          if (other.lease == nullptr) continue;
          other.lease.reset();
          other.prompt.reset();
          other.ended = true;
          break;
        }
        continue;
      }
      ++admitted;
      life.lease = *std::move(lease);
      life.id = life.lease->id();
      ASSERT_TRUE(names.insert(life.id).second);
      lives.push_back(std::move(life));
    } else if (!lives.empty()) {
      const auto index = Draw<size_t>(random, 0, lives.size() - 1);
      Life& life = lives[index];
      if (what == 3 && life.prompt != nullptr) {  // a run begins, perhaps again, and keeps some layers
        const TokenLayout layout = DrawTokenLayout(random, life.tokens);
        life.prompt->Begin(layout);
        for (int rank = 0; rank < layout.ranks(); ++rank) {
          ASSERT_EQ(KeepValues(*life.prompt, layout, rank, 0), !life.ended);
        }
      } else if (what == 4 && life.lease != nullptr) {  // it is done
        const auto rest = life.lease->Keep();
        ASSERT_EQ(rest.ok(), !life.ended);
        if (rest.ok()) life.expires = now_ + *rest;
        life.lease.reset();
        life.prompt.reset();
      } else if (what == 5 && life.lease != nullptr) {  // it fails
        life.lease.reset();
        life.prompt.reset();
        life.ended = true;
      } else if (what == 6) {
        const auto lasts = absl::Milliseconds(Draw<int>(random, 1, 20'000));
        const auto rest = store.Renew(life.id, life.tenant, lasts);
        ASSERT_EQ(rest.ok(), live(life));
        if (rest.ok() && life.lease == nullptr) life.expires = now_ + lasts;
      } else if (what == 7) {
        store.Release(life.id, life.tenant);
        if (live(life)) life.ended = true;
      } else if (what == 8) {
        const auto found = store.Find(life.id, life.tenant);
        ASSERT_EQ(found.ok(), live(life));
        ASSERT_FALSE(store.Find(life.id, "c").ok());
        if (found.ok()) readers.emplace_back(*found, index);
        if (readers.size() > 3) readers.erase(readers.begin());
      } else if (what == 9) {
        store.EndLapsed();
        // Whoever has ended and is nobody's any more is forgotten here, too.
        if (lives.size() > 100) {
          std::erase_if(lives, [&](const Life& each) { return !live(each) && each.lease == nullptr; });
          readers.clear();
        }
      }
    }
    check();
    if (HasFatalFailure()) FAIL() << "seed " << seed;
  }
  EXPECT_GT(refused, 100);
  lives.clear();
  readers.clear();
  now_ += absl::Hours(1);
  store.EndLapsed();
  lapsed = static_cast<int>(store.counts().lapsed);
  EXPECT_GT(lapsed, 100);
  EXPECT_EQ(store.counts().refused, static_cast<uint64_t>(refused));
  EXPECT_EQ(store.counts().bytes, 0);
  EXPECT_EQ(store.counts().leases, 0);
  EXPECT_GT(changes, 10'000);
}

// What a client calls a lease stands in logs: its begin, and no control characters.
TEST(LeaseNameTest, ShowsItsBegin) {
  EXPECT_EQ(ShownLease("0123456789abcdef"), "01234567…");
  EXPECT_EQ(ShownLease("a\n\x1b[2J0123"), "a\\n\\x1b[2J01…");
}

// For ThreadSanitizer.
TEST_F(KvStoreTest, IsUsedFromManyThreads) {
  KvStore store(100 * kTokenBytes);
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&store, thread] {
      const TokenLayout layout = TokenLayout::Make(LayoutKind::kStriped, 2, 40, 4).value();
      for (int round = 0; round < 200; ++round) {
        auto prompt = Prompt(40);
        auto lease = store.Admit(prompt, "", absl::Milliseconds(thread));
        if (!lease.ok()) continue;
        KeepAllValues(*prompt, layout);
        EXPECT_TRUE(store.Find((*lease)->id(), "").ok());
        EXPECT_TRUE((*lease)->Keep().ok());
        if (thread % 2 == 0) store.Release((*lease)->id(), "");
        store.EndLapsed();
        EXPECT_LE(store.counts().bytes, store.budget_bytes());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  absl::SleepFor(absl::Milliseconds(10));
  store.EndLapsed();
  EXPECT_EQ(store.counts().bytes, 0);
}

}  // namespace
}  // namespace meshfill
