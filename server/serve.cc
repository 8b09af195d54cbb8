#include "server/serve.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "engine/embedded_engine.h"
#include "engine/prefill_engine.h"
#include "kernels/monotonic_time.h"
#include "kernels/return_if_error.h"
#include "server/api/front_end.h"
#include "server/config/config.h"
#include "server/config/config_units.h"
#include "server/idle_memory.h"
#include "server/observe/http_pages.h"
#include "server/observe/liveness.h"
#include "server/observe/log.h"
#include "server/observe/metrics.h"
#include "server/observe/pool_log.h"
#include "server/observe/span_exporter.h"
#include "server/observe/status_page.h"
#include "server/pool/pool_engine.h"
#include "server/process_setup.h"
#include "server/shutdown_signals.h"
#include "server/stoppable_load.h"

namespace meshfill {
namespace {

constexpr absl::Duration kPoll = absl::Milliseconds(50);
constexpr absl::Duration kDrainPoll = absl::Milliseconds(10);  // a second signal stops at once
constexpr absl::Duration kLastSpans = absl::Seconds(3);        // for the collector to take, at the end
constexpr absl::Duration kLastAnswers = absl::Seconds(1);      // for the requests that a lost device fails

// The leader of workers that join.
absl::StatusOr<std::unique_ptr<PoolEngine>> StartPool(const v1::Config& config, Metrics& metrics) {
  auto pool = PoolEngine::Listen(config, metrics);
  if (!pool.ok()) {
    return absl::Status(pool.status().code(), absl::StrCat("pool.control_listen: ", pool.status().message()));
  }
  Log(absl::StrCat("workers join at ", (*pool)->control_address()));
  return pool;
}

// /metrics, and the status page beside it.
absl::StatusOr<std::unique_ptr<HttpPages>> ListenForPages(const std::string& address, Metrics& metrics,
                                                          const SpanExporter* spans,
                                                          const FrontEnd& front_end,
                                                          const Liveness& liveness) {
  std::vector<HttpPage> pages =
      StatusPages([&front_end] { return front_end.pool_status(); }, front_end.last_prefill());
  pages.push_back(MetricsPage([&metrics, spans](MetricsFormat format) {
    if (spans != nullptr) metrics.SetTraceSpans(spans->counts());
    return metrics.Text(format);
  }));
  pages.push_back(liveness.Page());
  return HttpPages::Listen(address, std::move(pages));
}

void LogAddresses(const FrontEnd& front_end, const HttpPages* pages) {
  Log(absl::StrCat("listening on ", front_end.address()));
  if (pages != nullptr) Log(absl::StrCat("metrics listening on ", pages->address()));
}

absl::Status Drain(const v1::Config& config, FrontEnd& front_end, Liveness& liveness,
                   ShutdownSignals& signals) {
  const absl::Duration timeout = ToDuration(config.limits().drain_timeout());
  const absl::Time deadline = MonotonicNow() + timeout;
  front_end.StartDrain();
  Log("draining: new requests are refused, accepted ones finish; a second signal stops at once");
  while (!front_end.WaitUntilIdle(MonotonicNow() + kDrainPoll)) {
    liveness.Beat(front_end.standstill());
    if (signals.Wait(absl::ZeroDuration())) return absl::CancelledError("stopped by a second signal");
    if (MonotonicNow() >= deadline) {
      return absl::DeadlineExceededError(
          absl::StrCat("requests still ran, or leases still lived, after limits.drain_timeout of ",
                       absl::FormatDuration(timeout)));
    }
  }
  return absl::OkStatus();
}

// Nothing goes well in this process any more: whoever started it is to start it anew.
absl::Status EndLost(FrontEnd& front_end) {
  front_end.StartDrain();
  front_end.WaitUntilIdle(MonotonicNow() + kLastAnswers);
  return absl::UnavailableError(
      "a device of this pool has failed; start the server anew, or see what the driver says");
}

}  // namespace

absl::Status Serve(const v1::Config& config) {
  SetUpProcess(config.log());
  const LogFlush flush;
  RETURN_IF_ERROR(CheckModelFolder(config));
  ShutdownSignals signals;
  Metrics metrics;
  std::unique_ptr<SpanExporter> spans;
  if (const v1::TraceSection& trace = config.trace(); !trace.endpoint().empty()) {
    auto exporter = SpanExporter::Start(trace.endpoint(), ToDuration(trace.timeout()));
    if (!exporter.ok()) {
      return absl::Status(exporter.status().code(),
                          absl::StrCat("trace.endpoint: ", exporter.status().message()));
    }
    spans = *std::move(exporter);
  }
  auto front_end = FrontEnd::Start(config, metrics, spans.get());
  if (!front_end.ok()) {
    return absl::Status(front_end.status().code(), absl::StrCat("listen: ", front_end.status().message()));
  }
  Liveness liveness;
  std::unique_ptr<HttpPages> pages;
  if (!config.metrics_listen().empty()) {
    auto listening = ListenForPages(config.metrics_listen(), metrics, spans.get(), **front_end, liveness);
    if (!listening.ok()) {
      return absl::Status(listening.status().code(),
                          absl::StrCat("metrics_listen: ", listening.status().message()));
    }
    pages = *std::move(listening);
  }

  const bool embedded = config.pool().control_listen().empty();
  if (embedded) {
    Log(absl::StrCat("loading ", config.model().path(), "; until then health at ", (*front_end)->address(),
                     " says NOT_SERVING"));
    ASSIGN_OR_RETURN(std::unique_ptr<PrefillEngine> engine, LoadUnlessStopped(signals, [&config] {
                       return LoadEmbeddedEngine(ToEngineOptions(config), LogPoolNote);
                     }));
    LogAddresses(**front_end, pages.get());
    Log(absl::StrCat("ready: model ", engine->model_name(), " on ", RanksText(engine->ranks()), " of ",
                     engine->backend_name()));
    (*front_end)->Open(std::move(engine));
  } else {
    ASSIGN_OR_RETURN(std::unique_ptr<PoolEngine> pool, StartPool(config, metrics));
    LogAddresses(**front_end, pages.get());
    Log(absl::StrCat("model ", pool->model_name(), " waits for workers"));
    KvLeases& leases = pool->kv_leases();
    (*front_end)->Open(std::move(pool), &leases);
  }

  IdleMemory memory;
  bool lost = false;
  while (!lost && !signals.Wait(kPoll)) {
    (*front_end)->Refresh();
    memory.Look((*front_end)->WaitUntilIdle(absl::InfinitePast()), MonotonicNow());
    liveness.Beat((*front_end)->standstill());
    lost = (*front_end)->lost();
  }
  absl::Status ended = lost ? EndLost(**front_end) : Drain(config, **front_end, liveness, signals);
  pages.reset();  // it asks the front-end
  (*front_end)->Stop();
  if (spans != nullptr && (lost || ended.ok())) spans->Flush(MonotonicNow() + kLastSpans);
  if (ended.ok()) {
    Log("stopped");
  } else {
    Log(absl::StrCat("stopped: ", ended.message()), {.level = lost ? LogLevel::kError : LogLevel::kWarning});
  }
  return ended;
}

}  // namespace meshfill
