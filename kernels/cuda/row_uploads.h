// Rows of weights on their way to a device: several threads read them into pieces of pinned memory, of which
// each is copied while others are read.
//
//     thread 0   read piece 0 ▏copy      ▏read piece 3 …
//     thread 1   read piece 1 ▏     copy ▏read …
//     thread 2   read piece 2 ▏          ▏copy
//
// One thread alone reads from the page cache slower than a link moves, and from pageable memory the driver's
// own copies are slower still.
#ifndef MESHFILL_KERNELS_CUDA_ROW_UPLOADS_H_
#define MESHFILL_KERNELS_CUDA_ROW_UPLOADS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/cuda/pinned_memory.h"
#include "kernels/cuda/queue.h"
#include "kernels/device.h"

namespace meshfill {

// How rows come to lie on the device.
struct UploadedRows {
  size_t bytes;   // a row's, as its source has them
  size_t stride;  // from one row to the next, `bytes` or more
  // Writes the stride − bytes bytes behind row `row` of the source. Several threads call it. Null: there are
  // none.
  std::function<void(int64_t row, std::byte* behind)> write_behind = nullptr;
};

// One thread at a time calls it.
class CudaRowUploads {
 public:
  static constexpr size_t kPieceBytes = size_t{2} << 20;

  // `threads` ≥ 1, each with a piece. RESOURCE_EXHAUSTED: no pinned memory, or no thread.
  static absl::StatusOr<std::unique_ptr<CudaRowUploads>> Make(int device, int threads);
  ~CudaRowUploads();  // once its copies are done
  CudaRowUploads(const CudaRowUploads&) = delete;
  CudaRowUploads& operator=(const CudaRowUploads&) = delete;

  // Reads rows [first, first + count), and enqueues their copies: to `to`, [count, stride], on the device. A
  // source's error is this one's; then some rows may have been copied. INVALID_ARGUMENT: a row is longer than
  // a piece.
  absl::Status Upload(const WeightRows& rows, int64_t first, int64_t count, const UploadedRows& form,
                      std::byte* to, CudaQueue& queue);

 private:
  struct Piece {
    PinnedMemory host;
    std::shared_ptr<const CudaPoint> copied;  // where it may be written again; null: it may now
  };

  CudaRowUploads(int device, std::vector<Piece> pieces);

  const int device_;
  std::vector<Piece> pieces_;  // by thread
  ThreadPool threads_;
};

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CUDA_ROW_UPLOADS_H_
