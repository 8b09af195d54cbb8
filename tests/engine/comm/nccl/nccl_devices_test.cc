// NCCL's ranks and their GPUs, which the host plays.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "engine/comm/nccl/nccl.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/monotonic_time.h"
#include "tests/fake_cuda/fake_cuda.h"

namespace meshfill {
namespace {

constexpr absl::Duration kSoon = absl::Seconds(60);

// Connects one rank on each of `devices` and passes a message round. The first failure.
absl::Status PassRound(const std::vector<int>& devices) {
  const int ranks = static_cast<int>(devices.size());
  const std::vector<CudaDeviceInfo> infos = FindCudaDevices().value();
  std::vector<std::unique_ptr<Endpoint>> endpoints;
  std::vector<std::string> addresses;
  for (int rank = 0; rank < ranks; ++rank) {
    endpoints.push_back(ListenNccl({.rank = rank, .ranks = ranks, .device = devices[rank]}).value());
    addresses.push_back(endpoints.back()->address());
  }
  const auto run = [&](int rank) -> absl::Status {
    const std::unique_ptr<Device> device = MakeCudaDevice(infos[devices[rank]]).value();
    const std::unique_ptr<Stream> stream = device->NewStream(nullptr).value();
    const absl::Time deadline = MonotonicNow() + kSoon;
    auto communicator = endpoints[rank]->Connect(addresses, *stream, deadline);
    if (!communicator.ok()) return communicator.status();
    BufferRef message = stream->Place(&rank, sizeof(rank)).value();
    auto pending = (*communicator)
                       ->SendReceive(Traffic::kKv, (rank + 1) % ranks, std::move(message),
                                     (rank + ranks - 1) % ranks, sizeof(rank));
    if (!pending.ok()) return pending.status();
    absl::StatusOr<BufferRef> received = (*pending)->Wait(deadline);
    if (!received.ok()) return received.status();
    int from = -1;
    if (absl::Status status = stream->Download((*received)->data(), sizeof(from), &from); !status.ok()) {
      return status;
    }
    EXPECT_EQ(from, (rank + ranks - 1) % ranks);
    return absl::OkStatus();
  };
  std::vector<absl::Status> statuses(ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&, rank] {
      statuses[rank] = run(rank);
      if (!statuses[rank].ok()) {
        for (const auto& endpoint : endpoints) endpoint->Abort(statuses[rank]);
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& status : statuses) {
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

// The runtime makes a context, half a gigabyte, on whatever device a thread happens to have.
TEST(NcclDevicesTest, TouchOnlyTheirOwn) {
  FakeCuda::set_devices(4);
  const absl::Status status = PassRound({1, 3});
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_FALSE(FakeCuda::has_context(0));
  EXPECT_TRUE(FakeCuda::has_context(1));
  EXPECT_FALSE(FakeCuda::has_context(2));
  EXPECT_TRUE(FakeCuda::has_context(3));
}

TEST(NcclDevicesTest, TwoRanksOnOneDeviceAreToldWhatToDo) {
  FakeCuda::set_devices(2);
  FakeCuda::set_nccl_refuses_shared_devices(true);
  const absl::Status status = PassRound({1, 1});
  FakeCuda::set_nccl_refuses_shared_devices(false);
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  const std::string message(status.message());
  EXPECT_NE(message.find("Duplicate GPU detected"), std::string::npos) << status;
  EXPECT_NE(message.find("pool.worker.devices"), std::string::npos) << status;
}

}  // namespace
}  // namespace meshfill
