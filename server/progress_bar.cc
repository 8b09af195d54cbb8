#include "server/progress_bar.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"

namespace meshfill {
namespace {

constexpr absl::Duration kRedrawInterval = absl::Milliseconds(200);
constexpr int kLongestBar = 40;  // columns
constexpr char kClearLine[] = "\r\x1b[K";

// Share of the prefill that is done, in [0, 1]; below 0 where nothing is known.
double DoneShare(const PrefillProgress& progress) {
  if (progress.layers_done > 0 && progress.layers > 0) {
    return static_cast<double>(progress.layers_done) / progress.layers;
  }
  if (progress.predicted_seconds <= 0) return progress.layers > 0 ? 0 : -1;
  // The first layer's share is the most that a prediction may claim.
  const double claimed = progress.elapsed_seconds / progress.predicted_seconds;
  return std::min(claimed, progress.layers > 0 ? 1.0 / progress.layers : 0.99);
}

double RemainingSeconds(const PrefillProgress& progress, double share) {
  if (progress.layers_done > 0) return progress.elapsed_seconds * (1 - share) / share;
  return progress.predicted_seconds - progress.elapsed_seconds;
}

int TerminalColumns() {
  winsize size{};
  if (ioctl(STDERR_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return 80;
  return size.ws_col;
}

}  // namespace

std::string FormatSeconds(double seconds) {
  if (seconds < 0.9995) return absl::StrFormat("%.0f ms", seconds * 1e3);
  if (seconds < 99.95) return absl::StrFormat("%.1f s", seconds);
  const int64_t whole = std::llround(seconds);
  if (whole < 3600) return absl::StrFormat("%d min %02d s", whole / 60, whole % 60);
  return absl::StrFormat("%d h %02d min", whole / 3600, whole / 60 % 60);
}

std::string RenderProgress(const PrefillProgress& progress, int width) {
  const double share = DoneShare(progress);
  std::string facts;
  if (progress.layers > 0) absl::StrAppend(&facts, progress.layers_done, "/", progress.layers, " layers  ");
  if (share >= 0) absl::StrAppendFormat(&facts, "%3.0f %%  ", 100 * share);
  absl::StrAppend(&facts, FormatSeconds(progress.elapsed_seconds));
  const double remaining = RemainingSeconds(progress, share);
  if (remaining > 0) absl::StrAppend(&facts, ", ", FormatSeconds(remaining), " left");

  constexpr absl::string_view kLabel = "prefill ";
  const int room = width - static_cast<int>(kLabel.size() + facts.size()) - 3;  // brackets and a space
  const int bar = std::min(room, kLongestBar);
  if (bar < 5) return facts.substr(0, static_cast<size_t>(std::max(width, 0)));
  const int filled = static_cast<int>(std::max(share, 0.0) * bar);
  std::string drawn(static_cast<size_t>(filled), '=');
  if (filled < bar) absl::StrAppend(&drawn, ">", std::string(static_cast<size_t>(bar - filled - 1), ' '));
  return absl::StrCat(kLabel, "[", drawn, "] ", facts);
}

ProgressBar::ProgressBar() : start_(absl::Now()) {
  if (isatty(STDERR_FILENO)) drawer_ = std::thread([this] { DrawUntilStopped(); });
}

ProgressBar::~ProgressBar() {
  if (!drawer_.joinable()) return;
  {
    absl::MutexLock lock(&mutex_);
    stopped_ = true;
  }
  drawer_.join();
}

void ProgressBar::SetPrediction(double predicted_seconds) {
  absl::MutexLock lock(&mutex_);
  progress_.predicted_seconds = predicted_seconds;
  start_ = absl::Now();
}

void ProgressBar::SetLayersDone(int layers_done, int layers) {
  absl::MutexLock lock(&mutex_);
  progress_.layers_done = layers_done;
  progress_.layers = layers;
}

void ProgressBar::DrawUntilStopped() {
  absl::MutexLock lock(&mutex_);
  while (!mutex_.AwaitWithTimeout(absl::Condition(&stopped_), kRedrawInterval)) {
    progress_.elapsed_seconds = absl::ToDoubleSeconds(absl::Now() - start_);
    std::fputs(absl::StrCat(kClearLine, RenderProgress(progress_, TerminalColumns() - 1)).c_str(), stderr);
    std::fflush(stderr);
  }
  std::fputs(kClearLine, stderr);
  std::fflush(stderr);
}

}  // namespace meshfill
