#include "server/cli/commands/serve.h"

#include "kernels/return_if_error.h"
#include "server/cli/commands/flags.h"
#include "server/serve.h"

namespace meshfill {
namespace {

class ServeCommand : public Command {
 public:
  explicit ServeCommand(CLI::App& parent)
      : Command(parent.add_subcommand("serve",
                                      "Serve prefills: the gRPC API, its queue, /metrics and the pool")) {
    config_.AddTo(*app_)->required();
  }

  absl::Status Run() override {
    ASSIGN_OR_RETURN(v1::Config config, config_.Load());
    return Serve(config);
  }

 private:
  ConfigFlags config_;
};

}  // namespace

std::unique_ptr<Command> AddServeCommand(CLI::App& parent) { return std::make_unique<ServeCommand>(parent); }

}  // namespace meshfill
