// Bounds on what one client can make a server's channel do.
#ifndef MESHFILL_SERVER_LISTENER_CHANNEL_LIMITS_H_
#define MESHFILL_SERVER_LISTENER_CHANNEL_LIMITS_H_

#include "grpcpp/server_builder.h"
#include "meshfill/v1/config.pb.h"
#include "server/listener/grpc_listener.h"

namespace meshfill {

// No compression, no shared port; bounded messages, streams, metadata, pings and threads.
void LimitChannel(const v1::LimitsSection& limits, grpc::ServerBuilder& builder);

PortLimits PortLimitsOf(const v1::LimitsSection& limits);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_LISTENER_CHANNEL_LIMITS_H_
