// The engine's values as messages of the API.
#ifndef MESHFILL_SERVER_API_RESULT_PROTO_H_
#define MESHFILL_SERVER_API_RESULT_PROTO_H_

#include <span>
#include <string>

#include "absl/time/time.h"
#include "engine/kv/kv_prompt.h"
#include "engine/mesh/layout.h"
#include "engine/plan/plan.h"
#include "engine/prefill_engine.h"
#include "grpcpp/support/byte_buffer.h"
#include "meshfill/v1/prefill.pb.h"

namespace meshfill {

v1::Layout ToProto(LayoutKind layout);
v1::PlanSummary ToProto(const Plan& plan);
v1::CommBytes ToProto(const CommBytes& bytes);

// Leaves out the logits and the time in a queue.
v1::PrefillResult ToProto(const PrefillResult& result, const std::string& request_id);
// The bytes of a PrefillEvent with this result and these logits. Where they are many, they are in pages of
// their own: results that wait long for their readers take no more than their bytes, and leave no holes in
// the heap.
grpc::ByteBuffer ResultEvent(const v1::PrefillResult& result, std::span<const float> logits);

// Leaves out the block hashes. This process holds all of the K and V.
v1::KvManifest ToProto(const KvPrompt& kept, const std::string& lease, absl::Duration expires_in);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_API_RESULT_PROTO_H_
