#include "engine/kv/block_hash.h"

#include <openssl/sha.h>

#include <algorithm>

namespace meshfill {
namespace {

// Canonical CBOR (RFC 8949): the first byte of an item is its major type and, where that fits, its value.
enum class Major : uint8_t { kUnsigned = 0, kBytes = 2, kText = 3, kArray = 4 };
constexpr char kNull = '\xf6';

void AppendHead(Major major, uint64_t value, std::string& out) {
  const auto first = static_cast<uint8_t>(static_cast<uint8_t>(major) << 5);
  if (value < 24) {
    out.push_back(static_cast<char>(first | value));
    return;
  }
  const int log_bytes = value < 1u << 8 ? 0 : value < 1u << 16 ? 1 : value < uint64_t{1} << 32 ? 2 : 3;
  out.push_back(static_cast<char>(first | (24 + log_bytes)));
  for (int shift = (8 << log_bytes) - 8; shift >= 0; shift -= 8) {
    out.push_back(static_cast<char>(value >> shift));
  }
}

void AppendText(std::string_view text, std::string& out) {
  AppendHead(Major::kText, text.size(), out);
  out.append(text);
}

Sha256 HashOf(std::string_view bytes) {
  Sha256 hash;
  SHA256(reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(), hash.data());
  return hash;
}

}  // namespace

Sha256 FirstBlockParent() {
  std::string cbor;
  AppendText("vllm-none-hash", cbor);
  return HashOf(cbor);
}

BlockHasher::BlockHasher(int block_tokens, std::string_view cache_salt)
    : block_tokens_(block_tokens), salt_(cache_salt), parent_(FirstBlockParent()) {}

void BlockHasher::Append(std::span<const uint32_t> tokens) {
  while (!tokens.empty()) {
    const size_t taken = std::min(tokens.size(), block_tokens_ - block_.size());
    block_.insert(block_.end(), tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(taken));
    tokens = tokens.subspan(taken);
    if (block_.size() == static_cast<size_t>(block_tokens_)) HashBlock();
  }
}

void BlockHasher::HashBlock() {
  std::string cbor;
  AppendHead(Major::kArray, 3, cbor);
  AppendHead(Major::kBytes, parent_.size(), cbor);
  cbor.append(reinterpret_cast<const char*>(parent_.data()), parent_.size());
  AppendHead(Major::kArray, block_.size(), cbor);
  for (const uint32_t token : block_) AppendHead(Major::kUnsigned, token, cbor);
  if (salt_.empty()) {
    cbor.push_back(kNull);
  } else {
    AppendHead(Major::kArray, 1, cbor);
    AppendHead(Major::kArray, 2, cbor);
    AppendText("cache_salt", cbor);
    AppendText(salt_, cbor);
    salt_.clear();  // only the first block is salted
  }
  parent_ = HashOf(cbor);
  hashes_.append(reinterpret_cast<const char*>(parent_.data()), parent_.size());
  block_.clear();
}

}  // namespace meshfill
