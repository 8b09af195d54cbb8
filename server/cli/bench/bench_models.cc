#include "server/cli/bench/bench_models.h"

#include <stdlib.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

constexpr int64_t kVocab = 4096;

std::vector<MakeModelOptions> Models() {
  return {
      {.layers = 4, .hidden = 256, .q_heads = 4, .kv_heads = 4, .head_dim = 64, .vocab = kVocab},
      {.layers = 4, .hidden = 512, .q_heads = 8, .kv_heads = 2, .head_dim = 64, .vocab = kVocab},
      {.layers = 2, .hidden = 1024, .q_heads = 8, .kv_heads = 1, .head_dim = 128, .vocab = kVocab},
      {.layers = 2, .hidden = 1024, .q_heads = 16, .kv_heads = 8, .head_dim = 64, .vocab = kVocab},
      {.family = ModelFamily::kMistral,
       .layers = 3,
       .hidden = 512,
       .q_heads = 4,
       .kv_heads = 4,
       .head_dim = 128,
       .vocab = kVocab,
       .sliding_window = 1024},
  };
}

}  // namespace

BenchModels::~BenchModels() {
  std::error_code ignored;
  if (!parent_.empty()) std::filesystem::remove_all(parent_, ignored);
}

absl::Status BenchModels::Make() { return Make(Models()); }

absl::Status BenchModels::Make(std::span<const MakeModelOptions> models) {
  std::error_code error;
  std::string pattern = (std::filesystem::temp_directory_path(error) / "meshfill-bench-XXXXXX").string();
  if (error || mkdtemp(pattern.data()) == nullptr) {
    return absl::UnavailableError(absl::StrCat("cannot make a temporary folder ", pattern, ": ",
                                               error ? error.message() : std::strerror(errno),
                                               "; set TMPDIR to a folder that can be written"));
  }
  parent_ = pattern;
  for (const MakeModelOptions& options : models) {
    const std::string folder = absl::StrCat(
        parent_, "/", options.hidden, "-", options.q_heads, "q", options.kv_heads, "kv-", options.head_dim,
        options.sliding_window > 0 ? "-window" : "", options.experts > 0 ? "-experts" : "");
    RETURN_IF_ERROR(MakeModel(options, folder));
    folders_.push_back(folder);
  }
  return absl::OkStatus();
}

}  // namespace meshfill
