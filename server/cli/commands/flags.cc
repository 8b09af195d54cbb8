#include "server/cli/commands/flags.h"

#include <cmath>
#include <limits>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/engine_options.h"
#include "engine/platforms.h"
#include "kernels/return_if_error.h"
#include "server/config/address.h"
#include "server/config/config.h"

namespace meshfill {

absl::StatusOr<Tile> ParseTile(const std::string& text) {
  const size_t cross = text.find('x');
  Tile tile;
  if (cross == std::string::npos || !absl::SimpleAtoi(text.substr(0, cross), &tile.a) ||
      !absl::SimpleAtoi(text.substr(cross + 1), &tile.b) || tile.a < 1 || tile.b < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", text, "' is no tile; write AxB, Q chunks by KV chunks of a rank, as in 2x2"));
  }
  return tile;
}

absl::StatusOr<DType> ParseComputeDType(const std::string& text) {
  if (text == "bf16") return DType::kBf16;
  if (text == "f32") return DType::kF32;
  return absl::InvalidArgumentError(absl::StrCat("'", text, "' is no compute dtype; use bf16 or f32"));
}

CLI::Validator WholeNumber(int64_t least) {
  const auto check = [least](const std::string& text) -> std::string {
    int64_t number = 0;
    if (absl::SimpleAtoi(text, &number) && number >= least) return "";
    return absl::StrCat("'", text, "' is no whole number of ", least, " or more");
  };
  return CLI::Validator(check, "");
}

CLI::Validator PositiveNumber() {
  const auto check = [](const std::string& text) -> std::string {
    double number = 0;
    if (absl::SimpleAtod(text, &number) && std::isfinite(number) && number > 0) return "";
    return absl::StrCat("'", text, "' is no number above 0");
  };
  return CLI::Validator(check, "");
}

CLI::Option* AddTileOption(CLI::App& app, std::optional<Tile>& tile) {
  return AddParsedOption(
      app, "--tile", tile, ParseTile, "AxB",
      "Q chunks by KV chunks that a rank computes; heads*A*B = ranks (default: the planner's choice)");
}

CLI::Option* AddHeadsOption(CLI::App& app, std::optional<int>& heads) {
  return app
      .add_option("--heads", heads,
                  "Head groups; heads*A*B = ranks (default: with --tile 1, else the planner's choice)")
      ->type_name("H")
      ->check(WholeNumber(1));
}

CLI::Option* AddLayoutOption(CLI::App& app, std::optional<LayoutKind>& layout) {
  return AddParsedOption(app, "--layout", layout, ParseLayout, "NAME",
                         "striped, zigzag or contiguous (default: the pool's)");
}

CLI::Option* AddStripeOption(CLI::App& app, std::optional<int64_t>& stripe) {
  return app.add_option("--stripe", stripe, "Tokens in a stripe of the striped layout (default: the pool's)")
      ->type_name("TOKENS")
      ->check(CLI::Range(int64_t{1}, int64_t{std::numeric_limits<int32_t>::max()}));
}

CLI::Option* AddDeviceOption(CLI::App& app, std::string& device) {
  return AddParsedOption(
      app, "--device", device, ParseDevice, "NAME",
      absl::StrCat("One of ", absl::StrJoin(DeviceNames(), ", "), " (default: ", device, ")"));
}

CLI::Option* AddDTypeOption(CLI::App& app, std::optional<DType>& dtype) {
  return AddParsedOption(app, "--dtype", dtype, ParseComputeDType, "NAME",
                         "Compute dtype, bf16 or f32 (default: f32 for f32 weights, else bf16)");
}

CLI::Option* AddRanksOption(CLI::App& app, std::optional<int>& ranks) {
  return app
      .add_option(
          "--ranks", ranks,
          absl::StrCat("Ranks that share the prompt, 1 to ", kMaxHostRanks, " (default: the config's)"))
      ->type_name("N")
      ->check(CLI::Range(1, kMaxHostRanks));
}

CLI::Option* AddJsonFlag(CLI::App& app, bool& json) {
  return app.add_flag("--json", json, "Print one JSON object and nothing else");
}

CLI::Option* AddServerOption(CLI::App& app, ServerOptions& server, const std::string& help) {
  const auto parse = [](const std::string& text) -> absl::StatusOr<std::string> {
    RETURN_IF_ERROR(ParseHostPort(text).status());
    return text;
  };
  return AddParsedOption(app, "--server", server.address, parse, "HOST:PORT", help);
}

std::vector<CLI::Option*> AddConnectionOptions(CLI::App& app, ServerOptions& server) {
  const auto add_file = [&app](const char* name, std::string& path, const char* help) {
    return app.add_option(name, path, help)->type_name("FILE");
  };
  CLI::Option* cert = add_file("--cert", server.cert, "Client certificate, PEM; with --key");
  CLI::Option* key = add_file("--key", server.key, "Its private key, PEM")->needs(cert);
  cert->needs(key);
  const std::vector<CLI::Option*> options = {
      app.add_flag("--tls", server.tls, "Encrypt; implied by the certificates"),
      add_file("--ca", server.ca, "Root certificates, PEM (default: the system's)"),
      cert,
      key,
      app.add_option("--server-name", server.server_name,
                     "Name in the server's certificate (default: the host)")
          ->type_name("NAME"),
      add_file("--token-file", server.token_file, "File of the bearer token (default: $MESHFILL_TOKEN)")};
  for (CLI::Option* option : options) option->group("Connection");
  return options;
}

CLI::Option* ConfigFlags::AddTo(CLI::App& app) {
  CLI::Option* config = app.add_option("--config", path, "Configuration file (YAML)")->type_name("FILE");
  app.add_option("--set", overrides,
                 "Override one key of the configuration, as in --set pool.embedded.ranks=4")
      ->type_name("PATH=VALUE")
      ->allow_extra_args(false);
  return config;
}

absl::StatusOr<v1::Config> ConfigFlags::Load() const {
  return LoadConfig(path, overrides, ConfigReader::kServe);
}

absl::Status ConfigFlags::CheckModelPath(const v1::Config& config) const {
  if (!config.model().path().empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(path.empty() ? "" : path + ": ",
                                                 "model.path: not set; name a Hugging Face folder, "
                                                 "also with --set model.path=DIR"));
}

}  // namespace meshfill
