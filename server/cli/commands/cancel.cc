#include "server/cli/commands/cancel.h"

#include <cstdio>
#include <string>

#include "kernels/return_if_error.h"
#include "server/cli/client.h"
#include "server/cli/commands/flags.h"
#include "server/config/config.h"

namespace meshfill {
namespace {

class CancelCommand : public Command {
 public:
  explicit CancelCommand(CLI::App& parent)
      : Command(parent.add_subcommand(
            "cancel", "End a prefill on a server, whether it computes, stands still, waits or uploads")) {
    app_->add_option("ID", id_, "Its request id, as `meshfill status` shows it")->required();
    server_.address = kDefaultListen;
    AddServerOption(*app_, server_, "The server")->default_str(server_.address);
    AddConnectionOptions(*app_, server_);
  }

  absl::Status Run() override {
    ASSIGN_OR_RETURN(const ServerChannel server, ServerChannel::Open(server_));
    RETURN_IF_ERROR(CancelOnServer(server, id_, kCallTimeout));
    std::printf("cancelled %s\n", id_.c_str());
    return absl::OkStatus();
  }

 private:
  ServerOptions server_;
  std::string id_;
};

}  // namespace

std::unique_ptr<Command> AddCancelCommand(CLI::App& parent) {
  return std::make_unique<CancelCommand>(parent);
}

}  // namespace meshfill
