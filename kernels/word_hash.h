// A hash of 64-bit words that is the same on every machine: by it processes know that they mean the same
// thing. Not against malice.
#ifndef MESHFILL_KERNELS_WORD_HASH_H_
#define MESHFILL_KERNELS_WORD_HASH_H_

#include <bit>
#include <cstdint>

namespace meshfill {

// One multiply and one rotation a word, then SplitMix64's finish, which spreads every bit.
class WordHash {
 public:
  void Add(uint64_t word) { state_ = std::rotl((state_ ^ word) * 0x9E3779B97F4A7C15u, 29); }
  uint64_t Finish() const {
    uint64_t hash = state_;
    hash = (hash ^ (hash >> 30)) * 0xBF58476D1CE4E5B9u;
    hash = (hash ^ (hash >> 27)) * 0x94D049BB133111EBu;
    return hash ^ (hash >> 31);
  }

 private:
  uint64_t state_ = 0x6D657368;  // any but 0
};

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_WORD_HASH_H_
