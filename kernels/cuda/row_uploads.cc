#include "kernels/cuda/row_uploads.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/cuda/launch_status.h"
#include "kernels/mutex.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

// Interval of looks at a piece: a copy of one takes some 50 µs.
constexpr absl::Duration kPoll = absl::Microseconds(20);

absl::Status AwaitCopied(const CudaPoint* copied) {
  if (copied == nullptr) return absl::OkStatus();
  cudaError_t now;
  while ((now = copied->Query()) == cudaErrorNotReady) absl::SleepFor(kPoll);
  return LaunchStatus("upload of weights", now);
}

absl::Status Read(const WeightRows& rows, size_t row_bytes, int64_t first, int64_t count, std::byte* to) {
  if (rows.source != nullptr) return rows.source->Read(first, count, to);
  std::memcpy(to, static_cast<const std::byte*>(rows.data) + first * row_bytes, count * row_bytes);
  return absl::OkStatus();
}

// Moves rows that lie one after the other, `count` of them, to where the form has them. The last goes first:
// none is written over before it has been moved.
void Spread(const UploadedRows& form, int64_t first, int64_t count, std::byte* rows) {
  if (form.write_behind == nullptr) return;
  for (int64_t row = count - 1; row >= 0; --row) {
    std::byte* const to = rows + row * form.stride;
    std::memmove(to, rows + row * form.bytes, form.bytes);
    form.write_behind(first + row, to + form.bytes);
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<CudaRowUploads>> CudaRowUploads::Make(int device, int threads) {
  std::vector<Piece> pieces;
  for (int thread = 0; thread < threads; ++thread) {
    ASSIGN_OR_RETURN(PinnedMemory host, AllocatePinnedMemory(device, kPieceBytes));
    pieces.push_back({.host = std::move(host), .copied = nullptr});
  }
  try {
    return std::unique_ptr<CudaRowUploads>(new CudaRowUploads(device, std::move(pieces)));
  } catch (const std::system_error& error) {
    return absl::ResourceExhaustedError(absl::StrCat("no thread could be started to read weights (",
                                                     error.what(), "); raise the limit of threads"));
  }
}

CudaRowUploads::CudaRowUploads(int device, std::vector<Piece> pieces)
    : device_(device), pieces_(std::move(pieces)), threads_(static_cast<int>(pieces_.size())) {}

CudaRowUploads::~CudaRowUploads() {
  for (const Piece& piece : pieces_) (void)AwaitCopied(piece.copied.get());
}

absl::Status CudaRowUploads::Upload(const WeightRows& rows, int64_t first, int64_t count,
                                    const UploadedRows& form, std::byte* to, CudaQueue& queue) {
  const auto rows_of_piece = static_cast<int64_t>(kPieceBytes / form.stride);
  if (rows_of_piece == 0) {
    return absl::InvalidArgumentError(absl::StrCat("a weight's row has ", form.stride,
                                                   " bytes, of which a GPU takes ", kPieceBytes,
                                                   "; choose the device cpu"));
  }
  Mutex mu;
  absl::Status failed;
  std::atomic<bool> gives_up{false};
  const auto copy = [&](int64_t done, Piece& piece) -> absl::Status {
    const int64_t of_piece = std::min(rows_of_piece, count - done);
    RETURN_IF_ERROR(AwaitCopied(piece.copied.get()));
    RETURN_IF_ERROR(Read(rows, form.bytes, first + done, of_piece, piece.host.get()));
    Spread(form, first + done, of_piece, piece.host.get());
    RETURN_IF_ERROR(queue.Upload(piece.host.get(), of_piece * form.stride, to + done * form.stride));
    ASSIGN_OR_RETURN(piece.copied, queue.Mark());
    return absl::OkStatus();
  };
  threads_.ParallelFor((count + rows_of_piece - 1) / rows_of_piece, [&](int64_t task, int worker) {
    if (gives_up.load(std::memory_order_relaxed)) return;
    const ScopedCudaDevice scope(device_);
    absl::Status status = copy(task * rows_of_piece, pieces_[worker]);
    if (status.ok()) return;
    gives_up.store(true, std::memory_order_relaxed);
    const MutexLock lock(mu);
    if (failed.ok()) failed = std::move(status);
  });
  return failed;
}

}  // namespace meshfill
