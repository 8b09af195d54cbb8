// A subcommand of the binary: its options, declared on a CLI11 app, and what it does with them.
#ifndef MESHFILL_SERVER_CLI_COMMANDS_COMMAND_H_
#define MESHFILL_SERVER_CLI_COMMANDS_COMMAND_H_

#include <CLI/CLI.hpp>

#include "absl/status/status.h"

namespace meshfill {

class Command {
 public:
  explicit Command(CLI::App* app) : app_(app) {}
  virtual ~Command() = default;
  Command(const Command&) = delete;
  Command& operator=(const Command&) = delete;

  const CLI::App& app() const { return *app_; }

  // After the parse, once. Output goes to standard output; an error becomes one line and the exit status
  // (main.cc).
  virtual absl::Status Run() = 0;

 protected:
  CLI::App* const
      app_;  // owned by its parent; holds references to the command's members until the parse is over
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_CLI_COMMANDS_COMMAND_H_
