// The seam to a device: its memory and the operations of a transformer layer (DESIGN §6).
//
// One Backend serves one rank and is called from that rank's thread alone; it may use further threads inside.
// Operations run in the order of their calls. Outputs never overlap inputs unless an operation says so.
// Tensors are row-major, without padding between rows. `dtype()` is the compute dtype: f32 or bf16; softmax
// state, accumulators, the residual stream and LSE are always f32. An operation returns CANCELLED once the
// stop token is raised (its outputs are then unspecified), and otherwise fails only where the device fails:
// shapes are the caller's to check.
//
// Pointers in arguments are the device's: into buffers of Allocate, Place or TakeOver. Whether an operation
// has run when its call returns is the backend's to choose:
//     the CPU's    it has. Mark is null, Finish returns at once, host memory is device memory
//     CUDA's       it is queued, a bounded number of operations ahead of the device, and reads the memory of
//                  its arguments later. A buffer may be dropped meanwhile: it is freed behind the operations
//                  that use it. A failure of the device shows in a later call, at the latest in Finish
// So nothing on the host waits for the device between Embed and Finish, but to bound how far it runs ahead.
//
// Implementations: ReferenceBackend (kernels/reference: plain loops, the meaning of each operation),
// CpuBackend (kernels/cpu) and CudaBackend (kernels/cuda). Same inputs, same implementation, same thread
// count: same bits.
#ifndef MESHFILL_KERNELS_BACKEND_H_
#define MESHFILL_KERNELS_BACKEND_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/band.h"
#include "kernels/buffer.h"
#include "kernels/dtype.h"
#include "kernels/stop_token.h"

namespace meshfill {

// A matrix of a linear layer, y = x Wᵀ + bias, in the form that its backend multiplies fastest. Immutable;
// shared by all ranks of a process whose backends are of one kind.
class PackedWeight {
 public:
  virtual ~PackedWeight() = default;
  int64_t out_features() const { return out_features_; }
  int64_t in_features() const { return in_features_; }

 protected:
  PackedWeight(int64_t out_features, int64_t in_features)
      : out_features_(out_features), in_features_(in_features) {}

 private:
  int64_t out_features_;
  int64_t in_features_;
};

// Rows of a matrix as a file holds them; several of them stack into one PackedWeight (q, k, v; gate, up).
struct WeightRows {
  const void* data;  // [rows, in_features], dtype
  DType dtype;
  int64_t rows;
  const float* bias = nullptr;  // [rows] or null
};

// y = x Wᵀ + bias.
struct GemmArgs {
  const PackedWeight* weight;
  const void* x;  // [tokens, in_features], compute dtype
  int64_t tokens;
  void* y;                  // [tokens, out_features], y_dtype
  DType y_dtype;            // compute dtype or f32
  bool accumulate = false;  // y += …; y_dtype must be f32
};

// From the projections' output to the chunks that move: splits heads, normalises Q and K per head where the
// model does (Qwen3), rotates Q and K by their positions (RoPE, the half-split pairing of Hugging Face),
// writes heads outermost.
struct SplitQkvArgs {
  const void* qkv;  // [tokens, (q_heads + 2·kv_heads)·head_dim], compute dtype: q heads, k heads, v heads
  int64_t tokens;   // tokens in this slice
  int64_t slot_begin;    // the slice's first slot in its chunk
  int64_t chunk_tokens;  // tokens in the chunk
  int q_heads;
  int kv_heads;
  int head_dim;                   // even
  const float* q_norm = nullptr;  // [head_dim] or null: RMSNorm weight per head of Q
  const float* k_norm = nullptr;  // [head_dim] or null
  float norm_eps = 0;
  const float* rope_cos;  // [chunk_tokens, head_dim/2], by slot of the chunk
  const float* rope_sin;  // [chunk_tokens, head_dim/2]
  void* q;                // [q_heads, chunk_tokens, head_dim], compute dtype
  void* k;                // [kv_heads, chunk_tokens, head_dim], compute dtype
  void* v;                // [kv_heads, chunk_tokens, head_dim], compute dtype
};

// One block (DESIGN §1): the attention of one Q chunk with one KV chunk, merged into the rows' carried state.
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
  int64_t tokens;  // slots 0 … tokens − 1 of both
  int head_dim;
};

// A point between two operations of a backend that queues them.
class StreamPoint {
 public:
  virtual ~StreamPoint() = default;
  // On the device's clock; `earlier` is of the same backend, and Finish has been called since both.
  virtual double SecondsSince(const StreamPoint& earlier) const = 0;
};

// A buffer on its way from one rank of a process to another, and when its contents are there.
struct DeviceMessage {
  BufferRef buffer;
  std::shared_ptr<const StreamPoint> ready;  // null: they are there
};

// How much a device takes on at a time: enough to be busy, little enough that what lies between operations
// stays small.
struct Grain {
  int64_t slice_tokens = 1024;  // whose projections and MLP are computed at a time
  int host_threads = 1;         // for what the host does while the device waits
  // Of the operations that its speed is measured with (engine/speed/layer_probe.h).
  int64_t probe_width = 2048;
  int probe_kv_heads = 2;
  double probe_flops = 4e9;
};

class Backend {
 public:
  virtual ~Backend() = default;

  // ---- The device.
  virtual std::string name() const = 0;  // e.g. "cpu/avx512_bf16", "cuda/sm90"
  virtual DType dtype() const = 0;
  virtual Grain grain() const { return {}; }
  // `size_bytes` may be 0. Contents are unspecified. RESOURCE_EXHAUSTED where memory is short, with the bytes
  // needed.
  virtual absl::StatusOr<BufferRef> Allocate(size_t size_bytes) = 0;
  // Operations watch `stop` from now on; null: none. It must outlive its use here.
  virtual void set_stop_token(const StopToken* stop) = 0;
  // True once the device has failed for good: every operation will, and the process has to be started anew.
  virtual bool lost() const { return false; }

  // ---- When operations run.
  // The point behind the operations called so far; null: they have run.
  virtual std::shared_ptr<const StreamPoint> Mark() { return nullptr; }
  // Returns when all operations called so far have run, with the failure of any of them.
  virtual absl::Status Finish() { return absl::OkStatus(); }

  // ---- Host memory. `host` bytes as operations read them: where they are, or a copy. They outlive the
  // buffer.
  virtual absl::StatusOr<BufferRef> Place(const void* host, size_t size_bytes);
  // Copies before later operations run; `host` may go when it returns.
  virtual absl::Status Upload(const void* host, size_t size_bytes, void* to);
  // Copies what earlier operations left; they have run when it returns.
  virtual absl::Status Download(const void* from, size_t size_bytes, void* host);

  // ---- Hand-over between ranks of one process whose backends are of one kind. The sender marks; the message
  // goes through Fetch of the receiver's backend, on the sender's thread, and then TakeOver, on the
  // receiver's. Brings the message to this backend's device, where it is on another. Thread-safe.
  virtual absl::StatusOr<DeviceMessage> Fetch(DeviceMessage message) { return message; }
  // Operations called from now on run when the contents are there. Nobody writes the buffer from now on.
  virtual absl::StatusOr<BufferRef> TakeOver(DeviceMessage message) { return std::move(message.buffer); }

  // ---- Weights. The rows are stacked in order and converted to the compute dtype; the sources may go
  // afterwards.
  virtual absl::StatusOr<std::unique_ptr<PackedWeight>> PackWeight(std::span<const WeightRows> rows,
                                                                   int64_t in_features) = 0;

  // ---- The operations of a layer.
  // x[t] = table[ids[t]] as f32. Ids are below the table's rows.
  virtual absl::Status Embed(std::span<const uint32_t> ids, const void* table /* [vocab, width] */,
                             DType table_dtype, int64_t width, float* x /* [ids, width] */) = 0;
  // y = x / sqrt(mean(x²) + eps) · weight, computed in f32, rounded once.
  virtual absl::Status RmsNorm(const float* x /* [tokens, width] */, const float* weight /* [width] */,
                               int64_t tokens, int64_t width, float eps,
                               void* y /* [tokens, width], compute dtype */) = 0;
  virtual absl::Status Gemm(const GemmArgs& args) = 0;
  virtual absl::Status SplitQkv(const SplitQkvArgs& args) = 0;
  virtual absl::Status AttentionBlock(const AttentionBlockArgs& args) = 0;
  virtual absl::Status MergePartial(const MergePartialArgs& args) = 0;
  virtual absl::Status CopyHeads(const CopyHeadsArgs& args) = 0;
  // The same with `to` in host memory and of the same dtype, slots outermost: [slots, heads, head_dim]. It is
  // there after Finish.
  virtual absl::Status CopyHeadsToHost(const CopyHeadsArgs& args) { return CopyHeads(args); }
  // y = silu(gate) · up, with x = [gate | up] per token.
  virtual absl::Status SwiGlu(const void* x /* [tokens, 2·width], compute dtype */, int64_t tokens,
                              int64_t width, void* y /* [tokens, width], compute dtype */) = 0;
  // Rounds to nearest even; the wire form of partial outputs. `to` is f32 (a copy) or bf16.
  virtual absl::Status Convert(const float* from, int64_t count, DType to_dtype, void* to) = 0;
};

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_BACKEND_H_
