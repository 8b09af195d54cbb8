#include "server/commands/simulate.h"

#include <cstdio>
#include <string>

#include "absl/strings/str_cat.h"
#include "server/commands/flags.h"
#include "server/scenario.h"
#include "server/simulation_report.h"

namespace meshfill {
namespace {

class SimulateCommand : public Command {
 public:
  explicit SimulateCommand(CLI::App& parent)
      : Command(parent.add_subcommand("simulate", "Simulate attention on a cluster, strategy by strategy")) {
    app_->add_option("--scenario", scenario_, "Scenario, e.g. configs/scenarios/h100_nodes.yaml")
        ->type_name("F")
        ->required();
    AddJsonFlag(*app_, json_);
  }

  absl::Status Run() override {
    const absl::StatusOr<Scenario> scenario = LoadScenario(scenario_);
    if (!scenario.ok()) return scenario.status();
    const absl::StatusOr<SimulationReport> report = RunScenario(*scenario);
    if (!report.ok()) return report.status();
    const std::string text =
        json_ ? absl::StrCat(SimulationJson(*scenario, *report), "\n") : SimulationText(*scenario, *report);
    std::fputs(text.c_str(), stdout);
    return absl::OkStatus();
  }

 private:
  std::string scenario_;
  bool json_ = false;
};

}  // namespace

std::unique_ptr<Command> AddSimulateCommand(CLI::App& parent) {
  return std::make_unique<SimulateCommand>(parent);
}

}  // namespace meshfill
