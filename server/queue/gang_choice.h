// Chooses who computes at the same time, by the order of turns (run_order.h): one prefill on all devices,
// several on sub-meshes, or several that share one pass on all devices (engine/plan/pack.h). Pure; made for
// one choice.
#ifndef MESHFILL_SERVER_QUEUE_GANG_CHOICE_H_
#define MESHFILL_SERVER_QUEUE_GANG_CHOICE_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "absl/time/time.h"
#include "engine/plan/pack.h"
#include "server/queue/free_places.h"
#include "server/queue/run_entry.h"

namespace meshfill {

// Who computes at the same time, each on one of so many sub-meshes. Several on all devices share one pass.
struct Gang {
  int submeshes = 1;
  // By the order, each at a place of its own, or as they are dealt to a pass that begins. Empty: nobody may.
  std::vector<RunTicket> tickets;
  std::optional<double> pass_seconds = {};  // of the pass that they begin to share now
};

class GangChoice {
 public:
  using Entries = std::map<RunTicket, RunEntry>;
  struct Limits {
    FreePlaces places;       // those that share a pass take one
    absl::Duration max_age;  // RunOrder's
    PackRoom pack;
  };

  // Of `entries` some are `computing` now. Both outlive the choice.
  GangChoice(const Entries& entries, const std::vector<RunTicket>& computing, const Limits& limits,
             absl::Time now)
      : entries_(entries), computing_(computing), limits_(limits), now_(now) {}

  // The first of `ranked` that may compute, and those beside it.
  Gang FirstThatMay(std::span<const RunTicket> ranked) const;

 private:
  // Whether one of the gang is at this place.
  bool IsAt(uint64_t place, const Gang& gang) const;
  // How many sub-meshes are best for the first of `ranked`, which waits, and those after it, in these places.
  int BestSubmeshes(std::span<const RunTicket> ranked, const FreePlaces& places) const;
  // Whether this one, which waits, may run beside others on one of so many sub-meshes.
  bool MayBeBeside(const RunEntry& entry, int submeshes, double longest_seconds) const;
  // Whether those of `ranked` that wait end sooner on sub-meshes beside those that live there, of which there
  // is one, than after these on all devices.
  bool GainBeside(std::span<const RunTicket> ranked, int submeshes, double longest_seconds) const;

  using Sharer = Entries::const_iterator;
  // How prefills end that share passes, one pass after the other.
  struct Passes {
    size_t prompts = 0;       // that share the first
    double seconds = 0;       // of the first
    double ends_seconds = 0;  // from now on until each ends, added up
    double all_seconds = 0;   // until all have ended
  };
  // Who lives in this pack, and is not being stopped.
  std::vector<RunTicket> MembersOf(uint64_t pack) const;
  // The pass that the first of `ranked`, which waits, should share, where that is better than to run on one
  // of so many sub-meshes, or in turn; nobody: it should share none.
  Gang BestPack(std::span<const RunTicket> ranked, int submeshes, const FreePlaces& places) const;
  // Those of `ranked` that could share a pass with its first, by the order, at most kMostWeighed.
  std::vector<Sharer> Sharers(std::span<const RunTicket> ranked) const;
  bool MayShare(const RunEntry& entry) const;
  Passes InPasses(std::span<const Sharer> sharers, size_t most_prompts) const;
  // Ends, added up, of those that compute on sub-meshes, and of `sharers` beside and after them.
  double EndsBeside(std::span<const Sharer> sharers, int submeshes, const FreePlaces& places) const;
  // The same, where `sharers` share passes on all devices, and those on sub-meshes go on after them.
  double EndsAround(const Passes& passes, int submeshes) const;
  bool KeepDeadlines(std::span<const Sharer> sharers, double pass_seconds) const;
  // Whether a run of so many seconds from now on loses nobody's deadline that can be met on all devices.
  bool KeepsDeadline(const RunEntry& entry, double seconds) const;

  const Entries& entries_;
  const std::vector<RunTicket>& computing_;
  const Limits limits_;
  const absl::Time now_;
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_QUEUE_GANG_CHOICE_H_
