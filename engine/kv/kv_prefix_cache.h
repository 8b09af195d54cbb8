// K and V of finished prompts, found again by the names of their blocks (block_hash.h).
//
// Each tenant has its own; a salt is part of the names. Prompts share the slabs of what they have in common,
// and so do the entries here: an entry that goes frees what no other one and nobody else holds.
//
//     entry, by its last use    pieces             held by
//     1                         run 1              entries 1 and 2: stays while 2 is here
//     2                         run 1, run 2       run 2: this entry alone. It goes first, then entry 1
//
// Not thread-safe: KvStore has the lock. What goes is handed to the caller, who drops it outside of the lock.
// The leader of a pool of workers has one, too, whose runs have no slabs (server/pool/kv_directory.h).
#ifndef MESHFILL_ENGINE_KV_KV_PREFIX_CACHE_H_
#define MESHFILL_ENGINE_KV_KV_PREFIX_CACHE_H_

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/kv/kv_slabs.h"

namespace meshfill {

// Two prompts of one tenant that agree in the name of a block begin with the same tokens up to its end, in
// blocks of the same size. Their K and V up to there are the same where `long_rope` is, too.
struct KvBlockNames {
  std::string tenant;
  int block_tokens = 16;
  std::string hashes;      // SHA-256 hashes of the prompt's whole blocks, 32 bytes each (BlockHasher)
  bool long_rope = false;  // ModelShape::HasLongRope of the prompt

  int64_t blocks() const;
};

class KvPrefixCache {
 public:
  // The longest prefix of whole blocks that is here; no pieces: none. Counts as a use of its entry.
  KvSlabs Find(const KvBlockNames& names);
  // Find, without counting as a use.
  KvSlabs Look(const KvBlockNames& names) const;

  // All tokens of a prompt; every piece begins where a block does. Nothing happens where all its blocks are
  // here already.
  void Enter(const KvBlockNames& names, const KvSlabs& slabs);

  // Takes the entry out that was not used for longest, of those that free anything. Empty: none does.
  std::vector<KvPiece> Evict();
  // Takes the entries out that have a run of which `is_lost` is true.
  std::vector<KvPiece> EraseIf(const std::function<bool(const KvRunSlabs&)>& is_lost);

  int64_t bytes() const { return bytes_; }  // that the entries hold; K and V in several entries count once
  int64_t EvictableBytes() const;           // bytes that would be free if all entries went

 private:
  struct Piece {
    KvPiece kept;
    std::shared_ptr<const std::string> hashes;  // hashes of the run's blocks, at least of those that are kept
  };
  struct Entry {
    std::string tenant;
    int block_tokens = 0;
    bool long_rope = false;
    KvShape shape;
    std::vector<Piece> pieces;
    int64_t last_use = 0;
  };
  using Entries = std::list<Entry>;

  struct HeldRun {
    std::shared_ptr<const KvRunSlabs> run;
    std::shared_ptr<const std::string> hashes;  // of the longest piece
    int64_t bytes = 0;                          // that the run charges
    int64_t pieces = 0;                         // how many pieces of the entries are of this run

    bool by_others() const { return run.use_count() > pieces + 1; }  // the one here
  };

  // Takes the entry out; what it had is handed to `gone`.
  Entries::iterator Erase(Entries::iterator entry, std::vector<KvPiece>& gone);

  static int64_t BlocksInCommon(const Entry& entry, const KvBlockNames& names);
  // The entry that has most in common, of several the last used; `blocks` is how much.
  Entries::iterator Best(const KvBlockNames& names, int64_t& blocks) const;
  void Use(Entries::iterator entry);
  // Counts the piece; its blocks' hashes are those of a piece of the same run, where one is as long.
  void Hold(Piece& piece, const KvBlockNames& names);

  Entries entries_;                                                         // the last used first
  std::unordered_multimap<std::string, Entries::iterator> by_first_block_;  // by the hash of its first block
  std::unordered_map<const KvRunSlabs*, HeldRun> held_;                     // runs that the entries hold
  int64_t bytes_ = 0;
  int64_t uses_ = 0;
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_KV_KV_PREFIX_CACHE_H_
