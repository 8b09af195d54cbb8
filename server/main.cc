// The binary `meshfill`: its subcommands, and how their errors end.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <system_error>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "server/cli/bench/bench.h"
#include "server/cli/cancel_watch.h"
#include "server/cli/commands/cancel.h"
#include "server/cli/commands/make_model.h"
#include "server/cli/commands/plan.h"
#include "server/cli/commands/prefill.h"
#include "server/cli/commands/serve.h"
#include "server/cli/commands/simulate.h"
#include "server/cli/commands/status.h"
#include "server/cli/commands/worker.h"
#include "server/config/closest_name.h"
#include "server/observe/build_name.h"
#include "server/observe/log.h"
#include "server/process_setup.h"

namespace meshfill {
namespace {

constexpr int kExitFailed = 1;
constexpr int kExitUsage = 2;

// 2: what the caller gave is wrong. 128 + n: signal n stopped it, as shells have it. 1: everything else.
int ExitStatus(const absl::Status& status) {
  if (const int signal = SignalOf(status); signal != 0) return 128 + signal;
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return 0;
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kOutOfRange:
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kAlreadyExists:
      return kExitUsage;
    default:
      return kExitFailed;
  }
}

// "meshfill prefill: what, where, what to do".
std::string ErrorLine(absl::string_view command, absl::string_view message) {
  return absl::StrCat(command, ": ",
                      absl::StrReplaceAll(absl::StripAsciiWhitespace(message), {{"\r", " "}, {"\n", " "}}));
}

// Every error is one line on standard error.
void PrintError(absl::string_view command, absl::string_view message) {
  std::fprintf(stderr, "%s\n", ErrorLine(command, message).c_str());
}

// Prints the error as PrintError does, or as a line of the log where that is JSON.
void ReportError(absl::string_view command, absl::string_view message) {
  if (GetLogFormat() == LogFormat::kText) return PrintError(command, message);
  Log(ErrorLine(command, message), {.level = LogLevel::kError});
  FlushLog();
}

// What no code can answer for, wherever it is thrown: the process ends as after any other error.
[[noreturn]] void OnUncaughtException() {
  try {
    if (const std::exception_ptr thrown = std::current_exception()) std::rethrow_exception(thrown);
    std::abort();  // a broken promise of our own
  } catch (const std::bad_alloc&) {
    PrintError("meshfill", "out of memory; use a shorter prompt, fewer ranks or more memory");
  } catch (const std::system_error& error) {
    PrintError("meshfill", absl::StrCat(error.what(),
                                        ": a thread could not be started? use fewer ranks and threads, "
                                        "or raise the limits of processes and memory"));
  } catch (const std::exception& error) {
    PrintError("meshfill", absl::StrCat("internal error: ", error.what(), "; please report it"));
  }
  std::_Exit(kExitFailed);
}

// "meshfill bench attention": the app and the subcommands below it that were parsed.
std::string CommandPath(const CLI::App& app) {
  const std::vector<CLI::App*> parsed = app.get_subcommands();
  return parsed.empty() ? app.get_name() : absl::StrCat(app.get_name(), " ", CommandPath(*parsed.front()));
}

// The app, below `app`, whose arguments were wrong.
const CLI::App& LastParsed(const CLI::App& app) {
  const std::vector<CLI::App*> parsed = app.get_subcommands();
  return parsed.empty() ? app : LastParsed(*parsed.front());
}

std::vector<std::string> SubcommandNames(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* subcommand : app.get_subcommands(nullptr)) names.push_back(subcommand->get_name());
  return names;
}

// "--server", …
std::vector<std::string> OptionNames(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back(absl::StrCat("--", name));
  }
  return names;
}

// What to give instead of an option that other programs have; empty: nothing is known. `value` follows the
// option.
std::string OptionOfOthers(absl::string_view name, absl::string_view value,
                           const std::vector<std::string>& options) {
  const auto has = [&](absl::string_view option) {
    return std::find(options.begin(), options.end(), option) != options.end();
  };
  if (name == "--text" && has("--tokens")) {
    return "a prompt of text goes through the Python client: "
           "`python -m meshfill prefill --text FILE --tokenizer DIR`; ";
  }
  if (name != "--port" || value.empty()) return "";
  for (const absl::string_view option : {"--listen", "--server"}) {
    if (has(option))
      return absl::StrCat("host and port are one option: ", option, " 127.0.0.1:", value, "; ");
  }
  return "";
}

// What is wrong with the words that `command` does not know: options of them before the others.
std::string UnknownWord(const CLI::App& command, const std::vector<std::string>& unknown) {
  const auto option = std::find_if(unknown.begin(), unknown.end(),
                                   [](const std::string& word) { return absl::StartsWith(word, "-"); });
  if (option != unknown.end()) {
    const size_t equals = option->find('=');
    const std::string name = option->substr(0, equals);
    std::string value;
    if (equals != std::string::npos) {
      value = option->substr(equals + 1);
    } else if (option + 1 != unknown.end()) {
      value = option[1];
    }
    const std::vector<std::string> options = OptionNames(command);
    const std::string instead = OptionOfOthers(name, value, options);
    return absl::StrCat("'", name, "' is no option; ", instead.empty() ? DidYouMean(name, options) : instead);
  }
  const std::vector<std::string> commands = SubcommandNames(command);
  const std::string& word = unknown.front();
  if (commands.empty()) return absl::StrCat("'", word, "' was not expected; ");
  return absl::StrCat("'", word, "' is no command; ", DidYouMean(word, commands), "there are ",
                      absl::StrJoin(commands, ", "), "; ");
}

int ReportUsageError(const CLI::App& app, const CLI::ParseError& error) {
  const std::string path = CommandPath(app);
  const CLI::App& command = LastParsed(app);
  std::string message = absl::StrCat(absl::StripSuffix(error.what(), "."), "; ");
  if (absl::EndsWith(error.what(), "requires --config")) {
    absl::StrAppend(&message, "give --config FILE, as configs/local.yaml; ");
  }
  const std::vector<std::string> commands = SubcommandNames(command);
  if (const std::vector<std::string> unknown = command.remaining(); !unknown.empty()) {
    message = UnknownWord(command, unknown);
  } else if (!commands.empty()) {
    message = absl::StrCat("no command given; there are ", absl::StrJoin(commands, ", "), "; ");
  }
  PrintError(path, absl::StrCat(message, "see `", path, " --help`"));
  return kExitUsage;
}

// Whether a word that should name a command names none, as in "meshfill prefil --help".
bool NamesNoCommand(const CLI::App& command) {
  return !SubcommandNames(command).empty() && !command.remaining().empty();
}

// `meshfill help prefill` is `meshfill prefill --help`.
std::vector<std::string> Arguments(int argc, char** argv) {
  std::vector<std::string> arguments(argv + std::min(argc, 1), argv + argc);
  if (!arguments.empty() && arguments.front() == "help") {
    arguments.erase(arguments.begin());
    arguments.push_back("--help");
  }
  std::reverse(arguments.begin(), arguments.end());  // as CLI11 takes them
  return arguments;
}

int Main(int argc, char** argv) {
  TrustLockOrders();
  std::set_terminate(OnUncaughtException);
  CLI::App app("Meshfill prefills very long prompts: sharded over ranks, with Mesh-Attention.", "meshfill");
  app.set_version_flag("--version", kBuildName);
  app.require_subcommand(1);
  std::vector<std::unique_ptr<Command>> commands;
  commands.push_back(AddServeCommand(app));
  commands.push_back(AddWorkerCommand(app));
  commands.push_back(AddPrefillCommand(app));
  commands.push_back(AddPlanCommand(app));
  commands.push_back(AddStatusCommand(app));
  commands.push_back(AddCancelCommand(app));
  commands.push_back(AddSimulateCommand(app));
  commands.push_back(AddMakeModelCommand(app));
  commands.push_back(AddBenchCommand(app));

  try {
    app.parse(Arguments(argc, argv));
  } catch (const CLI::ParseError& error) {
    const bool asked = error.get_exit_code() == 0;  // for --help or --version
    if (asked && !NamesNoCommand(LastParsed(app))) return app.exit(error);
    return ReportUsageError(app, error);
  }

  const auto chosen = std::ranges::find_if(
      commands, [](const std::unique_ptr<Command>& command) { return command->app().parsed(); });
  absl::Status status = (*chosen)->Run();
  if (std::fflush(stdout) != 0 && status.ok()) {
    status = absl::UnknownError("standard output cannot be written; is the disk full?");
  }
  if (!status.ok()) ReportError(CommandPath(app), status.message());
  return ExitStatus(status);
}

}  // namespace
}  // namespace meshfill

int main(int argc, char** argv) { return meshfill::Main(argc, argv); }
