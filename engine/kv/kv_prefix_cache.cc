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

template <typename Entry>
KvSlabs FirstTokensOf(const Entry& entry, int64_t tokens) {
  KvSlabs all = {.shape = entry.shape, .pieces = {}};
  for (const auto& piece : entry.pieces) all.pieces.push_back(piece.kept);
  return FirstTokens(all, tokens);
}

}  // namespace

int64_t KvBlockNames::blocks() const { return std::ssize(hashes) / kHashBytes; }

int64_t KvPrefixCache::BlocksInCommon(const Entry& entry, const KvBlockNames& names) {
  if (entry.tenant != names.tenant || entry.block_tokens != names.block_tokens ||
      entry.long_rope != names.long_rope) {
    return 0;
  }
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

KvPrefixCache::Entries::const_iterator KvPrefixCache::Best(const KvBlockNames& names, int64_t& blocks) const {
  auto best = entries_.end();
  blocks = 0;
  for (auto entry = entries_.begin(); entry != entries_.end(); ++entry) {
    const int64_t in_common = BlocksInCommon(*entry, names);
    if (in_common <= blocks) continue;
    best = entry;
    blocks = in_common;
  }
  return best;
}

KvSlabs KvPrefixCache::Find(const KvBlockNames& names) {
  int64_t blocks = 0;
  const auto best = Best(names, blocks);
  if (best == entries_.end()) return {};
  entries_.splice(entries_.begin(), entries_, best);
  return FirstTokensOf(*best, blocks * names.block_tokens);
}

KvSlabs KvPrefixCache::Look(const KvBlockNames& names) const {
  int64_t blocks = 0;
  const auto best = Best(names, blocks);
  return best == entries_.end() ? KvSlabs() : FirstTokensOf(*best, blocks * names.block_tokens);
}

void KvPrefixCache::Enter(const KvBlockNames& names, const KvSlabs& slabs) {
  int64_t blocks = 0;
  const auto best = Best(names, blocks);
  if (blocks == names.blocks()) {
    if (best != entries_.end()) entries_.splice(entries_.begin(), entries_, best);
    return;
  }
  Entry entry = {.tenant = names.tenant,
                 .block_tokens = names.block_tokens,
                 .long_rope = names.long_rope,
                 .shape = slabs.shape,
                 .pieces = {}};
  for (const KvPiece& piece : slabs.pieces) {
    entry.pieces.push_back({piece, HashesOf(piece, names)});
    HeldRun& held = held_[piece.run.get()];
    held.run = piece.run;
    ++held.pieces;
  }
  entries_.push_front(std::move(entry));
}

std::shared_ptr<const std::string> KvPrefixCache::HashesOf(const KvPiece& piece,
                                                           const KvBlockNames& names) const {
  for (const Entry& entry : entries_) {
    for (const Piece& known : entry.pieces) {
      if (known.kept.run == piece.run && known.kept.tokens >= piece.tokens) return known.hashes;
    }
  }
  const int64_t first = piece.first_token / names.block_tokens;
  const int64_t count = piece.tokens / names.block_tokens;
  return std::make_shared<const std::string>(
      names.hashes.substr(static_cast<size_t>(first * kHashBytes), static_cast<size_t>(count * kHashBytes)));
}

KvPrefixCache::Entries::iterator KvPrefixCache::Erase(Entries::iterator entry, std::vector<KvPiece>& gone) {
  for (Piece& piece : entry->pieces) {
    const auto held = held_.find(piece.kept.run.get());
    if (--held->second.pieces == 0) held_.erase(held);
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

int64_t KvPrefixCache::bytes() const {
  int64_t sum = 0;
  for (const auto& [run, held] : held_) sum += ChargedBytes(*run);
  return sum;
}

int64_t KvPrefixCache::EvictableBytes() const {
  int64_t sum = 0;
  for (const auto& [run, held] : held_) {
    if (!held.by_others()) sum += ChargedBytes(*run);
  }
  return sum;
}

std::vector<const KvRunSlabs*> KvPrefixCache::EvictableRuns() const {
  std::vector<const KvRunSlabs*> runs;
  for (const auto& [run, held] : held_) {
    if (!held.by_others()) runs.push_back(run);
  }
  return runs;
}

}  // namespace meshfill
