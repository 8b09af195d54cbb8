// What the front-end makes of holders that are damaged, late, away, or of another run.
#include "server/pool/pool_kv_reader.h"

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <mutex>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "engine/kv/crc32c.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "meshfill/v1/prefill.grpc.pb.h"
#include "server/api/slab_reader.h"
#include "tests/engine/kv/kv_values.h"

namespace meshfill {
namespace {

constexpr int64_t kTokens = 200;
constexpr int64_t kMessageBytes = 4 << 20;
const KvShape kShape = {.layers = 2, .kv_heads = 2, .head_dim = 4};

enum class Fault { kHolds, kNone, kChecksum, kOrder, kLayer, kSize, kEndsEarly, kRefuses };

// A holder of some ranks, which does one of its parts wrong.
class Holder final : public v1::PrefillService::Service {
 public:
  Holder(std::shared_ptr<const KvPrompt> prompt, std::vector<bool> here)
      : prompt_(std::move(prompt)), here_(std::move(here)) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }
  ~Holder() override {
    if (server_ != nullptr) server_->Shutdown(std::chrono::system_clock::now());
  }
  void Stop() {
    server_->Shutdown(std::chrono::system_clock::now());
    server_.reset();
  }

  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }

  grpc::Status FetchKv(grpc::ServerContext*, const v1::FetchKvRequest* request,
                       grpc::ServerWriter<v1::KvPart>* writer) override {
    while (fault == Fault::kHolds) absl::SleepFor(absl::Milliseconds(1));
    if (fault == Fault::kRefuses) return {grpc::StatusCode::NOT_FOUND, "no such lease here"};
    KvFetch fetch = CheckFetch(*request, kShape, kTokens, kMessageBytes).value();
    fetch.part_tokens = 13;
    SlabReader reader(fetch, here_, [this] { return prompt_; });
    v1::KvPart part;
    for (int count = 0; reader.Take(part).value() == KvReader::Next::kPart; ++count) {
      if (count == 1 && fault == Fault::kChecksum) part.set_crc32c(part.crc32c() ^ 1);
      if (count == 1 && fault == Fault::kOrder) part.set_first_token(part.first_token() + 1);
      if (count == 1 && fault == Fault::kLayer) part.set_layer(part.layer() + 1);
      if (count == 1 && fault == Fault::kSize) part.mutable_v()->pop_back();
      if (count == 1 && fault == Fault::kEndsEarly) break;
      writer->Write(part);
    }
    return grpc::Status::OK;
  }

  std::atomic<Fault> fault{Fault::kNone};

 private:
  const std::shared_ptr<const KvPrompt> prompt_;
  const std::vector<bool> here_;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

class PoolKvReaderTest : public testing::Test {
 protected:
  PoolKvReaderTest() {
    auto prompt = std::make_shared<KvPrompt>(kShape, kTokens);
    KeepAllValues(*prompt, layout_);
    for (int i = 0; i < 2; ++i) {
      holders_.push_back(std::make_unique<Holder>(prompt, std::vector<bool>{i == 0, i == 1, i == 0}));
    }
    Place(1);
  }

  void Place(uint64_t run) {
    view_ = {.run = run, .layers_done = kShape.layers, .tokens = kTokens};
    place_ = std::make_shared<KvDirectory::Place>(KvDirectory::Place{.layout = layout_, .holders = {}});
    for (int i = 0; i < 2; ++i) {
      place_->holders.push_back({.worker = static_cast<uint64_t>(i + 1),
                                 .name = i == 0 ? "left" : "right",
                                 .address = holders_[i]->address(),
                                 .ranks = i == 0 ? std::vector<int>{0, 2} : std::vector<int>{1},
                                 .bytes = 1});
    }
  }

  std::unique_ptr<PoolKvReader> Reader(const v1::FetchKvRequest& request) {
    KvFetch fetch = CheckFetch(request, kShape, kTokens, kMessageBytes).value();
    if (fetch.format == KvFormat::kTokens) fetch.part_tokens = 31;
    fetch_ = fetch;
    return std::make_unique<PoolKvReader>(
        kShape, fetch, "lease", "tenant",
        [this](uint64_t) -> absl::StatusOr<PoolKvReader::Found> {
          if (!lease_.ok()) return lease_;
          return PoolKvReader::Found{view_, place_};
        },
        *channels_,
        [this] {
          const std::lock_guard<std::mutex> lock(mu_);
          changed_ = true;
          wake_.notify_all();
        });
  }

  // The next part, once it is there.
  absl::StatusOr<KvReader::Next> Take(PoolKvReader& reader, v1::KvPart& part) {
    for (int i = 0; i < 1000; ++i) {
      const auto next = reader.Take(part);
      if (!next.ok() || *next != KvReader::Next::kNotYet) return next;
      std::unique_lock<std::mutex> lock(mu_);
      wake_.wait_for(lock, std::chrono::milliseconds(100), [this] { return changed_; });
      changed_ = false;
    }
    return absl::DeadlineExceededError("nothing came");
  }
  absl::Status ReadAll() {
    const auto reader = Reader({});
    v1::KvPart part;
    while (true) {
      const auto next = Take(*reader, part);
      if (!next.ok()) return next.status();
      if (*next == KvReader::Next::kEnd) return absl::OkStatus();
    }
  }

  const TokenLayout layout_ = TokenLayout::Make(LayoutKind::kStriped, 3, kTokens, 16).value();
  std::vector<std::unique_ptr<Holder>> holders_;
  absl::Status lease_;
  KvDirectory::View view_;
  std::shared_ptr<KvDirectory::Place> place_;
  KvFetch fetch_;
  const std::unique_ptr<HolderChannels> channels_ = HolderChannels::Make({}).value();
  std::mutex mu_;
  std::condition_variable wake_;
  bool changed_ = false;
};

TEST_F(PoolKvReaderTest, PutsPartsTogetherInAnyLayout) {
  std::mt19937_64 random(TestSeed());
  for (int round = 0; round < 60; ++round) {
    v1::FetchKvRequest request;
    request.set_layout(static_cast<v1::KvLayout>(round % 3));
    int64_t first = Draw<int64_t>(random, 0, kTokens - 1);
    if (round % 3 != 0) {
      request.set_page_tokens(Draw<uint32_t>(random, 1, 40));
      first -= first % request.page_tokens();
    } else {
      request.set_tokens(Draw<uint64_t>(random, 1, static_cast<uint64_t>(kTokens - first)));
    }
    request.set_first_token(static_cast<uint64_t>(first));
    request.set_first_head(Draw<uint32_t>(random, 0, 1));
    request.set_first_layer(Draw<uint32_t>(random, 0, 1));
    const auto reader = Reader(request);
    v1::KvPart part;
    std::vector<std::string> k(2), v(2), pages(2);
    while (true) {
      const auto next = Take(*reader, part);
      ASSERT_TRUE(next.ok()) << next.status();
      if (*next == KvReader::Next::kEnd) break;
      EXPECT_EQ(part.crc32c(), PartChecksum(part));
      k[part.layer()] += part.k();
      v[part.layer()] += part.v();
      pages[part.layer()] += part.pages();
    }
    for (int layer = fetch_.first_layer; layer < 2; ++layer) {
      const auto expected =
          KvBytes(kShape, layer, fetch_.range, fetch_.format, std::max<int64_t>(1, fetch_.page_tokens));
      const std::string bytes = k[layer] + v[layer] + pages[layer];
      ASSERT_EQ(bytes.size(), expected.size());
      EXPECT_EQ(std::memcmp(bytes.data(), expected.data(), bytes.size()), 0);
    }
  }
}

// A part that it puts together, and one of each holder that it reads from.
TEST_F(PoolKvReaderTest, SaysWhatItHolds) {
  v1::FetchKvRequest of_one;
  of_one.set_tokens(10);  // all of rank 0
  for (const bool both : {false, true}) {
    const auto reader = Reader(both ? v1::FetchKvRequest() : of_one);
    v1::KvPart part;
    const auto next = Take(*reader, part);
    ASSERT_TRUE(next.ok()) << next.status();
    EXPECT_EQ(part.tokens(), both ? 31u : 10u);
    EXPECT_EQ(reader->held_bytes(), static_cast<int64_t>(part.k().size() + part.v().size()) * (both ? 3 : 2));
  }
}

TEST_F(PoolKvReaderTest, NamesAHolderThatSendsDamage) {
  for (const Fault fault : {Fault::kChecksum, Fault::kOrder, Fault::kLayer, Fault::kSize}) {
    holders_[1]->fault = fault;
    const absl::Status status = ReadAll();
    EXPECT_TRUE(absl::IsDataLoss(status)) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "worker right with rank 1")) << status;
    holders_[1]->fault = Fault::kNone;
    EXPECT_TRUE(ReadAll().ok());
  }
}

TEST_F(PoolKvReaderTest, NamesAHolderThatIsAway) {
  for (const Fault fault : {Fault::kEndsEarly, Fault::kRefuses}) {
    holders_[0]->fault = fault;
    const absl::Status status = ReadAll();
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "worker left with ranks 0, 2")) << status;
  }
  holders_[0]->fault = Fault::kNone;
  holders_[1]->Stop();
  const absl::Status status = ReadAll();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "worker right")) << status;
}

TEST_F(PoolKvReaderTest, APartThatIsHalfThereIsNotOfTheNextRun) {
  holders_[1]->fault = Fault::kHolds;
  const auto reader = Reader({});
  v1::KvPart part;
  EXPECT_EQ(reader->Take(part).value(), KvReader::Next::kNotYet);
  {
    std::unique_lock<std::mutex> lock(mu_);
    EXPECT_TRUE(wake_.wait_for(lock, std::chrono::seconds(10), [this] { return changed_; }));
  }
  EXPECT_EQ(reader->Take(part).value(), KvReader::Next::kNotYet) << "the other holder has the rest";
  Place(2);  // it was begun again
  holders_[1]->fault = Fault::kNone;
  const auto next = Take(*reader, part);
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_EQ(*next, KvReader::Next::kPart);
  EXPECT_EQ(part.tokens(), 31u);
}

TEST_F(PoolKvReaderTest, MixesNoRunsAndEndsWithTheLease) {
  v1::KvPart part;
  view_.run = 0;
  const auto waits = Reader({});
  EXPECT_EQ(waits->Take(part).value(), KvReader::Next::kNotYet);
  Place(1);
  EXPECT_EQ(Take(*waits, part).value(), KvReader::Next::kPart);
  Place(2);  // it was begun again
  const absl::Status mixed = waits->Take(part).status();
  EXPECT_TRUE(absl::IsUnavailable(mixed)) << mixed;
  EXPECT_TRUE(absl::StrContains(mixed.message(), "begun again")) << mixed;

  const auto reader = Reader({});
  EXPECT_EQ(Take(*reader, part).value(), KvReader::Next::kPart);
  lease_ = absl::NotFoundError("ended");
  EXPECT_TRUE(absl::IsNotFound(reader->Take(part).status()));
}

}  // namespace
}  // namespace meshfill
