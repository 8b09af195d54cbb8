// What `meshfill bench serve` measured, and how it is printed.
#ifndef MESHFILL_SERVER_CLI_BENCH_LOAD_REPORT_H_
#define MESHFILL_SERVER_CLI_BENCH_LOAD_REPORT_H_

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "server/cli/bench/load_figures.h"

namespace meshfill {

struct LengthFigures {
  LoadClass of;
  std::vector<double> slowdowns;    // TTFT over lone TTFT
  std::vector<double> first_comes;  // TTFT over lone TTFT, if prompts were served first come, first served
  // TTFT over lone TTFT, if none of another length had come: no order betters the worst.
  std::vector<double> by_themselves;
  // Wait and prefill; the same where only one of them were wrong.
  std::vector<PredictedTime> predictions, wait_predictions, prefill_predictions;
};

struct LoadReport {
  std::string scenario;
  size_t requests = 0;
  int failed = 0;
  std::vector<double> refusal_seconds;  // of each try that was refused
  double seconds = 0;                   // of the load
  std::vector<LengthFigures> lengths;
  std::vector<std::pair<std::string, double>> figures;
  std::vector<LoadCheck> checks;
};

// One line.
std::string JsonOf(const LoadReport& report);
std::string TextOf(const LoadReport& report);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_CLI_BENCH_LOAD_REPORT_H_
