#include "server/cli/commands/serve.h"

#include <string>

#include "absl/strings/str_cat.h"
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
    config_.AddTo(*app_);
    AddKey("--model", "DIR", "model.path", "Model folder");
    AddKey("--listen", "HOST:PORT", "listen", "Where the API listens");
    app_->add_flag_callback(
        "--measure", [this] { config_.overrides.push_back("plan.measure=true"); },
        "Measure the pool's speed anew, whatever plan.profile_path keeps (as --set plan.measure=true)");
    AddKey("--metrics-listen", "HOST:PORT", "metrics_listen", "Where /metrics and the status page listen");
  }

  absl::Status Run() override {
    if (config_.path.empty() && config_.overrides.empty()) {
      return absl::InvalidArgumentError("nothing to serve; give --model DIR or --config FILE");
    }
    ASSIGN_OR_RETURN(v1::Config config, config_.Load());
    RETURN_IF_ERROR(config_.CheckModelPath(config));
    return Serve(config);
  }

 private:
  // An option that stands for --set KEY=VALUE.
  void AddKey(const std::string& name, const std::string& type, const std::string& key,
              const std::string& help) {
    app_->add_option_function<std::string>(
            name, [this, key](const std::string& value) { config_.overrides.push_back(key + "=" + value); },
            absl::StrCat(help, " (as --set ", key, "=…)"))
        ->type_name(type);
  }

  ConfigFlags config_;
};

}  // namespace

std::unique_ptr<Command> AddServeCommand(CLI::App& parent) { return std::make_unique<ServeCommand>(parent); }

}  // namespace meshfill
