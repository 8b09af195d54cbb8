// What `meshfill prefill --kv-out` makes of a server that sends something else than it should.
#include "server/cli/kv_download.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/kv/crc32c.h"
#include "meshfill/v1/prefill.grpc.pb.h"

namespace meshfill {
namespace {

using testing::HasSubstr;

// Sends the parts that the test says, then the status; takes releases.
class PlannedServer final : public v1::PrefillService::Service {
 public:
  PlannedServer() {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }

  std::string address() const { return absl::StrCat("127.0.0.1:", port_); }

  std::vector<v1::KvPart> parts;
  grpc::Status status;
  std::atomic<int> released = 0;

 private:
  grpc::Status FetchKv(grpc::ServerContext*, const v1::FetchKvRequest* request,
                       grpc::ServerWriter<v1::KvPart>* writer) override {
    EXPECT_EQ(request->lease(), "the lease");
    for (const v1::KvPart& part : parts) writer->Write(part);
    return status;
  }
  grpc::Status ReleaseKv(grpc::ServerContext*, const v1::ReleaseKvRequest*, v1::ReleaseKvReply*) override {
    ++released;
    return grpc::Status::OK;
  }

  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

v1::KvPart Part(int layer, const std::string& k, const std::string& v) {
  v1::KvPart part;
  part.set_layer(static_cast<uint32_t>(layer));
  part.set_k(k);
  part.set_v(v);
  part.set_crc32c(Crc32c(v, Crc32c(k)));
  return part;
}

class KvDownloadTest : public testing::Test {
 protected:
  // Layer 0 of eight bytes each.
  absl::Status Read() {
    const auto server = ServerChannel::Open({.address = server_.address()});
    EXPECT_TRUE(server.ok()) << server.status();
    k_.assign(8, '-'), v_.assign(8, '-');
    KvDownload download(*server, "tenant", "the lease");
    return download.ReadLayer(0, std::as_writable_bytes(std::span(k_)),
                              std::as_writable_bytes(std::span(v_)));
  }

  PlannedServer server_;
  std::string k_, v_;
};

TEST_F(KvDownloadTest, PartsFillALayerInTurn) {
  server_.parts = {Part(0, "abc", "ABC"), Part(0, "defgh", "DEFGH"), Part(1, "x", "X")};
  const absl::Status read = Read();
  EXPECT_TRUE(read.ok()) << read;
  EXPECT_EQ(k_, "abcdefgh");
  EXPECT_EQ(v_, "ABCDEFGH");
  EXPECT_EQ(server_.released, 1) << "whoever has read it needs it no more";
}

TEST_F(KvDownloadTest, APartThatIsNotTheNextIsAnError) {
  const v1::KvPart good = Part(0, "abc", "ABC");
  for (const v1::KvPart& bad :
       {Part(1, "defgh", "DEFGH"), Part(0, "defgh", "DEFG"), Part(0, "", ""), Part(0, "defghi", "DEFGHI")}) {
    server_.parts = {good, bad};
    const absl::Status read = Read();
    EXPECT_TRUE(absl::IsInternal(read)) << read;
    EXPECT_THAT(std::string(read.message()), HasSubstr(absl::StrCat("sent a part of layer ", bad.layer())));
    EXPECT_THAT(std::string(read.message()), HasSubstr(server_.address()));
  }
}

TEST_F(KvDownloadTest, AFlippedBitIsDataLoss) {
  for (const bool of_v : {false, true}) {
    v1::KvPart part = Part(0, "abcdefgh", "ABCDEFGH");
    (of_v ? *part.mutable_v() : *part.mutable_k())[7] ^= 1;
    server_.parts = {part};
    const absl::Status read = Read();
    EXPECT_TRUE(absl::IsDataLoss(read)) << read;
    EXPECT_THAT(std::string(read.message()), HasSubstr("K and V of layer 0"));
  }
}

TEST_F(KvDownloadTest, AStreamThatEndsEarlyIsAnError) {
  server_.parts = {Part(0, "abc", "ABC")};
  absl::Status read = Read();
  EXPECT_TRUE(absl::IsInternal(read)) << read;
  EXPECT_THAT(std::string(read.message()), HasSubstr("sent too little of K and V"));
  server_.status = grpc::Status(grpc::StatusCode::NOT_FOUND, "the lease has lapsed");
  read = Read();
  EXPECT_TRUE(absl::IsNotFound(read)) << read;
  EXPECT_THAT(std::string(read.message()), HasSubstr("the lease has lapsed"));
}

TEST(KvShapeOf, RefusesADtypeThatItDoesNotKnow) {
  v1::KvManifest manifest;
  manifest.set_layers(3);
  manifest.set_kv_heads(2);
  manifest.set_head_dim(16);
  for (const char* known : {"f32", "bf16"}) {
    manifest.set_dtype(known);
    const auto shape = KvShapeOf(manifest);
    ASSERT_TRUE(shape.ok()) << shape.status();
    EXPECT_EQ(DTypeName(shape->dtype), std::string(known));
    EXPECT_EQ(shape->layers, 3);
    EXPECT_EQ(shape->kv_heads, 2);
    EXPECT_EQ(shape->head_dim, 16);
  }
  manifest.set_dtype("fp8");
  const absl::Status status = KvShapeOf(manifest).status();
  EXPECT_TRUE(absl::IsInternal(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("\"fp8\""));
}

}  // namespace
}  // namespace meshfill
