#include "server/pool/worker/run_watch.h"

#include <variant>
#include <vector>

namespace meshfill {

void RunWatch::Hear(const WorkerMachine::Action& action, int layers) {
  const auto change = [this](uint64_t number, auto to) {
    if (const auto entry = runs_.find(number); entry != runs_.end()) to(entry->second);
  };
  if (const auto* prepare = std::get_if<WorkerMachine::PrepareRun>(&action)) {
    runs_[prepare->part.number] = {.layer_seconds = prepare->part.plan.predicted.seconds / layers};
  } else if (const auto* pause = std::get_if<WorkerMachine::PauseRun>(&action)) {
    change(pause->run, [](Run& run) { run.paused = true; });
  } else if (const auto* resume = std::get_if<WorkerMachine::ResumeRun>(&action)) {
    change(resume->run, [](Run& run) { run.paused = false; });
  } else if (const auto* stop = std::get_if<WorkerMachine::StopRun>(&action)) {
    change(stop->run, [](Run& run) { run.stopping = true; });
  } else if (const auto* release = std::get_if<WorkerMachine::ReleaseRun>(&action)) {
    End(release->run);
  }
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
