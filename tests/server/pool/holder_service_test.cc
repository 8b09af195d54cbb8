#include "server/pool/holder_service.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <vector>

#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/grpcpp.h"

namespace meshfill {
namespace {

// Holds nothing.
class NoKv final : public KvSource {
 public:
  absl::StatusOr<std::unique_ptr<KvReader>> Open(const v1::FetchKvRequest&, const std::string&, int64_t,
                                                 std::function<void()>) override {
    return absl::NotFoundError("nothing is held here");
  }
  absl::Time EndLapsed() override { return absl::InfiniteFuture(); }
  KvStore::Counts counts() const override { return {}; }
  void SetObserver(std::function<void()>) override {}
};

// The health of a service: 1 SERVING, 2 NOT_SERVING (grpc.health.v1); -1: an error.
int Health(const std::string& address, const std::string& service) {
  const auto channel = grpc::CreateChannel(address, grpc::InsecureChannelCredentials());
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
  const grpc::Slice name("\n" + std::string(1, static_cast<char>(service.size())) + service);
  grpc::CompletionQueue queue;
  auto call =
      stub.PrepareUnaryCall(&context, "/grpc.health.v1.Health/Check", grpc::ByteBuffer(&name, 1), &queue);
  call->StartCall();
  grpc::ByteBuffer answer;
  grpc::Status status;
  call->Finish(&answer, &status, nullptr);
  void* tag = nullptr;
  bool ok = false;
  queue.Next(&tag, &ok);
  std::vector<grpc::Slice> parts;
  if (!status.ok() || !answer.Dump(&parts).ok() || parts.size() != 1 || parts[0].size() != 2) return -1;
  return parts[0].begin()[0] == 8 ? parts[0].begin()[1] : -1;
}

TEST(HolderService, HealthFollowsTheMembership) {
  NoKv held;
  v1::LimitsSection limits;
  limits.set_max_connections(8);
  limits.set_channel_memory_bytes(64 << 20);
  limits.set_max_streams(8);
  limits.set_max_message_bytes(1 << 20);
  const auto service = HolderService::Start("127.0.0.1:0", limits, held);
  ASSERT_TRUE(service.ok()) << service.status();
  EXPECT_EQ(Health((*service)->address(), ""), 1) << "the process lives";
  EXPECT_EQ(Health((*service)->address(), kWorkerHealthService), 2);
  for (const bool member : {true, false, true}) {
    (*service)->SetMember(member);
    EXPECT_EQ(Health((*service)->address(), kWorkerHealthService), member ? 1 : 2);
  }
  EXPECT_EQ(Health((*service)->address(), "meshfill.v1.Nothing"), -1);
}

}  // namespace
}  // namespace meshfill
