#include "engine/comm/nccl/nccl_comm.h"

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/monotonic_time.h"

namespace meshfill {
namespace {

constexpr absl::Duration kPoll = absl::Microseconds(50);   // interval of looks at NCCL's state in a call
constexpr absl::Duration kEndTimeout = absl::Seconds(10);  // longest time for the last messages to leave

}  // namespace

NcclComm::~NcclComm() {
  const MutexLock lock(mu_);
  if (comm_ == nullptr) return;
  ncclResult_t state = connected_ ? nccl_.CommFinalize(comm_) : ncclSystemError;
  const absl::Time deadline = MonotonicNow() + kEndTimeout;
  while ((state == ncclSuccess || state == ncclInProgress) && MonotonicNow() < deadline) {
    if (nccl_.CommGetAsyncError(comm_, &state) == ncclSuccess && state == ncclSuccess) break;
    absl::SleepFor(kPoll);
  }
  state == ncclSuccess ? nccl_.CommDestroy(comm_) : nccl_.CommAbort(comm_);
  comm_ = nullptr;
}

absl::Status NcclComm::Init(int ranks, const ncclUniqueId& id, int most_ctas, absl::Time deadline) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  if (most_ctas > 0) config.maxCTAs = most_ctas;
  ncclComm_t comm = nullptr;
  const ncclResult_t begun = nccl_.CommInitRankConfig(&comm, ranks, id, rank_, &config);
  {
    const MutexLock lock(mu_);
    comm_ = comm;
    if (aborted_ && comm_ != nullptr) nccl_.CommAbort(std::exchange(comm_, nullptr));
  }
  absl::Status status = Settle(begun, "connecting", deadline);
  const MutexLock lock(mu_);
  connected_ = status.ok();
  return status;
}

absl::Status NcclComm::Group(const std::string& what, absl::Time deadline,
                             const std::function<ncclResult_t(ncclComm_t)>& body) {
  ncclResult_t result;
  {
    const MutexLock lock(mu_);
    if (aborted_) return reason_;
    result = nccl_.GroupStart();
    if (result == ncclSuccess) result = body(comm_);
    const ncclResult_t ended = nccl_.GroupEnd();
    if (result == ncclSuccess || result == ncclInProgress) result = ended;
  }
  return Settle(result, what, deadline);
}

absl::Status NcclComm::Check(const std::string& what) {
  const MutexLock lock(mu_);
  if (aborted_) return reason_;
  ncclResult_t state = ncclSuccess;
  const ncclResult_t asked = nccl_.CommGetAsyncError(comm_, &state);
  if (asked != ncclSuccess) state = asked;
  return state == ncclSuccess || state == ncclInProgress ? absl::OkStatus() : Failure(what, state);
}

void NcclComm::Abort(absl::Status reason) {
  const MutexLock lock(mu_);
  if (std::exchange(aborted_, true)) return;
  reason_ = reason.ok() ? absl::AbortedError("aborted without a reason") : std::move(reason);
  if (comm_ != nullptr) nccl_.CommAbort(std::exchange(comm_, nullptr));
}

absl::Status NcclComm::Settle(ncclResult_t result, const std::string& what, absl::Time deadline) {
  while (result == ncclInProgress || result == ncclSuccess) {
    {
      const MutexLock lock(mu_);
      if (aborted_) return reason_;
      const ncclResult_t asked = nccl_.CommGetAsyncError(comm_, &result);
      if (asked != ncclSuccess) result = asked;
      if (result == ncclSuccess) return absl::OkStatus();
      if (result != ncclInProgress) return Failure(what, result);
    }
    if (MonotonicNow() >= deadline) {
      return absl::DeadlineExceededError(
          absl::StrCat("rank ", rank_, ": ", what, ": NCCL did not get there before the deadline"));
    }
    absl::SleepFor(kPoll);
  }
  const MutexLock lock(mu_);
  return aborted_ ? reason_ : Failure(what, result);
}

absl::Status NcclComm::Failure(const std::string& what, ncclResult_t result) const {
  const char* const last = nccl_.GetLastError(comm_);
  const std::string detail = last == nullptr ? "" : last;
  const bool shared = absl::StrContains(detail, "Duplicate GPU");
  return absl::UnavailableError(absl::StrCat(
      "rank ", rank_, ": ", what, ": NCCL: ", nccl_.GetErrorString(result), detail.empty() ? "" : ": ",
      detail,
      shared ? "; two ranks have the same GPU: give each worker of a machine GPUs of its own, by "
               "pool.worker.devices in its config"
             : ""));
}

}  // namespace meshfill
