// A pool of workers beside a server that knows of no other prompt, for tests of what runs behind K and V that
// are there.
#ifndef MESHFILL_TESTS_SERVER_POOL_POOL_CACHE_FIXTURE_H_
#define MESHFILL_TESTS_SERVER_POOL_POOL_CACHE_FIXTURE_H_

#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "engine/embedded_engine.h"
#include "tests/engine/close.h"
#include "tests/engine/devices/far_platform.h"
#include "tests/engine/fixed_speeds.h"
#include "tests/engine/kept_kv.h"
#include "tests/server/pool/pool_kv_fixture.h"

namespace meshfill {

constexpr double kTolerance = 1e-4;  // sums run in another order behind a prefix

inline std::vector<uint32_t> RandomTokens(std::mt19937_64& random, int64_t count) {
  std::vector<uint32_t> tokens(static_cast<size_t>(count));
  for (uint32_t& id : tokens) id = static_cast<uint32_t>(random() % 300);
  return tokens;
}

inline std::vector<uint32_t> Joined(std::vector<uint32_t> first, int64_t kept,
                                    const std::vector<uint32_t>& second) {
  first.resize(static_cast<size_t>(kept));
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

class PoolCacheTest : public PoolKvTest {
 protected:
  void SetUp() override {
    of_leader_ = {"plan.layout=striped"};
    RegisterFarPlatform();
    for (const std::string device : {"cpu", "far"}) {
      for (const int ranks : {1, 2}) {  // of a worker
        EngineOptions options = {.model_path = Folder(),
                                 .ranks = ranks,
                                 .device = device,
                                 .dtype = DType::kF32,
                                 .peak_flops = 1e12,
                                 .threads = 1};
        options.speed_profile_path = SpeedProfile();
        ASSERT_TRUE(LoadEmbeddedEngine(options).ok());  // measures
      }
    }
    FixSpeeds(SpeedProfile(), {.gemm_flops_per_second = 1e8});  // what is computed counts, not what is sent
    auto fresh = LoadEmbeddedEngine({.model_path = Folder(),
                                     .ranks = 1,
                                     .dtype = DType::kF32,
                                     .peak_flops = 1e12,
                                     .kv_cache = false,
                                     .threads = 1});
    ASSERT_TRUE(fresh.ok()) << fresh.status();
    fresh_ = *std::move(fresh);
  }

  // The answer is that of a server that knows of no other prompt. Returns how many tokens were cached.
  int64_t PrefillAndCompare(KvClient& client, const std::vector<uint32_t>& prompt, v1::PrefillHeader header,
                            const std::string& what) {
    header.set_return_logits(true);
    const auto result = client.Prefill(header, prompt);
    EXPECT_TRUE(result.ok()) << what << ": " << result.status();
    const auto expected = PrefillKeepingKv(*fresh_, prompt);
    EXPECT_TRUE(expected.ok()) << expected.status();
    if (!result.ok() || !expected.ok()) return -1;
    ExpectClose({result->logits().begin(), result->logits().end()}, expected->logits, kTolerance, what);
    if (header.kv().keep()) {
      leases_.push_back(result->kv().lease());
      const Fetched fetched = client.Fetch(Request(result->kv().lease()));
      EXPECT_TRUE(fetched.status.ok()) << what << ": " << fetched.status;
      for (size_t layer = 0; layer < fetched.k.size(); ++layer) {
        ExpectClose(Floats(fetched.k[layer]), AsFloats(expected->kv.layers[layer].k, DType::kF32), kTolerance,
                    what + ": k");
        ExpectClose(Floats(fetched.v[layer]), AsFloats(expected->kv.layers[layer].v, DType::kF32), kTolerance,
                    what + ": v");
      }
    }
    return static_cast<int64_t>(result->cached_tokens());
  }

  static std::vector<float> Floats(const std::string& bytes) {
    std::vector<float> floats(bytes.size() / sizeof(float));
    std::memcpy(floats.data(), bytes.data(), floats.size() * sizeof(float));
    return floats;
  }

  v1::PrefillHeader Header(bool keep = false) const {
    v1::PrefillHeader header = client_->Header(0);
    header.mutable_kv()->set_keep(keep);
    header.mutable_kv()->set_lease_seconds(60);
    return header;
  }
  void ReleaseAll() {
    for (const std::string& lease : leases_) EXPECT_TRUE(client_->Release(lease).ok());
    leases_.clear();
  }

  std::unique_ptr<PrefillEngine> fresh_;
  std::vector<std::string> leases_;
};

}  // namespace meshfill

#endif  // MESHFILL_TESTS_SERVER_POOL_POOL_CACHE_FIXTURE_H_
