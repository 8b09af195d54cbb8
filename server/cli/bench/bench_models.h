// Small models of random weights for benchmarks, in a temporary folder that goes with this object.
#ifndef MESHFILL_SERVER_CLI_BENCH_BENCH_MODELS_H_
#define MESHFILL_SERVER_CLI_BENCH_BENCH_MODELS_H_

#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "engine/model/make_model.h"

namespace meshfill {

class BenchModels {
 public:
  BenchModels() = default;
  ~BenchModels();
  BenchModels(const BenchModels&) = delete;
  BenchModels& operator=(const BenchModels&) = delete;

  // Writes these models, or some that differ in width, GQA ratio, head_dim and sliding window. Once.
  absl::Status Make(std::span<const MakeModelOptions> models);
  absl::Status Make();

  const std::vector<std::string>& folders() const { return folders_; }

 private:
  std::string parent_;
  std::vector<std::string> folders_;
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_CLI_BENCH_BENCH_MODELS_H_
