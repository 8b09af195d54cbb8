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

std::string Blocks(const v1::PlanReply::Step& step) {
  std::string blocks;
  for (const v1::PlanReply::Block& block : step.blocks()) {
    absl::StrAppend(&blocks, "(", block.u(), ",", block.v(), ")");
  }
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
std::string ScheduleText(const v1::PlanReply& reply) {
  std::vector<std::string> number = {"step"};
  std::vector<std::string> comm = {"comm"};
  for (int i = 0; i < reply.steps_size(); ++i) {
    number.push_back(absl::StrCat(i));
    const v1::PlanReply::Step& step = reply.steps(i);
    comm.push_back(step.comm() == CommName(std::nullopt) ? "." : step.comm());
    if (step.spans() > 1) absl::StrAppend(&comm.back(), " to ", i + static_cast<int>(step.spans()) - 1);
  }
  AlignColumn(number);
  AlignColumn(comm);
  std::string text = absl::StrCat(number[0], "  ", comm[0], "  blocks (Q#u,KV#v) computed meanwhile\n");
  for (int i = 0; i < reply.steps_size(); ++i) {
    const auto row = static_cast<size_t>(i) + 1;
    absl::StrAppend(&text, number[row], "  ", comm[row], "  ", Blocks(reply.steps(i)), "\n");
  }
  return text;
}

// "striped in stripes of 64 tokens"; of the layouts the striped one alone has stripes.
std::string LayoutText(absl::string_view name, int64_t stripe) {
  return name == "striped" ? absl::StrCat(name, " in stripes of ", stripe, " tokens") : std::string(name);
}

double SentBytes(const v1::CommBytes& bytes) {
  return static_cast<double>(bytes.q() + bytes.kv() + bytes.o() + bytes.all_to_all() + bytes.gather());
}

std::string ShapeName(const v1::PlanReply::Candidate& candidate) {
  const std::string tile = absl::StrCat(candidate.a(), "x", candidate.b());
  return candidate.heads() == 1 ? tile : absl::StrCat(candidate.heads(), "*", tile);
}

// A wire dtype or a placement is a column only where some candidate has another than the usual one.
std::string CandidatesText(const v1::PlanReply& reply) {
  using Candidate = v1::PlanReply::Candidate;
  const v1::PlanSummary& plan = reply.plan();
  const auto any = [&reply](auto&& unusual) {
    return std::any_of(reply.candidates().begin(), reply.candidates().end(), unusual);
  };
  const bool wire = any([](const Candidate& each) { return each.partial_dtype() != DTypeName(DType::kF32); });
  const bool placed = any([](const Candidate& each) { return PlacementName(each.placement()) != kRowFirst; });
  const bool fewer = any([&](const Candidate& each) { return each.ranks() != plan.ranks(); });
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
  for (const Candidate& candidate : reply.candidates()) {
    const v1::PlanReply::Prediction& predicted = candidate.predicted();
    const bool chosen = candidate.a() == plan.a() && candidate.b() == plan.b() &&
                        candidate.heads() == plan.heads() && candidate.ranks() == plan.ranks();
    absl::StrAppend(&text,
                    row(absl::StrCat(candidate.ranks()), ShapeName(candidate), LayoutName(candidate.layout()),
                        candidate.partial_dtype(), PlacementName(candidate.placement())));
    absl::StrAppendFormat(
        &text, "%10s  %10s  %10s  %10s  %10s%s\n", FormatSeconds(predicted.seconds()),
        FormatSeconds(predicted.compute_seconds()), FormatSeconds(predicted.comm_wait_seconds()),
        FormatBytes(SentBytes(predicted.comm_bytes())),
        FormatBytes(static_cast<double>(predicted.peak_bytes())), chosen ? "  <- chosen" : "");
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

// How the prompt is shared.
void AppendPlan(const v1::PlanSummary& plan, std::string& text) {
  const std::string placement = PlacementName(plan.placement());
  AppendLine("plan",
             absl::StrFormat("%u rank%s: %u head group%s of %ux%u, %s, partial outputs in %s, ranks %s%s",
                             plan.ranks(), plan.ranks() == 1 ? "" : "s", plan.heads(),
                             plan.heads() == 1 ? "" : "s", plan.a(), plan.b(),
                             LayoutText(LayoutName(plan.layout()), plan.stripe()), plan.partial_dtype(),
                             placement, absl::StartsWith(placement, "box ") ? " on a host" : ""),
             text);
  if (plan.kv_inner() > 0) {
    AppendLine("KV rings",
               absl::StrCat("of ", plan.kv_inner(), " ranks, beside one that leads from each to the next"),
               text);
  }
  if (plan.exchange_tokens() > 0) {
    AppendLine("exchange",
               absl::StrCat("by ", FormatCount(static_cast<double>(plan.exchange_tokens())),
                            " tokens of each rank, beside the work on others"),
               text);
  }
  if (plan.pieces() > 1) {
    AppendLine("pieces",
               absl::StrFormat("%d of %s tokens, one after the other, to fit the memory", plan.pieces(),
                               FormatCount(static_cast<double>(plan.piece_tokens()))),
               text);
  }
}

}  // namespace

std::string PrefillText(const v1::PrefillResult& result, double upload_seconds) {
  const v1::PrefillResult::Seconds& seconds = result.seconds();
  const v1::CommBytes& bytes = result.comm_bytes();
  std::string top;
  for (const v1::TokenLogit& best : result.top()) {
    absl::StrAppendFormat(&top, "%s%u (%.4g)", top.empty() ? "" : "  ", best.token(), best.logit());
  }
  const double tokens = static_cast<double>(result.tokens());

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
  AppendLine(
      "TTFT",
      absl::StrFormat("%s (%squeue %s, prefill %s)", FormatSeconds(TtftSeconds(result, upload_seconds)),
                      upload, FormatSeconds(seconds.queue()), FormatSeconds(seconds.prefill())),
      text);
  if (result.attempts() > 1) {
    AppendLine("attempts", absl::StrCat(result.attempts(), ", after the loss of workers"), text);
  }
  if (result.pack_prompts() > 1) {
    AppendLine("pack", absl::StrCat(result.pack_prompts(), " prompts, in one pass over the weights"), text);
  }
  AppendLine("tokens/s", FormatCount(seconds.prefill() > 0 ? tokens / seconds.prefill() : 0), text);
  AppendLine("comm wait",
             absl::StrFormat("%s, %s of attention (%s)", FormatSeconds(seconds.comm_wait()),
                             PercentOf(seconds.comm_wait(), seconds.attention()),
                             FormatSeconds(seconds.attention())),
             text);
  AppendLine("MFU", PercentOf(result.mfu(), 1), text);
  AppendPlan(result.plan(), text);
  AppendLine("sent by a rank",
             absl::StrFormat("%s (Q %s, KV %s, O %s)", FormatBytes(SentBytes(bytes)),
                             FormatBytes(static_cast<double>(bytes.q())),
                             FormatBytes(static_cast<double>(bytes.kv())),
                             FormatBytes(static_cast<double>(bytes.o()))),
             text);
  return text;
}

// Columns, with a heading each; text that clients chose has no control characters.
//
//     request  tenant  phase    tokens  layers  elapsed  rest
//     r-1      search  running  65,536  12/32   8.1 s    13.5 s
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
  Table requests({"request", "tenant", "phase", "tokens", "layers", "elapsed", "rest"});
  for (const v1::PoolStatus::Request& each : status.requests()) {
    requests.Add({each.id(), each.tenant().empty() ? "-" : each.tenant(), each.phase(),
                  FormatCount(static_cast<double>(each.tokens())),
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

namespace {

// What the mode takes of the hosts, and what these have where that is less.
std::string OfHost(const WeightModeBytes& mode) {
  if (mode.host_bytes == 0) return "";
  const std::string lacks =
      mode.fits_host()
          ? ""
          : absl::StrCat(", which has ", FormatBytes(static_cast<double>(mode.host_memory_bytes)));
  return absl::StrCat(", ", FormatBytes(static_cast<double>(mode.host_bytes)), " of each node's host", lacks);
}

}  // namespace

std::string PlanText(const v1::PlanReply& reply, int64_t tokens,
                     std::span<const WeightModeBytes> weight_modes, const char* place,
                     std::span<const std::string> not_yet) {
  const v1::PlanReply::Prediction& predicted = reply.predicted();
  std::string text;
  AppendLine("tokens", FormatCount(static_cast<double>(tokens)), text);
  AppendPlan(reply.plan(), text);
  AppendLine("predicted",
             absl::StrFormat("%s, of it %s comm wait", FormatSeconds(predicted.seconds()),
                             FormatSeconds(predicted.comm_wait_seconds())),
             text);
  const std::string added = reply.weights() == WeightModeName(WeightMode::kResident)
                                ? ""
                                : absl::StrCat(", which adds ", FormatSeconds(predicted.weight_seconds()));
  const auto is_chosen = [&](const WeightModeBytes& mode) {
    return WeightModeName(mode.mode) == reply.weights();
  };
  const auto chosen = std::find_if(weight_modes.begin(), weight_modes.end(), is_chosen);
  AppendLine("weights",
             absl::StrCat(reply.weights(), ", ", FormatBytes(static_cast<double>(predicted.weight_bytes())),
                          " of memory", chosen == weight_modes.end() ? "" : OfHost(*chosen), added),
             text);
  for (const WeightModeBytes& each : weight_modes) {
    if (is_chosen(each)) continue;
    AppendLine(
        "",
        absl::StrCat(WeightModeName(each.mode), " would need ", FormatBytes(static_cast<double>(each.bytes)),
                     " of ", place, OfHost(each), each.fits || !each.fits_host() ? "" : ", more than is free",
                     each.seconds > 0 ? absl::StrCat(", and take ", FormatSeconds(each.seconds)) : ""),
        text);
  }
  if (!not_yet.empty()) AppendLine("not yet", absl::StrJoin(not_yet, ", "), text);
  return absl::StrCat(text, "\n", ScheduleText(reply), "\n", CandidatesText(reply));
}

}  // namespace meshfill
