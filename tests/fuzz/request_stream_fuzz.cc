// The messages of a Prefill stream, each of them as it comes from the wire: what the front-end makes of them
// before a prefill has its place.
#include <limits>

#include "engine/engine_options.h"
#include "engine/kv/block_hash.h"
#include "engine/prefill_request.h"
#include "grpcpp/support/slice.h"
#include "kernels/return_if_error.h"
#include "server/api/decoded.h"
#include "server/api/plan_proto.h"
#include "server/api/status_details.h"
#include "server/api/wide_token.h"
#include "server/pool/pool_planner.h"
#include "tests/fuzz/fuzz_target.h"

namespace meshfill {
namespace {

constexpr int64_t kMostBytes = 1 << 14;  // of a message

const ModelShape kModel = {.layers = 2,
                           .hidden = 64,
                           .intermediate = 128,
                           .q_heads = 8,
                           .kv_heads = 4,
                           .head_dim = 8,
                           .vocab = 256,
                           .context_tokens = 1 << 16};

absl::Status TakeHeader(const v1::PrefillHeader& header) {
  ASSIGN_OR_RETURN(PrefillOptions options, ToPrefillOptions(header.plan()));
  options.top_k = static_cast<int>(header.top_k() % 2000);
  const uint64_t most = std::numeric_limits<int64_t>::max();
  const auto tokens = static_cast<int64_t>(std::min<uint64_t>(header.token_count(), most));
  if (tokens == 0) return absl::InvalidArgumentError("no tokens");
  RETURN_IF_ERROR(CheckPromptOptions(kModel, "m", tokens, options));
  PoolCapacity capacity;
  capacity.ranks = 4;
  ASSIGN_OR_RETURN(const PlanChoice choice, PlanForPool(kModel, EngineOptions(), capacity, tokens, options));
  FUZZ_CHECK(choice.plan.layout.tokens() == tokens && choice.plan.ranks() <= capacity.ranks);
  FUZZ_CHECK(CheckSchedule(choice.plan.schedule).ok());
  FUZZ_CHECK(choice.plan.predicted.seconds >= 0 && choice.plan.predicted.peak_bytes > 0);
  v1::PlanReply reply = ToProto(choice);
  FUZZ_CHECK(reply.ByteSizeLong() > 0);
  return absl::OkStatus();
}

absl::Status TakeMessage(const std::string& bytes, int64_t tokens_before, v1::PrefillRequest& message) {
  const grpc::Slice slice(bytes);
  const grpc::ByteBuffer buffer(&slice, 1);
  RETURN_IF_ERROR(Decode("a message", buffer, kMostBytes, message));
  if (message.has_header()) return TakeHeader(message.header());
  const auto& ids = message.tokens().ids();
  if (const auto wide = FindWideToken(buffer, message); wide.has_value()) {
    FUZZ_CHECK(wide->id > UINT32_MAX && wide->index < ids.size());
    FUZZ_CHECK(static_cast<uint32_t>(wide->id) == ids[static_cast<int>(wide->index)]);
    return absl::InvalidArgumentError("a token of more than 32 bits");
  }
  RETURN_IF_ERROR(CheckTokenIds(kModel, "m", {ids.data(), static_cast<size_t>(ids.size())}, tokens_before));
  BlockHasher(16, "salt").Append({ids.data(), static_cast<size_t>(ids.size())});
  return absl::OkStatus();
}

}  // namespace

const int kFuzzRounds = 30'000;

std::vector<std::string> FuzzSeeds() {
  v1::PrefillRequest header, planned, tokens;
  header.mutable_header()->set_request_id("a");
  header.mutable_header()->set_token_count(5);
  header.mutable_header()->set_top_k(3);
  header.mutable_header()->mutable_kv()->set_keep(true);
  planned.mutable_header()->set_token_count(1000);
  planned.mutable_header()->mutable_plan()->mutable_tile()->set_a(2);
  planned.mutable_header()->mutable_plan()->mutable_tile()->set_b(2);
  planned.mutable_header()->mutable_plan()->set_heads(1);
  planned.mutable_header()->mutable_plan()->set_stripe(16);
  planned.mutable_header()->mutable_plan()->set_layout(v1::LAYOUT_ZIGZAG);
  for (const uint32_t id : {0, 1, 127, 128, 255}) tokens.mutable_tokens()->add_ids(id);
  const std::string chunk = FuzzPiece(tokens.SerializeAsString());
  return {FuzzPiece(header.SerializeAsString()) + chunk,
          FuzzPiece(planned.SerializeAsString()) + chunk + chunk};
}

}  // namespace meshfill

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace meshfill;
  FuzzInput input(data, size);
  v1::PrefillRequest message;  // kept, as the stream does
  int64_t tokens = 0;
  while (!input.empty()) {
    const absl::Status status = TakeMessage(input.Piece(), tokens, message);
    if (!status.ok()) {
      FUZZ_CHECK(!status.message().empty());
      FUZZ_CHECK(!ToGrpcStatus(status).ok());
      break;
    }
    tokens += message.tokens().ids_size();
  }
  return 0;
}
