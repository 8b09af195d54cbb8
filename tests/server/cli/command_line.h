// A command, run in this process with the words of a command line.
#ifndef MESHFILL_TESTS_SERVER_CLI_COMMAND_LINE_H_
#define MESHFILL_TESTS_SERVER_CLI_COMMAND_LINE_H_

#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "server/cli/commands/command.h"

namespace meshfill {

using AddCommand = std::unique_ptr<Command> (*)(CLI::App& parent);

struct Ran {
  absl::Status status;  // INVALID_ARGUMENT, too, where the words are wrong
  std::string out;      // what it printed
  nlohmann::json json() const { return nlohmann::json::parse(out, nullptr, /*allow_exceptions=*/false); }
};

// `words`: the command's name, then its arguments.
inline Ran RunCommand(AddCommand add, std::vector<std::string> words) {
  CLI::App app;
  const std::unique_ptr<Command> command = add(app);
  std::reverse(words.begin(), words.end());  // as CLI11 takes them
  try {
    app.parse(std::move(words));
  } catch (const CLI::ParseError& error) {
    return {absl::InvalidArgumentError(error.what()), ""};
  }
  testing::internal::CaptureStdout();
  absl::Status status = command->Run();
  return {std::move(status), testing::internal::GetCapturedStdout()};
}

// One line an option: its name, "!" where it is required, its default, and what it needs and excludes.
inline std::string OptionsOf(const CLI::App& command) {
  std::string lines;
  const auto append_names = [&lines](const char* what, const std::set<CLI::Option*>& options) {
    std::set<std::string> names;  // sets of pointers have any order
    for (const CLI::Option* option : options) names.insert(option->get_name());
    for (const std::string& name : names) absl::StrAppend(&lines, what, name);
  };
  for (const CLI::Option* option : command.get_options()) {
    if (option->get_name() == "--help") continue;
    absl::StrAppend(&lines, option->get_name(), option->get_required() ? "!" : "",
                    option->get_default_str().empty() ? "" : "=", option->get_default_str());
    append_names(" needs ", option->get_needs());
    append_names(" excludes ", option->get_excludes());
    absl::StrAppend(&lines, "\n");
  }
  return lines;
}

}  // namespace meshfill

#endif  // MESHFILL_TESTS_SERVER_CLI_COMMAND_LINE_H_
