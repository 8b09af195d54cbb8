#include "server/pool/worker/run_watch.h"

#include <vector>

namespace meshfill {

void RunWatch::SetPaused(uint64_t run, bool paused) {
  if (const auto entry = runs_.find(run); entry != runs_.end()) entry->second.paused = paused;
}

void RunWatch::Stop(uint64_t run) {
  if (const auto entry = runs_.find(run); entry != runs_.end()) entry->second.stopping = true;
}

std::string RunWatch::Look(const WorkerMachine::ProgressOfRuns& progress, absl::Time now) {
  std::vector<StandstillWatch::At> all;
  for (const auto& [number, ranks] : progress) {
    const auto entry = runs_.find(number);
    if (entry == runs_.end()) continue;
    const Run& run = entry->second;
    for (const WorkerMachine::RankProgress& rank : ranks) {
      all.push_back({.run = number,
                     .rank = rank.rank,
                     .moves = rank.operations,
                     .has_to_move = (rank.computing && !run.paused) || run.stopping,
                     .predicted_seconds = run.layer_seconds});
    }
  }
  return watch_.Look(all, now);
}

}  // namespace meshfill
