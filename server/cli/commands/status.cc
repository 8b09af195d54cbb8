#include "server/cli/commands/status.h"

#include <cstdio>
#include <string>

#include "kernels/return_if_error.h"
#include "server/cli/client.h"
#include "server/cli/commands/flags.h"
#include "server/cli/result_json.h"
#include "server/cli/result_text.h"
#include "server/config/config.h"

namespace meshfill {
namespace {

class StatusCommand : public Command {
 public:
  explicit StatusCommand(CLI::App& parent)
      : Command(parent.add_subcommand("status", "Show what runs on a server, what waits, and who is there")) {
    AddJsonFlag(*app_, json_);
    server_.address = kDefaultListen;
    AddServerOption(*app_, server_, "The server")->default_str(server_.address);
    AddConnectionOptions(*app_, server_);
  }

  absl::Status Run() override {
    ASSIGN_OR_RETURN(const ServerChannel server, ServerChannel::Open(server_));
    ASSIGN_OR_RETURN(const v1::PoolStatus status, GetPool(server, kCallTimeout));
    const std::string text = json_ ? PoolJson(status) + "\n" : PoolText(status);
    std::fwrite(text.data(), 1, text.size(), stdout);
    return absl::OkStatus();
  }

 private:
  ServerOptions server_;
  bool json_ = false;
};

}  // namespace

std::unique_ptr<Command> AddStatusCommand(CLI::App& parent) {
  return std::make_unique<StatusCommand>(parent);
}

}  // namespace meshfill
