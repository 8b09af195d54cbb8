// K and V of one prompt, kept by the ranks of this process where they computed them.
//
// A rank writes its slab of a layer once; a layer that all ranks have written is read by anyone. Readers hold
// the slabs of the run that they read from: a run that begins again drops them only once the readers have let
// go. Thread-safe.
#ifndef MESHFILL_ENGINE_KV_KV_PROMPT_H_
#define MESHFILL_ENGINE_KV_KV_PROMPT_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "engine/kv/kv_shape.h"
#include "engine/kv/kv_sink.h"
#include "engine/kv/kv_slabs.h"
#include "kernels/mutex.h"

namespace meshfill {

class KvPrompt final : public KvSink {
 public:
  // Allocates nothing: memory comes with the layers.
  KvPrompt(const KvShape& shape, int64_t tokens) : shape_(shape), tokens_(tokens) {}
  ~KvPrompt() override;

  const KvShape& shape() const { return shape_; }
  int64_t tokens() const { return tokens_; }
  int64_t bytes() const { return shape_.layers * shape_.LayerBytes(tokens_); }  // once all layers are kept

  // KvSink.
  void Begin(const TokenLayout& layout) override;
  absl::StatusOr<std::byte*> Place(int rank, int layer) override;
  void OnLayerKept(int rank, int layer) override;

  // The slabs of the run that began last, if all ranks have written `layer`; else null.
  std::shared_ptr<const KvSlabs> Layer(int layer) const;

  // From now on Place gives nothing: nobody will read. What is there stays until this goes.
  void Drop();

  // Calls `on_layer` whenever a layer is there, and `on_gone` when this goes. Before Begin, once.
  void Watch(std::function<void()> on_layer, std::function<void()> on_gone);

 private:
  const KvShape shape_;
  const int64_t tokens_;
  std::function<void()> on_layer_;
  std::function<void()> on_gone_;

  mutable Mutex mu_;
  std::shared_ptr<KvSlabs> slabs_ ABSL_GUARDED_BY(mu_);  // null: no run has begun
  std::vector<int> ranks_missing_ ABSL_GUARDED_BY(mu_);  // by layer: ranks that have not written it
  bool dropped_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_KV_KV_PROMPT_H_
