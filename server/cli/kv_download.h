// Fetches the K and V of a lease from a server, layer by layer: what `meshfill prefill --server --kv-out`
// runs.
#ifndef MESHFILL_SERVER_CLI_KV_DOWNLOAD_H_
#define MESHFILL_SERVER_CLI_KV_DOWNLOAD_H_

#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "engine/kv/kv_shape.h"
#include "meshfill/v1/prefill.pb.h"
#include "server/cli/server_channel.h"

namespace meshfill {

// INTERNAL: a server that says nothing usable.
absl::StatusOr<KvShape> KvShapeOf(const v1::KvManifest& manifest);

class KvDownload {
 public:
  KvDownload(const ServerChannel& server, const std::string& tenant, const std::string& lease);
  ~KvDownload();  // ends the lease

  // Fills K and V of the whole prompt, [tokens, kv_heads, head_dim] each. Layers in order, from 0; blocks.
  // Errors: the server's own, with its address; DATA_LOSS: a part that is not what its checksum says.
  absl::Status ReadLayer(int layer, std::span<std::byte> k, std::span<std::byte> v);

 private:
  class Call;  // keeps gRPC's headers out of this one
  std::unique_ptr<Call> call_;
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_CLI_KV_DOWNLOAD_H_
