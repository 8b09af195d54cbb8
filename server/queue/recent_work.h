// What the devices have computed in the last minutes, by how long the prompts were: so much of the time a
// longer one leaves to those that come before it, as long as they keep coming.
#ifndef MESHFILL_SERVER_QUEUE_RECENT_WORK_H_
#define MESHFILL_SERVER_QUEUE_RECENT_WORK_H_

#include <array>

#include "absl/time/time.h"
#include "server/config/priority_class.h"

namespace meshfill {

class RecentWork {
 public:
  static constexpr double kMostShare = 0.75;  // what is left may not vanish, however much came

  // A prompt of `priority`, predicted to take `work_seconds` on all devices, has had `seconds` of all of them
  // until `now`, which never falls.
  void Add(int priority, double work_seconds, double seconds, absl::Time now);

  // The part of the time, 0 to kMostShare, that went to what comes before a prompt of `priority` that has
  // `rest_seconds` left: to higher classes, and in its own to what took at most half as long. What was
  // computed two minutes ago counts 1/e times.
  double ShareBefore(int priority, double rest_seconds, absl::Time now) const;

 private:
  static constexpr int kPerOctave = 4, kOctaves = 40;
  using ByLength = std::array<double, kPerOctave * kOctaves>;  // by log2 of the work: from 2^-20 s on

  // Of an exponential average over the time: it falls by that until `now`.
  double Decay(absl::Time now) const;

  absl::Time at_ = absl::UnixEpoch();  // of the averages
  std::array<ByLength, 2 * kTopPriority + 1> shares_ = {};
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_QUEUE_RECENT_WORK_H_
