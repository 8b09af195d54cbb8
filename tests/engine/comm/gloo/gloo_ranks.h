// Ranks that talk over gloo on loopback, as threads of one process or as processes of their own.
#ifndef MESHFILL_TESTS_ENGINE_COMM_GLOO_GLOO_RANKS_H_
#define MESHFILL_TESTS_ENGINE_COMM_GLOO_GLOO_RANKS_H_

#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/comm/gloo/gloo.h"
#include "engine/run/executor.h"
#include "gtest/gtest.h"
#include "kernels/monotonic_time.h"
#include "kernels/stream.h"
#include "tests/kernels/lone_stream.h"

namespace meshfill {

inline BufferRef MakeBuffer(size_t size_bytes) {
  return std::make_shared<Buffer>(::operator new(size_bytes), size_bytes,
                                  [](void* data, size_t) { ::operator delete(data); });
}

// Bytes that depend on all of `seed` and on their place.
inline uint8_t PatternByte(uint64_t seed, size_t i) {
  return static_cast<uint8_t>((seed * 0x9e3779b97f4a7c15 + i * 0xbf58476d1ce4e5b9) >> 56);
}
inline BufferRef PatternBuffer(size_t size_bytes, uint64_t seed) {
  BufferRef buffer = MakeBuffer(size_bytes);
  for (size_t i = 0; i < size_bytes; ++i) buffer->data<uint8_t>()[i] = PatternByte(seed, i);
  return buffer;
}
inline bool HasPattern(const Buffer& buffer, size_t size_bytes, uint64_t seed) {
  if (buffer.size_bytes() != size_bytes) return false;
  for (size_t i = 0; i < size_bytes; ++i) {
    if (buffer.data<uint8_t>()[i] != PatternByte(seed, i)) return false;
  }
  return true;
}

inline absl::Time Soon() { return MonotonicNow() + absl::Seconds(60); }

// Whether `status` has the code and names each of the words.
inline void ExpectStatus(const absl::Status& status, absl::StatusCode code,
                         const std::vector<std::string>& words) {
  EXPECT_EQ(status.code(), code) << status;
  for (const std::string& word : words) EXPECT_NE(status.message().find(word), std::string::npos) << status;
}

// Endpoints of `ranks` ranks in this process.
struct GlooEndpoints {
  explicit GlooEndpoints(int ranks, GlooOptions options = {}) {
    options.ranks = ranks;
    for (options.rank = 0; options.rank < ranks; ++options.rank) {
      endpoints.push_back(GlooEndpoint::Listen(options).value());
      addresses.push_back(endpoints.back()->address());
      streams.push_back(ReferenceStream(DType::kF32));
    }
  }

  absl::StatusOr<std::unique_ptr<Communicator>> Connect(int rank, absl::Time deadline = Soon()) {
    return endpoints[rank]->Connect(addresses, *streams[rank], deadline);
  }

  std::vector<std::unique_ptr<Communicator>> ConnectAll() {
    std::vector<std::unique_ptr<Communicator>> communicators(endpoints.size());
    std::vector<std::thread> threads;
    for (int rank = 0; rank < std::ssize(endpoints); ++rank) {
      threads.emplace_back([&, rank] { communicators[rank] = Connect(rank).value(); });
    }
    for (std::thread& thread : threads) thread.join();
    return communicators;
  }

  std::vector<LoneStream> streams;  // outlive the communicators
  std::vector<std::unique_ptr<GlooEndpoint>> endpoints;
  std::vector<std::string> addresses;
};

// Runs body(rank) on a thread each.
inline void RunRanks(int ranks, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) threads.emplace_back(body, rank);
  for (std::thread& thread : threads) thread.join();
}

// Attention of one layer on one rank, over chunks drawn from `seed`: its output, empty where it failed.
inline std::vector<float> RunExecutor(const Plan& plan, const ModelShape& model, uint64_t seed, int rank,
                                      Communicator& communicator) {
  const LoneStream stream = ReferenceStream(DType::kF32);
  const int64_t tokens = plan.layout.ChunkTokens(rank);
  const auto draw = [&](int64_t size_bytes, uint64_t chunk_seed) {
    std::mt19937_64 random(chunk_seed);
    std::normal_distribution<float> normal;
    BufferRef buffer = stream->Allocate(static_cast<size_t>(size_bytes)).value();
    std::generate_n(buffer->data<float>(), size_bytes / sizeof(float), [&] { return normal(random); });
    return buffer;
  };
  RankStats stats;
  AttentionExecutor executor(plan, model, rank, *stream, communicator, absl::Seconds(60), stats);
  const auto o = executor.Run({.q = draw(model.q_bytes(tokens), seed + 2 * rank),
                               .kv = draw(model.kv_bytes(tokens), seed + 2 * rank + 1)},
                              0);
  if (!o.ok()) return {};
  return {(*o)->data<float>(), (*o)->data<float>() + model.q_elements(tokens)};
}

// A pipe, of which each process uses one end.
class Pipe {
 public:
  Pipe() { EXPECT_EQ(pipe(ends_), 0); }
  ~Pipe() {
    close(ends_[0]);
    close(ends_[1]);
  }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;

  void Write(const std::string& bytes) {
    EXPECT_EQ(write(ends_[1], bytes.data(), bytes.size()), std::ssize(bytes));
  }
  // Empty where nothing came within the minute.
  std::string Read(size_t size_bytes) {
    std::string bytes(size_bytes, 0);
    for (size_t done = 0; done < size_bytes;) {
      pollfd readable = {.fd = ends_[0], .events = POLLIN, .revents = 0};
      const ssize_t count =
          poll(&readable, 1, 60000) == 1 ? read(ends_[0], bytes.data() + done, size_bytes - done) : 0;
      if (count <= 0) return "";
      done += static_cast<size_t>(count);
    }
    return bytes;
  }

 private:
  int ends_[2];
};

// Ranks 1 … ranks−1 as processes, rank 0 the test itself; to be made while the test has no other thread.
class GlooProcesses {
 public:
  // What a process does once it is connected; its result is the process's exit status. `report` and `command`
  // talk with the test.
  using Body = std::function<int(int rank, Communicator&, Pipe& report, Pipe& command)>;

  GlooProcesses(int ranks, const Body& body) : children_(ranks) {
    for (int rank = 1; rank < ranks; ++rank) {
      children_[rank] = std::make_unique<Child>();
      Child& child = *children_[rank];
      child.pid = fork();
      if (child.pid == 0) _exit(RunChild(rank, ranks, child, body));
    }
    const GlooOptions options = {.rank = 0, .ranks = ranks, .run = kRun};
    endpoint_ = GlooEndpoint::Listen(options).value();
    std::vector<std::string> addresses = {endpoint_->address()};
    for (int rank = 1; rank < ranks; ++rank) {
      addresses.push_back(children_[rank]->report.Read(addresses[0].size()));
    }
    for (int rank = 1; rank < ranks; ++rank) {
      for (const std::string& address : addresses) children_[rank]->command.Write(address);
    }
    communicator_ = endpoint_->Connect(addresses, *stream_, Soon()).value();
  }
  ~GlooProcesses() {
    communicator_.reset();
    for (int rank = 1; rank < std::ssize(children_); ++rank) {
      if (children_[rank]->pid == 0) continue;
      Kill(rank, SIGKILL);
      Join(rank);
    }
  }

  Communicator& communicator() { return *communicator_; }
  Pipe& report(int rank) { return children_[rank]->report; }
  Pipe& command(int rank) { return children_[rank]->command; }
  void Kill(int rank, int signal) { EXPECT_EQ(kill(children_[rank]->pid, signal), 0); }

  // Returns once it stands still, whatever it was at.
  void Stop(int rank) {
    Kill(rank, SIGSTOP);
    int status = 0;
    EXPECT_EQ(waitpid(children_[rank]->pid, &status, WUNTRACED), children_[rank]->pid);
    EXPECT_TRUE(WIFSTOPPED(status));
  }
  void EndRun() { communicator_.reset(); }  // of rank 0

  // The exit status, or minus the signal that ended it.
  int Join(int rank) {
    int status = 0;
    EXPECT_GT(waitpid(std::exchange(children_[rank]->pid, 0), &status, 0), 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

 private:
  static constexpr uint64_t kRun = 7;

  struct Child {
    pid_t pid = 0;
    Pipe report;   // to the test
    Pipe command;  // to the child
  };

  static int RunChild(int rank, int ranks, Child& child, const Body& body) {
    const GlooOptions options = {.rank = rank, .ranks = ranks, .run = kRun};
    auto endpoint = GlooEndpoint::Listen(options).value();
    child.report.Write(endpoint->address());
    std::vector<std::string> addresses;
    for (int i = 0; i < ranks; ++i) addresses.push_back(child.command.Read(endpoint->address().size()));
    const LoneStream stream = ReferenceStream(DType::kF32);
    auto communicator = endpoint->Connect(addresses, *stream, Soon());
    if (!communicator.ok()) return 99;
    return body(rank, **communicator, child.report, child.command);
  }

  std::vector<std::unique_ptr<Child>> children_;  // by rank
  const LoneStream stream_ = ReferenceStream(DType::kF32);
  std::unique_ptr<GlooEndpoint> endpoint_;
  std::unique_ptr<Communicator> communicator_;
};

}  // namespace meshfill

#endif  // MESHFILL_TESTS_ENGINE_COMM_GLOO_GLOO_RANKS_H_
