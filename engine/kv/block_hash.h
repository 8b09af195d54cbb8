// Names of a prompt's blocks by their contents, as vLLM has them with --prefix-caching-hash-algo sha256_cbor:
//
//     h(i) = SHA-256(CBOR [h(i − 1), [tokens of block i], extra]),   h(−1) = SHA-256(CBOR "vllm-none-hash")
//
// So a block's name stands for all tokens up to its end. `extra` is null; in the first block of a salted
// prompt, [["cache_salt", salt]].
#ifndef MESHFILL_ENGINE_KV_BLOCK_HASH_H_
#define MESHFILL_ENGINE_KV_BLOCK_HASH_H_

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace meshfill {

using Sha256 = std::array<uint8_t, 32>;

Sha256 FirstBlockParent();  // h(−1)

// Hashes a prompt as its tokens come.
class BlockHasher {
 public:
  // `block_tokens` ≥ 1. An empty salt: none.
  BlockHasher(int block_tokens, std::string_view cache_salt);

  void Append(std::span<const uint32_t> tokens);

  // Hashes of the whole blocks so far, 32 bytes each. Tokens of an unfinished block have none yet.
  const std::string& hashes() const { return hashes_; }

 private:
  void HashBlock();

  const int block_tokens_;
  std::string salt_;  // goes into the next block's hash
  Sha256 parent_;
  std::vector<uint32_t> block_;  // not yet whole
  std::string hashes_;
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_KV_BLOCK_HASH_H_
