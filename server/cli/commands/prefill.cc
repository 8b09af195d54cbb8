#include "server/cli/commands/prefill.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "engine/embedded_engine.h"
#include "engine/kv/kv_prompt.h"
#include "engine/prefill_engine.h"
#include "kernels/monotonic_time.h"
#include "kernels/mutex.h"
#include "kernels/return_if_error.h"
#include "server/api/plan_proto.h"
#include "server/api/request_id.h"
#include "server/api/result_proto.h"
#include "server/cli/cancel_watch.h"
#include "server/cli/client.h"
#include "server/cli/commands/flags.h"
#include "server/cli/kv_download.h"
#include "server/cli/output_file.h"
#include "server/cli/progress_bar.h"
#include "server/cli/result_json.h"
#include "server/cli/result_text.h"
#include "server/cli/tensor_output.h"
#include "server/cli/token_file.h"
#include "server/config/address.h"
#include "server/config/config.h"
#include "server/pictures/trace_json.h"

namespace meshfill {
namespace {

// Events of a server's answer, or layers of an embedded run, onto the bar.
class BarEvents : public PrefillEvents, public PrefillObserver {
 public:
  explicit BarEvents(ProgressBar& bar) : bar_(bar) {}
  void OnAccepted(const v1::Accepted& accepted) override {
    bar_.SetPrediction(accepted.predicted_seconds(), static_cast<int>(accepted.queue_position()),
                       accepted.predicted_queue_seconds());
  }
  void OnProgress(const v1::Progress& progress) override {
    bar_.SetLayersDone(static_cast<int>(progress.layers_done()), static_cast<int>(progress.layers()),
                       progress.seconds());
  }
  void OnLayerDone(int layers_done, int layers) override {
    bar_.SetLayersDone(layers_done, layers, absl::ToDoubleSeconds(MonotonicNow() - begin_));
  }

 private:
  ProgressBar& bar_;
  const absl::Time begin_ = MonotonicNow();  // an embedded run's: it computes from then on
};

// Stops a prefill that may not have begun yet.
class StopSwitch {
 public:
  // May be called from any thread.
  void Stop() {
    const MutexLock lock(mu_);
    stopped_ = true;
    if (prefill_ != nullptr) prefill_->Stop();
  }
  absl::StatusOr<PrefillResult> Wait(Prefill& prefill) {
    Watch(&prefill);
    absl::StatusOr<PrefillResult> result = prefill.Wait();
    Watch(nullptr);
    return result;
  }

 private:
  void Watch(Prefill* prefill) {
    const MutexLock lock(mu_);
    prefill_ = prefill;
    if (stopped_ && prefill_ != nullptr) prefill_->Stop();
  }

  Mutex mu_;
  Prefill* prefill_ ABSL_GUARDED_BY(mu_) = nullptr;  // the prefill that runs now
  bool stopped_ ABSL_GUARDED_BY(mu_) = false;
};

constexpr uint32_t kLeaseSeconds = 3600;  // lease on K and V, which are released once they are in the file

class PrefillCommand : public Command {
 public:
  explicit PrefillCommand(CLI::App& parent)
      : Command(parent.add_subcommand("prefill", "Prefill one prompt and print its first token")) {
    DeclareWhereToRun();
    DeclarePrompt();
    DeclarePlan();
    DeclareRequest();
    DeclareOutput();
  }

  absl::Status Run() override {
    if (server_.address.empty() && config_.path.empty()) {
      return absl::InvalidArgumentError(
          "nowhere to run; give --server HOST:PORT or --config FILE, as configs/local.yaml");
    }
    if (!server_.address.empty() && !trace_path_.empty()) {
      return absl::InvalidArgumentError(
          "--trace-out shows the ranks of an embedded pool; give --config FILE instead of --server");
    }
    for (const std::string& path : {logits_path_, kv_path_, trace_path_}) {
      if (path.empty()) continue;
      RETURN_IF_ERROR(CheckOutputPath(path));
    }
    ASSIGN_OR_RETURN(std::vector<uint32_t> tokens, ReadTokens(tokens_path_, format_));
    ASSIGN_OR_RETURN(Outcome outcome, server_.address.empty() ? RunEmbedded(tokens) : RunOnServer(tokens));
    return Deliver(outcome);
  }

 private:
  struct Outcome {
    v1::PrefillResult result;
    ReadKvLayer read_kv;  // where --kv-out asks for it
    KvShape kv_shape;
    std::optional<Timeline> timeline;
    double upload_seconds = 0;
  };

  void DeclareWhereToRun() {
    CLI::Option* server =
        AddServerOption(*app_, server_, "Run on the server that listens there")->group("Where to run");
    for (CLI::Option* option : AddConnectionOptions(*app_, server_)) option->needs(server);
    CLI::Option* config = config_.AddTo(*app_)->group("Where to run")->excludes(server);
    app_->get_option("--set")->group("Where to run")->needs(config);
    app_->add_option("--model", model_path_, "Model folder (default: the config's)")
        ->type_name("DIR")
        ->group("Where to run")
        ->needs(config);
    AddRanksOption(*app_, ranks_)->group("Where to run")->needs(config);
    AddDTypeOption(*app_, dtype_)->group("Where to run")->needs(config);
  }

  void DeclareRequest() {
    CLI::Option* server = app_->get_option("--server");
    app_->add_option("--deadline", deadline_seconds_, "Give up after so many seconds")
        ->type_name("SECONDS")
        ->check(PositiveNumber())
        ->group("Request");
    app_->add_option("--request-id", request_id_, "Its name in results and logs (default: a new one)")
        ->type_name("ID")
        ->group("Request");
    app_->add_option("--tenant", tenant_, "Whose request it is: its share, bounds, leases and cache")
        ->type_name("NAME")
        ->needs(server)
        ->group("Request");
    app_->add_option("--priority", priority_,
                     "-2 to 2, others count as the nearest; higher runs first (default: 0)")
        ->type_name("N")
        ->needs(server)
        ->group("Request");
  }

  void DeclarePrompt() {
    app_->add_option("--tokens", tokens_path_, "File of the prompt's token ids; - is standard input")
        ->type_name("FILE")
        ->required()
        ->group("Prompt");
    AddParsedOption(
        *app_, "--format", format_, ParseTokenFormat, "NAME",
        "ids: decimal, with white space or commas between them, or a JSON list (default); u32le: raw; "
        "bytes: each byte is an id")
        ->group("Prompt");
  }

  void DeclarePlan() {
    AddTileOption(*app_, options_.tile)->group("Plan");
    AddHeadsOption(*app_, options_.heads)->group("Plan");
    AddLayoutOption(*app_, options_.layout)->group("Plan");
    AddStripeOption(*app_, options_.stripe)->group("Plan");
  }

  void DeclareOutput() {
    app_->add_option("--top-k", options_.top_k, "Best tokens to report")
        ->type_name("K")
        ->check(WholeNumber(1))
        ->capture_default_str()
        ->group("Output");
    app_->add_option("--logits-out", logits_path_,
                     "Write the last token's logits, safetensors; computes all tokens, cached or not")
        ->type_name("FILE")
        ->group("Output");
    app_->add_option("--kv-out", kv_path_,
                     "Write K and V of every layer in token order, safetensors; likewise")
        ->type_name("FILE")
        ->group("Output");
    app_->add_option("--trace-out", trace_path_,
                     "Write what every rank did when, for ui.perfetto.dev; embedded pool alone")
        ->type_name("FILE")
        ->group("Output");
    AddJsonFlag(*app_, json_)->group("Output");
  }

  absl::Time Deadline() const {
    return deadline_seconds_ > 0 ? MonotonicNow() + absl::Seconds(deadline_seconds_) : absl::InfiniteFuture();
  }

  absl::StatusOr<Outcome> RunEmbedded(std::span<const uint32_t> tokens) {
    ASSIGN_OR_RETURN(v1::Config config, config_.Load());
    if (!model_path_.empty()) config.mutable_model()->set_path(model_path_);
    RETURN_IF_ERROR(config_.CheckModelPath(config));
    RETURN_IF_ERROR(CheckModelFolder(config));
    EngineOptions engine_options = ToEngineOptions(config);
    if (ranks_.has_value()) engine_options.ranks = *ranks_;
    if (dtype_.has_value()) engine_options.dtype = dtype_;

    StopSwitch stop;
    CancelWatch watch(Deadline(), [&stop] { stop.Stop(); });
    ASSIGN_OR_RETURN(std::unique_ptr<PrefillEngine> engine, LoadEmbeddedEngine(engine_options));
    std::shared_ptr<KvPrompt> kv;
    if (!kv_path_.empty()) {
      kv = std::make_shared<KvPrompt>(KvShapeOf(engine->model()), static_cast<int64_t>(tokens.size()));
    }
    options_.kv = kv;
    options_.keep_timeline = !trace_path_.empty();
    absl::StatusOr<PrefillResult> result = RunWithBar(*engine, tokens, stop);
    if (absl::Status reason = watch.status(); absl::IsCancelled(result.status()) && !reason.ok())
      return reason;
    if (!result.ok()) return result.status();

    Outcome outcome{.result = ToProto(*result, request_id_.empty() ? NewRequestId() : request_id_),
                    .read_kv = kv == nullptr ? nullptr : ReadKept(std::move(kv)),
                    .timeline = std::move(result->timeline)};
    outcome.kv_shape = KvShapeOf(engine->model());
    if (!logits_path_.empty())
      outcome.result.mutable_logits()->Assign(result->logits.begin(), result->logits.end());
    return outcome;
  }

  absl::StatusOr<PrefillResult> RunWithBar(PrefillEngine& engine, std::span<const uint32_t> tokens,
                                           StopSwitch& stop) {
    ASSIGN_OR_RETURN(PlanChoice choice, engine.MakePlan(static_cast<int64_t>(tokens.size()), options_));
    ProgressBar bar;
    bar.SetPrediction(choice.plan.predicted.seconds);
    bar.SetLayersDone(0, engine.model().layers, /*computed_seconds=*/0);
    BarEvents events(bar);
    ASSIGN_OR_RETURN(std::unique_ptr<Prefill> prefill, engine.Start({tokens, options_}, &events));
    return stop.Wait(*prefill);
  }

  absl::StatusOr<Outcome> RunOnServer(std::span<const uint32_t> tokens) {
    const absl::Time deadline = Deadline();
    PrefillClient client;
    CancelWatch watch(absl::InfiniteFuture(), [&client] { client.Cancel(); });
    ASSIGN_OR_RETURN(const ServerChannel server, ServerChannel::Open(server_));  // starts gRPC's threads
    ProgressBar bar;
    BarEvents events(bar);
    const absl::Time begin = MonotonicNow();
    absl::StatusOr<v1::PrefillResult> result = client.Prefill(server, Header(), tokens, deadline, events);
    const double seconds = absl::ToDoubleSeconds(MonotonicNow() - begin);
    if (absl::Status reason = watch.status(); absl::IsCancelled(result.status()) && !reason.ok())
      return reason;
    if (!result.ok()) return result.status();
    Outcome outcome;
    outcome.upload_seconds = std::max(0.0, seconds - result->seconds().queue() - result->seconds().prefill());
    if (!kv_path_.empty()) {
      ASSIGN_OR_RETURN(outcome.kv_shape, KvShapeOf(result->kv()));
      outcome.read_kv = [download = std::make_shared<KvDownload>(server, tenant_, result->kv().lease())](
                            int layer, std::span<std::byte> k, std::span<std::byte> v) {
        return download->ReadLayer(layer, k, v);
      };
    }
    outcome.result = *std::move(result);
    return outcome;
  }

  v1::PrefillHeader Header() const {
    v1::PrefillHeader header;
    header.set_request_id(request_id_);
    header.set_tenant(tenant_);
    header.set_priority(priority_);
    header.set_top_k(static_cast<uint32_t>(options_.top_k));
    header.set_return_logits(!logits_path_.empty());
    // Files hold what the whole prompt's own computation gives, bit by bit, not what earlier ones gave.
    header.mutable_kv()->set_ignore_cache(!logits_path_.empty() || !kv_path_.empty());
    if (!kv_path_.empty()) {
      header.mutable_kv()->set_keep(true);
      header.mutable_kv()->set_lease_seconds(kLeaseSeconds);
    }
    *header.mutable_plan() = PlanOptionsOf(options_);
    return header;
  }

  static ReadKvLayer ReadKept(std::shared_ptr<const KvPrompt> kv) {
    return [kv = std::move(kv)](int layer, std::span<std::byte> k, std::span<std::byte> v) {
      const KvRange all = {.tokens = kv->tokens(), .heads = kv->shape().kv_heads};
      return CopyKvTokens(*kv->Layer(layer), layer, all, k.data(), v.data());
    };
  }

  absl::Status WriteTrace(const Timeline& timeline) const {
    if (timeline.dropped_spans > 0) {
      std::fprintf(stderr,
                   "meshfill prefill: %s lacks the last %lld spans of the run: a trace has its bounds\n",
                   trace_path_.c_str(), static_cast<long long>(timeline.dropped_spans));
    }
    return WriteTextFile(trace_path_, TraceJson(timeline));
  }

  absl::Status Deliver(const Outcome& outcome) const {
    if (!logits_path_.empty()) {
      const std::span<const float> logits(outcome.result.logits().data(), outcome.result.logits_size());
      RETURN_IF_ERROR(WriteLogits(logits_path_, logits));
    }
    if (!kv_path_.empty()) {
      const auto tokens = static_cast<int64_t>(outcome.result.tokens());
      RETURN_IF_ERROR(WriteKv(kv_path_, outcome.kv_shape, tokens, outcome.read_kv));
    }
    if (!trace_path_.empty()) {
      RETURN_IF_ERROR(WriteTrace(*outcome.timeline));
    }
    const std::string text = json_ ? absl::StrCat(PrefillJson(outcome.result, outcome.upload_seconds), "\n")
                                   : PrefillText(outcome.result, outcome.upload_seconds);
    std::fputs(text.c_str(), stdout);
    return absl::OkStatus();
  }

  ServerOptions server_;
  ConfigFlags config_;
  std::string model_path_;
  std::optional<int> ranks_;
  std::optional<DType> dtype_;
  double deadline_seconds_ = 0;  // 0: none
  std::string request_id_;
  std::string tenant_;
  int32_t priority_ = 0;
  std::string tokens_path_;
  TokenFormat format_ = TokenFormat::kIds;
  PrefillOptions options_;
  std::string logits_path_;
  std::string kv_path_;
  std::string trace_path_;
  bool json_ = false;
};

}  // namespace

std::unique_ptr<Command> AddPrefillCommand(CLI::App& parent) {
  return std::make_unique<PrefillCommand>(parent);
}

}  // namespace meshfill
