// An endpoint of an in-process communicator, for tests of what connects by one.
#ifndef MESHFILL_TESTS_ENGINE_RUN_READY_ENDPOINT_H_
#define MESHFILL_TESTS_ENGINE_RUN_READY_ENDPOINT_H_

#include <atomic>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "engine/comm/communicator.h"
#include "engine/comm/endpoint.h"

namespace meshfill {

// Counts the bytes that it is given to send.
class CountingCommunicator final : public Communicator {
 public:
  CountingCommunicator(std::unique_ptr<Communicator> communicator, std::atomic<int64_t>& sent_bytes)
      : communicator_(std::move(communicator)), sent_bytes_(sent_bytes) {}
  int rank() const override { return communicator_->rank(); }
  int size() const override { return communicator_->size(); }
  absl::StatusOr<std::unique_ptr<PendingReceive>> SendReceive(Traffic traffic, int to, BufferRef message,
                                                              int from, size_t receive_bytes) override {
    sent_bytes_ += static_cast<int64_t>(message->size_bytes());
    return communicator_->SendReceive(traffic, to, std::move(message), from, receive_bytes);
  }
  void Abort(absl::Status reason) override { communicator_->Abort(std::move(reason)); }

 private:
  const std::unique_ptr<Communicator> communicator_;
  std::atomic<int64_t>& sent_bytes_;
};

// Its communicator is there already, and counts.
class ReadyEndpoint final : public Endpoint {
 public:
  explicit ReadyEndpoint(std::unique_ptr<Communicator> communicator)
      : communicator_(std::make_unique<CountingCommunicator>(std::move(communicator), sent_bytes_)),
        shared_(communicator_.get()) {}
  int64_t sent_bytes() const { return sent_bytes_; }
  const std::string& address() const override { return address_; }
  absl::StatusOr<std::unique_ptr<Communicator>> Connect(std::span<const std::string>, Stream&,
                                                        absl::Time) override {
    return std::move(communicator_);
  }
  void Abort(absl::Status reason) override { shared_->Abort(std::move(reason)); }

 private:
  const std::string address_ = "here";
  std::atomic<int64_t> sent_bytes_{0};
  std::unique_ptr<Communicator> communicator_;
  Communicator* const shared_;
};

}  // namespace meshfill

#endif  // MESHFILL_TESTS_ENGINE_RUN_READY_ENDPOINT_H_
