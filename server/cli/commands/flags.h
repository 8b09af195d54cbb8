// Options that several commands share, and the parsers of their values.
#ifndef MESHFILL_SERVER_CLI_COMMANDS_FLAGS_H_
#define MESHFILL_SERVER_CLI_COMMANDS_FLAGS_H_

#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/mesh/layout.h"
#include "engine/mesh/mesh.h"
#include "engine/prefill_engine.h"
#include "kernels/dtype.h"
#include "meshfill/v1/config.pb.h"
#include "server/cli/server_channel.h"

namespace meshfill {

absl::StatusOr<Tile> ParseTile(const std::string& text);           // "2x4"
absl::StatusOr<DType> ParseComputeDType(const std::string& text);  // "bf16", "f32"

// Checks of an option's number. CLI11's own print the limits of a double as their range.
CLI::Validator WholeNumber(int64_t least);  // "'0' is no whole number of 1 or more"
CLI::Validator PositiveNumber();            // "'-1' is no number above 0"

// An option whose text `parse` (std::string → absl::StatusOr<T>) reads into `value`, a T or a
// std::optional<T>. Its error becomes a usage error that names the option.
template <typename Value, typename Parse>
CLI::Option* AddParsedOption(CLI::App& app, const std::string& name, Value& value, Parse parse,
                             const std::string& type, const std::string& help) {
  const auto store = [name, &value, parse](const std::string& text) {
    auto parsed = parse(text);
    if (!parsed.ok()) throw CLI::ValidationError(name, std::string(parsed.status().message()));
    value = *parsed;
  };
  return app.add_option_function<std::string>(name, store, help)->type_name(type);
}

// A whole number above 0, with its default. A default of 0 means that it is derived, as `help` then says.
template <typename T>
CLI::Option* AddCount(CLI::App& app, const std::string& name, T& value, const std::string& help) {
  CLI::Option* option = app.add_option(name, value, help)->type_name("N")->check(WholeNumber(1));
  return value == 0 ? option : option->capture_default_str();
}

// --tile, --heads, --layout, --stripe, --dtype, with the same words in every command.
CLI::Option* AddTileOption(CLI::App& app, std::optional<Tile>& tile);
CLI::Option* AddHeadsOption(CLI::App& app, std::optional<int>& heads);
CLI::Option* AddLayoutOption(CLI::App& app, std::optional<LayoutKind>& layout);
CLI::Option* AddStripeOption(CLI::App& app, std::optional<int64_t>& stripe);
CLI::Option* AddDeviceOption(CLI::App& app, std::string& device);
CLI::Option* AddDTypeOption(CLI::App& app, std::optional<DType>& dtype);
CLI::Option* AddRanksOption(CLI::App& app, std::optional<int>& ranks);
CLI::Option* AddJsonFlag(CLI::App& app, bool& json);

// --server; and --tls, --ca and so on, in a group of their own, named as the Python client's.
CLI::Option* AddServerOption(CLI::App& app, ServerOptions& server, const std::string& help);
std::vector<CLI::Option*> AddConnectionOptions(CLI::App& app, ServerOptions& server);

// --config and --set.
struct ConfigFlags {
  std::string path;
  std::vector<std::string> overrides;

  // Returns the option --config, so that a command can require it.
  CLI::Option* AddTo(CLI::App& app);
  absl::StatusOr<v1::Config> Load() const;
  // INVALID_ARGUMENT: `config`, which Load returned, names no model.
  absl::Status CheckModelPath(const v1::Config& config) const;
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_CLI_COMMANDS_FLAGS_H_
