#include "engine/kv/kv_store.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/kv/lease_name.h"
#include "kernels/return_if_error.h"

namespace meshfill {

KvLease::~KvLease() {
  if (!kept_) store_.End(id_);
}

absl::StatusOr<absl::Duration> KvLease::Keep() {
  kept_ = true;
  return store_.Keep(id_, lasts_);
}

KvStore::KvStore(int64_t budget_bytes, Clock clock, std::shared_ptr<KvDeviceMemory> device_memory)
    : budget_bytes_(budget_bytes), clock_(std::move(clock)), device_memory_(std::move(device_memory)) {}

KvStore::~KvStore() { SetObserver(nullptr); }

void KvStore::SetObserver(std::function<void()> changed) { bytes_->SetObserver(std::move(changed)); }

std::unique_ptr<KvCharge> KvStore::Charge(int64_t bytes) {
  // Only here bytes are added, so that the sum cannot grow between the look and the charge. What the cache
  // would give up is counted only where it matters.
  const int64_t room = budget_bytes_ - bytes_->charged();
  if (bytes > room && bytes > room + cache_.EvictableBytes()) return nullptr;
  bytes_->Add(bytes);
  return std::make_unique<KvCharge>(bytes_, bytes);
}

void KvStore::Attach(KvPrompt& prompt, std::unique_ptr<KvCharge> charge) const {
  prompt.Watch([bytes = bytes_] { bytes->Notify(); }, std::move(charge), device_memory_);
}

absl::StatusOr<std::unique_ptr<KvLease>> KvStore::Admit(const std::shared_ptr<KvPrompt>& prompt,
                                                        std::string tenant, absl::Duration lasts) {
  ASSIGN_OR_RETURN(std::string name, NewLeaseName());
  EndLapsed();
  const int64_t bytes = prompt->bytes();
  {
    const MutexLock lock(mu_);
    std::unique_ptr<KvCharge> charge = Charge(bytes);
    if (charge == nullptr) {
      ++refused_;
      return absl::ResourceExhaustedError(absl::StrCat(
          "no room for the ", bytes, " bytes of K and V that are to be kept: ",
          bytes_->charged() - cache_.EvictableBytes(), " of ", budget_bytes_, " bytes are taken; ",
          bytes > budget_bytes_ ? "raise the server's kv budget, or send a shorter prompt"
                                : "try again later"));
    }
    Attach(*prompt, std::move(charge));
    leases_[name] = {.tenant = std::move(tenant), .prompt = prompt};
  }
  bytes_->Notify();
  return std::make_unique<KvLease>(*this, std::move(name), lasts);
}

std::optional<absl::Duration> KvStore::RoomIn(int64_t bytes) const {
  if (bytes > budget_bytes_) return std::nullopt;
  const MutexLock lock(mu_);
  const absl::Time now = clock_();
  std::vector<std::pair<absl::Time, int64_t>> ends;
  for (const auto& [name, entry] : leases_) {
    ends.emplace_back(std::max(now, entry.expires), entry.prompt->bytes());
  }
  std::sort(ends.begin(), ends.end());
  int64_t room = budget_bytes_ - bytes_->charged() + cache_.EvictableBytes();
  absl::Time when = now;
  for (const auto& [end, freed] : ends) {
    if (room >= bytes) break;
    room += freed;
    when = end;
  }
  return when - now;
}

std::vector<KvStore::LeaseEnd> KvStore::LeasesOf(const std::string& tenant) const {
  const MutexLock lock(mu_);
  const absl::Time now = clock_();
  std::vector<LeaseEnd> leases;
  for (const auto& [name, entry] : leases_) {
    if (Live(name, tenant) == nullptr) continue;
    leases.push_back(
        {.ends_in = std::max(absl::ZeroDuration(), entry.expires - now), .bytes = entry.prompt->bytes()});
  }
  return leases;
}

const KvStore::Entry* KvStore::Live(const std::string& lease, const std::string& tenant) const {
  const auto found = leases_.find(lease);
  if (found == leases_.end() || found->second.tenant != tenant) return nullptr;
  return found->second.held || clock_() < found->second.expires ? &found->second : nullptr;
}

absl::StatusOr<std::shared_ptr<const KvPrompt>> KvStore::Find(const std::string& lease,
                                                              const std::string& tenant) const {
  const MutexLock lock(mu_);
  const Entry* entry = Live(lease, tenant);
  if (entry == nullptr) return NoLease(lease);
  return std::shared_ptr<const KvPrompt>(entry->prompt);
}

absl::StatusOr<absl::Duration> KvStore::Renew(const std::string& lease, const std::string& tenant,
                                              absl::Duration lasts) {
  {
    const MutexLock lock(mu_);
    if (Live(lease, tenant) == nullptr) return NoLease(lease);
    leases_[lease].expires = clock_() + lasts;
  }
  bytes_->Notify();
  return lasts;
}

absl::StatusOr<absl::Duration> KvStore::Keep(const std::string& lease, absl::Duration lasts) {
  absl::Duration rest;
  {
    const MutexLock lock(mu_);
    const auto found = leases_.find(lease);
    if (found == leases_.end()) return NoLease(lease);
    const absl::Time now = clock_();
    Entry& entry = found->second;
    entry.held = false;
    entry.expires = std::max(entry.expires, now + lasts);
    rest = entry.expires - now;
  }
  bytes_->Notify();
  return rest;
}

void KvStore::Release(const std::string& lease, const std::string& tenant) {
  {
    const MutexLock lock(mu_);
    if (Live(lease, tenant) == nullptr) return;
  }
  End(lease);
}

void KvStore::End(const std::string& lease) {
  std::shared_ptr<KvPrompt> gone;  // its end calls back: after the lock
  {
    const MutexLock lock(mu_);
    const auto found = leases_.find(lease);
    if (found == leases_.end()) return;
    gone = std::move(found->second.prompt);
    leases_.erase(found);
  }
  gone->Drop();
  bytes_->Notify();
}

absl::Time KvStore::EndLapsed() {
  std::vector<std::shared_ptr<KvPrompt>> gone;  // their ends call back: after the lock
  absl::Time next = absl::InfiniteFuture();
  {
    const MutexLock lock(mu_);
    const absl::Time now = clock_();
    for (auto entry = leases_.begin(); entry != leases_.end();) {
      const bool held = entry->second.held;
      if (!held && entry->second.expires <= now) {
        gone.push_back(std::move(entry->second.prompt));
        entry = leases_.erase(entry);
        ++lapsed_;
        continue;
      }
      if (!held) next = std::min(next, entry->second.expires);
      ++entry;
    }
  }
  const bool changed = !gone.empty();
  gone.clear();
  if (changed) bytes_->Notify();
  return next;
}

std::shared_ptr<const KvSlabs> KvStore::FindPrefix(const KvBlockNames& names,
                                                   int64_t returned_bytes_per_token,
                                                   const std::function<int64_t(int64_t)>& usable) {
  const MutexLock lock(mu_);
  std::shared_ptr<const KvSlabs> prefix;
  {
    const KvSlabs found = cache_.Find(names);  // gone before what is held is counted
    prefix = std::make_shared<const KvSlabs>(FirstTokens(found, usable(found.tokens())));
  }
  const int64_t charged = bytes_->charged() - prefix->tokens() * returned_bytes_per_token;
  const bool has_room = charged <= budget_bytes_ || charged - cache_.EvictableBytes() <= budget_bytes_;
  return has_room ? prefix : std::make_shared<const KvSlabs>();
}

int64_t KvStore::PrefixTokens(const KvBlockNames& names) const {
  const MutexLock lock(mu_);
  return cache_.Look(names).tokens();
}

bool KvStore::AdmitToCache(const std::shared_ptr<KvPrompt>& prompt, int64_t bytes) {
  EndLapsed();
  const MutexLock lock(mu_);
  std::unique_ptr<KvCharge> charge = Charge(bytes);
  if (charge == nullptr) return false;
  Attach(*prompt, std::move(charge));
  return true;
}

std::vector<KvPiece> KvStore::EvictOne() {
  const MutexLock lock(mu_);
  if (bytes_->charged() <= budget_bytes_) return {};
  const int64_t before = cache_.bytes();
  std::vector<KvPiece> gone = cache_.Evict();
  if (gone.empty()) return gone;
  ++evictions_;
  evicted_bytes_ += static_cast<uint64_t>(before - cache_.bytes());
  return gone;
}

void KvStore::MakeRoom() {
  while (true) {
    const std::vector<KvPiece> gone = EvictOne();  // its end calls back: after the lock
    if (gone.empty()) return;
  }
}

void KvStore::Enter(const KvBlockNames& names, const KvPrompt& prompt) {
  std::shared_ptr<const KvSlabs> slabs;
  for (int layer = 0; layer < prompt.shape().layers; ++layer) {
    slabs = prompt.Layer(layer);
    if (slabs == nullptr) return;
  }
  {
    const MutexLock lock(mu_);
    cache_.Enter(names, *slabs);
  }
  bytes_->Notify();
}

void KvStore::CountTokens(int64_t cached, int64_t computed) {
  {
    const MutexLock lock(mu_);
    hit_tokens_ += static_cast<uint64_t>(cached);
    miss_tokens_ += static_cast<uint64_t>(computed);
  }
  bytes_->Notify();
}

int64_t KvStore::RoomBytes() const {
  const MutexLock lock(mu_);
  return budget_bytes_ - bytes_->charged() + cache_.EvictableBytes();
}

KvStore::Counts KvStore::counts() const {
  const MutexLock lock(mu_);
  const int64_t charged = bytes_->charged();
  const int64_t beyond = charged - budget_bytes_;
  const int64_t given_up = beyond <= 0 ? 0 : std::min(beyond, cache_.EvictableBytes());
  return {.leases = static_cast<int64_t>(leases_.size()),
          .bytes = charged - given_up,
          .lapsed = lapsed_,
          .refused = refused_,
          .cached_bytes = cache_.bytes(),
          .hit_tokens = hit_tokens_,
          .miss_tokens = miss_tokens_,
          .evictions = evictions_,
          .evicted_bytes = evicted_bytes_,
          .device_bytes = device_memory_ == nullptr ? 0 : device_memory_->bytes()};
}

}  // namespace meshfill
