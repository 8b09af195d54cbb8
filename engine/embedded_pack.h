// Prompts that share a pass of an embedded pool (engine/plan/pack.h): its ranks are threads of this process,
// and each computes its prompts by itself.
#ifndef MESHFILL_ENGINE_EMBEDDED_PACK_H_
#define MESHFILL_ENGINE_EMBEDDED_PACK_H_

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/embedded_run.h"
#include "engine/prefill_engine.h"
#include "engine/run_places.h"

namespace meshfill {

struct PackedPrefill {
  PrefillRequest request;
  PlannedPrefill planned;     // whole, for one rank, with the prediction of the pass
  int rank;                   // of the place
  PrefillObserver* observer;  // may be null; lives as long as the prompt's prefill
};

// Begins them on the ranks of `place`; the prefills come in the same order. `runs` outlives them.
absl::StatusOr<std::vector<std::unique_ptr<Prefill>>> BeginEmbeddedPack(const EmbeddedRuns& runs,
                                                                        std::vector<PackedPrefill> prompts,
                                                                        RunPlaces::Place place);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_EMBEDDED_PACK_H_
