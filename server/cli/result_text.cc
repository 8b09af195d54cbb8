#include "server/cli/result_text.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "engine/mesh/placement_name.h"
#include "server/cli/progress_bar.h"
#include "server/cli/result_json.h"

namespace meshfill {
namespace {

constexpr int kLabelColumns = 16;

void AppendLine(absl::string_view label, absl::string_view value, std::string& text) {
  absl::StrAppendFormat(&text, "%-*s%s\n", kLabelColumns, label, value);
}

std::string PercentOf(double part, double whole) {
  return absl::StrFormat("%.1f %%", whole > 0 ? 100 * part / whole : 0);
}

std::string Blocks(const Step& step) {
  std::string blocks;
  for (const BlockIndex& block : step.blocks) absl::StrAppend(&blocks, "(", block.u, ",", block.v, ")");
  return blocks.empty() ? "." : blocks;
}

// Pads `cells` to the widest of them.
void AlignColumn(std::vector<std::string>& cells) {
  size_t width = 0;
  for (const std::string& cell : cells) width = std::max(width, cell.size());
  for (std::string& cell : cells) cell.resize(width, ' ');
}

// Rows below their headings; no rows: nothing.
class Table {
 public:
  explicit Table(const std::vector<std::string>& headings) {
    for (const std::string& heading : headings) columns_.push_back({heading});
  }
  void Add(std::vector<std::string> row) {
    for (size_t i = 0; i < row.size(); ++i) {
      std::replace_if(
          row[i].begin(), row[i].end(), [](unsigned char byte) { return absl::ascii_iscntrl(byte); }, '?');
      columns_[i].push_back(std::move(row[i]));
    }
  }
  std::string Text() {
    if (columns_.front().size() == 1) return "";
    for (size_t i = 0; i + 1 < columns_.size(); ++i) AlignColumn(columns_[i]);
    std::string text = "\n";
    for (size_t row = 0; row < columns_.front().size(); ++row) {
      std::vector<std::string> cells;
      for (const std::vector<std::string>& column : columns_) cells.push_back(column[row]);
      absl::StrAppend(&text, absl::StrJoin(cells, "  "), "\n");
    }
    return text;
  }

 private:
  std::vector<std::vector<std::string>> columns_;
};

// One row a step, so that large tiles stay readable:
//
//     step  comm  blocks computed meanwhile
//     0     kv    (0,0)
//     1     q     (0,1)
//
// "kv to 3": that one ends with step 3, and others start meanwhile.
std::string ScheduleText(const Schedule& schedule) {
  std::vector<std::string> number = {"step"};
  std::vector<std::string> comm = {"comm"};
  for (size_t i = 0; i < schedule.steps.size(); ++i) {
    number.push_back(absl::StrCat(i));
    const Step& step = schedule.steps[i];
    comm.push_back(step.comm.has_value() ? TrafficName(*step.comm) : ".");
    if (step.spans > 1) absl::StrAppend(&comm.back(), " to ", i + step.spans - 1);
  }
  AlignColumn(number);
  AlignColumn(comm);
  std::string text = absl::StrCat(number[0], "  ", comm[0], "  blocks (Q#u,KV#v) computed meanwhile\n");
  for (size_t i = 0; i < schedule.steps.size(); ++i) {
    absl::StrAppend(&text, number[i + 1], "  ", comm[i + 1], "  ", Blocks(schedule.steps[i]), "\n");
  }
  return text;
}

// "striped in stripes of 64 tokens"; of the layouts the striped one alone has stripes.
std::string LayoutText(absl::string_view name, int64_t stripe) {
  return name == "striped" ? absl::StrCat(name, " in stripes of ", stripe, " tokens") : std::string(name);
}

std::string WireAndPlacement(absl::string_view partial_dtype, absl::string_view placement) {
  return absl::StrCat(", partial outputs in ", partial_dtype, ", ranks ", placement,
                      absl::StartsWith(placement, "box ") ? " on a host" : "");
}

void AppendDoubleRing(uint64_t kv_inner, std::string& text) {
  if (kv_inner == 0) return;
  AppendLine("KV rings", absl::StrCat("of ", kv_inner, " ranks, beside one that leads from each to the next"),
             text);
}

void AppendExchange(uint64_t exchange_tokens, std::string& text) {
  if (exchange_tokens == 0) return;
  AppendLine("exchange",
             absl::StrCat("by ", FormatCount(static_cast<double>(exchange_tokens)),
                          " tokens of each rank, beside the work on others"),
             text);
}

std::string ShapeName(int heads, Tile tile) {
  return heads == 1 ? tile.DebugString() : absl::StrCat(heads, "*", tile.DebugString());
}

// A wire dtype or a placement is a column only where some candidate has another than the usual one.
std::string CandidatesText(const PlanChoice& choice) {
  const auto any = [&choice](auto&& unusual) {
    return std::any_of(choice.candidates.begin(), choice.candidates.end(), unusual);
  };
  const bool wire = any([](const PlanCandidate& each) { return each.partial_dtype != DType::kF32; });
  const bool placed = any([](const PlanCandidate& each) { return !each.placement.empty(); });
  const bool fewer = any([&](const PlanCandidate& each) { return each.ranks() != choice.plan.ranks(); });
  const auto row = [&](absl::string_view ranks, absl::string_view shape, absl::string_view layout,
                       absl::string_view dtype, absl::string_view placement) {
    std::string text;
    if (fewer) absl::StrAppendFormat(&text, "%-6s", ranks);
    absl::StrAppendFormat(&text, "%-15s%-12s", shape, layout);
    if (wire) absl::StrAppendFormat(&text, "%-6s", dtype);
    if (placed) absl::StrAppendFormat(&text, "%-12s", placement);
    return text;
  };
  std::string text = absl::StrCat(
      row("ranks", "heads*tile", "layout", "wire", "on a host"),
      absl::StrFormat("%10s  %10s  %10s  %10s  %10s\n", "seconds", "compute", "comm wait", "sent", "peak"));
  for (const PlanCandidate& candidate : choice.candidates) {
    const Prediction& predicted = candidate.predicted;
    const bool chosen = candidate.tile == choice.plan.tile && candidate.heads == choice.plan.heads &&
                        candidate.ranks() == choice.plan.ranks();
    absl::StrAppend(&text, row(absl::StrCat(candidate.ranks()), ShapeName(candidate.heads, candidate.tile),
                               LayoutName(candidate.layout.kind()), DTypeName(candidate.partial_dtype),
                               PlacementName(candidate.placement)));
    absl::StrAppendFormat(
        &text, "%10s  %10s  %10s  %10s  %10s%s\n", FormatSeconds(predicted.seconds),
        FormatSeconds(predicted.compute_seconds), FormatSeconds(predicted.comm_wait_seconds),
        FormatBytes(static_cast<double>(predicted.comm_bytes.total())),
        FormatBytes(static_cast<double>(predicted.peak_bytes)), chosen ? "  <- chosen" : "");
  }
  return text;
}

}  // namespace

std::string FormatBytes(double bytes) {
  constexpr std::array<const char*, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  while (bytes >= 1024 && unit + 1 < kUnits.size()) {
    bytes /= 1024;
    ++unit;
  }
  return absl::StrFormat("%.*f %s", unit == 0 ? 0 : 1, bytes, kUnits[unit]);
}

std::string FormatCount(double count) {
  std::string digits = absl::StrFormat("%.0f", count);
  for (size_t end = digits.size(); end > 3; end -= 3) digits.insert(end - 3, 1, ',');
  return digits;
}

namespace {

std::string PiecesText(uint64_t pieces, uint64_t piece_tokens) {
  return absl::StrFormat("%d of %s tokens, one after the other, to fit the memory", pieces,
                         FormatCount(static_cast<double>(piece_tokens)));
}

}  // namespace

std::string PrefillText(const v1::PrefillResult& result, double upload_seconds) {
  const v1::PrefillResult::Seconds& seconds = result.seconds();
  const v1::PlanSummary& plan = result.plan();
  const v1::CommBytes& bytes = result.comm_bytes();
  std::string top;
  for (const v1::TokenLogit& best : result.top()) {
    absl::StrAppendFormat(&top, "%s%u (%.4g)", top.empty() ? "" : "  ", best.token(), best.logit());
  }
  const double tokens = static_cast<double>(result.tokens());
  const double sent =
      static_cast<double>(bytes.q() + bytes.kv() + bytes.o() + bytes.all_to_all() + bytes.gather());

  std::string text;
  AppendLine("request", result.request_id(), text);
  AppendLine("first token", absl::StrCat(result.first_token()), text);
  AppendLine("top (logit)", top, text);
  const std::string cached =
      result.cached_tokens() == 0
          ? ""
          : absl::StrFormat(", %s of them cached", FormatCount(static_cast<double>(result.cached_tokens())));
  AppendLine("tokens", FormatCount(tokens) + cached, text);
  const std::string upload =
      upload_seconds > 0 ? absl::StrCat("upload ", FormatSeconds(upload_seconds), ", ") : "";
  AppendLine("TTFT",
             absl::StrFormat("%s (%squeue %s, prefill %s)",
                             FormatSeconds(upload_seconds + seconds.queue() + seconds.prefill()), upload,
                             FormatSeconds(seconds.queue()), FormatSeconds(seconds.prefill())),
             text);
  if (result.attempts() > 1) {
    AppendLine("attempts", absl::StrCat(result.attempts(), ", after the loss of workers"), text);
  }
  AppendLine("tokens/s", FormatCount(seconds.prefill() > 0 ? tokens / seconds.prefill() : 0), text);
  AppendLine("comm wait",
             absl::StrFormat("%s, %s of attention (%s)", FormatSeconds(seconds.comm_wait()),
                             PercentOf(seconds.comm_wait(), seconds.attention()),
                             FormatSeconds(seconds.attention())),
             text);
  AppendLine("MFU", PercentOf(result.mfu(), 1), text);
  AppendLine("plan",
             absl::StrFormat("%u rank%s: %u head group%s of %ux%u, %s%s", plan.ranks(),
                             plan.ranks() == 1 ? "" : "s", plan.heads(), plan.heads() == 1 ? "" : "s",
                             plan.a(), plan.b(), LayoutText(LayoutName(plan.layout()), plan.stripe()),
                             WireAndPlacement(plan.partial_dtype(), PlacementName(plan.placement()))),
             text);
  AppendDoubleRing(plan.kv_inner(), text);
  AppendExchange(plan.exchange_tokens(), text);
  if (plan.pieces() > 1) AppendLine("pieces", PiecesText(plan.pieces(), plan.piece_tokens()), text);
  AppendLine("sent by a rank",
             absl::StrFormat(
                 "%s (Q %s, KV %s, O %s)", FormatBytes(sent), FormatBytes(static_cast<double>(bytes.q())),
                 FormatBytes(static_cast<double>(bytes.kv())), FormatBytes(static_cast<double>(bytes.o()))),
             text);
  return text;
}

// Columns, with a heading each; text that clients chose has no control characters.
//
//     request  phase    tokens  layers  elapsed  rest
//     r-1      running  65,536  12/32   8.1 s    13.5 s
std::string PoolText(const v1::PoolStatus& status) {
  std::string text;
  const std::string state = v1::PoolStatus::State_Name(status.state());
  AppendLine("pool",
             absl::StrCat(absl::AsciiStrToLower(absl::StripPrefix(state, "STATE_")), ", ", status.ranks(),
                          " rank", status.ranks() == 1 ? "" : "s", " of ", status.backend()),
             text);
  AppendLine("model", status.model(), text);
  AppendLine("queue",
             absl::StrCat(status.queued_requests(), " waiting, ",
                          FormatCount(static_cast<double>(status.queued_tokens())), " tokens"),
             text);
  Table requests({"request", "phase", "tokens", "layers", "elapsed", "rest"});
  for (const v1::PoolStatus::Request& each : status.requests()) {
    requests.Add({each.id(), each.phase(), FormatCount(static_cast<double>(each.tokens())),
                  each.layers() == 0 ? "-" : absl::StrCat(each.layers_done(), "/", each.layers()),
                  FormatSeconds(each.elapsed_seconds()), FormatSeconds(each.predicted_rest_seconds())});
  }
  Table workers({"worker", "state", "ranks", "first rank", "host", "backend"});
  for (const v1::PoolStatus::Worker& each : status.workers()) {
    workers.Add({each.name(), each.state(), absl::StrCat(each.ranks()),
                 each.first_rank() < 0 ? "-" : absl::StrCat(each.first_rank()), each.host(), each.backend()});
  }
  return absl::StrCat(text, requests.Text(), workers.Text());
}

std::string PlanText(const PlanChoice& choice, std::span<const WeightModeBytes> weight_modes,
                     const char* place, std::span<const std::string> not_yet) {
  const Plan& plan = choice.plan;
  std::string text;
  const int64_t first = choice.pieces.empty() ? plan.cached_tokens : choice.pieces.front().cached_tokens;
  const int64_t tokens = plan.cached_tokens + plan.layout.tokens() - first;
  AppendLine("tokens", FormatCount(static_cast<double>(tokens)), text);
  AppendLine(
      "plan",
      absl::StrFormat("%d rank%s: %d head group%s of %s, %s%s", plan.ranks(), plan.ranks() == 1 ? "" : "s",
                      plan.heads, plan.heads == 1 ? "" : "s", plan.tile.DebugString(),
                      LayoutText(LayoutName(plan.layout.kind()), plan.layout.stripe()),
                      WireAndPlacement(DTypeName(plan.partial_dtype), PlacementName(plan.placement.name))),
      text);
  AppendDoubleRing(static_cast<uint64_t>(plan.kv_inner), text);
  AppendExchange(static_cast<uint64_t>(plan.exchanges() == 1 ? 0 : plan.exchange_tokens), text);
  if (!choice.pieces.empty()) {
    AppendLine("pieces",
               PiecesText(choice.pieces.size(), static_cast<uint64_t>(choice.pieces.front().layout.tokens())),
               text);
  }
  AppendLine("predicted",
             absl::StrFormat("%s, of it %s comm wait", FormatSeconds(plan.predicted.seconds),
                             FormatSeconds(plan.predicted.comm_wait_seconds)),
             text);
  const std::string added = choice.weights.mode == WeightMode::kResident
                                ? ""
                                : absl::StrCat(", which adds ", FormatSeconds(plan.predicted.weight_seconds));
  AppendLine("weights",
             absl::StrCat(WeightModeName(choice.weights.mode), ", ",
                          FormatBytes(static_cast<double>(plan.predicted.weight_bytes)), " of memory", added),
             text);
  for (const WeightModeBytes& each : weight_modes) {
    if (each.mode == choice.weights.mode) continue;
    AppendLine(
        "",
        absl::StrCat(WeightModeName(each.mode), " would need ", FormatBytes(static_cast<double>(each.bytes)),
                     " of ", place, each.fits ? "" : ", more than is free",
                     each.seconds > 0 ? absl::StrCat(", and take ", FormatSeconds(each.seconds)) : ""),
        text);
  }
  if (!not_yet.empty()) AppendLine("not yet", absl::StrJoin(not_yet, ", "), text);
  return absl::StrCat(text, "\n", ScheduleText(plan.schedule), "\n", CandidatesText(choice));
}

}  // namespace meshfill
