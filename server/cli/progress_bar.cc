#include "server/cli/progress_bar.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/mutex.h"

namespace meshfill {
namespace {

constexpr absl::Duration kRedrawInterval = absl::Milliseconds(200);
constexpr int kLongestBar = 40;  // columns
constexpr char kClearLine[] = "\r\x1b[K";

// Seconds of the whole prefill: by the pace of the layers that are done, else as predicted; 0: unknown.
double ExpectedSeconds(const PrefillProgress& progress) {
  if (progress.layers_done == 0) return progress.predicted_seconds;
  return progress.computed_seconds * progress.layers / progress.layers_done;
}

// Done share of the prefill, in [0, 1]. Time alone never claims a layer that has not been reported.
double DoneShare(const PrefillProgress& progress) {
  if (progress.layers == 0) return 0;  // it may not even have begun
  const double expected = ExpectedSeconds(progress);
  const double computed = progress.computed_seconds + progress.since_layer_seconds;
  const double claimed = expected > 0 ? computed / expected : 0;
  const double layer = 1.0 / progress.layers;
  return std::clamp(claimed, progress.layers_done * layer,
                    std::min((progress.layers_done + 0.99) * layer, 1.0));
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
  if (progress.before > 0 && progress.layers == 0) {
    const double rest = progress.wait_seconds - progress.elapsed_seconds;
    const std::string queued =
        absl::StrCat("queued, ", progress.before, " before it, ",
                     rest > 0 ? absl::StrCat("about ", FormatSeconds(rest)) : "soon its turn");
    return queued.substr(0, static_cast<size_t>(std::max(width, 0)));
  }
  const double share = DoneShare(progress);
  const double expected = ExpectedSeconds(progress);
  std::string facts;
  if (progress.layers > 0) absl::StrAppend(&facts, progress.layers_done, "/", progress.layers, " layers  ");
  if (expected > 0) absl::StrAppendFormat(&facts, "%3d %%  ", static_cast<int>(100 * share + 1e-9));
  absl::StrAppend(&facts, FormatSeconds(progress.elapsed_seconds));
  const double remaining = expected * (1 - share);
  if (remaining > 0) absl::StrAppend(&facts, ", ", FormatSeconds(remaining), " left");

  constexpr absl::string_view kLabel = "prefill ";
  const int room = width - static_cast<int>(kLabel.size() + facts.size()) - 3;  // brackets and a space
  const int bar = std::min(room, kLongestBar);
  if (bar < 5) {
    const size_t columns = static_cast<size_t>(std::max(width, 0));
    return (kLabel.size() + facts.size() <= columns ? absl::StrCat(kLabel, facts) : facts).substr(0, columns);
  }
  const int filled = static_cast<int>(share * bar);
  std::string drawn(static_cast<size_t>(filled), '=');
  if (filled < bar) absl::StrAppend(&drawn, ">", std::string(static_cast<size_t>(bar - filled - 1), ' '));
  return absl::StrCat(kLabel, "[", drawn, "] ", facts);
}

ProgressBar::ProgressBar(Clock clock) : clock_(std::move(clock)), start_(clock_()), layer_at_(start_) {
  if (isatty(STDERR_FILENO)) drawer_ = std::thread([this] { DrawUntilStopped(); });
}

ProgressBar::~ProgressBar() {
  if (!drawer_.joinable()) return;
  {
    const MutexLock lock(mu_);
    stopped_ = true;
  }
  stop_.NotifyAll();
  drawer_.join();
}

void ProgressBar::SetPrediction(double predicted_seconds, int before, double wait_seconds) {
  const MutexLock lock(mu_);
  progress_.predicted_seconds = predicted_seconds;
  progress_.before = before;
  progress_.wait_seconds = wait_seconds;
  start_ = clock_();
}

void ProgressBar::SetLayersDone(int layers_done, int layers, double computed_seconds) {
  const MutexLock lock(mu_);
  layer_at_ = clock_();
  if (progress_.before > 0 && progress_.layers == 0) start_ = layer_at_ - absl::Seconds(computed_seconds);
  // Its run was begun anew, perhaps in other pieces, where fewer of all are done.
  if (int64_t{layers_done} * progress_.layers < int64_t{progress_.layers_done} * layers) {
    lost_seconds_ = computed_seconds - progress_.predicted_seconds * layers_done / layers;
  }
  progress_.computed_seconds = computed_seconds - lost_seconds_;
  progress_.layers_done = layers_done;
  progress_.layers = layers;
}

PrefillProgress ProgressBar::progress() const {
  const MutexLock lock(mu_);
  return ProgressNow();
}

PrefillProgress ProgressBar::ProgressNow() const {
  PrefillProgress progress = progress_;
  const absl::Time now = clock_();
  progress.elapsed_seconds = absl::ToDoubleSeconds(now - start_);
  progress.since_layer_seconds = absl::ToDoubleSeconds(now - layer_at_);
  return progress;
}

void ProgressBar::DrawUntilStopped() {
  MutexLock lock(mu_);
  while (!stopped_) {
    if (stop_.WaitFor(mu_, kRedrawInterval)) continue;
    const std::string line = RenderProgress(ProgressNow(), TerminalColumns() - 1);
    std::fputs(absl::StrCat(kClearLine, line).c_str(), stderr);
    std::fflush(stderr);
  }
  std::fputs(kClearLine, stderr);
  std::fflush(stderr);
}

}  // namespace meshfill
