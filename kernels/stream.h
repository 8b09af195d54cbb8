// The ordered operations of one rank of one run on a device.
//
// A stream is called from its rank's thread alone; it may use further threads inside. Operations run in the
// order of their calls. Outputs never overlap inputs unless an operation says so. Tensors are row-major,
// without padding between rows. The device's `dtype()` is the compute dtype: f32 or bf16; softmax state,
// accumulators, the residual stream and LSE are always f32. An operation returns CANCELLED once the stop
// token that the stream was made with is raised (its outputs are then unspecified), and otherwise fails only
// where the device fails: shapes are the caller's to check. While the token is paused, no operation goes on:
// the CPU's stand still between two tiles, CUDA's are not queued.
//
// Pointers in arguments are the device's: into buffers of Allocate, Place or TakeOver, or of the device's own
// calls. Whether an operation has run when its call returns is the device's to choose:
//     the CPU's    it has. Mark is null, Finish returns at once, host memory is device memory
//     CUDA's       it is queued, a bounded number of operations ahead of the device, and reads the memory of
//                  its arguments later. A buffer may be dropped meanwhile: it is freed behind the operations
//                  that use it. A failure of the device shows in a later call, at the latest in Finish
// So nothing on the host waits for the device between Embed and Finish, but to bound how far it runs ahead.
//
// No operation has a default: what wraps a stream and forgets one does not compile.
#ifndef MESHFILL_KERNELS_STREAM_H_
#define MESHFILL_KERNELS_STREAM_H_

#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/activation.h"
#include "kernels/band.h"
#include "kernels/buffer.h"
#include "kernels/device.h"
#include "kernels/dtype.h"
#include "kernels/experts.h"

namespace meshfill {

// y = x Wᵀ + bias.
struct GemmArgs {
  const PackedWeight* weight;
  const void* x;  // [tokens, in_features], compute dtype
  int64_t tokens;
  void* y;                  // [tokens, out_features], y_dtype
  DType y_dtype;            // compute dtype or f32
  bool accumulate = false;  // y += …; y_dtype must be f32
};

// From the projections' output to the chunks that move: splits heads, normalises Q and K where the model does
// (Qwen3 per head, MiniMax-M2 over all heads), rotates the first dimensions of Q and K by their positions
// (RoPE, the half-split pairing of Hugging Face), writes heads outermost.
struct SplitQkvArgs {
  const void* qkv;  // [tokens, (q_heads + 2·kv_heads)·head_dim], compute dtype: q heads, k heads, v heads
  int64_t tokens;   // tokens in this slice
  int64_t slot_begin;    // the slice's first slot in its chunk
  int64_t chunk_tokens;  // tokens in the chunk
  int q_heads;
  int kv_heads;
  int head_dim;     // even
  int rotated_dim;  // even, up to head_dim; the dimensions behind it stay as they are
  // RMSNorm weight of Q: [head_dim], or [q_heads·head_dim] with norm_all_heads; null: none.
  const float* q_norm = nullptr;
  // RMSNorm weight of K: [head_dim], or [kv_heads·head_dim] with norm_all_heads; null: none.
  const float* k_norm = nullptr;
  bool norm_all_heads = false;  // one root mean square for all heads of a token
  float norm_eps = 0;
  const float* rope_cos;  // [chunk_tokens, rotated_dim/2], by slot of the chunk
  const float* rope_sin;  // [chunk_tokens, rotated_dim/2]
  void* q;                // [q_heads, chunk_tokens, head_dim], compute dtype
  void* k;                // [kv_heads, chunk_tokens, head_dim], compute dtype
  void* v;                // [kv_heads, chunk_tokens, head_dim], compute dtype
};

// One block: the attention of one Q chunk with one KV chunk, merged into the rows' carried state.
// Query head h attends KV head ⌊h / (q_heads / kv_heads)⌋. The state (o, lse) is FlashAttention's,
// normalised:
//     lse = ln Σ exp(s),  o = Σ exp(s − lse) v,  with s = scale · q·k over the visible keys seen so far
// A row that has seen no key has lse = −inf and o = 0.
struct AttentionBlockArgs {
  const void* q;     // [q_heads, q_tokens, head_dim], compute dtype
  const void* k;     // [kv_heads, k_tokens, head_dim], compute dtype
  const void* v;     // [kv_heads, k_tokens, head_dim], compute dtype
  int64_t q_tokens;  // ≥ 0
  int64_t k_tokens;  // ≥ 0
  int q_heads;
  int kv_heads;  // divides q_heads
  int head_dim;  // 1 to 256
  Band band;     // positions below 2^31
  float scale;
  bool carry_in;  // false: (o, lse) hold nothing yet and are written; true: they are read and merged into
  float* o;       // [q_heads, q_tokens, head_dim], f32
  float* lse;     // [q_heads, q_tokens], f32, natural log
};

// Merges a partial output that came from a peer into ours, row by row:
//     lse' = logaddexp(lse, other_lse); −inf with −inf stays −inf
//     o'   = exp(lse − lse')·o + exp(other_lse − lse')·other_o
struct MergePartialArgs {
  float* o;                // [rows, head_dim], f32, in and out
  float* lse;              // [rows], f32, in and out
  const void* other_o;     // [rows, head_dim], other_dtype
  DType other_dtype;       // f32 or bf16
  const float* other_lse;  // [rows], f32
  int64_t rows;            // q_heads · q_tokens
  int head_dim;
};

// Attention sinks as gpt-oss has them (its model card, arXiv 2508.10925, Architecture; transformers'
// modeling_gpt_oss.py): each head has a learned logit that joins the softmax's denominator, and no value. To
// a row that has attended to all of its keys, that is one factor:
//     o *= exp(lse) / (exp(lse) + exp(sink)) = 1 / (1 + exp(sink − lse))
// The LSE stays that of the keys.
struct ApplySinksArgs {
  float* o;            // [heads, tokens, head_dim], f32, in and out
  const float* lse;    // [heads, tokens], f32
  const float* sinks;  // [heads], finite
  int heads;
  int64_t tokens;
  int head_dim;
};

// Where the rows of a tensor of heads and slots lie: row (head, slot) is head_dim elements from element
// head · head_stride + slots.At(slot) · slot_stride on.
struct HeadRows {
  DType dtype;               // f32 or bf16
  int64_t head_stride;       // elements
  int64_t slot_stride;       // elements
  SlotPositions slots = {};  // default: slot s is the s-th; {.base = b}: the (b + s)-th
};

// Copies rows into another order, each value rounded to nearest even where the dtypes differ: heads outermost
// to tokens outermost, a chunk to its places in the chunk of its head group, and back.
struct CopyHeadsArgs {
  const void* from;
  HeadRows from_rows;
  void* to;
  HeadRows to_rows;  // no two rows overlap
  int heads;
  int64_t tokens;  // slots 0 … tokens − 1 are copied
  int head_dim;
};

// A point between two operations of a stream that queues them.
class StreamPoint {
 public:
  virtual ~StreamPoint() = default;
  // Seconds by the device's clock. `earlier` is of the same stream, and Finish has been called since both.
  virtual double SecondsSince(const StreamPoint& earlier) const = 0;
};

// A buffer on its way from one rank of a process to another, and when its contents are there.
struct DeviceMessage {
  BufferRef buffer;
  std::shared_ptr<const StreamPoint> ready;  // null: they are there
};

// A copy into host memory that goes on beside the operations of its stream. When this goes, nothing is
// written there any more.
class HostCopy {
 public:
  virtual ~HostCopy() = default;
  // Returns when all of it is there, CANCELLED once the stream's stop token is raised, or with the device's
  // failure.
  virtual absl::Status Wait() = 0;
};

class Stream {
 public:
  explicit Stream(Device& device) : device_(device) {}
  virtual ~Stream() = default;
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  Device& device() const { return device_; }

  // ---- Memory, in the order of the operations.
  // `size_bytes` may be 0. Contents are unspecified. RESOURCE_EXHAUSTED where memory is short, with the bytes
  // needed.
  virtual absl::StatusOr<BufferRef> Allocate(size_t size_bytes) = 0;
  // `host` bytes as operations read them: where they are, or a copy. They outlive the buffer.
  virtual absl::StatusOr<BufferRef> Place(const void* host, size_t size_bytes) = 0;
  // Copies before later operations run; `host` may go when it returns.
  virtual absl::Status Upload(const void* host, size_t size_bytes, void* to) = 0;
  // Copies what earlier operations left; they have run when it returns.
  virtual absl::Status Download(const void* from, size_t size_bytes, void* host) = 0;

  // ---- When operations run.
  // The point behind the operations called so far; null: they have run. UNAVAILABLE, with its name: the
  // device has failed.
  virtual absl::StatusOr<std::shared_ptr<const StreamPoint>> Mark() = 0;
  // Returns when all operations called so far have run, with the failure of any of them.
  virtual absl::Status Finish() = 0;

  // ---- Hand-over between ranks of one process whose devices are of one kind. The sender marks; the message
  // goes through Fetch of the receiver's stream, on the sender's thread, and then TakeOver, on the
  // receiver's. Brings the message to this stream's device, where it is on another. Thread-safe.
  virtual absl::StatusOr<DeviceMessage> Fetch(DeviceMessage message) = 0;
  // Operations called from now on run when the contents are there. Nobody writes the buffer from now on.
  virtual absl::StatusOr<BufferRef> TakeOver(DeviceMessage message) = 0;

  // ---- The operations of a layer.
  // x[t] = table[ids[t]] as f32. Ids are below the table's rows.
  virtual absl::Status Embed(std::span<const uint32_t> ids, const void* table /* [vocab, width] */,
                             DType table_dtype, int64_t width, float* x /* [ids, width] */) = 0;
  // y = x / sqrt(mean(x²) + eps) · weight, computed in f32, rounded once.
  virtual absl::Status RmsNorm(const float* x /* [tokens, width] */, const float* weight /* [width] */,
                               int64_t tokens, int64_t width, float eps,
                               void* y /* [tokens, width], compute dtype */) = 0;
  // x += y / sqrt(mean(y²) + eps) · weight, computed in f32: the norm behind a sublayer.
  virtual absl::Status AddRmsNorm(const float* y /* [tokens, width] */, const float* weight /* [width] */,
                                  int64_t tokens, int64_t width, float eps,
                                  float* x /* [tokens, width] */) = 0;
  // x *= factor.
  virtual absl::Status Scale(float* x, int64_t count, float factor) = 0;
  virtual absl::Status Gemm(const GemmArgs& args) = 0;
  virtual absl::Status SplitQkv(const SplitQkvArgs& args) = 0;
  virtual absl::Status AttentionBlock(const AttentionBlockArgs& args) = 0;
  virtual absl::Status MergePartial(const MergePartialArgs& args) = 0;
  virtual absl::Status ApplySinks(const ApplySinksArgs& args) = 0;
  virtual absl::Status CopyHeads(const CopyHeadsArgs& args) = 0;
  // The same with `to` in host memory and of the same dtype, slots outermost: [slots, heads, head_dim], from
  // what earlier operations left in `source`, which holds `from` in the order of its slots, and which nobody
  // writes from now on. No operation waits for it. Null: it is there.
  virtual absl::StatusOr<std::unique_ptr<HostCopy>> CopyHeadsToHost(const CopyHeadsArgs& args,
                                                                    BufferRef source) = 0;
  virtual absl::Status Activate(const ActivateArgs& args) = 0;
  // The MLP of experts (kernels/experts.h): chooses each token's experts and sorts the rows; puts the rows of
  // every expert through its MLP; adds what the experts say.
  virtual absl::Status Route(const RouteArgs& args) = 0;
  virtual absl::Status ExpertMlp(const ExpertMlpArgs& args) = 0;
  virtual absl::Status AddExperts(const AddExpertsArgs& args) = 0;
  // Rounds to nearest even; the wire form of partial outputs. `to` is f32 (a copy) or bf16.
  virtual absl::Status Convert(const float* from, int64_t count, DType to_dtype, void* to) = 0;

 private:
  Device& device_;
};

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_STREAM_H_
