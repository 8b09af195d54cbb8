#include "server/cli/bench/load_figures.h"

#include <algorithm>
#include <cmath>
#include <random>

namespace meshfill {
namespace {

double Ratio(const PredictedTime& time) { return time.predicted_seconds / time.real_seconds; }

double MedianRatio(std::span<const PredictedTime> times) {
  std::vector<double> ratios;
  for (const PredictedTime& time : times) ratios.push_back(Ratio(time));
  return Percentile(std::move(ratios), 0.5);
}

}  // namespace

std::vector<LoadPrompt> PoissonPrompts(std::span<const LoadClass> classes, double load, double seconds,
                                       uint64_t seed) {
  std::mt19937_64 random(seed);
  double mean_seconds = 0;
  for (const LoadClass& each : classes) mean_seconds += each.share * each.lone_seconds;
  const double count = load * seconds / mean_seconds;
  std::uniform_real_distribution<double> moment(0, seconds);
  std::uniform_real_distribution<double> part(0, 1);
  std::bernoulli_distribution second_tenant(0.5);
  std::vector<LoadPrompt> prompts;
  for (const LoadClass& each : classes) {
    // What is left of a whole prompt is one at random.
    const auto of_class = static_cast<size_t>(each.share * count + part(random));
    for (size_t i = 0; i < of_class; ++i) {
      prompts.push_back({.due_seconds = moment(random),
                         .tokens = each.tokens,
                         .tenant = second_tenant(random) ? "b" : "a"});
    }
  }
  std::stable_sort(prompts.begin(), prompts.end(), [](const LoadPrompt& one, const LoadPrompt& other) {
    return one.due_seconds < other.due_seconds;
  });
  return prompts;
}

std::vector<double> FirstComeFirstServed(std::span<const LoadPrompt> prompts,
                                         std::span<const LoadClass> classes) {
  std::vector<double> latencies;
  double free_at = 0;
  for (const LoadPrompt& prompt : prompts) {
    const auto of_length = [&](const LoadClass& each) { return each.tokens == prompt.tokens; };
    free_at = std::max(free_at, prompt.due_seconds) +
              std::find_if(classes.begin(), classes.end(), of_length)->lone_seconds;
    latencies.push_back(free_at - prompt.due_seconds);
  }
  return latencies;
}

double Percentile(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  const double place = std::ceil(share * static_cast<double>(values.size())) - 1;
  return values[static_cast<size_t>(std::max(0.0, place))];
}

double ShareOf(const std::vector<double>& ends, const std::vector<double>& beside, double counted) {
  if (ends.empty()) return 0;
  const double end = Percentile(ends, counted);
  const auto until_end = [end](const std::vector<double>& of) {
    return static_cast<double>(std::count_if(of.begin(), of.end(), [end](double at) { return at <= end; }));
  };
  return until_end(ends) / (until_end(ends) + until_end(beside));
}

PredictionFigures FiguresOf(std::span<const PredictedTime> times) {
  std::vector<double> errors;
  for (const PredictedTime& time : times) errors.push_back(std::abs(Ratio(time) - 1));
  const size_t third = std::max<size_t>(1, times.size() / 3);
  const double drift = MedianRatio(times.last(third)) / MedianRatio(times.first(third));
  return {.median_error = Percentile(errors, 0.5),
          .p95_error = Percentile(errors, 0.95),
          .bias = MedianRatio(times) - 1,
          .drift = std::max(drift, 1 / drift) - 1};
}

}  // namespace meshfill
