// K and V of a pool of workers: what FetchKv gives is what an embedded pool computes by the same plan, byte
// for byte, through the front-end and from the holders; and what becomes of leases when workers, clients and
// time go.
#include <cstring>

#include "absl/strings/match.h"
#include "engine/embedded_engine.h"
#include "engine/kv/crc32c.h"
#include "tests/engine/kept_kv.h"
#include "tests/engine/random_seed.h"
#include "tests/server/pool/pool_kv_fixture.h"

namespace meshfill {
namespace {

// A range as the API defines it, from K and V in the order of tokens.
std::string Expected(const KeptKv& kept, const v1::FetchKvRequest& request, int layer, int64_t tokens) {
  const auto row_bytes = static_cast<size_t>(kept.shape.head_bytes());
  const auto heads = static_cast<int64_t>(request.heads());
  const int64_t page_tokens = std::max<int64_t>(1, request.page_tokens());
  const bool pages = request.layout() != v1::KV_LAYOUT_TOKENS;
  const int64_t padded = (tokens + page_tokens - 1) / page_tokens * page_tokens;
  std::string bytes(static_cast<size_t>(2 * padded * heads) * row_bytes, '\0');
  for (int64_t token = 0; token < tokens; ++token) {
    for (int64_t head = 0; head < heads; ++head) {
      for (int half = 0; half < 2; ++half) {
        const int64_t page = token / page_tokens, in_page = token % page_tokens;
        int64_t to = (half * tokens + token) * heads + head;
        if (request.layout() == v1::KV_LAYOUT_PAGES_HND)
          to = 2 * ((page * heads + head) * page_tokens + in_page) + half;
        if (request.layout() == v1::KV_LAYOUT_PAGES_NHD)
          to = 2 * ((page * page_tokens + in_page) * heads + head) + half;
        const int64_t from = (static_cast<int64_t>(request.first_token()) + token) * kept.shape.kv_heads +
                             request.first_head() + head;
        const auto& values = half == 0 ? kept.layers[layer].k : kept.layers[layer].v;
        std::memcpy(&bytes[static_cast<size_t>(to) * row_bytes], &values[from * kept.shape.head_bytes()],
                    row_bytes);
      }
    }
  }
  EXPECT_TRUE(pages || padded == tokens);
  return bytes;
}

// The same bytes; or, where the schedules differ, as the links do, the same numbers but for the last digits.
void ExpectSame(std::string_view got, std::string_view want, bool to_the_byte, const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  if (to_the_byte) {
    EXPECT_TRUE(got == want) << what;
    return;
  }
  for (size_t at = 0; at < got.size(); at += sizeof(float)) {
    float one = 0, other = 0;
    std::memcpy(&one, got.data() + at, sizeof one);
    std::memcpy(&other, want.data() + at, sizeof other);
    ASSERT_NEAR(one, other, 1e-4) << what;
  }
}

TEST_F(PoolKvTest, FetchesTheBytesThatAnEmbeddedPoolComputes) {
  std::mt19937_64 random(TestSeed());
  int to_the_byte = 0, rounds = 0;
  for (const std::vector<int>& pool :
       std::vector<std::vector<int>>{{1}, {1, 1}, {2, 1}, {1, 1, 1, 1}, {2, 2, 2}, {3, 3, 3}, {4, 4, 4, 4}}) {
    int ranks = 0;
    for (const int of_worker : pool) ranks += of_worker;
    StartPool(pool);
    auto embedded = LoadEmbeddedEngine({.model_path = Folder(),
                                        .ranks = ranks,
                                        .dtype = DType::kF32,
                                        .peak_flops = 1e12,
                                        .threads = 1,
                                        .speed = PoolSpeed()});
    ASSERT_TRUE(embedded.ok()) << embedded.status();
    for (int round = 0; round < 3; ++round) {
      std::vector<uint32_t> prompt(Draw<int>(random, 1, 500));
      for (uint32_t& id : prompt) id = static_cast<uint32_t>(random() % 300);
      const auto tokens = static_cast<int64_t>(prompt.size());
      const int heads = ranks % 2 == 0 ? Draw<int>(random, 1, 2) : 1;
      const std::vector<Tile> tiles = TilesOf(ranks / heads);
      const Tile tile = tiles[random() % tiles.size()];
      const auto kind = static_cast<LayoutKind>(Draw<int>(random, 0, 2));
      const int64_t stripe = Draw<int>(random, 1, 70);
      const PrefillOptions options = {.tile = tile, .heads = heads, .layout = kind, .stripe = stripe};
      const auto expected = PrefillKeepingKv(**embedded, prompt, options);
      ASSERT_TRUE(expected.ok()) << expected.status();
      const auto choice = engine_->MakePlan(tokens, options);
      ASSERT_TRUE(choice.ok()) << choice.status();
      const bool same_plan = choice->plan.schedule == expected->plan.schedule;
      const std::string what = expected->plan.DebugString();
      ++rounds;
      to_the_byte += same_plan ? 1 : 0;

      v1::PrefillHeader header = client_->Header(prompt.size());
      header.mutable_plan()->mutable_tile()->set_a(static_cast<uint32_t>(tile.a));
      header.mutable_plan()->mutable_tile()->set_b(static_cast<uint32_t>(tile.b));
      header.mutable_plan()->set_heads(static_cast<uint32_t>(heads));
      header.mutable_plan()->set_stripe(static_cast<uint32_t>(stripe));
      header.mutable_plan()->set_layout(kind == LayoutKind::kStriped  ? v1::LAYOUT_STRIPED
                                        : kind == LayoutKind::kZigzag ? v1::LAYOUT_ZIGZAG
                                                                      : v1::LAYOUT_CONTIGUOUS);
      const auto result = client_->Prefill(header, prompt);
      ASSERT_TRUE(result.ok()) << result.status();
      const v1::KvManifest& manifest = result->kv();
      EXPECT_EQ(manifest.bytes(), static_cast<uint64_t>(2 * kLayers * tokens * kKvHeads * kHeadDim * 4));

      for (int fetch = 0; fetch < 5; ++fetch) {
        const v1::FetchKvRequest request = RandomFetch(random, manifest.lease(), expected->kv.shape, tokens);
        const auto count = static_cast<int64_t>(request.tokens());
        const Fetched fetched = client_->Fetch(request);
        ASSERT_TRUE(fetched.status.ok()) << fetched.status;
        ASSERT_EQ(fetched.k.size(), request.layers());
        for (uint32_t layer = 0; layer < request.layers(); ++layer) {
          const std::string want =
              Expected(expected->kv, request, static_cast<int>(request.first_layer() + layer), count);
          ExpectSame(fetched.k[layer] + fetched.v[layer] + fetched.pages[layer], want, same_plan, what);
        }
      }

      // The holders have each token once, and give what they say they have.
      std::vector<std::string> k(kLayers,
                                 std::string(static_cast<size_t>(tokens * kKvHeads * kHeadDim * 4), 0));
      std::set<std::string> addresses;
      for (const v1::KvHolder& holder : manifest.holders()) addresses.insert(holder.address());
      int64_t fetched_tokens = 0;
      for (const std::string& address : addresses) {
        const auto context = client_->Context();
        const auto stub = v1::PrefillService::NewStub(Channel(address));
        const auto stream = stub->FetchKv(context.get(), Request(manifest.lease()));
        v1::KvPart part;
        while (stream->Read(&part)) {
          EXPECT_EQ(part.crc32c(), Crc32c(part.k() + part.v()));
          for (uint64_t token = part.first_token(); token < part.first_token() + part.tokens(); ++token) {
            bool told = false;
            for (const v1::KvHolder& holder : manifest.holders()) {
              if (holder.address() != address || token < holder.first_token()) continue;
              const uint64_t distance = token - holder.first_token();
              told = told || (holder.step_tokens() == 0 ? distance : distance % holder.step_tokens()) <
                                 holder.run_tokens();
            }
            EXPECT_TRUE(told) << token;
          }
          k[part.layer()].replace(part.first_token() * kKvHeads * kHeadDim * 4, part.k().size(), part.k());
          fetched_tokens += static_cast<int64_t>(part.tokens());
        }
        EXPECT_TRUE(stream->Finish().ok());
      }
      EXPECT_EQ(fetched_tokens, tokens * kLayers);
      for (int layer = 0; layer < kLayers; ++layer) {
        const std::vector<std::byte>& want = expected->kv.layers[layer].k;
        ExpectSame(k[layer], {reinterpret_cast<const char*>(want.data()), want.size()}, same_plan, what);
      }
      EXPECT_TRUE(client_->Release(manifest.lease()).ok());
      EXPECT_TRUE(client_->Release(manifest.lease()).ok());
      EXPECT_TRUE(absl::IsNotFound(client_->Fetch(Request(manifest.lease())).status));
    }
    EXPECT_EQ(counts().leases, 0);
    EXPECT_EQ(counts().bytes, counts().cached_bytes);
    StopPool();
  }
  EXPECT_GT(to_the_byte, rounds / 3);
}

TEST_F(PoolKvTest, LeasesAreRenewedAndLapseAndAreOfTheirTenant) {
  StartPool({1, 1});
  const auto result = Prefill(100, /*lease_seconds=*/3);
  const absl::Time first_end = MonotonicNow() + absl::Seconds(3);
  ASSERT_TRUE(result.ok()) << result.status();
  const std::string lease = result->kv().lease();
  KvClient other(Channel(front_end_->address()), "other");
  EXPECT_TRUE(absl::IsNotFound(other.Fetch(Request(lease)).status));
  EXPECT_TRUE(absl::IsNotFound(other.Renew(lease, 5).status()));
  EXPECT_TRUE(other.Release(lease).ok());  // nothing of its own
  KvClient at_holder(Channel(result->kv().holders(0).address()), "other");
  EXPECT_TRUE(absl::IsNotFound(at_holder.Fetch(Request(lease)).status));
  EXPECT_TRUE(client_->Fetch(Request(lease)).status.ok());
  EXPECT_EQ(client_->Renew(lease, 6).value(), 6);
  absl::SleepFor(first_end + absl::Milliseconds(500) - MonotonicNow());
  EXPECT_TRUE(client_->Fetch(Request(lease)).status.ok());
  EXPECT_TRUE(Eventually([&] { return absl::IsNotFound(client_->Fetch(Request(lease)).status); }));
  KvClient holder(Channel(result->kv().holders(1).address()));
  EXPECT_TRUE(Eventually([&] { return absl::IsNotFound(holder.Fetch(Request(lease)).status); }));
  EXPECT_TRUE(absl::IsNotFound(client_->Renew(lease, 3).status()));
  EXPECT_EQ(counts().bytes, counts().cached_bytes);
}

TEST_F(PoolKvTest, MetricsSayWhatEachWorkerKeeps) {
  StartPool({1, 1});
  const auto has = [&](const std::string& line) { return absl::StrContains(metrics_.Text(), line + "\n"); };
  EXPECT_TRUE(Eventually([&] { return has("meshfill_kv_worker_leases{worker=\"w1\"} 0"); }));
  const auto result = Prefill(200);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_TRUE(Eventually([&] { return has("meshfill_kv_worker_leases{worker=\"w1\"} 1"); }));
  ASSERT_TRUE(client_->Release(result->kv().lease()).ok());
  EXPECT_TRUE(Eventually([&] { return has("meshfill_kv_worker_leases{worker=\"w1\"} 0"); }));
}

TEST_F(PoolKvTest, RefusesWhatAWorkerHasNoRoomFor) {
  // 100 tokens on two ranks: 50 · 3 layers · 2 · 2 heads · 16 · 4 bytes = 38,400 each.
  StartPool({1, 1}, {"kv.memory_bytes=64KiB"});
  const auto first = Prefill(100);
  ASSERT_TRUE(first.ok()) << first.status();
  const auto second = Prefill(100);
  EXPECT_TRUE(absl::IsResourceExhausted(second.status())) << second.status();
  EXPECT_TRUE(absl::StrContains(second.status().message(), "worker w")) << second.status();
  EXPECT_TRUE(absl::IsResourceExhausted(Prefill(10000).status()));
  EXPECT_TRUE(client_->Release(first->kv().lease()).ok());
  const auto third = Prefill(100);
  EXPECT_TRUE(third.ok()) << third.status();
  EXPECT_EQ(counts().refused, 2u);
}

TEST_F(PoolKvTest, ALostWorkerIsNamedAndItsLeasesAreUnavailable) {
  StartPool({1, 1});
  const auto lost = Prefill(200, 60);
  ASSERT_TRUE(lost.ok()) << lost.status();
  workers_[1].reset();
  ASSERT_TRUE(Eventually([&] { return engine_->ranks() == 1; }));
  const absl::Status status = client_->Fetch(Request(lost->kv().lease())).status;
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(),
                                "worker w1, which held the K and V of rank 1, is lost: its stream ended"))
      << status;
  EXPECT_EQ(counts().bytes, 0);  // what is left of it is of no use

  // Who is left keeps on: a later membership leaves what living workers hold readable.
  const auto kept = Prefill(200, 60);
  ASSERT_TRUE(kept.ok()) << kept.status();
  AddWorker(1);
  ASSERT_TRUE(Eventually([&] { return engine_->ranks() == 2; }));
  const auto wider = Prefill(200, 60);
  ASSERT_TRUE(wider.ok()) << wider.status();
  EXPECT_TRUE(client_->Fetch(Request(kept->kv().lease())).status.ok());
  EXPECT_TRUE(client_->Fetch(Request(wider->kv().lease())).status.ok());
  EXPECT_TRUE(client_->Release(lost->kv().lease()).ok());
  EXPECT_TRUE(absl::IsNotFound(client_->Fetch(Request(lost->kv().lease())).status));
}

TEST_F(PoolKvTest, ADrainingWorkerStaysForItsLeases) {
  StartPool({1, 1});
  const auto result = Prefill(200, 60);
  ASSERT_TRUE(result.ok()) << result.status();
  workers_[0]->Drain();
  ASSERT_TRUE(Eventually([&] { return engine_->ranks() == 1; }));
  EXPECT_TRUE(client_->Fetch(Request(result->kv().lease())).status.ok());
  absl::SleepFor(absl::Milliseconds(300));
  EXPECT_FALSE(workers_[0]->gone());
  EXPECT_TRUE(client_->Release(result->kv().lease()).ok());
  EXPECT_TRUE(Eventually([&] { return workers_[0]->gone(); }));
}

TEST_F(PoolKvTest, WorkersSayWhatTheyKeep) {
  StartPool({1, 1});
  const auto result = Prefill(200, 60);
  ASSERT_TRUE(result.ok()) << result.status();
  int64_t bytes = 0;
  for (const auto& worker : workers_) {
    const WorkerLoad load = worker->load();
    EXPECT_TRUE(load.member);
    EXPECT_EQ(load.kv_leases, 1);
    EXPECT_GT(load.kv_bytes, 0);
    EXPECT_LE(load.kv_bytes, load.kv_max_bytes);
    bytes += load.kv_bytes;
  }
  EXPECT_EQ(static_cast<uint64_t>(bytes), result->kv().bytes());
}

TEST_F(PoolKvTest, SlowReadersAreBoundedAndOthersAreServed) {
  of_leader_ = {"limits.result_timeout=10m"};
  StartPool({1, 1}, of_leader_);
  const auto result = Prefill(8000, 600);  // 6 MB
  ASSERT_TRUE(result.ok()) << result.status();
  struct Slow {
    std::unique_ptr<grpc::ClientContext> context;
    std::unique_ptr<v1::PrefillService::Stub> stub;
    std::unique_ptr<grpc::ClientReader<v1::KvPart>> stream;
  };
  std::vector<Slow> slow;
  v1::KvPart part;
  for (int i = 0; i < 30; ++i) {
    Slow& each = slow.emplace_back();
    each.context = client_->Context();
    each.stub = v1::PrefillService::NewStub(Channel(front_end_->address()));
    each.stream = each.stub->FetchKv(each.context.get(), Request(result->kv().lease()));
    ASSERT_TRUE(each.stream->Read(&part));
  }
  const Fetched fetched = client_->Fetch(Request(result->kv().lease()));
  EXPECT_TRUE(fetched.status.ok()) << fetched.status;
  for (size_t i = 1; i < slow.size(); ++i) {
    slow[i].context->TryCancel();
    EXPECT_FALSE(slow[i].stream->Finish().ok());
  }
  // The first goes on where it was; after the lease has ended, it gets no more than what is on its way.
  ASSERT_TRUE(slow[0].stream->Read(&part));
  EXPECT_TRUE(client_->Release(result->kv().lease()).ok());
  while (slow[0].stream->Read(&part)) {
  }
  EXPECT_TRUE(absl::IsNotFound(FromGrpcStatus(slow[0].stream->Finish())));
}

}  // namespace
}  // namespace meshfill
