#include "kernels/cuda/host_copies.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/launch_status.h"
#include "kernels/cuda/layer_ops.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

// Interval of looks at a piece: one takes some 200 µs.
constexpr absl::Duration kPoll = absl::Microseconds(50);
// Interval of looks at the stop token during a copy.
constexpr absl::Duration kStopPoll = absl::Milliseconds(5);

size_t SlotBytes(const CopyHeadsArgs& args) {
  return size_t{1} * args.heads * args.head_dim * DTypeBytes(args.to_rows.dtype);
}

// Slots [begin, begin + tokens) from a piece to their places, stripe by stripe (band.h).
void PutInPlace(const CopyHeadsArgs& args, int64_t begin, int64_t tokens, const std::byte* from) {
  const SlotPositions& slots = args.to_rows.slots;
  const size_t slot_bytes = SlotBytes(args);
  auto* const to = static_cast<std::byte*>(args.to);
  for (int64_t slot = begin; slot < begin + tokens;) {
    const int64_t run = std::min(begin + tokens - slot, slots.width - slot % slots.width);
    std::memcpy(to + slots.At(slot) * slot_bytes, from + (slot - begin) * slot_bytes, run * slot_bytes);
    slot += run;
  }
}

}  // namespace

struct CudaHostCopies::Job {
  const CopyHeadsArgs args;
  const std::shared_ptr<const CudaPoint> ready;
  CudaHealth& health;
  std::atomic<bool> dropped{false};  // nobody wants it any more

  Mutex mu;
  CondVar ended;
  BufferRef source ABSL_GUARDED_BY(mu);  // until it has ended
  bool over ABSL_GUARDED_BY(mu) = false;
  absl::Status status ABSL_GUARDED_BY(mu);

  Job(const CopyHeadsArgs& args, BufferRef source, std::shared_ptr<const CudaPoint> ready, CudaHealth& health)
      : args(args), ready(std::move(ready)), health(health), source(std::move(source)) {}

  void End(absl::Status how) {
    BufferRef gone;
    const MutexLock lock(mu);
    gone.swap(source);
    over = true;
    status = std::move(how);
    ended.NotifyAll();
  }
};

class CudaHostCopies::Copy : public HostCopy {
 public:
  Copy(std::shared_ptr<Job> job, const StopToken* stop) : job_(std::move(job)), stop_(stop) {}
  ~Copy() override {
    job_->dropped = true;
    const MutexLock lock(job_->mu);
    while (!job_->over) job_->ended.Wait(job_->mu);
  }

  absl::Status Wait() override {
    const MutexLock lock(job_->mu);
    while (!job_->over) {
      if (stop_ != nullptr && stop_->stopped()) return absl::CancelledError("copy to the host: stopped");
      job_->ended.WaitFor(job_->mu, kStopPoll);
    }
    return job_->status;
  }

 private:
  const std::shared_ptr<Job> job_;
  const StopToken* const stop_;
};

absl::StatusOr<std::unique_ptr<CudaHostCopies>> CudaHostCopies::Make(int device,
                                                                     std::shared_ptr<CudaQueue> retire) {
  const ScopedCudaDevice scope(device);
  ASSIGN_OR_RETURN(std::shared_ptr<CudaQueue> queue, CudaQueue::Make(device));
  std::array<Piece, kPieces> pieces;
  for (Piece& piece : pieces) {
    ASSIGN_OR_RETURN(piece.gathered, CudaAllocation::Allocate(kPieceBytes, queue, retire));
    ASSIGN_OR_RETURN(piece.host, AllocatePinnedMemory(device, kPieceBytes));
  }
  return std::unique_ptr<CudaHostCopies>(new CudaHostCopies(std::move(queue), std::move(pieces)));
}

CudaHostCopies::~CudaHostCopies() {
  {
    const MutexLock lock(mu_);
    quit_ = true;
    changed_.NotifyAll();
  }
  thread_.join();
  // What is still queued, of copies that were dropped, writes to the pieces.
  const ScopedCudaDevice scope(queue_->device());
  cudaStreamSynchronize(queue_->get());
}

std::unique_ptr<HostCopy> CudaHostCopies::Start(const CopyHeadsArgs& args, BufferRef source,
                                                std::shared_ptr<const CudaPoint> ready, const StopToken* stop,
                                                CudaHealth& health) {
  CudaAllocation::Of(*source).AddUser(queue_);
  auto job = std::make_shared<Job>(args, std::move(source), std::move(ready), health);
  const MutexLock lock(mu_);
  jobs_.push_back(job);
  changed_.NotifyAll();
  return std::make_unique<Copy>(std::move(job), stop);
}

void CudaHostCopies::Work() {
  const ScopedCudaDevice scope(queue_->device());
  while (const std::shared_ptr<Job> job = NextJob()) {
    absl::Status status = Run(*job);
    job->End(status.ok() || absl::IsCancelled(status) ? status : job->health.Diagnose(status, *queue_));
  }
}

std::shared_ptr<CudaHostCopies::Job> CudaHostCopies::NextJob() {
  const MutexLock lock(mu_);
  while (!quit_ && jobs_.empty()) changed_.Wait(mu_);
  if (jobs_.empty()) return nullptr;
  std::shared_ptr<Job> job = std::move(jobs_.front());
  jobs_.pop_front();
  return job;
}

absl::Status CudaHostCopies::Run(const Job& job) {
  struct UnderWay {
    int64_t begin;
    int64_t tokens;
    const Piece* piece;
    std::shared_ptr<const CudaPoint> there;
  };
  RETURN_IF_ERROR(queue_->WaitFor(*job.ready));
  const int64_t piece_tokens = static_cast<int64_t>(kPieceBytes / SlotBytes(job.args));
  if (piece_tokens == 0) {
    return absl::InvalidArgumentError(absl::StrCat("a slot to copy to the host has ", SlotBytes(job.args),
                                                   " bytes; use at most ", kPieceBytes));
  }
  std::deque<UnderWay> under_way;
  size_t fetched = 0;
  for (int64_t next = 0; next < job.args.tokens || !under_way.empty();) {
    if (next < job.args.tokens && under_way.size() < kPieces) {
      const Piece& piece = pieces_[fetched++ % kPieces];
      const int64_t tokens = std::min(piece_tokens, job.args.tokens - next);
      ASSIGN_OR_RETURN(std::shared_ptr<const CudaPoint> there, Fetch(job, next, tokens, piece));
      under_way.push_back({next, tokens, &piece, std::move(there)});
      next += tokens;
      continue;
    }
    const UnderWay& first = under_way.front();
    while (true) {
      const cudaError_t passed = first.there->Query();
      if (passed == cudaSuccess) break;
      if (passed != cudaErrorNotReady) return LaunchStatus("copying to the host", passed);
      if (job.dropped) return absl::CancelledError("copy to the host: dropped");
      absl::SleepFor(kPoll);
    }
    if (job.dropped) return absl::CancelledError("copy to the host: dropped");
    PutInPlace(job.args, first.begin, first.tokens, first.piece->host.get());
    under_way.pop_front();
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const CudaPoint>> CudaHostCopies::Fetch(const Job& job, int64_t begin,
                                                                       int64_t tokens, const Piece& piece) {
  CopyHeadsArgs gather = job.args;
  const int64_t skipped = begin * gather.from_rows.slot_stride;
  gather.from = static_cast<const std::byte*>(gather.from) + skipped * DTypeBytes(gather.from_rows.dtype);
  gather.tokens = tokens;
  gather.to = piece.gathered->data();
  gather.to_rows = {.dtype = gather.to_rows.dtype,
                    .head_stride = gather.head_dim,
                    .slot_stride = int64_t{gather.heads} * gather.head_dim};
  RETURN_IF_ERROR(LaunchCopyHeads(gather, queue_->get()));
  RETURN_IF_ERROR(LaunchStatus("copying to the host",
                               cudaMemcpyAsync(piece.host.get(), gather.to, tokens * SlotBytes(job.args),
                                               cudaMemcpyDeviceToHost, queue_->get())));
  return queue_->Mark();
}

}  // namespace meshfill
