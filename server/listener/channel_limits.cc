#include "server/listener/channel_limits.h"

#include <limits>

#include "grpcpp/grpcpp.h"
#include "grpcpp/resource_quota.h"

namespace meshfill {
namespace {

constexpr int kReflectionThreads = 8;  // gRPC's reflection blocks a thread a stream
constexpr int kMaxMetadataBytes = 16 << 10;

}  // namespace

void LimitChannel(const v1::LimitsSection& limits, grpc::ServerBuilder& builder) {
  // decoded.h bounds messages, and says how. This gRPC has a message whole before it looks at its own bound:
  // guarded_connections.h bounds the memory of all.
  builder.SetMaxReceiveMessageSize(std::numeric_limits<int>::max());
  builder.SetMaxSendMessageSize(std::numeric_limits<int>::max());
  // A small compressed message may stand for gigabytes, which this gRPC allocates before it looks at its
  // limit.
  for (int algorithm = GRPC_COMPRESS_NONE + 1; algorithm < GRPC_COMPRESS_ALGORITHMS_COUNT; ++algorithm) {
    builder.SetCompressionAlgorithmSupportStatus(static_cast<grpc_compression_algorithm>(algorithm), false);
  }
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, static_cast<int>(limits.max_streams()));
  builder.AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE, kMaxMetadataBytes);
  // Finds peers that are gone without a word; a queued client may be silent for an hour.
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 60'000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 20'000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);  // gRPC stops after two otherwise
  // Clients may ping every 10 s; two faster ones end their connection.
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 10'000);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 2);
  builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, 10'000);
  builder.SetResourceQuota(grpc::ResourceQuota("meshfill")
                               .SetMaxThreads(kReflectionThreads)
                               .Resize(static_cast<size_t>(limits.channel_memory_bytes())));
  builder.SetSyncServerOption(grpc::ServerBuilder::NUM_CQS, 1);
}

PortLimits PortLimitsOf(const v1::LimitsSection& limits) {
  return {.connections = static_cast<int>(limits.max_connections()),
          .streams = static_cast<int>(limits.max_streams()),
          .incomplete_bytes = static_cast<int64_t>(limits.channel_memory_bytes())};
}

}  // namespace meshfill
