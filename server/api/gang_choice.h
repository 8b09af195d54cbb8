// Chooses who computes at the same time, by the order of turns (run_order.h): one prefill on all devices, or
// several on sub-meshes. Pure; made for one choice.
#ifndef MESHFILL_SERVER_API_GANG_CHOICE_H_
#define MESHFILL_SERVER_API_GANG_CHOICE_H_

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "absl/time/time.h"
#include "server/api/run_entry.h"

namespace meshfill {

// Who computes at the same time, each on one of so many sub-meshes.
struct Gang {
  int submeshes = 1;
  std::vector<RunTicket> tickets;  // by the order, each at a place of its own; empty: nobody may
};

class GangChoice {
 public:
  using Entries = std::map<RunTicket, RunEntry>;

  // Of `entries` some are `computing` now. So many more `may_begin`. Both outlive the choice.
  GangChoice(const Entries& entries, const std::vector<RunTicket>& computing, int may_begin, absl::Time now)
      : entries_(entries), computing_(computing), may_begin_(may_begin), now_(now) {}

  // The first of `ranked` that may compute, and those beside it.
  Gang FirstThatMay(std::span<const RunTicket> ranked) const;

 private:
  // Whether one of the gang is at this place.
  bool IsAt(uint64_t place, const Gang& gang) const;
  // How many sub-meshes are best for the first of `ranked`, which waits, and those after it.
  int BestSubmeshes(std::span<const RunTicket> ranked) const;
  // Whether those of `ranked` that wait end sooner on sub-meshes beside those that live there, of which there
  // is one, than after these on all devices.
  bool GainBeside(std::span<const RunTicket> ranked, int submeshes, double longest_seconds) const;

  const Entries& entries_;
  const std::vector<RunTicket>& computing_;
  const int may_begin_;
  const absl::Time now_;
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_API_GANG_CHOICE_H_
