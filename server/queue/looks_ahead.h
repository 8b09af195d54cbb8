// When RunOrder looks at whose turn it is, as it runs ahead: the later, the more rarely. So the number of
// looks is bounded, however many wait.
#ifndef MESHFILL_SERVER_QUEUE_LOOKS_AHEAD_H_
#define MESHFILL_SERVER_QUEUE_LOOKS_AHEAD_H_

#include <algorithm>

namespace meshfill {

// Seconds are from where it begins to run ahead.
class LooksAhead {
 public:
  // Runs of `all_seconds` in all are ahead.
  explicit LooksAhead(double all_seconds) : most_seconds_(std::max(kLeastSeconds, all_seconds / kLooks)) {}

  // The next look after one at `seconds`, where nothing changes for `holds_seconds`.
  double Next(double seconds, double holds_seconds) const {
    return seconds + std::clamp(holds_seconds, LeastSeconds(seconds), most_seconds_);
  }
  double Earliest(double seconds) const { return Next(seconds, 0); }

 private:
  static constexpr int kLooks = 32;
  static constexpr double kLeastSeconds = 0.1;  // between two looks: no rank changes much before
  static constexpr double kLeastShare = 0.05;    // the same, of the time until then

  double LeastSeconds(double seconds) const {
    return std::min(most_seconds_, std::max(kLeastSeconds, kLeastShare * seconds));
  }

  double most_seconds_;
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_QUEUE_LOOKS_AHEAD_H_
