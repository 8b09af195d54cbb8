#include "server/pool/held_kv.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/kv/lease_name.h"
#include "kernels/return_if_error.h"
#include "server/api/kv_fetch.h"
#include "server/api/slab_reader.h"

namespace meshfill {

absl::StatusOr<std::shared_ptr<KvSink>> HeldKv::Begin(uint64_t run, const Lease& lease,
                                                      const TokenLayout& layout,
                                                      const std::vector<int>& ranks) {
  Ends(lease.name);
  std::vector<bool> here(layout.ranks());
  for (const int rank : ranks) here[rank] = true;
  const auto prompt = std::make_shared<KvPrompt>(shape_, layout, here);
  ASSIGN_OR_RETURN(std::unique_ptr<KvLease> held, store_.Admit(prompt, lease.tenant, lease.lasts));
  prompt->Begin(layout);
  const MutexLock lock(mu_);
  const std::string stored = held->id();
  entries_.insert_or_assign(lease.name, Entry{.run = run,
                                              .stored = stored,
                                              .tenant = lease.tenant,
                                              .layout = layout,
                                              .here = std::move(here),
                                              .held = std::move(held)});
  return prompt;
}

std::map<std::string, HeldKv::Entry>::iterator HeldKv::OfRun(uint64_t run) {
  return std::find_if(entries_.begin(), entries_.end(), [run](const auto& entry) {
    return entry.second.run == run && entry.second.held != nullptr;
  });
}

void HeldKv::Keep(uint64_t run) {
  const MutexLock lock(mu_);
  const auto entry = OfRun(run);
  if (entry == entries_.end()) return;
  entry->second.held->Keep().IgnoreError();  // it has not ended: who ends it takes the entry out
  entry->second.held.reset();
}

void HeldKv::Drop(uint64_t run) {
  const MutexLock lock(mu_);
  const auto entry = OfRun(run);
  if (entry != entries_.end()) entries_.erase(entry);
}

void HeldKv::Lasts(const std::string& lease, absl::Duration lasts) {
  const MutexLock lock(mu_);
  const auto entry = entries_.find(lease);
  if (entry != entries_.end()) {
    store_.Renew(entry->second.stored, entry->second.tenant, lasts).IgnoreError();  // it may have lapsed
  }
}

void HeldKv::Ends(const std::string& lease) {
  const MutexLock lock(mu_);
  const auto entry = entries_.find(lease);
  if (entry == entries_.end()) return;
  store_.Release(entry->second.stored, entry->second.tenant);
  entries_.erase(entry);
}

void HeldKv::EndAll() {
  const MutexLock lock(mu_);
  for (const auto& [lease, entry] : entries_) store_.Release(entry.stored, entry.tenant);
  entries_.clear();
}

absl::Time HeldKv::EndLapsed() {
  const absl::Time next = store_.EndLapsed();
  const MutexLock lock(mu_);
  std::erase_if(entries_, [this](const auto& entry) {
    return !store_.Find(entry.second.stored, entry.second.tenant).ok();
  });
  return next;
}

absl::StatusOr<std::shared_ptr<const KvPrompt>> HeldKv::Find(const std::string& lease,
                                                             const std::string& tenant, uint64_t run) const {
  const MutexLock lock(mu_);
  const auto entry = entries_.find(lease);
  if (entry == entries_.end()) return NoLease(lease);
  if (entry->second.run != run) {
    return absl::UnavailableError(absl::StrCat("lease ", ShownLease(lease),
                                               ": its prefill was begun again, and so are its K and V; fetch "
                                               "them again"));
  }
  absl::StatusOr<std::shared_ptr<const KvPrompt>> prompt = store_.Find(entry->second.stored, tenant);
  return prompt.ok() ? prompt : NoLease(lease);
}

absl::StatusOr<std::unique_ptr<KvReader>> HeldKv::Open(const v1::FetchKvRequest& request,
                                                       const std::string& tenant, int64_t max_message_bytes,
                                                       std::function<void()> /*changed*/) {
  uint64_t run = 0;
  int64_t tokens = 0;
  std::vector<bool> here;
  {
    const MutexLock lock(mu_);
    const auto entry = entries_.find(request.lease());
    if (entry == entries_.end()) return NoLease(request.lease());
    run = entry->second.run;
    tokens = entry->second.layout.tokens();
    here = entry->second.here;
  }
  const auto find = [this, lease = request.lease(), tenant, run] { return Find(lease, tenant, run); };
  RETURN_IF_ERROR(find().status());
  ASSIGN_OR_RETURN(const KvFetch fetch, CheckFetch(request, shape_, tokens, max_message_bytes));
  return std::make_unique<SlabReader>(fetch, std::move(here), find);
}

}  // namespace meshfill
