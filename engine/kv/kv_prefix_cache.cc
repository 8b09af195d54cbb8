#include "engine/kv/kv_prefix_cache.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include "engine/kv/block_hash.h"

namespace meshfill {
namespace {

constexpr auto kHashBytes = static_cast<int64_t>(sizeof(Sha256));

int64_t ChargedBytes(const KvRunSlabs& run) {
  int64_t bytes = 0;
  for (const auto& charge : run.charges) bytes += charge->bytes();
  return bytes;
}

// How many of the first `most` hashes agree. One that agrees stands for all before it.
int64_t HashesInCommon(const char* left, const char* right, int64_t most) {
  int64_t agree = 0, end = most + 1;  // the hashes before `agree` do, number `end − 1` does not
  while (end - agree > 1) {
    const int64_t middle = agree + (end - agree) / 2;
    const int64_t last = (middle - 1) * kHashBytes;
    (std::memcmp(left + last, right + last, kHashBytes) == 0 ? agree : end) = middle;
  }
  return agree;
}

// Empty: there is no whole block.
std::string FirstHash(const std::string& hashes) { return hashes.substr(0, kHashBytes); }

template <typename Entry>
KvSlabs FirstTokensOf(const Entry& entry, int64_t tokens) {
  KvSlabs all = {.shape = entry.shape, .pieces = {}};
  for (const auto& piece : entry.pieces) all.pieces.push_back(piece.kept);
  return FirstTokens(all, tokens);
}

}  // namespace

int64_t KvBlockNames::blocks() const { return std::ssize(hashes) / kHashBytes; }

int64_t KvPrefixCache::BlocksInCommon(const Entry& entry, const KvBlockNames& names) {
  if (entry.tenant != names.tenant || entry.long_rope != names.long_rope) return 0;
  int64_t blocks = 0;
  for (const Piece& piece : entry.pieces) {
    const int64_t own = piece.kept.tokens / entry.block_tokens;
    const int64_t most = std::min(own, names.blocks() - blocks);
    const int64_t agree =
        HashesInCommon(piece.hashes->data(), names.hashes.data() + blocks * kHashBytes, most);
    blocks += agree;
    if (agree < own) break;
  }
  return blocks;
}

KvPrefixCache::Entries::iterator KvPrefixCache::Best(const KvBlockNames& names, int64_t& blocks) const {
  Entries::iterator best;
  blocks = 0;
  const auto [begin, end] = by_first_block_.equal_range(FirstHash(names.hashes));
  for (auto candidate = begin; candidate != end; ++candidate) {
    const Entries::iterator entry = candidate->second;
    const int64_t in_common = BlocksInCommon(*entry, names);
    if (in_common == 0 || in_common < blocks) continue;
    if (in_common == blocks && entry->last_use < best->last_use) continue;
    best = entry;
    blocks = in_common;
  }
  return best;
}

void KvPrefixCache::Use(Entries::iterator entry) {
  entry->last_use = ++uses_;
  entries_.splice(entries_.begin(), entries_, entry);
}

KvSlabs KvPrefixCache::Find(const KvBlockNames& names) {
  int64_t blocks = 0;
  const auto best = Best(names, blocks);
  if (blocks == 0) return {};
  Use(best);
  return FirstTokensOf(*best, blocks * names.block_tokens);
}

KvSlabs KvPrefixCache::Look(const KvBlockNames& names) const {
  int64_t blocks = 0;
  const auto best = Best(names, blocks);
  return blocks == 0 ? KvSlabs() : FirstTokensOf(*best, blocks * names.block_tokens);
}

void KvPrefixCache::Enter(const KvBlockNames& names, const KvSlabs& slabs) {
  int64_t blocks = 0;
  const auto best = Best(names, blocks);
  if (blocks == names.blocks()) {
    if (blocks > 0) Use(best);
    return;
  }
  Entry entry = {.tenant = names.tenant,
                 .block_tokens = names.block_tokens,
                 .long_rope = names.long_rope,
                 .shape = slabs.shape,
                 .pieces = {},
                 .last_use = ++uses_};
  for (const KvPiece& kept : slabs.pieces) {
    entry.pieces.push_back({.kept = kept, .hashes = nullptr});
    Hold(entry.pieces.back(), names);
  }
  entries_.push_front(std::move(entry));
  by_first_block_.emplace(FirstHash(names.hashes), entries_.begin());
}

void KvPrefixCache::Hold(Piece& piece, const KvBlockNames& names) {
  const auto& [first_token, tokens, run] = piece.kept;
  HeldRun& held = held_[run.get()];
  if (held.run == nullptr) {
    held.run = run;
    held.bytes = ChargedBytes(*run);
    bytes_ += held.bytes;
  }
  ++held.pieces;
  const auto size = static_cast<size_t>(tokens / names.block_tokens * kHashBytes);
  if (held.hashes == nullptr || held.hashes->size() < size) {
    const auto first = static_cast<size_t>(first_token / names.block_tokens * kHashBytes);
    held.hashes = std::make_shared<const std::string>(names.hashes.substr(first, size));
  }
  piece.hashes = held.hashes;
}

KvPrefixCache::Entries::iterator KvPrefixCache::Erase(Entries::iterator entry, std::vector<KvPiece>& gone) {
  const auto [begin, end] = by_first_block_.equal_range(FirstHash(*entry->pieces.front().hashes));
  by_first_block_.erase(std::find_if(begin, end, [&](const auto& known) { return known.second == entry; }));
  for (Piece& piece : entry->pieces) {
    const auto held = held_.find(piece.kept.run.get());
    if (--held->second.pieces == 0) {
      bytes_ -= held->second.bytes;
      held_.erase(held);
    }
    gone.push_back(std::move(piece.kept));
  }
  return entries_.erase(entry);
}

std::vector<KvPiece> KvPrefixCache::Evict() {
  // Under the store's lock nobody but a holder can take another hold: what nobody else holds stays so.
  const auto frees = [this](const Entry& entry) {
    return std::any_of(entry.pieces.begin(), entry.pieces.end(), [this](const Piece& piece) {
      const HeldRun& held = held_.at(piece.kept.run.get());
      return held.pieces == 1 && !held.by_others();
    });
  };
  std::vector<KvPiece> gone;
  const auto victim = std::find_if(entries_.rbegin(), entries_.rend(), frees);
  if (victim != entries_.rend()) Erase(std::next(victim).base(), gone);
  return gone;
}

std::vector<KvPiece> KvPrefixCache::EraseIf(const std::function<bool(const KvRunSlabs&)>& is_lost) {
  std::vector<KvPiece> gone;
  for (auto entry = entries_.begin(); entry != entries_.end();) {
    const bool lost = std::any_of(entry->pieces.begin(), entry->pieces.end(),
                                  [&](const Piece& piece) { return is_lost(*piece.kept.run); });
    entry = lost ? Erase(entry, gone) : std::next(entry);
  }
  return gone;
}

int64_t KvPrefixCache::EvictableBytes() const {
  int64_t sum = 0;
  for (const auto& [run, held] : held_) {
    if (!held.by_others()) sum += held.bytes;
  }
  return sum;
}

}  // namespace meshfill
