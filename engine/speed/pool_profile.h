// Measured speeds of pools, kept on disk, so that a start need not measure and the same pool plans the same.
//
//     {"version": 1, "pools": [{"pool": "<what was measured>", "measured": "2026-01-31T12:00:00Z",
//                               "speed": {"gemm_flops_per_second": 1e11, …},
//                               "peak_flops_per_second": 2e11}, …]}
//
// The file holds the kMaxKeptPools pools that were stored last. A pool's key has all that its speed depends
// on: machine, backend, this build, the model's shape, threads and ranks; another key is another pool. Files
// are replaced whole, by renaming: readers never see half of one, and of two writers at once one wins.
#ifndef MESHFILL_ENGINE_SPEED_POOL_PROFILE_H_
#define MESHFILL_ENGINE_SPEED_POOL_PROFILE_H_

#include <functional>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/model/model_shape.h"
#include "engine/plan/cost_model.h"
#include "engine/speed/pool_notes.h"

namespace meshfill {

inline constexpr int kPoolProfileVersion = 1;
inline constexpr int kMaxKeptPools = 64;
inline constexpr int64_t kMaxPoolProfileBytes = int64_t{1} << 20;

// $XDG_CACHE_HOME/meshfill/pool_speed.json, else $HOME/.cache/meshfill/pool_speed.json; empty where neither
// is set.
std::string DefaultPoolProfilePath();

// The key of a pool on `hardware` that `shared_by` ("2 threads, 4 ranks") share, with this executable.
std::string PoolKey(const std::string& hardware, const ModelShape& model, const std::string& shared_by);

// The speed under `key`; none where the file is not there or lacks the key. INVALID_ARGUMENT: a file that is
// no profile of this version, is too long, or has a speed that no pool has (the message names the file and
// says what to do).
absl::StatusOr<std::optional<PoolSpeed>> ReadPoolProfile(const std::string& path, const std::string& key);

// Keeps the speed, measured now, beside those of other pools; a file that cannot be read is replaced. Makes
// the folder.
absl::Status StorePoolProfile(const std::string& path, const std::string& key, const PoolSpeed& speed);

// Drops the speed under `key`, so that the next start measures it anew.
absl::Status ForgetPoolSpeed(const std::string& path, const std::string& key);

// From the profile, else, or with `anew`, measured and stored there; `path` empty: measured. `notes` hears
// which of these, and a warning where something is wrong with the file, which is no failure.
absl::StatusOr<PoolSpeed> KeptPoolSpeed(const std::string& path, const std::string& key, bool anew,
                                        const std::function<absl::StatusOr<PoolSpeed>()>& measure,
                                        const PoolNotes& notes = WarnOnStandardError);

// The larger of `measured` and the peak that the profile has beside the speed under `key`, FLOP/s; it is kept
// there. A busy machine measures a peak too small, never too large, so that MFU compares from start to start.
// `measured` with `anew`, without a profile, or where that cannot be read or written.
double KeptPeakFlops(const std::string& path, const std::string& key, bool anew, double measured);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_SPEED_POOL_PROFILE_H_
