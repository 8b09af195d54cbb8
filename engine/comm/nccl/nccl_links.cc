#include "engine/comm/nccl/nccl_links.h"

#include <algorithm>
#include <utility>

#include "absl/status/status.h"

namespace meshfill {

NcclLinks::~NcclLinks() {
  for (KeptComm& kept : idle_) Drop(kept);
  for (auto& [run, kept] : in_use_) Drop(kept);
}

std::vector<KeptComm> NcclLinks::Offer(uint64_t epoch, int rank, int ranks) {
  std::vector<KeptComm> fitting, others;
  const MutexLock lock(mu_);
  for (KeptComm& kept : idle_) {
    if (kept.epoch != epoch || !kept.comm->Check("between runs").ok()) {
      Drop(kept);
      continue;
    }
    const bool fits = kept.rank == rank && kept.ranks == ranks;
    (fits ? fitting : others).push_back(std::move(kept));
  }
  idle_ = std::move(others);
  return fitting;
}

void NcclLinks::Return(std::vector<KeptComm> unused) {
  std::reverse(unused.begin(), unused.end());
  const MutexLock lock(mu_);
  for (KeptComm& kept : unused) AddIdle(std::move(kept));
}

void NcclLinks::Use(uint64_t run, KeptComm kept, bool fresh) {
  const MutexLock lock(mu_);
  in_use_[run] = std::move(kept);
  made_ += fresh ? 1 : 0;
}

void NcclLinks::End(uint64_t run) {
  const MutexLock lock(mu_);
  auto ended = in_use_.extract(run);
  if (ended.empty()) return;
  if (ended.mapped().comm->Check("after a run").ok()) return AddIdle(std::move(ended.mapped()));
  Drop(ended.mapped());  // a peer might still wait for it
}

std::optional<ncclUniqueId> NcclLinks::TakeSpareId() {
  const MutexLock lock(mu_);
  if (spare_ids_.empty()) return std::nullopt;
  const ncclUniqueId id = spare_ids_.back();
  spare_ids_.pop_back();
  return id;
}

void NcclLinks::KeepSpareId(const ncclUniqueId& id) {
  const MutexLock lock(mu_);
  spare_ids_.push_back(id);
}

int NcclLinks::made() const {
  const MutexLock lock(mu_);
  return made_;
}

void NcclLinks::Drop(KeptComm& kept) { kept.comm->Abort(absl::AbortedError("its run is over")); }

void NcclLinks::AddIdle(KeptComm kept) {
  idle_.insert(idle_.begin(), std::move(kept));
  if (idle_.size() <= kMostIdle) return;
  Drop(idle_.back());
  idle_.pop_back();
}

}  // namespace meshfill
