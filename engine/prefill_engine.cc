#include "engine/prefill_engine.h"

#include "kernels/return_if_error.h"

namespace meshfill {

absl::StatusOr<PrefillResult> RunPrefill(PrefillEngine& engine, const PrefillRequest& request,
                                         PrefillObserver* observer) {
  ASSIGN_OR_RETURN(std::unique_ptr<Prefill> prefill, engine.Start(request, observer));
  return prefill->Wait();
}

}  // namespace meshfill
