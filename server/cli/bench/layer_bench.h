// What the benchmarks of a layer have in common: its shape, and how it is run.
#ifndef MESHFILL_SERVER_CLI_BENCH_LAYER_BENCH_H_
#define MESHFILL_SERVER_CLI_BENCH_LAYER_BENCH_H_

#include <CLI/CLI.hpp>

#include "engine/engine_options.h"
#include "engine/model/make_model.h"
#include "kernels/dtype.h"
#include "server/cli/commands/command.h"

namespace meshfill {

class LayerBenchCommand : public Command {
 protected:
  // `model` and `tokens`: unless the command line says otherwise.
  LayerBenchCommand(CLI::App* app, const MakeModelOptions& model, int64_t tokens);

  MakeModelOptions model_;
  EngineOptions engine_ = {.device = "cpu"};
  DType dtype_ = DType::kBf16;
  int64_t tokens_;
  int repeats_ = 3;
  bool json_ = false;
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_CLI_BENCH_LAYER_BENCH_H_
