// FetchKv over gRPC gives what an embedded pool computes, byte for byte: any numbers of ranks, tiles, head
// groups and layouts of tokens.
#include <filesystem>

#include "engine/embedded_engine.h"
#include "engine/model/make_model.h"
#include "server/api/front_end.h"
#include "server/config/config.h"
#include "tests/engine/kept_kv.h"
#include "tests/engine/random_seed.h"
#include "tests/server/api/kv_client.h"

namespace meshfill {
namespace {

std::string MakeTestModel() {
  const std::string folder = testing::TempDir() + "/kv_embedded";
  std::filesystem::remove_all(folder);
  const absl::Status status = MakeModel({.family = ModelFamily::kQwen3,
                                         .layers = 3,
                                         .hidden = 64,
                                         .intermediate = 96,
                                         .q_heads = 4,
                                         .kv_heads = 2,
                                         .head_dim = 16,
                                         .vocab = 300,
                                         .context_tokens = 4096,
                                         .dtype = DType::kF32,
                                         .seed = 7},
                                        folder);
  EXPECT_TRUE(status.ok()) << status;
  return folder;
}

// One element's row, [head_dim] bytes, of a fetched layer.
std::string_view RowOf(const Fetched& fetched, const v1::FetchKvRequest& request, const KvShape& shape,
                       int layer, int half, int64_t token, int head) {
  const auto row_bytes = static_cast<size_t>(shape.head_bytes());
  const auto heads = static_cast<int64_t>(request.heads());
  if (request.layout() == v1::KV_LAYOUT_TOKENS) {
    const std::string& bytes = half == 0 ? fetched.k[layer] : fetched.v[layer];
    return std::string_view(bytes).substr((token * heads + head) * row_bytes, row_bytes);
  }
  const int64_t page_tokens = request.page_tokens(), page = token / page_tokens,
                in_page = token % page_tokens;
  const int64_t row = request.layout() == v1::KV_LAYOUT_PAGES_HND
                          ? (page * heads + head) * page_tokens + in_page
                          : (page * page_tokens + in_page) * heads + head;
  return std::string_view(fetched.pages[layer]).substr((2 * row + half) * row_bytes, row_bytes);
}

TEST(KvEmbeddedTest, FetchesTheBytesThatTheRanksComputed) {
  std::mt19937_64 random(TestSeed());
  const std::string folder = MakeTestModel();
  for (int ranks = 1; ranks <= 16; ++ranks) {
    for (const DType dtype : {DType::kF32, DType::kBf16}) {
      auto loaded = LoadEmbeddedEngine(
          {.model_path = folder, .ranks = ranks, .dtype = dtype, .peak_flops = 1e12, .speed = PoolSpeed()});
      ASSERT_TRUE(loaded.ok()) << loaded.status();
      PrefillEngine& engine = **loaded;
      const auto config = LoadConfig("", std::vector<std::string>{"listen=127.0.0.1:0"});
      Metrics metrics;
      auto front_end = FrontEnd::Start(*config, metrics);
      ASSERT_TRUE(front_end.ok()) << front_end.status();
      (*front_end)->Open(*std::move(loaded));
      KvClient client(grpc::CreateChannel((*front_end)->address(), grpc::InsecureChannelCredentials()));

      for (int round = 0; round < 2; ++round) {
        std::vector<uint32_t> prompt(Draw<int>(random, 1, 700));
        for (uint32_t& id : prompt) id = static_cast<uint32_t>(random() % 300);
        const auto tokens = static_cast<int64_t>(prompt.size());
        std::vector<int> head_groups;
        for (const int h : {1, 2, 4}) {
          if (ranks % h == 0) head_groups.push_back(h);
        }
        const int heads = head_groups[random() % head_groups.size()];
        const std::vector<Tile> tiles = TilesOf(ranks / heads);
        const Tile tile = tiles[random() % tiles.size()];
        const auto layout = static_cast<LayoutKind>(Draw<int>(random, 0, 2));
        const int64_t stripe = Draw<int>(random, 1, 70);

        const auto expected = PrefillKeepingKv(
            engine, prompt, {.tile = tile, .heads = heads, .layout = layout, .stripe = stripe});
        ASSERT_TRUE(expected.ok()) << expected.status();
        v1::PrefillHeader header = client.Header(prompt.size());
        header.mutable_plan()->mutable_tile()->set_a(static_cast<uint32_t>(tile.a));
        header.mutable_plan()->mutable_tile()->set_b(static_cast<uint32_t>(tile.b));
        header.mutable_plan()->set_heads(static_cast<uint32_t>(heads));
        header.mutable_plan()->set_stripe(static_cast<uint32_t>(stripe));
        header.mutable_plan()->set_layout(layout == LayoutKind::kStriped  ? v1::LAYOUT_STRIPED
                                          : layout == LayoutKind::kZigzag ? v1::LAYOUT_ZIGZAG
                                                                          : v1::LAYOUT_CONTIGUOUS);
        const auto result = client.Prefill(header, prompt);
        ASSERT_TRUE(result.ok()) << result.status();

        for (int fetch = 0; fetch < 4; ++fetch) {
          const KvShape& shape = expected->kv.shape;
          const v1::FetchKvRequest request = RandomFetch(random, result->kv().lease(), shape, tokens);
          const auto first = static_cast<int64_t>(request.first_token());
          const Fetched fetched = client.Fetch(request);
          ASSERT_TRUE(fetched.status.ok()) << fetched.status;
          ASSERT_EQ(fetched.k.size(), request.layers());
          for (uint32_t layer = 0; layer < request.layers(); ++layer) {
            const KeptKv::Layer& kept = expected->kv.layers[request.first_layer() + layer];
            for (int64_t token = 0; token < static_cast<int64_t>(request.tokens()); ++token) {
              for (uint32_t head = 0; head < request.heads(); ++head) {
                const int64_t row = (first + token) * shape.kv_heads + request.first_head() + head;
                for (int half = 0; half < 2; ++half) {
                  const std::string_view got = RowOf(fetched, request, shape, static_cast<int>(layer), half,
                                                     token, static_cast<int>(head));
                  const std::byte* const want = &(half == 0 ? kept.k : kept.v)[row * shape.head_bytes()];
                  ASSERT_EQ(got.size(), static_cast<size_t>(shape.head_bytes()));
                  ASSERT_EQ(std::memcmp(got.data(), want, got.size()), 0)
                      << expected->plan.DebugString() << ", layer " << layer << ", token " << first + token;
                }
              }
            }
          }
        }
        EXPECT_TRUE(client.Release(result->kv().lease()).ok());
      }
      EXPECT_EQ(engine.kv_store()->counts().leases, 0);
    }
  }
}

}  // namespace
}  // namespace meshfill
