#include "server/pool/worker/held_kv.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/kv/lease_name.h"
#include "kernels/return_if_error.h"
#include "server/api/kv_fetch.h"
#include "server/api/slab_reader.h"

namespace meshfill {

absl::StatusOr<std::shared_ptr<const KvSlabs>> HeldKv::PrefixOf(const std::vector<RunTokens>& runs) const {
  if (runs.empty()) return nullptr;
  auto prefix = std::make_shared<KvSlabs>(KvSlabs{.shape = shape_, .pieces = {}});
  const MutexLock lock(mu_);
  for (const auto& [run, tokens] : runs) {
    const auto found = cached_.find(run);
    if (found == cached_.end() || tokens > found->second->layout.tokens()) {
      return absl::UnavailableError(
          absl::StrCat("the first ", tokens, " tokens of run ", run, " are not kept here"));
    }
    prefix->pieces.push_back({.first_token = prefix->tokens(), .tokens = tokens, .run = found->second});
  }
  return prefix;
}

absl::StatusOr<std::shared_ptr<KvPrompt>> HeldKv::Begin(uint64_t run, const Keeping& keeping,
                                                        const std::shared_ptr<const KvSlabs>& prefix,
                                                        const TokenLayout& layout,
                                                        const std::vector<int>& ranks) {
  End(keeping.lease, /*gives_up=*/true);
  std::vector<bool> here(layout.ranks());
  for (const int rank : ranks) here[rank] = true;
  const auto prompt =
      std::make_shared<KvPrompt>(shape_, layout, here, prefix == nullptr ? 0 : prefix->tokens());
  Begun begun = {.held = nullptr, .prompt = prompt, .lease = keeping.lease, .cache = keeping.cache};
  if (!keeping.lease.empty()) {
    ASSIGN_OR_RETURN(begun.held, store_.Admit(prompt, keeping.tenant, keeping.lasts));
  } else if (!store_.AdmitToCache(prompt, prompt->bytes())) {
    return absl::ResourceExhaustedError(
        absl::StrCat("no room for ", prompt->bytes(), " bytes of K and V that are to be cached"));
  }
  if (keeping.cache) prompt->KeepWithoutLease();
  prompt->Begin(layout, prefix);
  const MutexLock lock(mu_);
  if (begun.held != nullptr) {
    entries_.insert_or_assign(keeping.lease, Entry{.run = run,
                                                   .stored = begun.held->id(),
                                                   .tenant = keeping.tenant,
                                                   .tokens = prompt->tokens(),
                                                   .here = std::move(here)});
  }
  begun_.insert_or_assign(run, std::move(begun));
  return prompt;
}

void HeldKv::Keep(uint64_t run) {
  decltype(begun_)::node_type begun;  // freed after the lock
  const MutexLock lock(mu_);
  begun = begun_.extract(run);
  if (begun.empty()) return;
  if (begun.mapped().held != nullptr) {
    begun.mapped().held->Keep().IgnoreError();  // it may have ended, and the run is for the cache alone
  }
  if (begun.mapped().cache) cached_[run] = begun.mapped().prompt->slabs()->pieces.back().run;
}

void HeldKv::Drop(uint64_t run) {
  decltype(begun_)::node_type begun;  // freed after the lock
  const MutexLock lock(mu_);
  begun = begun_.extract(run);
  if (!begun.empty()) entries_.erase(begun.mapped().lease);
}

void HeldKv::Lasts(const std::string& lease, absl::Duration lasts) {
  const MutexLock lock(mu_);
  const auto entry = entries_.find(lease);
  if (entry != entries_.end()) {
    store_.Renew(entry->second.stored, entry->second.tenant, lasts).IgnoreError();  // it may have lapsed
  }
}

void HeldKv::Ends(const std::string& lease) { End(lease, /*gives_up=*/false); }

void HeldKv::End(const std::string& lease, bool gives_up) {
  decltype(begun_)::node_type begun;  // freed after the lock
  Entry ended;
  {
    const MutexLock lock(mu_);
    const auto entry = entries_.find(lease);
    if (entry == entries_.end()) return;
    ended = std::move(entry->second);
    entries_.erase(entry);
    const auto computes = begun_.find(ended.run);
    if (computes != begun_.end() && (gives_up || !computes->second.cache)) begun = begun_.extract(computes);
  }
  store_.Release(ended.stored, ended.tenant);
}

void HeldKv::RunEnds(uint64_t run) {
  decltype(cached_)::node_type cached;  // freed after the lock
  const MutexLock lock(mu_);
  cached = cached_.extract(run);
}

void HeldKv::EndAll() {
  decltype(entries_) entries;
  decltype(begun_) begun;  // freed after the lock, as what is cached
  decltype(cached_) cached;
  {
    const MutexLock lock(mu_);
    entries.swap(entries_);
    begun.swap(begun_);
    cached.swap(cached_);
  }
  for (const auto& [lease, entry] : entries) store_.Release(entry.stored, entry.tenant);
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
    tokens = entry->second.tokens;
    here = entry->second.here;
  }
  const auto find = [this, lease = request.lease(), tenant, run] { return Find(lease, tenant, run); };
  RETURN_IF_ERROR(find().status());
  ASSIGN_OR_RETURN(const KvFetch fetch, CheckFetch(request, shape_, tokens, max_message_bytes));
  return std::make_unique<SlabReader>(fetch, std::move(here), find);
}

}  // namespace meshfill
