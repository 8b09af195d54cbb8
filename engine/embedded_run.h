// One prompt on an embedded pool: its ranks are threads of this process.
#ifndef MESHFILL_ENGINE_EMBEDDED_RUN_H_
#define MESHFILL_ENGINE_EMBEDDED_RUN_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "engine/embedded_pool.h"
#include "engine/kv/kv_prompt.h"
#include "engine/kv/kv_slabs.h"
#include "engine/plan/planner.h"
#include "engine/plan/speed_correction.h"
#include "engine/prefill_engine.h"
#include "engine/run_places.h"

namespace meshfill {

// What the runs of an engine have in common. Functions are called on any thread.
struct EmbeddedRuns {
  const EmbeddedPool& pool;
  const std::string& model_name;
  // A prompt is done, or a pass of several, and its ranks ran as its plan says: beside no others that share
  // cores with them. Of a pass, the parts of the prediction alone.
  std::function<void(const Prediction& predicted, const MeasuredSeconds& measured)> on_measured;
  // All of a prompt's K and V are there.
  std::function<void(const KvBlockNames& names, const KvPrompt& kv)> on_kept;
  std::function<void()> on_device_lost;

  const ModelShape& model() const { return pool.models.front()->shape(); }
  int ranks() const { return static_cast<int>(pool.models.size()); }
};

struct PlannedPrefill {
  PlanChoice choice;
  int64_t cached_tokens = 0;               // tokens found in the cache
  std::shared_ptr<const KvSlabs> prefix;   // K and V of the cached tokens
  std::shared_ptr<KvPrompt> kv = nullptr;  // where K and V of the other tokens go; null: nowhere
};

// Begins a prompt on the ranks of `place`, in one piece or more. Where a rank fails, the others are stopped
// and woken. `runs` outlives the prefill.
absl::StatusOr<std::unique_ptr<Prefill>> BeginEmbeddedRun(const EmbeddedRuns& runs,
                                                          const PrefillRequest& request,
                                                          PlannedPrefill planned, RunPlaces::Place place,
                                                          PrefillObserver* observer);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_EMBEDDED_RUN_H_
