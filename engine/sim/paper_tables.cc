#include "engine/sim/paper_tables.h"

#include <fstream>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "engine/sim/cluster.h"

namespace meshfill::sim {
namespace {

constexpr char kHeader[] = "causal,seqlen,gpus,ring,mesh";
constexpr int64_t kTooManyTokens = int64_t{1} << 31;

// Beyond these a fit's squares are infinite.
bool ParseFigure(const std::string& field, double& figure) {
  return absl::SimpleAtod(field, &figure) && figure >= 1e-9 && figure <= 1e9;
}

bool ParseCell(const std::string& line, PaperCell& cell) {
  const std::vector<std::string> fields = absl::StrSplit(line, ',');
  if (fields.size() != 5 || (fields[0] != "Y" && fields[0] != "N")) return false;
  cell.causal = fields[0] == "Y";
  return absl::SimpleAtoi(fields[1], &cell.tokens) && cell.tokens > 0 && cell.tokens < kTooManyTokens &&
         absl::SimpleAtoi(fields[2], &cell.gpus) && cell.gpus > 0 && cell.gpus <= kMaxGpus &&
         ParseFigure(fields[3], cell.ring) && ParseFigure(fields[4], cell.mesh);
}

}  // namespace

absl::StatusOr<std::vector<PaperCell>> ReadPaperTable(const std::string& path) {
  std::ifstream file(path);
  if (!file)
    return absl::NotFoundError(absl::StrCat(path, ": cannot be read; give a table of the paper as CSV"));
  std::vector<PaperCell> cells;
  bool header = false;
  std::string line;
  for (int number = 1; std::getline(file, line); ++number) {
    absl::string_view text = absl::StripTrailingAsciiWhitespace(line);
    if (text.empty() || text.front() == '#') continue;
    if (!header) {
      if (text != kHeader) {
        return absl::InvalidArgumentError(
            absl::StrCat(path, ":", number, ": the first line must be ", kHeader));
      }
      header = true;
      continue;
    }
    PaperCell cell;
    if (!ParseCell(std::string(text), cell)) {
      return absl::InvalidArgumentError(absl::StrCat(
          path, ":", number, ": \"", text, "\" is no cell; write e.g. Y,262144,32,13.6,35.4, ",
          "with fewer than 2^31 tokens, at most ", kMaxGpus, " GPUs, and figures from 1e-9 to 1e9"));
    }
    cells.push_back(cell);
  }
  if (cells.empty())
    return absl::InvalidArgumentError(absl::StrCat(path, ": no cells; write them below ", kHeader));
  return cells;
}

AttentionJob PaperJob(const PaperCell& cell) {
  return {.tokens = cell.tokens,
          .q_heads = 32,
          .kv_heads = 32,
          .head_dim = 128,
          .causal = cell.causal,
          .wire = {.element = 2, .partial = 2, .gradient = 4, .lse = 4}};
}

}  // namespace meshfill::sim
