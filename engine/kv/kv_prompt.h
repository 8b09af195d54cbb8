// K and V of one prompt, kept by the ranks of this process where they computed them: in one run, or in runs
// one after the other, behind a prefix that it may share with other prompts.
//
// A rank keeps its slab of a layer once in a run; a layer that all ranks have kept is read by anyone. A slab
// stays on its device where a store has room for it there (kv_store.h), else it goes to the host.
// Readers hold the slabs that they read from: a run that begins again drops its own only once the readers
// have let go. Thread-safe.
#ifndef MESHFILL_ENGINE_KV_KV_PROMPT_H_
#define MESHFILL_ENGINE_KV_KV_PROMPT_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "engine/kv/kv_device_memory.h"
#include "engine/kv/kv_shape.h"
#include "engine/kv/kv_sink.h"
#include "engine/kv/kv_slabs.h"
#include "kernels/mutex.h"

namespace meshfill {

class KvPrompt final : public KvSink {
 public:
  // Allocates nothing: memory comes with the layers.
  KvPrompt(const KvShape& shape, int64_t tokens) : shape_(shape), tokens_(tokens), kept_tokens_(tokens) {}
  // Only these ranks of its one run, `here` by rank, are in this process; the others keep theirs elsewhere.
  // The run computes the tokens of `layout`, behind `cached_tokens` that are kept already.
  KvPrompt(const KvShape& shape, const TokenLayout& layout, std::vector<bool> here, int64_t cached_tokens);

  const KvShape& shape() const { return shape_; }
  int64_t tokens() const { return tokens_; }
  // Here, once all layers are kept; of one run of these ranks: what it computes.
  int64_t bytes() const { return KvBytesOf(kept_tokens_); }

  // KvSink.
  using KvSink::Begin;
  void Begin(const TokenLayout& layout, std::shared_ptr<const KvSlabs> before) override;
  absl::StatusOr<std::unique_ptr<KvKeeping>> Keep(int rank, int layer, const BufferRef& kv,
                                                  Stream& stream) override;

  // The same for who has K and V on the host: memory for them (kv_slab.h), null where nothing is wanted, and
  // the word that it is filled.
  absl::StatusOr<std::byte*> Place(int rank, int layer);
  void OnLayerKept(int rank, int layer);

  // The slabs of all tokens, if all ranks that are here have written `layer` of them; else null.
  std::shared_ptr<const KvSlabs> Layer(int layer) const;
  // The slabs of the tokens that runs have begun so far, whatever their ranks have written; null: no run has
  // begun.
  std::shared_ptr<const KvSlabs> slabs() const;

  // From now on nothing is kept: nobody will read. What is there stays until this goes.
  void Drop();
  // The prompt's own later runs, or the cache, read it, too: Drop changes nothing.
  void KeepWithoutLease();

  // Whether a store counts its bytes.
  bool charged() const;

  // Calls `on_layer` whenever a layer is there. `charge` is of all tokens' bytes: what is a prefix's, and
  // charged for already, is given back as a run begins behind it. What fits stays in `device_memory`, which
  // may be null. Before Begin, once.
  void Watch(std::function<void()> on_layer, std::unique_ptr<KvCharge> charge,
             std::shared_ptr<KvDeviceMemory> device_memory);

 private:
  class OnItsWay;
  struct Run {
    std::shared_ptr<KvRunSlabs> slabs;
    std::vector<int> ranks_missing;  // by layer: ranks that are here and have not written it
  };

  // A slab for a rank of the last run; null: nothing is wanted.
  KvSlab* NewSlab(int rank, int layer);
  int64_t KvBytesOf(int64_t tokens) const { return shape_.layers * shape_.LayerBytes(tokens); }
  // Charges for a run of `tokens` tokens behind the first `before`, of which those in `charges` are there.
  void Charge(int64_t tokens, int64_t before, std::vector<std::shared_ptr<const KvCharge>>& charges)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const KvShape shape_;
  const int64_t tokens_;
  const std::vector<bool> here_;  // by rank; empty: all
  const int64_t kept_tokens_;     // tokens of the ranks that are here
  std::function<void()> on_layer_;
  std::shared_ptr<KvDeviceMemory> device_memory_;

  mutable Mutex mu_;
  std::shared_ptr<const KvSlabs> slabs_ ABSL_GUARDED_BY(mu_);  // null: no run has begun
  std::vector<Run> runs_ ABSL_GUARDED_BY(mu_);                 // this prompt's own
  std::unique_ptr<KvCharge> charge_ ABSL_GUARDED_BY(mu_);      // bytes that no run has begun
  bool dropped_ ABSL_GUARDED_BY(mu_) = false;
  bool kept_without_lease_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_KV_KV_PROMPT_H_
