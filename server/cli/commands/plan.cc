#include "server/cli/commands/plan.h"

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/embedded_pool.h"
#include "engine/kv_budget.h"
#include "engine/model/config_sizes.h"
#include "engine/model/model_config.h"
#include "engine/model/rope_config.h"
#include "engine/model/strict_json.h"
#include "engine/plan/pieces.h"
#include "engine/plan/planner.h"
#include "engine/plan/predicted_timeline.h"
#include "engine/plan/short_room.h"
#include "engine/prefill_request.h"
#include "kernels/return_if_error.h"
#include "server/api/plan_proto.h"
#include "server/cli/client.h"
#include "server/cli/commands/flags.h"
#include "server/cli/gpu_plan.h"
#include "server/cli/output_file.h"
#include "server/cli/result_json.h"
#include "server/cli/result_text.h"
#include "server/cli/scenario.h"
#include "server/config/config.h"
#include "server/pictures/plan_picture.h"
#include "server/pool/pool_planner.h"
#include "server/pool/run_plan.h"

namespace meshfill {
namespace {

// The model's numbers from its config.json alone: a plan needs no weights.
absl::StatusOr<ModelShape> ReadModelShape(const EngineOptions& options) {
  const std::string path = absl::StrCat(options.model_path, "/config.json");
  ASSIGN_OR_RETURN(const std::string text, ReadJsonText(path));
  ASSIGN_OR_RETURN(ModelConfig config, ModelConfig::Parse(text, path));
  ModelShape shape = config.shape;
  shape.dtype = options.dtype.value_or(AutoDType(shape.dtype == DType::kF32));
  return shape;
}

class PlanCommand : public Command {
 public:
  explicit PlanCommand(CLI::App& parent)
      : Command(parent.add_subcommand("plan", "Show what a prefill would run, and how long it would take")) {
    CLI::Option* server = AddServerOption(
        *app_, server_, "Ask the server that listens there: with its ranks, and as fast as they have been");
    for (CLI::Option* option : AddConnectionOptions(*app_, server_)) option->needs(server);
    CLI::Option* config = config_.AddTo(*app_);
    app_->add_option("--model", model_path_, "Model folder (default: the config's)")->type_name("DIR");
    app_->add_option("--cluster", cluster_path_,
                     "Plan for the GPUs of a scenario (YAML), which need not be here; without it for this "
                     "machine, as --config has it")
        ->type_name("FILE");
    config->description(config->get_description() + "; needed without --server and --cluster");
    app_->add_option("--tokens", tokens_, "Tokens in the prompt")
        ->type_name("N")
        ->check(WholeNumber(1))
        ->required();
    app_->add_option("--context", context_tokens_,
                     "Longest prompt of the model (default: the config.json's): plan for more than it is for")
        ->type_name("N")
        ->check(CLI::Range(int64_t{1}, kMaxPosition));
    app_->add_option("--cached", cached_tokens_, "Tokens before it whose keys and values are there already")
        ->type_name("P")
        ->check(WholeNumber(0))
        ->capture_default_str();
    app_->add_option("--ranks", ranks_,
                     absl::StrCat("Ranks that share the prompt: of an embedded pool 1 to ", kMaxHostRanks,
                                  ", of a pool of workers or a cluster 1 to ", kMaxPlanRanks,
                                  " (default: the config's, of a cluster a node)"))
        ->type_name("N")
        ->check(CLI::Range(1, kMaxPlanRanks));
    app_->add_option("--ranks-per-host", ranks_per_host_,
                     "Of a pool of workers: how many of the ranks are on one host (default: all). Every host "
                     "is taken to be as fast and as large as this machine")
        ->type_name("N")
        ->check(CLI::Range(1, kMaxHostRanks));
    AddTileOption(*app_, shape_.tile);
    AddHeadsOption(*app_, shape_.heads);
    AddLayoutOption(*app_, shape_.layout);
    AddStripeOption(*app_, shape_.stripe);
    AddDTypeOption(*app_, dtype_);
    AddJsonFlag(*app_, json_);
    app_->add_option("--svg", svg_path_,
                     "Draw the plan: who computes what, in which steps, how long it takes")
        ->type_name("FILE");
    for (const char* own : {"--config", "--set", "--model", "--cluster", "--context", "--cached", "--ranks",
                            "--ranks-per-host", "--dtype", "--svg"}) {
      server->excludes(app_->get_option(own));
    }
  }

  absl::Status Run() override {
    if (!server_.address.empty()) return AskServer();
    if (!svg_path_.empty()) {
      RETURN_IF_ERROR(CheckOutputPath(svg_path_));
    }
    if (config_.path.empty() && cluster_path_.empty()) {
      return absl::InvalidArgumentError(
          "nothing to plan for; give --server HOST:PORT, --config FILE, as configs/local.yaml, or --cluster "
          "FILE");
    }
    ConfigFlags flags = config_;
    if (!model_path_.empty()) flags.overrides.push_back(absl::StrCat("model.path=", model_path_));
    ASSIGN_OR_RETURN(v1::Config config, flags.Load());
    RETURN_IF_ERROR(flags.CheckModelPath(config));
    RETURN_IF_ERROR(CheckModelFolder(config));
    if (!cluster_path_.empty()) return PlanForCluster(config);
    EngineOptions options = ToEngineOptions(config);
    if (dtype_.has_value()) options.dtype = dtype_;
    const int ranks = ranks_.value_or(options.ranks);
    const bool workers = !config.pool().control_listen().empty();
    options.of_worker = workers;
    options.may_share = workers && !options.weights.has_value();
    options.ranks = workers ? std::min(ranks, ranks_per_host_.value_or(ranks)) : ranks;  // on this machine
    if (options.ranks > kMaxHostRanks) {
      return absl::InvalidArgumentError(absl::StrCat(
          "--ranks ", ranks, ": one host has at most ", kMaxHostRanks, "; ",
          workers ? "give --ranks-per-host" : "plan for workers with a config that has pool.control_listen"));
    }
    ASSIGN_OR_RETURN(ModelShape shape, ReadModelShape(options));
    RETURN_IF_ERROR(SetContext(shape));
    ASSIGN_OR_RETURN(const EmbeddedPoolCapacity host, CapacityWithoutWeights(options, shape));
    std::vector<WeightModeBytes> modes = host.weight_modes;
    absl::StatusOr<PlanChoice> choice = Choose(config, options, shape, host, ranks);
    if (host.shared_weights.has_value()) {
      EmbeddedPoolCapacity sharing = host;
      sharing.weights = *host.shared_weights;
      absl::StatusOr<PlanChoice> shared = Choose(config, options, shape, sharing, ranks);
      AddSeconds(choice, shared, (ranks + options.ranks - 1) / options.ranks, modes);
      if (IsFaster(shared, choice)) choice = std::move(shared);
    }
    if (!choice.ok()) return choice.status();
    return Show(shape, host.speed, *choice, modes, "a host", {});
  }

 private:
  absl::Status AskServer() const {
    ASSIGN_OR_RETURN(const ServerChannel server, ServerChannel::Open(server_));
    v1::PlanRequest request;
    request.set_token_count(static_cast<uint64_t>(tokens_));
    *request.mutable_plan() = PlanOptionsOf(shape_);
    ASSIGN_OR_RETURN(const v1::PlanReply reply, PlanOnServer(server, request, kCallTimeout));
    Print(reply, {}, "", {});
    return absl::OkStatus();
  }

  absl::StatusOr<PlanChoice> Choose(const v1::Config& config, const EngineOptions& options,
                                    const ModelShape& shape, const EmbeddedPoolCapacity& host,
                                    int ranks) const {
    ASSIGN_OR_RETURN(PlanRequest request, Request(config, options, host, ranks));
    PlanRequest on_rank = request;
    on_rank.memory_budget_bytes /= ranks;
    on_rank.weights = host.weights.Share(1, options.ranks);
    const int64_t short_bytes = ranks * ShortRoomBytes(shape, host.speed, on_rank);
    const int64_t kv_bytes = KvBudgetBytes(host, options.kv_memory_bytes, options.kv_host_memory_bytes);
    return PlanBesideShort(
        request.memory_budget_bytes, short_bytes, [&](int64_t memory_bytes) -> absl::StatusOr<PlanChoice> {
          request.memory_budget_bytes = memory_bytes;
          ASSIGN_OR_RETURN(PlanChoice choice,
                           MakePlanInPieces(shape, host.speed, request, GranuleOf(config, request)));
          RETURN_IF_ERROR(
              CheckKvOfPieces(shape, request, choice, OfAllRanks(kv_bytes, options.ranks, ranks)));
          return choice;
        });
  }

  // Adds the predicted seconds of streamed weights, and a row for the same weights shared by `hosts` hosts.
  static void AddSeconds(const absl::StatusOr<PlanChoice>& streamed, const absl::StatusOr<PlanChoice>& shared,
                         int hosts, std::vector<WeightModeBytes>& modes) {
    for (WeightModeBytes& mode : modes) {
      if (streamed.ok() && mode.mode == WeightMode::kStreamed) {
        mode.seconds = streamed->plan.predicted.seconds;
      }
    }
    if (!shared.ok()) return;
    const Prediction& predicted = shared->plan.predicted;
    modes.push_back({WeightMode::kSharded, predicted.weight_bytes / hosts, true, predicted.seconds});
  }

  // Gives the model the context that was asked for. OUT_OF_RANGE: the prompt is above it.
  absl::Status SetContext(ModelShape& shape) const {
    if (context_tokens_.has_value()) {
      shape.context_tokens = *context_tokens_;
      RETURN_IF_ERROR(CheckSizes(shape, "--context"));
    }
    if (cached_tokens_ <= shape.context_tokens && tokens_ <= shape.context_tokens - cached_tokens_) {
      return absl::OkStatus();
    }
    const std::string cached = cached_tokens_ == 0 ? "" : absl::StrCat(" after --cached ", cached_tokens_);
    return absl::OutOfRangeError(absl::StrCat("--tokens ", tokens_, cached,
                                              " is above the model's context of ", shape.context_tokens,
                                              " tokens; plan a shorter prompt, or give --context"));
  }

  // The server cuts what does not fit where a block begins, too.
  static int64_t GranuleOf(const v1::Config& config, const PlanRequest& request) {
    return std::lcm<int64_t>(RoundTokens(request.ranks, request.stripe), config.kv().block_tokens());
  }

  absl::Status PlanForCluster(const v1::Config& config) const {
    if (ranks_per_host_.has_value()) {
      return absl::InvalidArgumentError(
          "--ranks-per-host: a cluster has its own gpus_per_node; leave it out");
    }
    if (dtype_ == DType::kF32) {
      return absl::InvalidArgumentError("--dtype f32: GPUs compute in bf16; leave it out");
    }
    ASSIGN_OR_RETURN(const GpuCluster gpus, LoadGpuCluster(cluster_path_));
    EngineOptions options = ToEngineOptions(config);
    options.dtype = DType::kBf16;
    ASSIGN_OR_RETURN(ModelShape shape, ReadModelShape(options));
    RETURN_IF_ERROR(SetContext(shape));
    PlanRequest request = PlanRequestOf(options, shape_, tokens_);
    request.ranks = ranks_.value_or(gpus.cluster.gpus_per_node);
    request.cached_tokens = cached_tokens_;
    ASSIGN_OR_RETURN(const GpuPlan plan, PlanOnGpus(shape, gpus, request, GranuleOf(config, request)));
    return Show(shape, plan.speed, plan.choice, plan.modes, "a GPU", plan.not_yet);
  }

  absl::Status Show(const ModelShape& shape, const PoolSpeed& speed, const PlanChoice& choice,
                    const std::vector<WeightModeBytes>& modes, const char* place,
                    const std::vector<std::string>& not_yet) const {
    if (!svg_path_.empty()) {
      const std::string svg = PlanSvg(choice.plan, PredictLayer(shape, speed, choice.plan));
      RETURN_IF_ERROR(WriteTextFile(svg_path_, svg));
    }
    Print(ToProto(choice), modes, place, not_yet);
    return absl::OkStatus();
  }

  void Print(const v1::PlanReply& reply, const std::vector<WeightModeBytes>& modes, const char* place,
             const std::vector<std::string>& not_yet) const {
    const std::string text = json_ ? absl::StrCat(PlanJson(reply, modes, not_yet), "\n")
                                   : PlanText(reply, tokens_, modes, place, not_yet);
    std::fwrite(text.data(), 1, text.size(), stdout);
  }

  // What all ranks have where a host has `host_bytes` for its own: each has as much as one of a full host.
  static int64_t OfAllRanks(int64_t host_bytes, int ranks_of_host, int ranks) {
    return ranks == ranks_of_host ? host_bytes : host_bytes / ranks_of_host * ranks;
  }

  // `options` and `host` are of one host, which this machine stands for.
  absl::StatusOr<PlanRequest> Request(const v1::Config& config, const EngineOptions& options,
                                      const EmbeddedPoolCapacity& host, int ranks) const {
    PlanRequest request = PlanRequestOf(options, shape_, tokens_);
    request.ranks = ranks;
    request.cached_tokens = cached_tokens_;
    request.memory_budget_bytes = OfAllRanks(host.memory_budget_bytes, options.ranks, ranks);
    request.one_memory = host.one_memory;
    request.kv_on_host = host.kv_on_host;
    const int workers = (ranks + options.ranks - 1) / options.ranks;
    // Where ranks of a host share one copy, the fewer of the last host have as much among them: a plan counts
    // as much for each rank as for the one that has most.
    const int last = ranks - (workers - 1) * options.ranks;
    request.weights = host.weights.Share(ranks, host.one_memory ? last : options.ranks);
    if (config.pool().control_listen().empty()) {
      // A server's prompts leave K and V for its cache, behind GPUs where the config wants that.
      request.keeps_kv = host.kv_on_host && options.kv_cache.value_or(false);
      return request;
    }
    request.one_memory = false;
    request.hides_exchanges = host.many_messages && !options.whole_exchanges;
    request.many_rings = host.many_messages;
    request.topology = TopologyOf(config.pool());
    for (int seat = 0; seat < ranks; ++seat) request.topology.node_of_seat.push_back(seat / options.ranks);
    if (host.weights.mode != WeightMode::kSharded) return request;
    std::vector<int> hosts(static_cast<size_t>(workers));
    std::iota(hosts.begin(), hosts.end(), 0);
    const int64_t left = host.memory_budget_bytes - ShareBytes(host.weights, workers);
    RETURN_IF_ERROR(CheckShares(host.weights, workers, left));
    request.memory_budget_bytes = std::max<int64_t>(1, OfAllRanks(left, options.ranks, ranks));
    request.weights = SharedWeightsOf(host.weights, request.topology, hosts);
    return request;
  }

  ServerOptions server_;
  ConfigFlags config_;
  std::string model_path_;
  std::string cluster_path_;
  int64_t tokens_ = 0;
  std::optional<int64_t> context_tokens_;
  int64_t cached_tokens_ = 0;
  std::optional<int> ranks_;
  std::optional<int> ranks_per_host_;
  PrefillOptions shape_;  // what it fixes of the plan
  std::optional<DType> dtype_;
  bool json_ = false;
  std::string svg_path_;
};

}  // namespace

std::unique_ptr<Command> AddPlanCommand(CLI::App& parent) { return std::make_unique<PlanCommand>(parent); }

}  // namespace meshfill
