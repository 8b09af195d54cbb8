// The places that are free, of those in which prefills live. The last of all is kept for what is short beside
// whatever lives: a short prompt waits for no long one's end, though as many of these have begun as may.
#ifndef MESHFILL_SERVER_QUEUE_FREE_PLACES_H_
#define MESHFILL_SERVER_QUEUE_FREE_PLACES_H_

#include <algorithm>
#include <limits>

namespace meshfill {

class FreePlaces {
 public:
  explicit FreePlaces(int count) : count_(std::max(0, count)) {}

  // Something lives that is predicted to take so long still. All seconds are on all devices.
  void CountRest(double rest_seconds) {
    shortest_rest_seconds_ = std::min(shortest_rest_seconds_, rest_seconds);
  }

  bool HasOneFor(double work_seconds) const {
    return count_ > 1 || (count_ == 1 && work_seconds <= kShortBeside * shortest_rest_seconds_);
  }
  // Prefills that may begin side by side, none of them short beside another.
  int alike() const { return count_ > 1 ? count_ - 1 : count_; }

  void Take(double work_seconds) {  // by what begins
    --count_;
    CountRest(work_seconds);
  }
  // Something waits for memory that is predicted to take so long: from now on only what is short beside that,
  // too, begins.
  void KeepForShort(double work_seconds) {
    count_ = std::min(count_, 1);
    CountRest(work_seconds);
  }
  void Close() { count_ = 0; }  // nothing more begins

 private:
  static constexpr double kShortBeside = 0.5;

  int count_;
  double shortest_rest_seconds_ = std::numeric_limits<double>::infinity();  // of all that it counts
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_QUEUE_FREE_PLACES_H_
