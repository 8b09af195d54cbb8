// Figures of a server under load, from when prompts came and when they were served. Pure.
#ifndef MESHFILL_SERVER_CLI_BENCH_LOAD_FIGURES_H_
#define MESHFILL_SERVER_CLI_BENCH_LOAD_FIGURES_H_

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace meshfill {

// A prompt that comes `due_seconds` after the load's begin.
struct LoadPrompt {
  double due_seconds = 0;
  int64_t tokens = 0;
  std::string tenant;
  int priority = 0;
};

// Prompts of a length among those that come, and their seconds alone.
struct LoadClass {
  int64_t tokens = 0;
  double share = 0;  // fraction of the prompts; all shares add up to 1
  double lone_seconds = 0;
};

// Prompts come at random, independent moments of [0, seconds), in order: a Poisson process, given that as
// many of each class come as keep a server that serves one at a time busy for `load` of the time, to the next
// whole number. (With numbers drawn, too, a few long prompts more would change the load.) Each is of tenant
// "a" or "b", at random.
std::vector<LoadPrompt> PoissonPrompts(std::span<const LoadClass> classes, double load, double seconds,
                                       uint64_t seed);

// The seconds from each prompt's coming to its end, if they were served one after the other as they come,
// each in the seconds of its class.
std::vector<double> FirstComeFirstServed(std::span<const LoadPrompt> prompts,
                                         std::span<const LoadClass> classes);

// The smallest value that `share` of the values do not exceed. `values` is not empty.
double Percentile(std::vector<double> values, double share);

// The part of the answers that came at `ends` among these and those that came at `beside`, until `counted` of
// `ends`: the last prompts of a tenant may come again one by one, as they were told to. 0: there are no
// `ends`.
double ShareOf(const std::vector<double>& ends, const std::vector<double>& beside, double counted);

// What was predicted, and what it took: by time.
struct PredictedTime {
  double predicted_seconds = 0;
  double real_seconds = 0;  // above 0
};
struct PredictionFigures {
  double median_error = 0;  // |predicted − real| / real
  double p95_error = 0;
  double bias = 0;   // median of predicted / real, less 1
  double drift = 0;  // change of that median from the first to the last third of the time: factor − 1
};
// `times` is not empty.
PredictionFigures FiguresOf(std::span<const PredictedTime> times);

// A figure with its bound.
struct LoadCheck {
  std::string name;
  double value = 0;
  std::optional<double> at_least;
  std::optional<double> at_most;

  bool met() const {
    return (!at_least.has_value() || value >= *at_least) && (!at_most.has_value() || value <= *at_most);
  }
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_CLI_BENCH_LOAD_FIGURES_H_
