// Leases of a real pool with random lives: clients that go away at any step, workers that are lost, time. In
// the end nothing is left, and nothing was served after its lease. MESHFILL_LEASES=1000 lives more of them.
#include <cstdlib>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "tests/engine/random_seed.h"
#include "tests/server/pool/pool_kv_fixture.h"

namespace meshfill {
namespace {

constexpr int64_t kTokenBytes = 2 * kLayers * kKvHeads * kHeadDim * 4;
constexpr int64_t kRoomTokens = 4000;  // of a worker

int LeaseCount() {
  const char* text = std::getenv("MESHFILL_LEASES");
  return text != nullptr ? std::atoi(text) : 40;
}

class PoolLeasesTest : public PoolKvTest {
 protected:
  void CheckBudgets() {
    const int64_t most = kRoomTokens * kTokenBytes;
    EXPECT_LE(counts().bytes, std::ssize(workers_) * most);
    for (const auto& worker : workers_) {
      if (worker != nullptr) {
        EXPECT_LE(worker->kv().bytes, most);
      }
    }
  }
  // Reads a part or all, and goes away.
  void Read(const std::string& lease, int parts) {
    const auto context = client_->Context();
    const auto stream = client_->stub().FetchKv(context.get(), Request(lease));
    v1::KvPart part;
    while (parts-- > 0 && stream->Read(&part)) {
    }
    context->TryCancel();
    stream->Finish();
  }
  // A client that goes away while its prompt waits or runs, perhaps in the middle of a fetch. Its lease, if
  // it heard of one.
  std::string LeaveEarly(const std::vector<uint32_t>& prompt, bool fetches) {
    const auto context = client_->Context();
    const auto stream = client_->stub().Prefill(context.get());
    v1::PrefillRequest header;
    *header.mutable_header() = client_->Header(prompt.size());
    header.mutable_header()->mutable_kv()->set_lease_seconds(1);  // of a prefill that was faster than it
    stream->Write(header);
    v1::PrefillRequest tokens;
    tokens.mutable_tokens()->mutable_ids()->Add(prompt.begin(), prompt.end());
    stream->Write(tokens);
    stream->WritesDone();
    v1::PrefillEvent event;
    std::string lease;
    while (lease.empty() && stream->Read(&event)) lease = event.accepted().kv_lease();
    if (fetches && !lease.empty()) Read(lease, 1);
    context->TryCancel();
    stream->Finish();
    return lease;
  }
  void ExpectGone(const std::string& lease) {
    EXPECT_TRUE(absl::IsNotFound(client_->Fetch(Request(lease)).status)) << lease;
  }
};

TEST_F(PoolLeasesTest, ATenantKeepsNoMoreThanItMay) {
  of_leader_.push_back(absl::StrCat("tenant_limits.max_kv_bytes=", 100 * kTokenBytes, "B"));
  StartPool({1, 1});
  const auto keep = [&](KvClient& client, int64_t tokens) {
    return client.Prefill(client.Header(static_cast<size_t>(tokens)),
                          std::vector<uint32_t>(static_cast<size_t>(tokens), 7));
  };
  EXPECT_TRUE(absl::IsResourceExhausted(keep(*client_, 101).status()));
  const auto kept = keep(*client_, 60);
  ASSERT_TRUE(kept.ok()) << kept.status();
  EXPECT_TRUE(absl::IsResourceExhausted(keep(*client_, 41).status()));
  EXPECT_TRUE(keep(*client_, 40).ok());
  EXPECT_TRUE(client_->Release(kept->kv().lease()).ok());
  EXPECT_TRUE(keep(*client_, 60).ok());
}

TEST_F(PoolLeasesTest, RandomLivesLeaveNothing) {
  const uint64_t seed = TestSeed();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  const std::vector<std::string> room = {absl::StrCat("kv.memory_bytes=", kRoomTokens * kTokenBytes, "B")};
  StartPool({1, 1}, room);
  std::map<std::string, absl::Time> lapse;  // of leases that nobody ends: when they have at the latest
  int refused = 0, lost = 0, served = 0;
  const int leases = LeaseCount();
  int lives = 0;  // more where chance or a slow machine lets few be read
  for (; lives < leases || (served < leases / 40 && lives < 3 * leases); ++lives) {
    std::vector<uint32_t> prompt(Draw<size_t>(random, 1, 1200));
    for (uint32_t& id : prompt) id = static_cast<uint32_t>(random() % 4);  // some begin alike
    if (Draw<int>(random, 0, 5) == 0) {
      const std::string lease = LeaveEarly(prompt, Draw<int>(random, 0, 1) == 0);
      if (!lease.empty()) {
        EXPECT_TRUE(Eventually([&] { return absl::IsNotFound(client_->Fetch(Request(lease)).status); }));
      }
      continue;
    }
    v1::PrefillHeader header = client_->Header(prompt.size());
    header.mutable_kv()->set_lease_seconds(Draw<uint32_t>(random, 1, 2));
    const absl::Time earliest = MonotonicNow() + absl::Seconds(header.kv().lease_seconds());
    const auto result = client_->Prefill(header, prompt);
    if (!result.ok()) {
      EXPECT_TRUE(absl::IsResourceExhausted(result.status())) << result.status();
      ++refused;
      absl::SleepFor(absl::Milliseconds(200));  // leases lapse
      continue;
    }
    const std::string& lease = result->kv().lease();
    const absl::Time ends = MonotonicNow() + absl::Seconds(header.kv().lease_seconds());
    lapse[lease] = ends;
    // Whether it is served; NOT_FOUND where the machine stood still for the lease's seconds.
    const auto is_served = [&](const absl::Status& status) {
      EXPECT_TRUE(status.ok() || (absl::IsNotFound(status) && MonotonicNow() >= earliest)) << status;
      return status.ok();
    };
    const int fate = Draw<int>(random, 0, 4);
    if (fate == 0) Read(lease, Draw<int>(random, 0, 2));
    if (fate == 1 && is_served(client_->Renew(lease, 1).status())) {
      lapse[lease] = MonotonicNow() + absl::Seconds(1);
    }
    if (fate == 2 && is_served(client_->Fetch(Request(lease)).status)) ++served;
    if (fate == 3) {
      EXPECT_TRUE(client_->Release(lease).ok());
      lapse.erase(lease);
      ExpectGone(lease);
    }
    for (auto old = lapse.begin(); old != lapse.end();) {
      const bool over = MonotonicNow() > old->second + absl::Milliseconds(300);
      if (over) ExpectGone(old->first);
      old = over ? lapse.erase(old) : std::next(old);
    }
    CheckBudgets();
    if (Draw<int>(random, 0, 15) > 0) continue;
    ++lost;
    workers_[Draw<size_t>(random, 0, 1)].reset();
    ASSERT_TRUE(Eventually([&] { return engine_->ranks() == 1; }));
    for (auto& worker : workers_) {
      if (worker != nullptr) continue;
      worker =
          std::make_unique<TestWorker>(engine_->control_address(), absl::StrCat("again", lives), 1, room);
    }
    ASSERT_TRUE(Eventually([&] { return engine_->ranks() == 2; }));
  }
  EXPECT_TRUE(Eventually([&] { return counts().leases == 0; }));
  for (const auto& [lease, when] : lapse) ExpectGone(lease);
  // What stays is the cache's, and the workers have what the leader knows of.
  EXPECT_EQ(counts().bytes, counts().cached_bytes);
  EXPECT_TRUE(Eventually([&] {
    int64_t bytes = 0;
    for (const auto& worker : workers_) bytes += worker->kv().bytes;
    return bytes == counts().bytes;
  }));
  for (const auto& worker : workers_) {
    EXPECT_TRUE(Eventually([&] { return worker->kv().leases == 0; }));
  }
  std::printf("%d leases: %d refused, %d read whole, %d workers lost\n", lives, refused, served, lost);
  EXPECT_GE(served, leases / 40);
  // Leases last for seconds: where prefills are fast, more of them live at once.
  EXPECT_LT(refused, lives / 2);
}

TEST_F(PoolLeasesTest, ReadersHearWhatIsLostInTheMiddleOfAPrefill) {
  StartPool({1, 1});
  const std::vector<uint32_t> prompt(6000, 7);
  const auto context = client_->Context();
  const auto prefill = client_->stub().Prefill(context.get());
  v1::PrefillRequest request;
  *request.mutable_header() = client_->Header(prompt.size());
  prefill->Write(request);
  request.mutable_tokens()->mutable_ids()->Add(prompt.begin(), prompt.end());
  prefill->Write(request);
  prefill->WritesDone();
  v1::PrefillEvent event;
  while (!event.has_accepted()) ASSERT_TRUE(prefill->Read(&event));
  const std::string lease = event.accepted().kv_lease();
  const auto fetch_context = client_->Context();
  const auto stream = client_->stub().FetchKv(fetch_context.get(), Request(lease));
  v1::KvPart part;
  ASSERT_TRUE(stream->Read(&part));  // a layer is there: others still run
  const absl::Time begin = MonotonicNow();
  workers_[1].reset();
  while (stream->Read(&part)) {
  }
  const absl::Status status = FromGrpcStatus(stream->Finish());
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "w1")) << status;
  EXPECT_LT(MonotonicNow() - begin, absl::Seconds(15));
  // The prefill has its answer, and K and V can be fetched; or both say that they are lost.
  while (prefill->Read(&event)) {
  }
  EXPECT_TRUE(prefill->Finish().ok());
  ASSERT_TRUE(event.has_result());
  const absl::Status after = client_->Fetch(Request(lease)).status;
  EXPECT_TRUE(after.ok() || absl::IsUnavailable(after)) << after;
}

}  // namespace
}  // namespace meshfill
