// Ranks over NCCL: as threads with a GPU each, and as processes that share one GPU and are told that they are
// on different hosts (NCCL_HOSTID). What is missing on a machine is not run.
#include "engine/comm/nccl/nccl.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "engine/comm/in_process.h"
#include "engine/comm/nccl/nccl_links.h"
#include "engine/embedded_pool.h"
#include "engine/engine_options.h"
#include "engine/model/make_model.h"
#include "engine/prefill_engine.h"
#include "engine/run/rank_runner.h"
#include "kernels/cuda/device_info.h"
#include "kernels/monotonic_time.h"
#include "tests/engine/test_device.h"

namespace meshfill {
namespace {

constexpr absl::Duration kSoon = absl::Seconds(60);

// The model's and the prompt's folder; processes of one test agree on it.
std::string MakeTestModel(const std::string& folder) {
  std::filesystem::remove_all(folder);
  const absl::Status status = MakeModel({.layers = 2,
                                         .hidden = 128,
                                         .intermediate = 128,
                                         .q_heads = 4,
                                         .kv_heads = 2,
                                         .head_dim = 32,
                                         .vocab = 200,
                                         .context_tokens = 8192,
                                         .dtype = DType::kBf16},
                                        folder);
  EXPECT_TRUE(status.ok()) << status;
  return folder;
}

std::vector<uint32_t> Prompt() {
  std::vector<uint32_t> ids(600);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<uint32_t>(i * i % 200);
  return ids;
}

Tile TileOf(int ranks) { return ranks == 4 ? Tile{2, 2} : Tile{1, ranks}; }

EngineOptions Options(const std::string& folder, int ranks) {
  return {.model_path = folder, .ranks = ranks, .device = "cuda", .peak_flops = 1e12};
}

// The same plan everywhere: the sizes decide it, and no speed that was measured.
absl::StatusOr<Plan> PlanOf(const ModelShape& shape, int ranks) {
  absl::StatusOr<PlanChoice> choice = MakePlan(shape, PoolSpeed{},
                                               {.tokens = static_cast<int64_t>(Prompt().size()),
                                                .ranks = ranks,
                                                .layout = LayoutKind::kStriped,
                                                .stripe = 64,
                                                .tile = TileOf(ranks),
                                                .heads = 1,
                                                .partial_dtype = DType::kF32,
                                                .schedule = ScheduleChoice::kGreedy,
                                                .memory_budget_bytes = int64_t{1} << 40});
  if (!choice.ok()) return choice.status();
  return std::move(choice->plan);
}

// A stream for each rank of the pool.
std::vector<std::unique_ptr<Stream>> StreamsOf(const EmbeddedPool& pool) {
  std::vector<std::unique_ptr<Stream>> streams;
  for (const auto& device : pool.devices) streams.push_back(device->NewStream(nullptr).value());
  return streams;
}

absl::StatusOr<RankOutput> RunOn(const EmbeddedPool& pool, size_t of_pool, Stream& stream, int rank,
                                 const Plan& plan, Communicator& communicator) {
  const std::vector<uint32_t> prompt = Prompt();
  const std::vector<uint32_t> ids = plan.layout.Deal(rank, std::span<const uint32_t>(prompt));
  TimelineRecorder recorder(rank, TimelineRecorder::Clock::now(), 0);
  const Model& model = *pool.models[of_pool];
  const std::unique_ptr<WeightFeed> weights = model.OpenFeed(1, ReadsHead(plan, rank), nullptr);
  const RankPrompt part = {.plan = plan, .ids = ids};
  return RunRank({.prompts = {&part, 1},
                  .model = model,
                  .weights = *weights,
                  .reader = 0,
                  .rank = rank,
                  .stream = stream,
                  .communicator = communicator,
                  .wait_timeout = kSoon,
                  .on_layer_done = [](int) {},
                  .recorder = &recorder});
}

std::vector<float> InProcessLogits(const std::string& folder, int ranks) {
  absl::StatusOr<EmbeddedPool> pool = LoadEmbeddedPool(Options(folder, ranks));
  EXPECT_TRUE(pool.ok()) << pool.status();
  if (!pool.ok()) return {};
  const absl::StatusOr<Plan> plan = PlanOf(pool->models[0]->shape(), ranks);
  EXPECT_TRUE(plan.ok()) << plan.status();
  const auto streams = StreamsOf(*pool);
  std::vector<Stream*> by_rank;
  for (const auto& stream : streams) by_rank.push_back(stream.get());
  auto communicators = MakeInProcessCommunicators(by_rank);
  std::vector<float> logits;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      absl::StatusOr<RankOutput> output =
          RunOn(*pool, rank, *streams[rank], rank, *plan, *communicators[rank]);
      EXPECT_TRUE(output.ok()) << output.status();
      if (output.ok() && !output->logits.empty()) logits = output->logits;
    });
  }
  for (std::thread& thread : threads) thread.join();
  return logits;
}

// Of runs that are connected at once over communicators that were there.
TEST(NcclLinksTest, KeepsEachIdThatNoCommunicatorWasMadeWith) {
  NcclLinks links;
  EXPECT_FALSE(links.TakeSpareId().has_value());
  std::set<char> kept = {1, 2, 3};
  for (const char name : kept) {
    ncclUniqueId id = {};
    id.internal[0] = name;
    links.KeepSpareId(id);
  }
  while (const auto id = links.TakeSpareId()) EXPECT_EQ(kept.erase(id->internal[0]), 1u);
  EXPECT_TRUE(kept.empty());
}

// ---- Threads, each with a GPU of its own.

class NcclThreadsTest : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(TestsOnCuda());
    devices_ = *FindCudaDevices();
    if (devices_.size() < 2) GTEST_SKIP() << "one GPU";
    ranks_ = devices_.size() < 4 ? 2 : 4;
    folder_ = MakeTestModel(testing::TempDir() + "/nccl_threads");
  }

  std::vector<std::unique_ptr<Endpoint>> Listen(int ranks) {
    std::vector<std::unique_ptr<Endpoint>> endpoints;
    addresses_.clear();
    for (int rank = 0; rank < ranks; ++rank) {
      auto endpoint = ListenNccl({.rank = rank,
                                  .ranks = ranks,
                                  .device = devices_[rank].ordinal,
                                  .epoch = epoch_,
                                  .run = run_,
                                  .links = links_.empty() ? nullptr : links_[rank]});
      EXPECT_TRUE(endpoint.ok()) << endpoint.status();
      addresses_.push_back((*endpoint)->address());
      endpoints.push_back(*std::move(endpoint));
    }
    return endpoints;
  }

  // body(rank, stream, communicator) on a thread for each rank.
  template <typename Body>
  void OnRanks(const EmbeddedPool& pool, std::vector<std::unique_ptr<Endpoint>>& endpoints,
               const Body& body) {
    const auto streams = StreamsOf(pool);
    std::vector<std::thread> threads;
    for (size_t rank = 0; rank < endpoints.size(); ++rank) {
      threads.emplace_back([&, rank] {
        auto communicator = endpoints[rank]->Connect(addresses_, *streams[rank], MonotonicNow() + kSoon);
        ASSERT_TRUE(communicator.ok()) << communicator.status();
        body(static_cast<int>(rank), *streams[rank], **communicator);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  static void Abort(std::vector<std::unique_ptr<Endpoint>>& endpoints) {
    for (const auto& endpoint : endpoints) endpoint->Abort(absl::AbortedError("never mind"));
  }

  std::vector<CudaDeviceInfo> devices_;
  int ranks_ = 0;
  std::string folder_;
  std::vector<std::string> addresses_;
  std::vector<std::shared_ptr<NcclLinks>> links_;  // by rank; none: nothing is kept
  uint64_t epoch_ = 1;
  uint64_t run_ = 1;
};

TEST_F(NcclThreadsTest, GiveTheBitsOfRanksInOneProcess) {
  const std::vector<float> expected = InProcessLogits(folder_, ranks_);
  const absl::StatusOr<EmbeddedPool> pool = LoadEmbeddedPool(Options(folder_, ranks_));
  ASSERT_TRUE(pool.ok()) << pool.status();
  const absl::StatusOr<Plan> plan = PlanOf(pool->models[0]->shape(), ranks_);
  ASSERT_TRUE(plan.ok()) << plan.status();
  for (int round = 0; round < 3; ++round) {
    auto endpoints = Listen(ranks_);
    std::vector<float> logits;
    OnRanks(*pool, endpoints, [&](int rank, Stream& stream, Communicator& communicator) {
      absl::StatusOr<RankOutput> output = RunOn(*pool, rank, stream, rank, *plan, communicator);
      ASSERT_TRUE(output.ok()) << output.status();
      EXPECT_GT(output->stats.block_seconds, 0);
      if (!output->logits.empty()) logits = output->logits;
    });
    EXPECT_EQ(logits, expected);
  }
}

TEST_F(NcclThreadsTest, RunsOfAnEpochShareACommunicatorUntilOneIsAborted) {
  const std::vector<float> expected = InProcessLogits(folder_, 2);
  const absl::StatusOr<EmbeddedPool> pool = LoadEmbeddedPool(Options(folder_, 2));
  ASSERT_TRUE(pool.ok()) << pool.status();
  const absl::StatusOr<Plan> plan = PlanOf(pool->models[0]->shape(), 2);
  ASSERT_TRUE(plan.ok()) << plan.status();
  for (int rank = 0; rank < 2; ++rank) links_.push_back(std::make_shared<NcclLinks>());
  const auto run = [&](bool is_aborted = false) {
    auto endpoints = Listen(2);
    std::vector<float> logits;
    OnRanks(*pool, endpoints, [&](int rank, Stream& stream, Communicator& communicator) {
      absl::StatusOr<RankOutput> output = RunOn(*pool, rank, stream, rank, *plan, communicator);
      ASSERT_TRUE(output.ok()) << output.status();
      if (!output->logits.empty()) logits = output->logits;
    });
    EXPECT_EQ(logits, expected);
    if (is_aborted) Abort(endpoints);
  };
  const auto end = [&] {
    for (const auto& links : links_) links->End(run_);
    ++run_;
  };
  const auto made = [&] { return std::vector<int>{links_[0]->made(), links_[1]->made()}; };
  for (int round = 0; round < 3; ++round) {
    run();
    end();
    EXPECT_EQ(made(), std::vector<int>({1, 1}));
  }
  run(/*is_aborted=*/true);  // goes well, and is then told to have failed elsewhere
  end();
  run();
  EXPECT_EQ(made(), std::vector<int>({2, 2}));
  end();
  ++epoch_;
  run();
  end();
  EXPECT_EQ(made(), std::vector<int>({3, 3}));
  {  // a run that is stopped before it starts costs nothing
    auto endpoints = Listen(2);
    Abort(endpoints);
  }
  end();
  run();
  end();
  EXPECT_EQ(made(), std::vector<int>({3, 3}));
  {
    auto endpoints = Listen(2);  // one that is aborted on its way
    OnRanks(*pool, endpoints, [&](int rank, Stream& stream, Communicator& communicator) {
      communicator.Abort(absl::AbortedError("a rank is gone"));
      EXPECT_FALSE(RunOn(*pool, rank, stream, rank, *plan, communicator).ok());
    });
  }
  EXPECT_EQ(made(), std::vector<int>({3, 3}));
  end();
  run();
  EXPECT_EQ(made(), std::vector<int>({4, 4}));
  end();
}

// Runs that live at once have communicators of their own, which later runs take over; ranks may have ended
// them in different orders.
TEST_F(NcclThreadsTest, EachRunThatLivesHasACommunicator) {
  const absl::StatusOr<EmbeddedPool> pool = LoadEmbeddedPool(Options(folder_, 2));
  ASSERT_TRUE(pool.ok()) << pool.status();
  for (int rank = 0; rank < 2; ++rank) links_.push_back(std::make_shared<NcclLinks>());
  // Passes a number round.
  const auto pass = [&](int rank, Stream& stream, Communicator& communicator) {
    const int sent = 10 + rank;
    auto pending = communicator.SendReceive(Traffic::kKv, 1 - rank, stream.Place(&sent, sizeof sent).value(),
                                            1 - rank, sizeof sent);
    ASSERT_TRUE(pending.ok()) << pending.status();
    const absl::StatusOr<BufferRef> received = (*pending)->Wait(MonotonicNow() + kSoon);
    ASSERT_TRUE(received.ok()) << received.status();
    int heard = 0;
    ASSERT_TRUE(stream.Download((*received)->data(), sizeof heard, &heard).ok());
    EXPECT_EQ(heard, 11 - rank);
  };
  const auto made = [&] { return std::vector<int>{links_[0]->made(), links_[1]->made()}; };
  // `live` runs, each begun while those before it live.
  const auto live = [&](int runs, bool last_is_aborted = false) {
    const uint64_t first = run_, end = first + static_cast<uint64_t>(runs);
    for (; run_ < end; ++run_) {
      auto endpoints = Listen(2);
      OnRanks(*pool, endpoints, pass);
      if (last_is_aborted && run_ + 1 == end) Abort(endpoints);
    }
    for (int i = 0; i < runs; ++i) {
      links_[0]->End(first + static_cast<uint64_t>(i));
      links_[1]->End(first + static_cast<uint64_t>(runs - 1 - i));
    }
  };
  live(1);
  EXPECT_EQ(made(), std::vector<int>({1, 1}));
  live(3);
  EXPECT_EQ(made(), std::vector<int>({3, 3}));
  live(3);
  live(2);
  EXPECT_EQ(made(), std::vector<int>({3, 3}));
  const int most = static_cast<int>(NcclLinks::kMostIdle);
  live(most);
  EXPECT_EQ(made(), std::vector<int>({most, most}));
  live(most + 1, /*last_is_aborted=*/true);
  live(most);
  EXPECT_EQ(made(), std::vector<int>({most + 1, most + 1}))
      << "no other has gone for the one that was aborted";
  live(most + 2);  // some are let go of, by each rank others
  const int before = links_[0]->made();
  live(1);
  EXPECT_LE(links_[0]->made(), before + 1);
  EXPECT_EQ(links_[0]->made(), links_[1]->made());
  {  // two that are prepared at once, of which one goes its way
    auto one = Listen(2);
    const std::vector<std::string> addresses = addresses_;
    ++run_;
    auto other = Listen(2);
    OnRanks(*pool, other, pass);
    addresses_ = addresses;
    --run_;
    OnRanks(*pool, one, pass);
    for (const auto& links : links_) {
      for (const uint64_t run : {run_, run_ + 1}) links->End(run);
    }
  }
}

TEST_F(NcclThreadsTest, AWaitForNothingEndsAtItsDeadline) {
  const absl::StatusOr<EmbeddedPool> pool = LoadEmbeddedPool(Options(folder_, 2));
  ASSERT_TRUE(pool.ok()) << pool.status();
  auto endpoints = Listen(2);
  OnRanks(*pool, endpoints, [&](int rank, Stream& stream, Communicator& communicator) {
    if (rank == 1) return;  // connects, and sends nothing
    auto pending = communicator.SendReceive(Traffic::kKv, 1, *stream.Allocate(64), 1, 64);
    ASSERT_TRUE(pending.ok()) << pending.status();
    auto received = (*pending)->Wait(MonotonicNow() + absl::Milliseconds(200));
    ASSERT_TRUE(received.ok()) << received.status();  // the device waits, the host goes on
    EXPECT_TRUE(stream.Finish().ok());
    const auto next = communicator.SendReceive(Traffic::kKv, 1, *stream.Allocate(64), 1, 64);
    EXPECT_TRUE(absl::IsDeadlineExceeded(next.status())) << next.status();
    EXPECT_EQ(next.status().message(), "rank 0: recv_kv from rank 1: nothing arrived before the deadline");
  });
}

TEST_F(NcclThreadsTest, AbortEndsWaitsWithItsReason) {
  const absl::StatusOr<EmbeddedPool> pool = LoadEmbeddedPool(Options(folder_, 2));
  ASSERT_TRUE(pool.ok()) << pool.status();
  auto endpoints = Listen(2);
  OnRanks(*pool, endpoints, [&](int rank, Stream& stream, Communicator& communicator) {
    if (rank == 1) return;
    auto pending = communicator.SendReceive(Traffic::kO, 1, *stream.Allocate(64), 1, 64);
    ASSERT_TRUE(pending.ok()) << pending.status();
    ASSERT_TRUE((*pending)->Wait(MonotonicNow() + kSoon).ok());
    std::thread leader([&] {
      absl::SleepFor(absl::Milliseconds(100));
      endpoints[0]->Abort(absl::AbortedError("rank 1 is gone"));
    });
    EXPECT_TRUE(stream.Finish().ok());  // returns: what waited was ended
    leader.join();
    const auto next = communicator.SendReceive(Traffic::kO, 1, *stream.Allocate(64), 1, 64);
    EXPECT_EQ(next.status(), absl::AbortedError("rank 1 is gone"));
  });
}

TEST_F(NcclThreadsTest, ConnectWaitsForAllRanksUntilItsDeadlineOrAbort) {
  const absl::StatusOr<EmbeddedPool> pool = LoadEmbeddedPool(Options(folder_, 2));
  ASSERT_TRUE(pool.ok()) << pool.status();
  const auto streams = StreamsOf(*pool);
  auto endpoints = Listen(2);
  auto late = endpoints[0]->Connect(addresses_, *streams[0], MonotonicNow() + absl::Milliseconds(200));
  EXPECT_TRUE(absl::IsDeadlineExceeded(late.status())) << late.status();
  endpoints = Listen(2);
  endpoints[0]->Abort(absl::AbortedError("never mind"));
  EXPECT_EQ(endpoints[0]->Connect(addresses_, *streams[0], MonotonicNow() + kSoon).status(),
            absl::AbortedError("never mind"));
  endpoints = Listen(2);
  addresses_[1] = "an address of gloo's";
  EXPECT_TRUE(absl::IsInvalidArgument(
      endpoints[0]->Connect(addresses_, *streams[0], MonotonicNow() + kSoon).status()));
}

// ---- Processes that share a GPU.

// What a child does: the part of one rank, the id by way of a file, the logits into another.
int RunChild(const std::string& folder, int rank, int ranks) {
  if (rank < 0) {  // all ranks in one process
    const std::vector<float> logits = InProcessLogits(folder, ranks);
    std::ofstream(folder + "/expected", std::ios::binary)
        .write(reinterpret_cast<const char*>(logits.data()),
               static_cast<std::streamsize>(logits.size() * sizeof(float)));
    return 0;
  }
  const auto fail = [rank](const absl::Status& status) {
    std::fprintf(stderr, "rank %d: %s\n", rank, std::string(status.message()).c_str());
    return 1;
  };
  const absl::StatusOr<EmbeddedPool> pool = LoadEmbeddedPool(Options(folder, 1));
  if (!pool.ok()) return fail(pool.status());
  auto endpoint = ListenNccl({.rank = rank, .ranks = ranks, .device = (*FindCudaDevices())[0].ordinal});
  if (!endpoint.ok()) return fail(endpoint.status());
  const std::string id_path = folder + "/id";
  if (rank == 0) {
    std::ofstream(id_path + ".draft", std::ios::binary) << (*endpoint)->address();
    std::filesystem::rename(id_path + ".draft", id_path);
  }
  for (int wait = 0; wait < 600 && !std::filesystem::exists(id_path); ++wait)
    absl::SleepFor(absl::Milliseconds(50));
  std::ifstream id_file(id_path, std::ios::binary);
  std::vector<std::string> addresses(ranks, rank == 0 ? "" : (*endpoint)->address());
  addresses[0].assign(std::istreambuf_iterator<char>(id_file), {});
  for (int other = 1; other < ranks; ++other) addresses[other] = std::string("nccl:\0", 6);  // keeps nothing
  const auto streams = StreamsOf(*pool);
  auto communicator = (*endpoint)->Connect(addresses, *streams[0], MonotonicNow() + kSoon);
  if (!communicator.ok()) return fail(communicator.status());
  const absl::StatusOr<Plan> plan = PlanOf(pool->models[0]->shape(), ranks);
  if (!plan.ok()) return fail(plan.status());
  const absl::StatusOr<RankOutput> output = RunOn(*pool, 0, *streams[0], rank, *plan, **communicator);
  if (!output.ok()) return fail(output.status());
  if (output->logits.empty()) return 0;
  std::ofstream(folder + "/logits", std::ios::binary)
      .write(reinterpret_cast<const char*>(output->logits.data()),
             static_cast<std::streamsize>(output->logits.size() * sizeof(float)));
  return 0;
}

pid_t StartChild(const std::string& folder, int rank, int ranks) {
  const pid_t child = fork();
  if (child != 0) return child;
  setenv("NCCL_HOSTID", ("rank" + std::to_string(rank)).c_str(), 1);
  setenv("NCCL_SOCKET_IFNAME", "lo", 0);
  const std::string rank_text = std::to_string(rank), ranks_text = std::to_string(ranks);
  execl("/proc/self/exe", "nccl_test", "--rank", folder.c_str(), rank_text.c_str(), ranks_text.c_str(),
        nullptr);
  _exit(127);
}

std::string Contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void ExpectProcessesAgree(int ranks) {
  if (std::getenv("MESHFILL_FAKE_DEVICES") != nullptr) GTEST_SKIP() << "the fake is of one process";
  const std::string folder = MakeTestModel(testing::TempDir() + "/nccl_processes_" + std::to_string(ranks));
  for (const std::vector<int>& together : {std::vector<int>{-1}, [ranks] {
                                             std::vector<int> all(ranks);
                                             for (int rank = 0; rank < ranks; ++rank) all[rank] = rank;
                                             return all;
                                           }()}) {
    std::vector<pid_t> children;
    for (const int rank : together) children.push_back(StartChild(folder, rank, ranks));
    for (const pid_t child : children) {
      int status = 0;
      ASSERT_EQ(waitpid(child, &status, 0), child);
      EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
    }
  }
  const std::string expected = Contents(folder + "/expected");
  ASSERT_FALSE(expected.empty());
  EXPECT_EQ(Contents(folder + "/logits"), expected);
}

TEST(NcclProcessesTest, Ranks2ProcessesOnOneGpuGiveTheBitsOfOne) { ExpectProcessesAgree(2); }
TEST(NcclProcessesTest, Ranks4ProcessesOnOneGpuGiveTheBitsOfOne) { ExpectProcessesAgree(4); }

}  // namespace
}  // namespace meshfill

int main(int argc, char** argv) {
  if (argc == 5 && std::string(argv[1]) == "--rank") {
    return meshfill::RunChild(argv[2], std::atoi(argv[3]), std::atoi(argv[4]));
  }
  testing::InitGoogleTest(&argc, argv);
  meshfill::TestDevice();  // ends where there is none
  return RUN_ALL_TESTS();
}
