#include "server/cli/kv_download.h"

#include <grpcpp/grpcpp.h>

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/kv/crc32c.h"
#include "kernels/return_if_error.h"
#include "meshfill/v1/prefill.grpc.pb.h"

namespace meshfill {
namespace {

constexpr char kTenantMetadata[] = "meshfill-tenant";  // the API's (docs/kv.md)

}  // namespace

absl::StatusOr<KvShape> KvShapeOf(const v1::KvManifest& manifest) {
  KvShape shape = {.layers = static_cast<int>(manifest.layers()),
                   .kv_heads = static_cast<int>(manifest.kv_heads()),
                   .head_dim = static_cast<int>(manifest.head_dim())};
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    if (manifest.dtype() != DTypeName(dtype)) continue;
    shape.dtype = dtype;
    return shape;
  }
  return absl::InternalError(absl::StrCat("the server keeps K and V as \"", manifest.dtype(),
                                          "\", which this version does not know; use the server's version"));
}

class KvDownload::Call {
 public:
  Call(const ServerChannel& server, const std::string& tenant, const std::string& lease)
      : server_(server),
        address_(server.address()),
        tenant_(tenant),
        stub_(v1::PrefillService::NewStub(server.channel())) {
    request_.set_lease(lease);
    Prepare(context_);
    stream_ = stub_->FetchKv(&context_, request_);
  }

  ~Call() {
    if (!ended_) {
      context_.TryCancel();
      while (stream_->Read(&part_)) {
      }
      stream_->Finish();
    }
    grpc::ClientContext context;
    Prepare(context);
    v1::ReleaseKvRequest release;
    release.set_lease(request_.lease());
    v1::ReleaseKvReply reply;
    stub_->ReleaseKv(&context, release, &reply);  // where it fails, the lease lapses
  }

  absl::Status ReadLayer(int layer, std::span<std::byte> k, std::span<std::byte> v) {
    while (!k.empty()) {
      if (!stream_->Read(&part_)) return Ended();
      const size_t bytes = part_.k().size();
      if (part_.layer() != static_cast<uint32_t>(layer) || bytes != part_.v().size() || bytes == 0 ||
          bytes > k.size()) {
        return absl::InternalError(absl::StrCat("server ", address_, " sent a part of layer ", part_.layer(),
                                                " that is none of layer ", layer, "'s next ones"));
      }
      if (part_.crc32c() != Crc32c(part_.v(), Crc32c(part_.k()))) {
        return absl::DataLossError(absl::StrCat("server ", address_, ": K and V of layer ", layer,
                                                " from token ", part_.first_token(),
                                                " on have a wrong checksum; fetch them again"));
      }
      std::memcpy(k.data(), part_.k().data(), bytes);
      std::memcpy(v.data(), part_.v().data(), bytes);
      k = k.subspan(bytes);
      v = v.subspan(bytes);
    }
    return absl::OkStatus();
  }

 private:
  void Prepare(grpc::ClientContext& context) const {
    context.AddMetadata(kTenantMetadata, tenant_);
    server_.Authorize(context);
  }

  absl::Status Ended() {
    ended_ = true;
    const grpc::Status status = stream_->Finish();
    if (status.ok()) {
      return absl::InternalError(
          absl::StrCat("server ", address_, " sent too little of K and V; see its log"));
    }
    return absl::Status(static_cast<absl::StatusCode>(status.error_code()),
                        absl::StrCat("server ", address_, ": ", status.error_message()));
  }

  const ServerChannel server_;
  const std::string address_;
  const std::string tenant_;
  std::unique_ptr<v1::PrefillService::Stub> stub_;
  v1::FetchKvRequest request_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReader<v1::KvPart>> stream_;
  v1::KvPart part_;
  bool ended_ = false;
};

KvDownload::KvDownload(const ServerChannel& server, const std::string& tenant, const std::string& lease)
    : call_(std::make_unique<Call>(server, tenant, lease)) {}
KvDownload::~KvDownload() = default;

absl::Status KvDownload::ReadLayer(int layer, std::span<std::byte> k, std::span<std::byte> v) {
  return call_->ReadLayer(layer, k, v);
}

}  // namespace meshfill
