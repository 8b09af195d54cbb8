// A client of leases for tests: prefills, and fetches that check what every part must be.
#ifndef MESHFILL_TESTS_SERVER_API_KV_CLIENT_H_
#define MESHFILL_TESTS_SERVER_API_KV_CLIENT_H_

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "engine/kv/crc32c.h"
#include "engine/kv/kv_shape.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "meshfill/v1/prefill.grpc.pb.h"
#include "server/api/status_details.h"
#include "tests/engine/random_seed.h"

namespace meshfill {

// What FetchKv gave: by layer, the parts one after the other.
struct Fetched {
  absl::Status status;
  std::vector<std::string> k, v, pages;
  int parts = 0;
};

// Any range of a prompt's tokens, layers and heads, in any layout.
inline v1::FetchKvRequest RandomFetch(std::mt19937_64& random, const std::string& lease, const KvShape& shape,
                                      int64_t tokens) {
  v1::FetchKvRequest request;
  request.set_lease(lease);
  request.set_layout(static_cast<v1::KvLayout>(Draw<int>(random, 0, 2)));
  int64_t first = Draw<int64_t>(random, 0, tokens - 1);
  int64_t count = Draw<int64_t>(random, 1, tokens - first);
  if (request.layout() != v1::KV_LAYOUT_TOKENS) {
    const int64_t page_tokens = Draw<int>(random, 1, 48);
    request.set_page_tokens(static_cast<uint32_t>(page_tokens));
    first -= first % page_tokens;
    count = std::min(tokens - first, (count / page_tokens + 1) * page_tokens);
  }
  request.set_first_token(static_cast<uint64_t>(first));
  request.set_tokens(static_cast<uint64_t>(count));
  request.set_first_layer(Draw<uint32_t>(random, 0, shape.layers - 1));
  request.set_layers(Draw<uint32_t>(random, 1, shape.layers - request.first_layer()));
  request.set_first_head(Draw<uint32_t>(random, 0, shape.kv_heads - 1));
  request.set_heads(Draw<uint32_t>(random, 1, shape.kv_heads - request.first_head()));
  return request;
}

class KvClient {
 public:
  explicit KvClient(std::shared_ptr<grpc::Channel> channel, std::string tenant = "")
      : stub_(v1::PrefillService::NewStub(std::move(channel))), tenant_(std::move(tenant)) {}

  v1::PrefillService::Stub& stub() { return *stub_; }

  std::unique_ptr<grpc::ClientContext> Context(absl::Duration timeout = absl::Seconds(60)) const {
    auto context = std::make_unique<grpc::ClientContext>();
    context->set_deadline(absl::ToChronoTime(absl::Now() + timeout));
    if (!tenant_.empty()) context->AddMetadata("meshfill-tenant", tenant_);
    return context;
  }

  v1::PrefillHeader Header(uint64_t tokens) const {
    v1::PrefillHeader header;
    header.set_token_count(tokens);
    header.set_tenant(tenant_);
    header.mutable_kv()->set_keep(true);
    return header;
  }

  // A whole prefill of `ids`, whose count the header gets.
  absl::StatusOr<v1::PrefillResult> Prefill(v1::PrefillHeader header, const std::vector<uint32_t>& ids) {
    const auto context = Context();
    const auto stream = stub_->Prefill(context.get());
    v1::PrefillRequest request;
    header.set_token_count(ids.size());
    *request.mutable_header() = header;
    stream->Write(request);
    request.mutable_tokens()->mutable_ids()->Add(ids.begin(), ids.end());
    stream->Write(request);
    stream->WritesDone();
    v1::PrefillEvent event;
    v1::PrefillResult result;
    while (stream->Read(&event)) {
      if (event.has_result()) result = event.result();
    }
    const absl::Status status = FromGrpcStatus(stream->Finish());
    if (!status.ok()) return status;
    return result;
  }

  Fetched Fetch(const v1::FetchKvRequest& request) {
    const auto context = Context();
    const auto stream = stub_->FetchKv(context.get(), request);
    Fetched fetched;
    v1::KvPart part;
    uint64_t next_token = request.first_token();
    while (stream->Read(&part)) {
      ++fetched.parts;
      if (part.first_token() == request.first_token()) {
        EXPECT_EQ(part.layer(), request.first_layer() + fetched.k.size());
        fetched.k.emplace_back();
        fetched.v.emplace_back();
        fetched.pages.emplace_back();
        next_token = request.first_token();
      }
      EXPECT_EQ(part.first_token(), next_token);
      next_token += part.tokens();
      EXPECT_EQ(part.crc32c(), Crc32c(part.k() + part.v() + part.pages()));
      EXPECT_LE(part.ByteSizeLong(), size_t{4} << 20);
      fetched.k.back() += part.k();
      fetched.v.back() += part.v();
      fetched.pages.back() += part.pages();
    }
    fetched.status = FromGrpcStatus(stream->Finish());
    return fetched;
  }

  absl::StatusOr<double> Renew(const std::string& lease, uint32_t seconds) {
    v1::RenewKvRequest request;
    request.set_lease(lease);
    request.set_seconds(seconds);
    v1::KvLease reply;
    const absl::Status status = FromGrpcStatus(stub_->RenewKv(Context().get(), request, &reply));
    if (!status.ok()) return status;
    EXPECT_EQ(reply.lease(), lease);
    return reply.expires_in_seconds();
  }

  absl::Status Release(const std::string& lease) {
    v1::ReleaseKvRequest request;
    request.set_lease(lease);
    v1::ReleaseKvReply reply;
    return FromGrpcStatus(stub_->ReleaseKv(Context().get(), request, &reply));
  }

  absl::Status Cancel(const std::string& request_id) {
    v1::CancelRequest request;
    request.set_request_id(request_id);
    v1::CancelReply reply;
    return FromGrpcStatus(stub_->Cancel(Context().get(), request, &reply));
  }

 private:
  std::unique_ptr<v1::PrefillService::Stub> stub_;
  std::string tenant_;
};

}  // namespace meshfill

#endif  // MESHFILL_TESTS_SERVER_API_KV_CLIENT_H_
