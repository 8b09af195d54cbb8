// What tests of CUDA's streams share: a device with a stream, the reference beside it, and tensors on it.
#ifndef MESHFILL_TESTS_KERNELS_CUDA_STREAM_FIXTURE_H_
#define MESHFILL_TESTS_KERNELS_CUDA_STREAM_FIXTURE_H_

#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <utility>

#include "kernels/cuda/cuda_device.h"
#include "tests/kernels/lone_stream.h"
#include "tests/kernels/random_tensor.h"

namespace meshfill {

// A tensor's copy on the device.
class OnDevice {
 public:
  OnDevice(Stream& stream, const Tensor& tensor) : stream_(stream), tensor_(tensor) {
    absl::StatusOr<BufferRef> buffer = stream.Place(tensor.data(), ByteCount());
    EXPECT_TRUE(buffer.ok()) << buffer.status();
    if (buffer.ok()) buffer_ = *std::move(buffer);
  }
  template <typename T = void>
  T* data() {
    return buffer_->data<T>();
  }
  const BufferRef& buffer() const { return buffer_; }
  // After what was called before.
  Tensor Read() {
    EXPECT_TRUE(stream_.Download(data(), ByteCount(), tensor_.data()).ok());
    return tensor_;
  }

 private:
  size_t ByteCount() const { return tensor_.count() * DTypeBytes(tensor_.dtype()); }

  Stream& stream_;
  Tensor tensor_;
  BufferRef buffer_;
};

class CudaStreamTest : public testing::Test {
 protected:
  void SetUp() override {
    device_ = MakeDevice();
    ASSERT_NE(device_, nullptr);
    stream_ = Make();
  }

  static std::unique_ptr<Device> MakeDevice(size_t index = 0) {
    const auto infos = FindCudaDevices();
    EXPECT_TRUE(infos.ok()) << infos.status();
    if (!infos.ok()) return nullptr;
    auto device = MakeCudaDevice((*infos)[index % infos->size()]);
    EXPECT_TRUE(device.ok()) << device.status();
    return device.ok() ? *std::move(device) : nullptr;
  }
  // Another rank on the device.
  std::unique_ptr<Stream> Make(const StopToken* stop = nullptr) {
    auto stream = device_->NewStream(stop);
    EXPECT_TRUE(stream.ok()) << stream.status();
    return stream.ok() ? *std::move(stream) : nullptr;
  }

  // Calls body(random) for some draws.
  template <typename Body>
  void ForRandomDraws(int draws, const Body& body) {
    ASSERT_NE(stream_, nullptr);
    const uint64_t seed = TestSeed();
    for (int draw = 0; draw < draws; ++draw) {
      SCOPED_TRACE(testing::Message() << "MESHFILL_SEED=" << seed << ", draw " << draw);
      std::mt19937_64 random(seed + draw);
      body(random);
      if (HasFatalFailure()) return;
    }
  }

  OnDevice Copy(const Tensor& tensor) { return OnDevice(*stream_, tensor); }

  const LoneStream reference_ = ReferenceStream(DType::kBf16);
  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
};

#define ASSERT_OK(expression)                    \
  do {                                           \
    const absl::Status ok_status = (expression); \
    ASSERT_TRUE(ok_status.ok()) << ok_status;    \
  } while (false)

}  // namespace meshfill

#endif  // MESHFILL_TESTS_KERNELS_CUDA_STREAM_FIXTURE_H_
