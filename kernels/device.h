// A device of this process: its memory, the weights that it holds, what it is.
//
// Thread-safe, and shared by its streams (kernels/stream.h), on which alone anything is computed; it outlives
// them. Buffers and weights may outlive it.
//
// Two kinds of memory. What the device gives lives long (weights, tables, a reservation): every stream may
// use it once the call has returned, and it is dropped when no stream uses it any more. What a stream gives
// (Stream::Allocate) lives between the operations of that stream: it is taken and freed in their order,
// without a wait of the host or of the device, which a device that queues operations could not offer for all
// its streams at once.
//
// Implementations: ReferenceDevice (kernels/reference: plain loops, the meaning of each operation), CpuDevice
// (kernels/cpu) and CudaDevice (kernels/cuda). Same inputs, same implementation, same thread count: same
// bits.
#ifndef MESHFILL_KERNELS_DEVICE_H_
#define MESHFILL_KERNELS_DEVICE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/buffer.h"
#include "kernels/dtype.h"
#include "kernels/stop_token.h"

namespace meshfill {

class Stream;

// A matrix of a linear layer, y = x Wᵀ + bias, in the form that its device multiplies fastest. Immutable;
// shared by all streams of the device.
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

// What a weight's elements are before they are packed, as far as its bytes depend on it.
struct ElementKind {
  DType dtype = DType::kF32;  // FP8 and MXFP4 stay so; all others are converted to the compute dtype
  int64_t scale_columns = 1;  // FP8 and MXFP4: input features that share a scale
  bool operator==(const ElementKind&) const = default;
};

// A packed weight as bytes: panels of rows, one after the other, each as it is packed by itself, with its
// scales.
struct PackedForm {
  int64_t bytes = 0;
  int64_t panel_rows = 0;   // rows of each panel but the last
  int64_t panel_bytes = 0;  // bytes of each panel but the last
  uint64_t layout = 0;      // a hash, the same where devices lay the elements out alike

  int64_t panels() const { return (bytes + panel_bytes - 1) / panel_bytes; }
  int64_t ByteOf(int64_t panel) const { return panel < panels() ? panel * panel_bytes : bytes; }
};

// Bytes that go from one buffer to another, of as many bytes.
struct BufferCopy {
  BufferRef from;
  BufferRef to;
};

// Rows of a matrix that are in no memory yet. Thread-safe.
class RowSource {
 public:
  virtual ~RowSource() = default;
  // Reads rows [first, first + count), at most 2^31 bytes.
  virtual absl::Status Read(int64_t first, int64_t count, std::byte* to) const = 0;
};

// Rows of a matrix as a file holds them; several of them stack into one PackedWeight (q, k, v; gate, up).
struct WeightRows {
  const void* data;  // [rows, in_features], dtype; null: `source` has them
  DType dtype;
  int64_t rows;
  const float* bias = nullptr;        // [rows] or null
  const RowSource* source = nullptr;
  // FP8 only: an element's value is the element times the scale of its block of scale_rows · scale_columns.
  // [⌈rows / scale_rows⌉, ⌈in_features / scale_columns⌉], f32, finite.
  const float* scales = nullptr;
  int64_t scale_rows = 1;
  int64_t scale_columns = 1;
  // MXFP4 only: an element's value is the element times the scale of its block of kMxBlock columns. A row has
  // in_features / 2 bytes, the element of the even column in the low half. kMxBlock divides in_features.
  // [rows, in_features / kMxBlock], E8M0, none of them NaN.
  const uint8_t* exponents = nullptr;

  float ScaleOf(int64_t row, int64_t column, int64_t in_features) const {
    const int64_t scales_of_row = (in_features + scale_columns - 1) / scale_columns;
    return scales[row / scale_rows * scales_of_row + column / scale_columns];
  }
};

// How much a device takes on at a time: enough to be busy, little enough that what lies between operations
// stays small.
struct Grain {
  int64_t slice_tokens = 1024;  // tokens whose projections and MLP are computed at a time
  int64_t expert_rows = 128;    // tokens of an expert for which reading its weights is worth while
  int host_threads = 1;         // host threads for what the host does while the device waits
  // Sizes of the operations that its speed is measured with (engine/speed/layer_probe.h).
  int64_t probe_width = 2048;
  int probe_kv_heads = 2;
  double probe_flops = 4e9;
  // How long it works before it is as fast as in a long prefill: a GPU at its power limit lowers its clocks.
  double settle_seconds = 0;
};

class Device {
 public:
  virtual ~Device() = default;

  virtual std::string name() const = 0;  // e.g. "cpu/avx512_bf16", "cuda/sm90"
  virtual DType dtype() const = 0;       // the compute dtype: f32 or bf16
  virtual Grain grain() const = 0;
  // Whether a product's row has the same bits whatever rows are beside it, and however many.
  virtual bool rows_are_independent() const = 0;
  // True once the device has failed for good: every operation will, and the process has to be started anew.
  virtual bool lost() const = 0;

  // `size_bytes` may be 0. Contents are unspecified. RESOURCE_EXHAUSTED where memory is short, with the bytes
  // needed.
  virtual absl::StatusOr<BufferRef> Allocate(size_t size_bytes) = 0;
  // `host` bytes as operations read them: where they are, or a copy. They outlive the buffer.
  virtual absl::StatusOr<BufferRef> Place(const void* host, size_t size_bytes) = 0;
  // Each `to` is this device's; each `from` is, too, or that of another of its kind in this process. All are
  // there when it returns.
  virtual absl::Status Copy(std::span<const BufferCopy> copies) = 0;
  // The rows are stacked in order and converted to the compute dtype; the sources may go afterwards. A
  // source's error is this one's. Of FP8 are all rows or none, with blocks of as many columns each, and so of
  // MXFP4; they stay as they are where the device can, and each product is that of the f32 products of
  // element and scale, rounded to the compute dtype.
  virtual absl::StatusOr<std::unique_ptr<PackedWeight>> PackWeight(std::span<const WeightRows> rows,
                                                                   int64_t in_features) = 0;

  // Weights in parts, for those that several devices of one kind have together. UNIMPLEMENTED: this one's
  // weights cannot be divided.
  virtual absl::StatusOr<PackedForm> FormOf(int64_t out_features, int64_t in_features,
                                            const ElementKind& kind) = 0;
  // Panels [first, first + panels) of what PackWeight makes of the rows, without biases.
  virtual absl::StatusOr<BufferRef> PackPanels(std::span<const WeightRows> rows, int64_t in_features,
                                               int64_t first, int64_t panels) = 0;
  // The weight of all those bytes, which stay where they are. `bias`: [out_features], or empty.
  virtual absl::StatusOr<std::unique_ptr<PackedWeight>> WeightOf(int64_t out_features, int64_t in_features,
                                                                 const ElementKind& kind, BufferRef packed,
                                                                 std::vector<float> bias) = 0;

  // A stream for one rank of one run, which watches `stop`. The token may be null, and outlives the stream.
  virtual absl::StatusOr<std::unique_ptr<Stream>> NewStream(const StopToken* stop) = 0;

 protected:
  absl::Status CannotDivide() const {
    return absl::UnimplementedError(name() + ": its packed weights cannot be divided");
  }
};

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_DEVICE_H_
