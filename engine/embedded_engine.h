// A model on an embedded pool: ranks are threads of this process.
#ifndef MESHFILL_ENGINE_EMBEDDED_ENGINE_H_
#define MESHFILL_ENGINE_EMBEDDED_ENGINE_H_

#include <memory>

#include "absl/status/statusor.h"
#include "engine/engine_options.h"
#include "engine/prefill_engine.h"
#include "engine/speed/pool_notes.h"

namespace meshfill {

// INVALID_ARGUMENT: a broken model folder or options (what, where, what to do). NOT_FOUND: no such folder.
// `notes` hears how the weights are held and where the pool's speed comes from, and later, where that stays
// wrong, that it is dropped.
absl::StatusOr<std::unique_ptr<PrefillEngine>> LoadEmbeddedEngine(
    const EngineOptions& options, const PoolNotes& notes = WarnOnStandardError);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_EMBEDDED_ENGINE_H_
