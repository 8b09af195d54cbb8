#include "engine/prefill_engine.h"

#include "kernels/return_if_error.h"

namespace meshfill {

absl::StatusOr<PrefillResult> RunPrefill(PrefillEngine& engine, const PrefillRequest& request,
                                         PrefillObserver* observer) {
  ASSIGN_OR_RETURN(std::unique_ptr<Prefill> prefill, engine.Start(request, observer));
  return prefill->Wait();
}

absl::StatusOr<std::vector<std::unique_ptr<Prefill>>> PrefillEngine::StartPack(
    std::span<const PrefillRequest> /*requests*/, std::span<PrefillObserver* const> /*observers*/) {
  return absl::InternalError("no prompts of this engine share a pass: its pack_room is nothing");
}

}  // namespace meshfill
