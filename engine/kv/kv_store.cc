#include "engine/kv/kv_store.h"

#include <unistd.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace meshfill {
namespace {

constexpr size_t kNameBytes = 16;  // 128 random bits
constexpr size_t kShownCharacters = 8;

absl::StatusOr<std::string> NewName() {
  char bytes[kNameBytes];
  if (getentropy(bytes, sizeof bytes) != 0) {
    return absl::InternalError("the system gives no random bytes for a lease's name");
  }
  return absl::BytesToHexString(absl::string_view(bytes, sizeof bytes));
}

absl::Status NoLease(const std::string& lease) {
  // Messages go to logs, and who knows a lease's name may read it: they have its begin.
  return absl::NotFoundError(absl::StrCat("lease ", absl::CHexEscape(lease.substr(0, kShownCharacters)),
                                          "… is unknown, or has ended; prefill the prompt again"));
}

}  // namespace

KvLease::~KvLease() {
  if (!kept_) store_.End(id_);
}

absl::StatusOr<absl::Duration> KvLease::Keep() {
  kept_ = true;
  return store_.Keep(id_, lasts_);
}

void KvStore::Shared::Notify() {
  const MutexLock lock(mu);
  if (changed != nullptr) changed();
}

KvStore::KvStore(int64_t budget_bytes, Clock clock) : budget_bytes_(budget_bytes), clock_(std::move(clock)) {}

KvStore::~KvStore() { SetObserver(nullptr); }

void KvStore::SetObserver(std::function<void()> changed) {
  const MutexLock lock(shared_->mu);
  shared_->changed = std::move(changed);
}

absl::StatusOr<std::unique_ptr<KvLease>> KvStore::Admit(const std::shared_ptr<KvPrompt>& prompt,
                                                        std::string tenant, absl::Duration lasts) {
  absl::StatusOr<std::string> name = NewName();
  if (!name.ok()) return name.status();
  EndLapsed();
  const int64_t bytes = prompt->bytes();
  {
    const MutexLock lock(mu_);
    // Only here bytes are added, so that the sum cannot grow between the look and the charge.
    if (const int64_t charged = shared_->bytes; bytes > budget_bytes_ - charged) {
      ++refused_;
      return absl::ResourceExhaustedError(
          absl::StrCat("no room for the ", bytes, " bytes of K and V that are to be kept: ", charged, " of ",
                       budget_bytes_, " bytes are taken; ",
                       bytes > budget_bytes_ ? "raise the server's kv budget, or send a shorter prompt"
                                             : "try again later"));
    }
    shared_->bytes += bytes;
    prompt->Watch([shared = shared_] { shared->Notify(); },
                  [shared = shared_, bytes] {
                    shared->bytes -= bytes;
                    shared->Notify();
                  });
    leases_[*name] = {.tenant = std::move(tenant), .prompt = prompt};
  }
  shared_->Notify();
  return std::make_unique<KvLease>(*this, *std::move(name), lasts);
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
  int64_t room = budget_bytes_ - shared_->bytes;
  absl::Time when = now;
  for (const auto& [end, freed] : ends) {
    if (room >= bytes) break;
    room += freed;
    when = end;
  }
  return when - now;
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
  shared_->Notify();
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
  shared_->Notify();
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
  gone.reset();
  shared_->Notify();
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
  if (changed) shared_->Notify();
  return next;
}

KvStore::Counts KvStore::counts() const {
  const MutexLock lock(mu_);
  return {.leases = static_cast<int64_t>(leases_.size()),
          .bytes = shared_->bytes,
          .lapsed = lapsed_,
          .refused = refused_};
}

}  // namespace meshfill
