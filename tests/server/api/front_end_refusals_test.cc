// Bad input to the front-end: each row of the API's table, and the next good request is served.
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "grpcpp/grpcpp.h"
#include "tests/server/api/front_end_fixture.h"

namespace meshfill {
namespace {

using FrontEndTest = FrontEndFixture;

struct BadRequest {
  std::string name;
  std::function<Reply(Call& call)> send;
  absl::StatusCode code;
  std::string message;  // part of it
};

Reply SendHeader(Call& call, const std::function<void(v1::PrefillHeader&)>& change) {
  v1::PrefillHeader header = Header(3);
  change(header);
  return call.Send(header).Send({1, 2, 3}).HalfClose().Finish();
}

std::vector<BadRequest> BadRequests() {
  using absl::StatusCode;
  const auto header = [](std::function<void(v1::PrefillHeader&)> change) {
    return [change](Call& call) { return SendHeader(call, change); };
  };
  return {
      {"nothing", [](Call& call) { return call.HalfClose().Finish(); }, StatusCode::kInvalidArgument,
       "without a header"},
      {"tokens first", [](Call& call) { return call.Send({1}).HalfClose().Finish(); },
       StatusCode::kInvalidArgument, "tokens before the header"},
      {"two headers",
       [](Call& call) { return call.Send(Header(1)).Send(Header(1)).Send({1}).HalfClose().Finish(); },
       StatusCode::kInvalidArgument, "a second header"},
      {"no tokens", [](Call& call) { return call.Send(Header(0)).HalfClose().Finish(); },
       StatusCode::kInvalidArgument, "token_count is 0"},
      {"too few",
       [](Call& call) {
         return call.Send(Header(4)).Send({1, 2, 3}).HalfClose().Finish();
       },
       StatusCode::kInvalidArgument, "announced 4 tokens, but only 3 came"},
      {"too many, refused without half-close",
       [](Call& call) {
         return call.Send(Header(4)).Send({1, 2, 3}).Send({4, 5}).Finish();
       },
       StatusCode::kInvalidArgument, "announced 4 tokens, but 5 have come"},
      {"id outside the vocabulary, refused without half-close",
       [](Call& call) {
         return call.Send(Header(9)).Send({1, 255}).Send({3, 256, 999}).Finish();
       },
       StatusCode::kInvalidArgument, "token 3 has id 256, outside the vocabulary of 256"},
      {"largest id", [](Call& call) { return call.Send(Header(1)).Send({UINT32_MAX}).Finish(); },
       StatusCode::kInvalidArgument, "token 0 has id 4294967295, outside the vocabulary of 256"},
      {"unknown model", header([](auto& h) { h.set_model("other"); }), StatusCode::kNotFound,
       "model \"other\" is not served here"},
      {"longer than the context",
       [](Call& call) { return call.Send(Header(FakeEngine::kContext + 1)).Finish(); },
       StatusCode::kOutOfRange, "fake-model is for 8388608 at most"},
      {"absurdly long", [](Call& call) { return call.Send(Header(UINT64_MAX)).Finish(); },
       StatusCode::kOutOfRange,
       "the prompt has 18446744073709551615 tokens; model fake-model is for 8388608 at most"},
      {"more than the memory",
       [](Call& call) { return call.Send(Header(FakeEngine::kMemoryTokens + 1)).Finish(); },
       StatusCode::kFailedPrecondition, "memory"},
      {"top_k", header([](auto& h) { h.set_top_k(257); }), StatusCode::kInvalidArgument,
       "top_k is 257; it must be 1 to the vocabulary's 256; ask for fewer"},
      {"empty tile", header([](auto& h) { h.mutable_plan()->mutable_tile(); }), StatusCode::kInvalidArgument,
       "0x0"},
      {"tile without columns", header([](auto& h) { h.mutable_plan()->mutable_tile()->set_a(4); }),
       StatusCode::kInvalidArgument, "plan.tile is 4x0"},
      {"huge tile", header([](auto& h) {
         h.mutable_plan()->mutable_tile()->set_a(1u << 31);
         h.mutable_plan()->mutable_tile()->set_b(2);
       }),
       StatusCode::kInvalidArgument, "2147483648x2"},
      {"tile that does not multiply to the ranks", header([](auto& h) {
         h.mutable_plan()->mutable_tile()->set_a(3);
         h.mutable_plan()->mutable_tile()->set_b(2);
       }),
       StatusCode::kInvalidArgument, "does not multiply"},
      {"layout", header([](auto& h) { h.mutable_plan()->set_layout(static_cast<v1::Layout>(17)); }),
       StatusCode::kInvalidArgument, "plan.layout is 17"},
      {"long request_id", header([](auto& h) { h.set_request_id(std::string(129, 'x')); }),
       StatusCode::kInvalidArgument, "request_id has 129"},
      {"long tenant", header([](auto& h) { h.set_tenant(std::string(129, 'x')); }),
       StatusCode::kInvalidArgument, "tenant has 129"},
      {"message above the limit",
       [](Call& call) { return call.Send(Header(9)).Send(std::vector<uint32_t>(5 << 20, 1)).Finish(); },
       StatusCode::kResourceExhausted,
       "a message after 0 tokens has 5242890 bytes; at most 4194304 are allowed (limits.max_message_bytes); "
       "send smaller messages"},
  };
}

TEST_F(FrontEndTest, RefusesBadRequestsAndServesTheNextGoodOne) {
  StartServer();
  for (const BadRequest& bad : BadRequests()) {
    SCOPED_TRACE(bad.name);
    Call call(*stub_);
    const Reply reply = bad.send(call);
    EXPECT_EQ(reply.status.code(), bad.code) << reply.status;
    EXPECT_NE(std::string(reply.status.message()).find(bad.message), std::string::npos) << reply.status;
    EXPECT_FALSE(reply.accepted.has_value() || reply.result.has_value());
    ExpectGoodRequestIsServed();
    EXPECT_EQ(GetPool().queued_requests(), 0u);
    EXPECT_EQ(GetPool().queued_tokens(), 0u);
  }
}

TEST_F(FrontEndTest, PassesTheEnginesErrorsOn) {
  StartServer();
  engine_->FailNext(absl::InternalError("NaN in the logits of token 2"));
  const Reply reply = Prefill(Header(3), {1, 2, 3});
  EXPECT_EQ(reply.status.code(), absl::StatusCode::kInternal);
  EXPECT_NE(std::string(reply.status.message()).find("NaN"), std::string::npos);
  EXPECT_TRUE(HasMetric("meshfill_requests_refused_total{reason=\"other\"} 0")) << "it had a place";
  EXPECT_TRUE(reply.accepted.has_value());
  EXPECT_FALSE(reply.result.has_value());
  ExpectGoodRequestIsServed();
}

TEST_F(FrontEndTest, RefusesALiveIdAgain) {
  StartServer();
  engine_->Hold();
  v1::PrefillHeader header = Header(3);
  header.set_request_id("same");
  Call first(*stub_);
  first.Send(header).Send({1, 2, 3}).HalfClose();
  ASSERT_TRUE(engine_->WaitForBegun(1));
  const Reply again = Prefill(header, {4, 5, 6});
  EXPECT_EQ(again.status.code(), absl::StatusCode::kAlreadyExists) << again.status;
  EXPECT_TRUE(WasRefusedOnce("duplicate"));
  v1::PrefillHeader bad = header;  // whatever the body
  bad.set_token_count(0);
  bad.set_model("another");
  bad.set_top_k(1 << 30);
  EXPECT_EQ(Prefill(bad, {4, 5, 6}).status.code(), absl::StatusCode::kAlreadyExists);
  header.set_tenant("another");
  Call of_another(*stub_);
  of_another.Send(header).Send({4, 5, 6}).HalfClose();
  EXPECT_TRUE(of_another.ReadEvent().has_accepted());
  engine_->Release();
  EXPECT_TRUE(first.Finish().status.ok());
  EXPECT_TRUE(of_another.Finish().status.ok());
  header.clear_tenant();
  EXPECT_TRUE(Prefill(header, {4, 5, 6}).status.ok());  // no longer live
}

TEST_F(FrontEndTest, AMessageThatCannotBeDecodedIsNoHalfClose) {
  StartServer();
  v1::PrefillRequest header, tokens;
  *header.mutable_header() = Header(4);
  for (const uint32_t id : {1, 2, 3, 4}) tokens.mutable_tokens()->add_ids(id);
  const std::string good_header = header.SerializeAsString(), good_tokens = tokens.SerializeAsString();
  const std::string bad_id = std::string("\x0a\x05\x0a\x03", 4) + "\xff\xfe\xfd";  // request_id: no UTF-8
  const std::string garbage = "\xff\xff\xff\xff garbage";
  for (const std::vector<std::string>& messages :
       std::vector<std::vector<std::string>>{{good_header, good_tokens, garbage},
                                             {good_header, good_tokens, garbage, good_tokens},
                                             {good_header, good_tokens.substr(0, good_tokens.size() - 1)},
                                             {good_header.substr(0, good_header.size() - 1), good_tokens},
                                             {bad_id, good_tokens},
                                             {garbage}}) {
    const auto [status, answer] = CallRaw("/meshfill.v1.PrefillService/Prefill", messages);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << status.error_message();
    EXPECT_NE(status.error_message().find("cannot be decoded"), std::string::npos) << status.error_message();
    EXPECT_EQ(answer, "");
    ExpectGoodRequestIsServed();
  }
}

TEST_F(FrontEndTest, AnIdOfMoreThan32BitsIsNotCut) {
  StartServer();
  v1::PrefillRequest header;
  *header.mutable_header() = Header(5);
  const std::string one("\x12\x03\x0a\x01\x07", 5);                                   // 7
  const std::string ids("\x12\x0b\x0a\x07\x01\x85\x80\x80\x80\x10\x02\x08\x03", 13);  // 1, 2^32 + 5, 2; 3
  const auto [status, answer] =
      CallRaw("/meshfill.v1.PrefillService/Prefill", {header.SerializeAsString(), one, ids});
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << status.error_message();
  EXPECT_EQ(
      status.error_message(),
      "token 2 has id 4294967301, outside the vocabulary of 256; use the tokenizer of model fake-model");
  ExpectGoodRequestIsServed();
}

TEST_F(FrontEndTest, EveryCallThatCannotBeDecodedSaysSo) {
  StartServer();
  for (const char* method : {"FetchKv", "RenewKv", "ReleaseKv", "Cancel", "Plan", "GetPool"}) {
    SCOPED_TRACE(method);
    const auto [status, answer] =
        CallRaw(absl::StrCat("/meshfill.v1.PrefillService/", method), {"\xff\xff\xff\xff garbage"});
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_EQ(status.error_message(), absl::StrCat("the request cannot be decoded; send meshfill.v1.", method,
                                                   "Request, uncompressed, its texts in UTF-8"));
    EXPECT_EQ(answer, "");
  }
  EXPECT_EQ(GetPool().ranks(), 4u);
}

TEST_F(FrontEndTest, EveryCallThatIsTooLongSaysSo) {
  StartServer({"limits.max_message_bytes=64KiB"});
  for (const char* method : {"Prefill", "FetchKv", "RenewKv", "ReleaseKv", "Cancel", "Plan", "GetPool"}) {
    SCOPED_TRACE(method);
    for (const size_t bytes : {size_t{64} << 10, (size_t{64} << 10) + 1, size_t{8} << 20}) {
      const auto [status, answer] =
          CallRaw(absl::StrCat("/meshfill.v1.PrefillService/", method), {std::string(bytes, '\xff')});
      const bool allowed = bytes == size_t{64} << 10;
      EXPECT_EQ(status.error_code(),
                allowed ? grpc::StatusCode::INVALID_ARGUMENT : grpc::StatusCode::RESOURCE_EXHAUSTED);
      const std::string said =
          allowed
              ? "cannot be decoded"
              : absl::StrCat("has ", bytes, " bytes; at most 65536 are allowed (limits.max_message_bytes)");
      EXPECT_NE(status.error_message().find(said), std::string::npos) << status.error_message();
      EXPECT_EQ(answer, "");
    }
  }
  EXPECT_EQ(Metric("meshfill_requests_refused_total{reason=\"memory\"}"), 0) << "the client is at fault";
  ExpectGoodRequestIsServed();
}

TEST_F(FrontEndTest, AnUnknownMethodIsNamed) {
  StartServer();
  const auto [status, answer] = CallRaw("/meshfill.v1.PrefillService/Prefil", {"whatever"});
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNIMPLEMENTED);
  EXPECT_EQ(
      status.error_message(),
      "no method \"/meshfill.v1.PrefillService/Prefil\" here; call those of meshfill.v1.PrefillService, or "
      "grpc.health.v1.Health");
  ExpectGoodRequestIsServed();
}

TEST_F(FrontEndTest, NamesAreCountedInCharacters) {
  StartServer();
  const auto name = [](int characters) {
    std::string text;
    for (int i = 0; i < characters; ++i) text += "\xc3\xa9";
    return text;
  };
  v1::PrefillHeader header = Header(1);
  header.set_request_id(name(128));
  header.set_tenant(std::string(128, 't'));
  header.set_cache_salt(name(128));
  EXPECT_TRUE(Prefill(header, {1}).status.ok());
  header.set_request_id(name(129));
  const Reply reply = Prefill(header, {1});
  EXPECT_EQ(reply.status.message(), "request_id has 129 characters; at most 128 are allowed");
}

TEST_F(FrontEndTest, RefusesCompressedMessages) {
  StartServer();
  grpc::ClientContext context;
  context.set_compression_algorithm(GRPC_COMPRESS_GZIP);
  auto stream = stub_->Prefill(&context);
  v1::PrefillRequest request;
  *request.mutable_header() = Header(200);
  request.mutable_header()->set_tenant(
      std::string(100, 'a'));  // compresses well, so that it is sent compressed
  stream->Write(request);
  stream->WritesDone();
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::UNIMPLEMENTED);
  ExpectGoodRequestIsServed();
}

}  // namespace
}  // namespace meshfill
