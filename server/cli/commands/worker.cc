#include "server/cli/commands/worker.h"

#include <string>

#include "kernels/return_if_error.h"
#include "server/cli/commands/flags.h"
#include "server/config/address.h"
#include "server/config/config.h"
#include "server/worker.h"

namespace meshfill {
namespace {

class WorkerCommand : public Command {
 public:
  explicit WorkerCommand(CLI::App& parent)
      : Command(
            parent.add_subcommand("worker", "Join a server and compute for it: one process of its pool")) {
    config_.AddTo(*app_)->required();
    // Run asks for it, behind what is wrong with the configuration.
    app_->add_option("--join", join_, "Where the server takes workers: its pool.control_listen")
        ->type_name("HOST:PORT REQUIRED");
  }

  absl::Status Run() override {
    ASSIGN_OR_RETURN(v1::Config config, LoadConfig(config_.path, config_.overrides, ConfigReader::kWorker));
    RETURN_IF_ERROR(config_.CheckModelPath(config));
    if (join_.empty()) {
      return absl::InvalidArgumentError(
          "--join is required; give the server's pool.control_listen, HOST:PORT");
    }
    RETURN_IF_ERROR(ParseHostPort(join_).status());
    return RunWorker(config, join_);
  }

 private:
  ConfigFlags config_;
  std::string join_;
};

}  // namespace

std::unique_ptr<Command> AddWorkerCommand(CLI::App& parent) {
  return std::make_unique<WorkerCommand>(parent);
}

}  // namespace meshfill
