// What tests of the front-end share: a server on a fake engine, and a client's streams.
#ifndef MESHFILL_TESTS_SERVER_API_FRONT_END_FIXTURE_H_
#define MESHFILL_TESTS_SERVER_API_FRONT_END_FIXTURE_H_

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "kernels/monotonic_time.h"
#include "meshfill/v1/prefill.grpc.pb.h"
#include "server/api/front_end.h"
#include "server/api/status_details.h"
#include "server/config/config.h"
#include "tests/server/eventually.h"
#include "tests/server/fake_engine.h"

namespace meshfill {

struct Reply {
  absl::Status status;
  std::optional<v1::Accepted> accepted;
  std::vector<v1::Progress> progress;
  std::optional<v1::PrefillResult> result;
};

inline v1::PrefillHeader Header(uint64_t token_count) {
  v1::PrefillHeader header;
  header.set_token_count(token_count);
  return header;
}

// One Prefill stream of a client.
class Call {
 public:
  explicit Call(v1::PrefillService::Stub& stub, absl::Duration timeout = absl::Seconds(60),
                const std::vector<std::string>& traceparents = {}) {
    context_.set_deadline(absl::ToChronoTime(absl::Now() + timeout));
    for (const std::string& traceparent : traceparents) context_.AddMetadata("traceparent", traceparent);
    stream_ = stub.Prefill(&context_);
  }

  Call& Send(const v1::PrefillHeader& header) {
    v1::PrefillRequest request;
    *request.mutable_header() = header;
    stream_->Write(request);  // fails where the server has refused already: the status tells
    return *this;
  }
  Call& Send(const std::vector<uint32_t>& ids) {
    v1::PrefillRequest request;
    request.mutable_tokens()->mutable_ids()->Add(ids.begin(), ids.end());
    stream_->Write(request);
    return *this;
  }
  Call& HalfClose() {
    stream_->WritesDone();
    return *this;
  }
  v1::PrefillEvent ReadEvent() {
    v1::PrefillEvent event;
    EXPECT_TRUE(stream_->Read(&event));
    return event;
  }
  // Reads to the end; checks that events come in their order.
  Reply Finish() {
    Reply reply;
    v1::PrefillEvent event;
    while (stream_->Read(&event)) {
      EXPECT_FALSE(reply.result.has_value()) << "an event after the result";
      if (event.has_accepted()) {
        EXPECT_FALSE(reply.accepted.has_value() || !reply.progress.empty()) << "Accepted is not first";
        reply.accepted = event.accepted();
      } else if (event.has_progress()) {
        reply.progress.push_back(event.progress());
      } else {
        reply.result = event.result();
      }
    }
    reply.status = FromGrpcStatus(stream_->Finish());
    return reply;
  }
  grpc::ClientContext& context() { return context_; }

 private:
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::PrefillRequest, v1::PrefillEvent>> stream_;
};

class FrontEndFixture : public testing::Test {
 protected:
  // With an embedded pool of four ranks, unless the overrides make it a leader of workers.
  void StartServer(std::vector<std::string> overrides = {}, bool open = true, int layers = 4,
                   int capacity = 1) {
    const bool leads = std::any_of(overrides.begin(), overrides.end(), [](const std::string& override) {
      return absl::StartsWith(override, "pool.control_listen=");
    });
    if (!leads) overrides.insert(overrides.begin(), "pool.embedded.ranks=4");
    overrides.insert(overrides.begin(), "listen=127.0.0.1:0");
    const auto config = LoadConfig("", overrides);
    ASSERT_TRUE(config.ok()) << config.status();
    auto front_end = FrontEnd::Start(*config, metrics_);
    ASSERT_TRUE(front_end.ok()) << front_end.status();
    front_end_ = *std::move(front_end);
    auto engine = std::make_unique<FakeEngine>(layers, capacity);
    engine_ = engine.get();
    if (open) {
      front_end_->Open(std::move(engine));
    } else {
      engine_owner_ = std::move(engine);
    }
    channel_ = NewChannel();
    stub_ = v1::PrefillService::NewStub(channel_);
  }

  std::shared_ptr<grpc::Channel> NewChannel() {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // a connection of its own
    return grpc::CreateCustomChannel(front_end_->address(), grpc::InsecureChannelCredentials(), arguments);
  }

  Reply Prefill(const v1::PrefillHeader& header, const std::vector<uint32_t>& ids) {
    return Call(*stub_).Send(header).Send(ids).HalfClose().Finish();
  }

  void ExpectGoodRequestIsServed() {
    const std::vector<uint32_t> ids = {250, 3, 9};
    const Reply reply = Prefill(Header(3), ids);
    ASSERT_TRUE(reply.status.ok()) << reply.status;
    ASSERT_TRUE(reply.result.has_value());
    EXPECT_EQ(reply.result->first_token(), FakeEngine::FirstToken(ids));
  }

  // Calls any method by its wire bytes; sends messages, reads one.
  std::pair<grpc::Status, std::string> CallRaw(const std::string& method,
                                               const std::vector<std::string>& requests) {
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(10)));
    grpc::CompletionQueue queue;
    grpc::GenericStub stub(channel_);
    auto call = stub.PrepareCall(&context, method, &queue);
    void* tag = nullptr;
    bool ok = false;
    call->StartCall(nullptr);
    queue.Next(&tag, &ok);
    for (const std::string& request : requests) {
      const grpc::Slice slice(request);
      call->Write(grpc::ByteBuffer(&slice, 1), nullptr);
      queue.Next(&tag, &ok);
    }
    call->WritesDone(nullptr);
    queue.Next(&tag, &ok);
    grpc::ByteBuffer answer;
    call->Read(&answer, nullptr);
    queue.Next(&tag, &ok);
    grpc::Status status;
    call->Finish(&status, nullptr);
    queue.Next(&tag, &ok);
    std::vector<grpc::Slice> slices;
    std::string bytes;
    if (answer.Dump(&slices).ok()) {
      for (const grpc::Slice& part : slices)
        bytes.append(reinterpret_cast<const char*>(part.begin()), part.size());
    }
    return {status, bytes};
  }

  // The health of a service: 1 SERVING, 2 NOT_SERVING (grpc.health.v1); -1: an error.
  int Health(const std::string& service) {
    const std::string request =
        service.empty() ? "" : std::string("\n") + static_cast<char>(service.size()) + service;
    const auto [status, answer] = CallRaw("/grpc.health.v1.Health/Check", {request});
    EXPECT_TRUE(status.ok()) << status.error_message();
    return answer.size() == 2 && answer[0] == 8 ? answer[1] : -1;
  }

  v1::PoolStatus GetPool() {
    grpc::ClientContext context;
    v1::PoolStatus pool;
    EXPECT_TRUE(stub_->GetPool(&context, {}, &pool).ok());
    return pool;
  }

  // True as soon as the condition holds; false after 10 s.

  bool WasRefusedOnce(const std::string& reason) {
    return HasMetric(absl::StrCat("meshfill_requests_refused_total{reason=\"", reason, "\"} 1"));
  }
  bool HasMetric(const std::string& line) { return metrics_.Text().find(line + "\n") != std::string::npos; }
  // The value of a series as /metrics has it, labels included; -1: there is none.
  double Metric(const std::string& series) const {
    const std::string text = absl::StrCat("\n", metrics_.Text());
    const std::string begin = absl::StrCat("\n", series, " ");
    const size_t at = text.find(begin);
    return at == std::string::npos ? -1 : std::stod(text.substr(at + begin.size()));
  }

  Metrics metrics_;
  std::unique_ptr<PrefillEngine> engine_owner_;
  FakeEngine* engine_ = nullptr;
  std::unique_ptr<FrontEnd> front_end_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::PrefillService::Stub> stub_;
};

}  // namespace meshfill

#endif  // MESHFILL_TESTS_SERVER_API_FRONT_END_FIXTURE_H_
