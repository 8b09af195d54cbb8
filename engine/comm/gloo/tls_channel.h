// TLS 1.3 over a connected, non-blocking socket between two ranks that share a key and have no certificates.
//
// The key is the external pre-shared key of RFC 8446, section 2.2, with an ephemeral exchange (psk_dhe_ke):
// who has not the key gets no byte across, and who learns it later can read nothing that was sent before.
// Records have a sequence number of their own and a tag of 128 bits: a byte that is changed, left out,
// repeated or moved ends the connection. AES-128-GCM where the processor has AES instructions, else
// ChaCha20-Poly1305; by OpenSSL.
//
// Cost: 22 bytes for each 16 KiB; a handshake takes a round trip and a half, and an exchange on X25519.
//
// Not thread-safe. A call that has failed for good is the last one.
#ifndef MESHFILL_ENGINE_COMM_GLOO_TLS_CHANNEL_H_
#define MESHFILL_ENGINE_COMM_GLOO_TLS_CHANNEL_H_

#include <openssl/types.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace meshfill {

class TlsChannel {
 public:
  enum class Side { kClient, kServer };
  using Key = std::array<uint8_t, 32>;
  // Far below the 2^24.5 records of 16 KiB that AES-GCM may protect with one key (RFC 8446, section 5.5).
  static constexpr uint64_t kBytesPerKey = uint64_t{64} << 30;

  // What became of a call.
  enum class State {
    kDone,
    kWantsRead,   // call again once the socket is readable
    kWantsWrite,  // call again with the same bytes once the socket is writable
    kEnded,       // the peer has closed its side, or is gone
    kFailed,      // error() says why: the other has another key, or what came is not what it sent
  };
  struct Moved {
    State state;
    size_t bytes;  // more than 0 where it is done
  };

  // A key that tells nothing of `secret`, and is another for another use (HKDF with SHA-256, RFC 5869).
  // INTERNAL: OpenSSL cannot.
  static absl::StatusOr<Key> DeriveKey(std::span<const uint8_t> secret, std::string_view use);

  // Does not own the socket, which stays open until the channel is gone or called no more. The channel
  // changes the key of what it sends after each `bytes_per_key`. INTERNAL: OpenSSL has no memory, or lacks
  // the ciphers.
  static absl::StatusOr<std::unique_ptr<TlsChannel>> Make(Side side, int socket, const Key& key,
                                                          uint64_t bytes_per_key = kBytesPerKey);
  ~TlsChannel();

  // Once it is done, nothing that was sent behind it is in the channel yet: the socket is readable.
  State Handshake();
  // After the handshake: at most `bytes` (above 0) from `data` or into it.
  Moved Write(const void* data, size_t bytes);
  Moved Read(void* data, size_t bytes);

  const std::string& error() const { return error_; }  // why the state is kFailed, for people

 private:
  explicit TlsChannel(const Key& key, uint64_t bytes_per_key) : key_(key), bytes_per_key_(bytes_per_key) {}

  State StateOf(int result);

  Key key_;
  const uint64_t bytes_per_key_;
  uint64_t bytes_by_key_ = 0;  // bytes that this side has sent since it changed its key
  SSL* ssl_ = nullptr;
  std::string error_;
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_COMM_GLOO_TLS_CHANNEL_H_
