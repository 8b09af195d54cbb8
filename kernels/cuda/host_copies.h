// Copies from a device into host memory beside what it computes: on a CUDA stream and a thread of their own,
// through two pieces of pinned memory.
//
//     compute   … k v ── mark ── attention, MLP, the next layer's products …
//     copies            └ wait ── gather 0, to host 0 ── gather 1, to host 1 ── gather 2 …
//     thread                                     └ wait, piece 0 to its place ── piece 1 …
//
// From pageable memory's own copies the driver returns only when they are done, at a tenth of the link's
// speed, and compute stands behind them meanwhile.
#ifndef MESHFILL_KERNELS_CUDA_HOST_COPIES_H_
#define MESHFILL_KERNELS_CUDA_HOST_COPIES_H_

#include <array>
#include <deque>
#include <memory>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "kernels/cuda/health.h"
#include "kernels/cuda/memory.h"
#include "kernels/cuda/pinned_memory.h"
#include "kernels/cuda/queue.h"
#include "kernels/mutex.h"
#include "kernels/stream.h"

namespace meshfill {

// Any thread may call it. Its copies run in the order of their starts.
class CudaHostCopies {
 public:
  static constexpr size_t kPieceBytes = size_t{8} << 20;

  // RESOURCE_EXHAUSTED: no room for the pieces, on the device or in pinned memory.
  static absl::StatusOr<std::unique_ptr<CudaHostCopies>> Make(int device, std::shared_ptr<CudaQueue> retire);
  ~CudaHostCopies();  // no HostCopy is left
  CudaHostCopies(const CudaHostCopies&) = delete;
  CudaHostCopies& operator=(const CudaHostCopies&) = delete;

  // Stream::CopyHeadsToHost, of what is in `source` at `ready`. `stop` (may be null) and `health` outlive the
  // copy.
  std::unique_ptr<HostCopy> Start(const CopyHeadsArgs& args, BufferRef source,
                                  std::shared_ptr<const CudaPoint> ready, const StopToken* stop,
                                  CudaHealth& health);

 private:
  static constexpr size_t kPieces = 2;  // one on its way, one being put in its place
  struct Piece {
    BufferRef gathered;  // on the device
    PinnedMemory host;
  };
  struct Job;
  class Copy;

  CudaHostCopies(std::shared_ptr<CudaQueue> queue, std::array<Piece, kPieces> pieces)
      : queue_(std::move(queue)), pieces_(std::move(pieces)), thread_([this] { Work(); }) {}

  void Work();
  std::shared_ptr<Job> NextJob();  // null: quit
  absl::Status Run(const Job& job);
  // The slots [begin, begin + tokens) of a job to a piece; where that will be done.
  absl::StatusOr<std::shared_ptr<const CudaPoint>> Fetch(const Job& job, int64_t begin, int64_t tokens,
                                                         const Piece& piece);

  const std::shared_ptr<CudaQueue> queue_;
  const std::array<Piece, kPieces> pieces_;  // buffers of the copying thread
  Mutex mu_;
  CondVar changed_;
  bool quit_ ABSL_GUARDED_BY(mu_) = false;
  std::deque<std::shared_ptr<Job>> jobs_ ABSL_GUARDED_BY(mu_);
  std::thread thread_;  // last
};

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CUDA_HOST_COPIES_H_
