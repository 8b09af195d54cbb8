#include "server/cli/bench/bench_comm.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/comm/checksum.h"
#include "engine/comm/gloo/gloo.h"
#include "kernels/cpu/cpu_device.h"
#include "kernels/median.h"
#include "kernels/monotonic_time.h"
#include "kernels/return_if_error.h"
#include "nlohmann/json.hpp"
#include "server/cli/commands/flags.h"
#include "server/cli/result_text.h"
#include "server/config/config_units.h"

namespace meshfill {
namespace {

constexpr absl::Duration kTimeout = absl::Minutes(1);

// A ring of ranks, each a thread with its sockets.
class Ring {
 public:
  static absl::StatusOr<std::unique_ptr<Ring>> Make(GlooOptions options, size_t message_bytes) {
    std::unique_ptr<Ring> ring(new Ring());
    for (options.rank = 0; options.rank < options.ranks; ++options.rank) {
      ASSIGN_OR_RETURN(std::unique_ptr<GlooEndpoint> endpoint, GlooEndpoint::Listen(options));
      ring->addresses_.push_back(endpoint->address());
      ring->endpoints_.push_back(std::move(endpoint));
      ASSIGN_OR_RETURN(std::unique_ptr<Stream> stream, ring->device_->NewStream(nullptr));
      ring->streams_.push_back(std::move(stream));
      ASSIGN_OR_RETURN(BufferRef message, ring->device_->Allocate(message_bytes));
      std::memset(message->data(), options.rank, message_bytes);
      ring->messages_.push_back(std::move(message));
    }
    ring->communicators_.resize(options.ranks);
    absl::Status status = ring->OnEachRank([&ring = *ring](int rank) {
      ASSIGN_OR_RETURN(
          auto communicator,
          ring.endpoints_[rank]->Connect(ring.addresses_, *ring.streams_[rank], MonotonicNow() + kTimeout));
      ring.communicators_[rank] = std::move(communicator);
      return absl::OkStatus();
    });
    RETURN_IF_ERROR(status);
    return ring;
  }

  // Each rank sends its message on, `rounds` times. Seconds.
  absl::StatusOr<double> Run(int rounds) {
    const absl::Time start = MonotonicNow();
    absl::Status status = OnEachRank([&](int rank) {
      Communicator& communicator = *communicators_[rank];
      const int n = communicator.size();
      for (int round = 0; round < rounds; ++round) {
        ASSIGN_OR_RETURN(auto receive,
                         communicator.SendReceive(Traffic::kKv, (rank + 1) % n, messages_[rank],
                                                  (rank + n - 1) % n, messages_[rank]->size_bytes()));
        ASSIGN_OR_RETURN(BufferRef message, receive->Wait(MonotonicNow() + kTimeout));
        messages_[rank] = std::move(message);
      }
      return absl::OkStatus();
    });
    RETURN_IF_ERROR(status);
    return absl::ToDoubleSeconds(MonotonicNow() - start);
  }

 private:
  Ring() = default;

  // The first error by rank.
  template <typename Body>
  absl::Status OnEachRank(Body body) {
    std::vector<absl::Status> statuses(endpoints_.size());
    std::vector<std::thread> threads;
    for (int rank = 0; rank < std::ssize(statuses); ++rank) {
      threads.emplace_back([&, rank] {
        statuses[rank] = body(rank);
        if (!statuses[rank].ok()) endpoints_[rank]->Abort(statuses[rank]);
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const absl::Status& status : statuses) RETURN_IF_ERROR(status);
    return absl::OkStatus();
  }

  const std::unique_ptr<Device> device_ = MakeCpuDevice(DType::kF32, 1);
  std::vector<std::unique_ptr<Stream>> streams_;
  std::vector<std::unique_ptr<GlooEndpoint>> endpoints_;
  std::vector<std::string> addresses_;
  std::vector<std::unique_ptr<Communicator>> communicators_;
  std::vector<BufferRef> messages_;  // by rank
};

class BenchCommCommand : public Command {
 public:
  explicit BenchCommCommand(CLI::App& parent)
      : Command(parent.add_subcommand(
            "comm", "Messages round a ring of ranks over gloo, with and without checksums")) {
    app_->add_option("--ranks", options_.ranks, "Ranks of the ring, threads of this process")
        ->type_name("N")
        ->check(CLI::Range(2, 64))
        ->capture_default_str();
    AddParsedOption(*app_, "--bytes", message_bytes_, ParseByteSize, "SIZE",
                    "Size of a message (default: 32MiB)");
    app_->add_option("--rounds", rounds_, "Messages that each rank sends in a run")
        ->type_name("N")
        ->check(WholeNumber(1))
        ->capture_default_str();
    app_->add_option("--repeats", repeats_, "Runs with and without checksums, in turns; medians are reported")
        ->type_name("N")
        ->check(WholeNumber(1))
        ->capture_default_str();
    app_->add_option("--listen", options_.listen, "Network interface or address")
        ->type_name("HOST")
        ->capture_default_str();
    AddJsonFlag(*app_, json_);
  }

  absl::Status Run() override {
    if (message_bytes_ == 0) return absl::InvalidArgumentError("--bytes: a message of no bytes has no speed");
    options_.checksum = true;
    ASSIGN_OR_RETURN(std::unique_ptr<Ring> checked, Ring::Make(options_, message_bytes_));
    options_.checksum = false;
    ASSIGN_OR_RETURN(std::unique_ptr<Ring> unchecked, Ring::Make(options_, message_bytes_));
    std::vector<double> checked_speeds;
    std::vector<double> unchecked_speeds;
    for (int repeat = -1; repeat < repeats_; ++repeat) {  // the first is the warm-up
      for (auto [ring, speeds] :
           {std::pair(checked.get(), &checked_speeds), std::pair(unchecked.get(), &unchecked_speeds)}) {
        ASSIGN_OR_RETURN(double seconds, ring->Run(rounds_));
        if (repeat >= 0) speeds->push_back(static_cast<double>(message_bytes_) * rounds_ / seconds);
      }
    }
    const Speeds speeds = {.checked = Median(checked_speeds),
                           .unchecked = Median(unchecked_speeds),
                           .checksum = ChecksumSpeed()};
    std::fputs(json_ ? Json(speeds).c_str() : Text(speeds).c_str(), stdout);
    return absl::OkStatus();
  }

 private:
  struct Speeds {  // bytes per second
    double checked;
    double unchecked;
    double checksum;  // one thread's checksum alone
  };

  double ChecksumSpeed() const {
    const std::vector<std::byte> message(message_bytes_, std::byte{1});
    std::vector<double> speeds;
    uint64_t sum = 0;
    for (int repeat = 0; repeat < repeats_; ++repeat) {
      const absl::Time start = MonotonicNow();
      sum ^= Checksum(message.data(), message.size());
      speeds.push_back(static_cast<double>(message.size()) / absl::ToDoubleSeconds(MonotonicNow() - start));
    }
    // Read the sum, so that it is computed.
    return sum == 1 ? 0 : Median(speeds);
  }

  std::string Json(const Speeds& speeds) const {
    const nlohmann::ordered_json json = {{"ranks", options_.ranks},
                                         {"message_bytes", message_bytes_},
                                         {"rounds", rounds_},
                                         {"bytes_per_second", speeds.checked},
                                         {"bytes_per_second_without_checksum", speeds.unchecked},
                                         {"ratio", speeds.checked / speeds.unchecked},
                                         {"checksum_bytes_per_second", speeds.checksum}};
    return absl::StrCat(json.dump(), "\n");
  }

  std::string Text(const Speeds& speeds) const {
    return absl::StrFormat(
        "ring of %d ranks over %s, %s a message\n"
        "with checksums     %.2f GB/s a rank\n"
        "without            %.2f GB/s a rank\n"
        "ratio              %.3f\n"
        "checksum alone     %.1f GB/s a thread\n",
        options_.ranks, options_.listen, FormatBytes(static_cast<double>(message_bytes_)),
        speeds.checked / 1e9, speeds.unchecked / 1e9, speeds.checked / speeds.unchecked,
        speeds.checksum / 1e9);
  }

  GlooOptions options_ = {.ranks = 4};
  uint64_t message_bytes_ = uint64_t{32} << 20;
  int rounds_ = 20;
  int repeats_ = 5;
  bool json_ = false;
};

}  // namespace

std::unique_ptr<Command> AddBenchCommCommand(CLI::App& parent) {
  return std::make_unique<BenchCommCommand>(parent);
}

}  // namespace meshfill
