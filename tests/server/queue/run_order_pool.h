// A pool that computes what the order says, one prompt at a time, in virtual time: what tests of the order by
// itself share.
#ifndef MESHFILL_TESTS_SERVER_QUEUE_RUN_ORDER_POOL_H_
#define MESHFILL_TESTS_SERVER_QUEUE_RUN_ORDER_POOL_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "server/queue/run_order.h"

namespace meshfill {

inline absl::Time At(double seconds) { return absl::UnixEpoch() + absl::Seconds(seconds); }

struct Prompt {
  double comes = 0;  // s
  double work = 0;   // s
  std::string tenant;
  int priority = 0;
  double predicted_of_work = 1;  // the prediction, as a part of the work
  double weight = 1;             // of the tenant
  double deadline = std::numeric_limits<double>::infinity();

  // What the simulation finds.
  std::optional<double> begins;
  std::optional<double> ends;
  double slowdown() const { return (*ends - comes) / work; }
};

// One prompt computes at a time, and the order hears of each of its layers.
class OrderedPool {
 public:
  OrderedPool(const RunOrder::Options& options, std::vector<Prompt>& prompts)
      : options_(options), order_(options), prompts_(prompts), done_(prompts.size(), 0) {}

  // Called whenever somebody computed: who, from when to when.
  std::function<void(const Prompt&, double, double)> on_computed = [](const Prompt&, double, double) {};

  // Between two looks at whose turn it is, where nothing happens.
  double look_seconds = std::numeric_limits<double>::infinity();

  void Run() {
    std::vector<size_t> by_time(prompts_.size());
    for (size_t i = 0; i < by_time.size(); ++i) by_time[i] = i;
    std::sort(by_time.begin(), by_time.end(),
              [&](size_t left, size_t right) { return prompts_[left].comes < prompts_[right].comes; });
    size_t next = 0, ended = 0;
    double now = 0;
    while (ended < prompts_.size()) {
      const double next_comes =
          next < by_time.size() ? prompts_[by_time[next]].comes : std::numeric_limits<double>::infinity();
      const RunOrder::Ticket ticket = order_.Choose(At(now));
      ASSERT_LE(order_.live(), options_.most_live);
      double until = next_comes;
      if (ticket != 0) {
        Prompt& prompt = prompts_[ticket - 1];
        double& done = done_[ticket - 1];
        if (!prompt.begins.has_value()) prompt.begins = now;
        const double layer = prompt.work / kLayers;
        const double layer_ends = std::min(prompt.work, (std::floor(done / layer + 1e-6) + 1) * layer);
        until = std::min({next_comes, now + layer_ends - done, now + look_seconds});
        on_computed(prompt, now, until);
        done += until - now;
        now = until;
        if (done >= prompt.work * (1 - 1e-9)) {
          prompt.ends = now;
          ++ended;
          order_.Remove(ticket, At(now));
        } else if (std::abs(done - layer_ends) < 1e-9) {
          order_.SetDone(ticket, done / prompt.work, At(now));
        }
      } else {
        ASSERT_EQ(ended, next) << "nobody computes, though somebody waits";
        now = until;
      }
      if (now < next_comes) continue;
      const Prompt& comes = prompts_[by_time[next]];
      const RunOrder::Ticket added = by_time[next++] + 1;
      order_.Announce(added,
                      {.tenant = comes.tenant,
                       .priority = comes.priority,
                       .work_seconds = comes.work * comes.predicted_of_work,
                       .weight = comes.weight,
                       .deadline = At(comes.deadline)},
                      At(now));
      order_.Complete(added, At(now));
    }
  }

 private:
  static constexpr double kLayers = 16;

  const RunOrder::Options options_;
  RunOrder order_;
  std::vector<Prompt>& prompts_;
  std::vector<double> done_;
};

inline double Percentile(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(share * static_cast<double>(values.size() - 1))];
}

// A draw, in seconds.
inline double Exponential(std::mt19937_64& random, double mean) {
  return std::exponential_distribution<double>(1 / mean)(random);
}

}  // namespace meshfill

#endif  // MESHFILL_TESTS_SERVER_QUEUE_RUN_ORDER_POOL_H_
