// The seam to whatever prefills prompts with one model: what the server and the commands call.
// Implementations: an embedded pool (engine/embedded_engine.h) and a pool of workers
// (server/pool/pool_engine.h).
#ifndef MESHFILL_ENGINE_PREFILL_ENGINE_H_
#define MESHFILL_ENGINE_PREFILL_ENGINE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/kv/kv_prefix_cache.h"
#include "engine/kv/kv_prompt.h"
#include "engine/kv/kv_store.h"
#include "engine/model/model_shape.h"
#include "engine/plan/pack.h"
#include "engine/plan/plan.h"
#include "engine/plan/planner.h"
#include "engine/run/expert_load.h"
#include "engine/run/rank_stats.h"
#include "engine/schedule/timeline.h"

namespace meshfill {

// What a prompt is predicted to take on one of so many sub-meshes, into which the pool is divided.
struct SubmeshSeconds {
  int submeshes = 2;
  double seconds = 0;
};

struct PrefillOptions {
  std::optional<Tile> tile;          // default: the planner's choice
  std::optional<int> heads;          // head groups; default: one with a tile, else the planner's choice
  std::optional<LayoutKind> layout;  // default: the engine's
  std::optional<int64_t> stripe;
  std::string request_id;        // names the request in logs and errors
  int top_k = 1;                 // best tokens reported; 1 to vocab
  std::shared_ptr<KvPrompt> kv;  // where K and V go; null: nowhere. Shared: a run may outlive its caller
  // Names of the prompt's blocks, by which the engine's cache finds what it begins with, and enters it in the
  // end. Null: the cache is left alone.
  std::shared_ptr<const KvBlockNames> block_names;
  bool ignore_cache = false;   // computes all tokens, also those of a cached prefix
  std::string kv_lease;        // where workers keep K and V: the lease that they keep them under
  bool keep_timeline = false;  // record what every rank does when; not where it shares its pass
  // The prompt runs on one of so many sub-meshes, where it can, so that others may run beside it. 1: on the
  // whole pool.
  int submeshes = 1;
};

struct PrefillRequest {
  std::span<const uint32_t> tokens;  // valid until the Prefill is destroyed
  PrefillOptions options;
};

// Called from the engine's threads, perhaps before Start has returned; must return quickly.
class PrefillObserver {
 public:
  virtual ~PrefillObserver() = default;
  // All ranks have finished `layers_done` of `layers` layers.
  virtual void OnLayerDone(int layers_done, int layers) = 0;
  // The run has failed, and another one computes the prompt, or what is left of it: what comes next is its.
  virtual void OnBegunAnew() {}
};

struct TokenLogit {
  uint32_t token = 0;
  float logit = 0;
};

struct PrefillResult {
  std::vector<float> logits;    // [vocab], of the last token
  std::vector<TokenLogit> top;  // by falling logit, ties by rising id
  Plan plan;  // what ran; a prompt in pieces: the last piece's plan, with the prediction of all
  int pieces = 1;
  int64_t piece_tokens = 0;      // tokens of each piece but the last; 0: there is one piece
  int64_t cached_tokens = 0;     // prompt tokens taken from the engine's cache: nobody computed them
  double prefill_seconds = 0;    // wall time of the run, without its pauses; so are all seconds that follow
  double paused_seconds = 0;     // time that the run stood still for others
  int attempts = 1;              // attempts begun, each after one that failed; the last one counts
  double lost_seconds = 0;       // from the first attempt's begin to the last one's, without pauses
  double attention_seconds = 0;  // the largest of any rank
  double comm_wait_seconds = 0;  // the largest of any rank
  CommBytes comm_bytes;          // bytes of the rank that sent most, over all layers
  double mfu = 0;                // model FLOPs utilisation of the whole model
  double attention_mfu = 0;
  std::vector<RankStats> ranks;  // by rank of its mesh
  std::vector<int> pool_ranks;   // the pool's rank that each of these is; empty: they are all, in order
  std::vector<ExpertLoad> expert_loads;  // by layer that has experts
  std::optional<Timeline> timeline;      // from the start of the run
  int pack_prompts = 1;                  // prompts that shared its pass, it included

  int64_t tokens() const { return plan.cached_tokens + plan.layout.tokens(); }  // the whole prompt
};

// A worker process of a pool.
struct PoolMember {
  std::string name;
  std::string host;
  std::string backend;
  std::string state;    // ready, preparing, running, stopping, draining
  int ranks = 0;        // ranks that the worker offers
  int first_rank = -1;  // its first rank in the present run; −1: it has none
};

// What connects the ranks of a pool of processes, as plans have it.
struct PoolLink {
  std::string where;  // "between hosts", "on a host", "out of a host": its flows together
  Link link;          // out of a host: no latency, and 0 bytes/s where nothing is shared
  // given (or its default), measured, measured before (the pool changed), assumed (until measured)
  std::string source;
};

// A prompt that an engine works on. The engine outlives it.
class Prefill {
 public:
  virtual ~Prefill() = default;  // stops it and waits for its end

  // Blocks until the prompt is done. Once. CANCELLED: it was stopped. INTERNAL: NaN or Inf in the logits.
  virtual absl::StatusOr<PrefillResult> Wait() = 0;
  // Makes Wait return soon. From any thread, at any time, also twice or after the end.
  virtual void Stop() = 0;

  // Of a pack (PrefillEngine::StartPack): whether Wait would return at once.
  virtual bool done() const { return true; }
  // Blocks until this one is done, or another of its pack is that has not gone; from one thread at a time, as
  // Wait of any of them.
  virtual void WaitForAny() {}

  // Lets it stand still, with all it has computed, until Resume or Stop: its result has the same bits. As
  // Stop, from any thread, at any time. Engines with a capacity of 1 need not.
  virtual void Pause() {}
  virtual void Resume() {}

  // Of those on as many sub-meshes, two with the same place share devices. 0: it has none yet, or all
  // devices. As Stop, from any thread, at any time.
  virtual uint64_t place() const { return 0; }
};

// The const methods may be called from any thread at any time.
class PrefillEngine {
 public:
  virtual ~PrefillEngine() = default;

  virtual const ModelShape& model() const = 0;
  virtual const std::string& model_name() const = 0;  // the folder's base name
  virtual const std::string& backend_name() const = 0;
  virtual int ranks() const = 0;          // now; of a pool of processes perhaps 0
  virtual double peak_flops() const = 0;  // sum over the ranks

  // Keeps K and V of this pool's ranks; null: the ranks keep none. The store lives as long as the engine.
  virtual KvStore* kv_store() { return nullptr; }

  // The worker processes; none where the ranks are threads of this one.
  virtual std::vector<PoolMember> members() const { return {}; }
  // Links between the workers; empty for an embedded pool.
  virtual std::vector<PoolLink> links() const { return {}; }

  // The prefills that may live at once, where their memory allows it; Start says so where it does not. They
  // share the devices: whoever wants one of them done as if it were alone pauses the others. Callers queue.
  virtual int capacity() const { return 1; }

  // What Start would run now. INVALID_ARGUMENT: no tokens, bad options. OUT_OF_RANGE: longer than the model's
  // context. FAILED_PRECONDITION: does not fit this pool's memory.
  virtual absl::StatusOr<PlanChoice> MakePlan(int64_t tokens, const PrefillOptions& options) const = 0;

  // The sub-meshes that a prompt could run on, smaller ones last, and its seconds there. None: it runs on the
  // whole pool alone. Errors are MakePlan's to tell.
  virtual std::vector<SubmeshSeconds> Submeshes(int64_t /*tokens*/, const PrefillOptions& /*options*/) const {
    return {};
  }

  // How many of a prompt's first tokens are cached now and can be reused by a run. `options` has the names of
  // the prompt's blocks.
  virtual int64_t CachedTokens(int64_t /*tokens*/, const PrefillOptions& /*options*/) const { return 0; }

  // Begins a prompt. Errors: those of MakePlan; INVALID_ARGUMENT for an id outside the vocabulary (its index
  // named); RESOURCE_EXHAUSTED where it cannot live beside those that do: try again when one of them is gone.
  // `observer` may be null; it lives as long as the prefill. After any error, here or of Wait, the next call
  // works.
  virtual absl::StatusOr<std::unique_ptr<Prefill>> Start(const PrefillRequest& request,
                                                         PrefillObserver* observer) = 0;

  // What one pass of several prompts holds now; none do where that is nothing.
  virtual PackRoom pack_room() const { return {}; }
  // What a prompt would bring to such a pass; no tokens: it runs in one of its own.
  virtual PackShare ShareOfPack(int64_t /*tokens*/, const PrefillOptions& /*options*/) const { return {}; }
  // Begins prompts that share a pass; `observers` by prompt, each as Start's. A prefill for each: they
  // compute and stand still together, which the last call of Pause or Resume of any of them decides, and
  // count as one that lives. Stop ends that prompt alone: its Wait returns soon, the others compute on. Where
  // ranks end apart, the prompts do: WaitForAny and done tell whose Wait comes first.
  // Errors: Start's, of the first prompt that has one; FAILED_PRECONDITION, too, where they are too much for
  // one pass by now: begin each by itself.
  virtual absl::StatusOr<std::vector<std::unique_ptr<Prefill>>> StartPack(
      std::span<const PrefillRequest> requests, std::span<PrefillObserver* const> observers);
};

// Runs one prompt from its start to its end, where nobody stops it.
absl::StatusOr<PrefillResult> RunPrefill(PrefillEngine& engine, const PrefillRequest& request,
                                         PrefillObserver* observer = nullptr);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_PREFILL_ENGINE_H_
