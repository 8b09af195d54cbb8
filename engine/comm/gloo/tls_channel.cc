#include "engine/comm/gloo/tls_channel.h"

#include <openssl/core_names.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/kdf.h>
#include <openssl/params.h>
#include <openssl/ssl.h>

#include "absl/strings/str_cat.h"

namespace meshfill {
namespace {

constexpr std::string_view kKeyName = "meshfill data plane";
constexpr size_t kReadAheadBytes = 128 << 10;  // fetched from the socket at a time

// Both have SHA-256 as their hash, as a pre-shared key must have one.
const char* Ciphers() {
  return __builtin_cpu_supports("aes") ? "TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256"
                                       : "TLS_CHACHA20_POLY1305_SHA256:TLS_AES_128_GCM_SHA256";
}
constexpr unsigned char kKeyCipher[] = {0x13, 0x01};  // one with that hash

SSL_CTX* MakeContext() {
  SSL_CTX* const context = SSL_CTX_new(TLS_method());
  if (context == nullptr) return nullptr;
  // Messages have their sizes within: an end of the connection need not be announced.
  SSL_CTX_set_options(context, SSL_OP_IGNORE_UNEXPECTED_EOF);
  SSL_CTX_set_mode(context, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
  SSL_CTX_set_default_read_buffer_len(context, kReadAheadBytes);
  if (SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION) == 1 &&
      SSL_CTX_set_ciphersuites(context, Ciphers()) == 1 && SSL_CTX_set_num_tickets(context, 0) == 1) {
    return context;
  }
  SSL_CTX_free(context);
  return nullptr;
}

// What OpenSSL keeps of the last failure of this thread, which is then forgotten.
std::string LastReason() {
  const unsigned long code = ERR_get_error();
  ERR_clear_error();
  const char* const reason = ERR_reason_error_string(code);
  return reason == nullptr ? "unknown" : reason;
}

// A channel's key, in the form in which OpenSSL takes one; null: no memory.
SSL_SESSION* KeyAsSession(SSL* ssl) {
  const auto* const key = static_cast<const TlsChannel::Key*>(SSL_get_app_data(ssl));
  SSL_SESSION* const session = SSL_SESSION_new();
  if (session != nullptr && SSL_SESSION_set1_master_key(session, key->data(), key->size()) == 1 &&
      SSL_SESSION_set_cipher(session, SSL_CIPHER_find(ssl, kKeyCipher)) == 1 &&
      SSL_SESSION_set_protocol_version(session, TLS1_3_VERSION) == 1) {
    return session;
  }
  SSL_SESSION_free(session);
  return nullptr;
}

// OpenSSL asks a client for its key, and a server for the key of this name.
int OfferKey(SSL* ssl, const EVP_MD* /*digest*/, const unsigned char** name, size_t* name_bytes,
             SSL_SESSION** session) {
  *session = KeyAsSession(ssl);
  *name = reinterpret_cast<const unsigned char*>(kKeyName.data());
  *name_bytes = kKeyName.size();
  return *session != nullptr;
}
int FindKey(SSL* ssl, const unsigned char* name, size_t name_bytes, SSL_SESSION** session) {
  const bool known = std::string_view(reinterpret_cast<const char*>(name), name_bytes) == kKeyName;
  *session = known ? KeyAsSession(ssl) : nullptr;
  return 1;
}

}  // namespace

absl::StatusOr<TlsChannel::Key> TlsChannel::DeriveKey(std::span<const uint8_t> secret, std::string_view use) {
  // OpenSSL reads what its parameters point to, and declares it writable.
  const OSSL_PARAM parameters[] = {
      OSSL_PARAM_construct_utf8_string(OSSL_KDF_PARAM_DIGEST, const_cast<char*>("SHA256"), 0),
      OSSL_PARAM_construct_octet_string(OSSL_KDF_PARAM_KEY, const_cast<uint8_t*>(secret.data()),
                                        secret.size()),
      OSSL_PARAM_construct_octet_string(OSSL_KDF_PARAM_INFO, const_cast<char*>(use.data()), use.size()),
      OSSL_PARAM_construct_end(),
  };
  const std::unique_ptr<EVP_KDF, decltype(&EVP_KDF_free)> hkdf(EVP_KDF_fetch(nullptr, "HKDF", nullptr),
                                                               &EVP_KDF_free);
  const std::unique_ptr<EVP_KDF_CTX, decltype(&EVP_KDF_CTX_free)> context(EVP_KDF_CTX_new(hkdf.get()),
                                                                          &EVP_KDF_CTX_free);
  Key key;
  if (context == nullptr || EVP_KDF_derive(context.get(), key.data(), key.size(), parameters) != 1) {
    return absl::InternalError(absl::StrCat("OpenSSL derives no key: ", LastReason()));
  }
  return key;
}

absl::StatusOr<std::unique_ptr<TlsChannel>> TlsChannel::Make(Side side, int socket, const Key& key,
                                                             uint64_t bytes_per_key) {
  static SSL_CTX* const context = MakeContext();  // shared by all channels, to the end of the process
  std::unique_ptr<TlsChannel> channel(new TlsChannel(key, bytes_per_key));
  SSL* const ssl = channel->ssl_ = context == nullptr ? nullptr : SSL_new(context);
  if (ssl == nullptr || SSL_set_fd(ssl, socket) != 1) {
    return absl::InternalError(absl::StrCat("TLS cannot be set up: ", LastReason()));
  }
  SSL_set_app_data(ssl, &channel->key_);
  if (side == Side::kClient) {
    SSL_set_psk_use_session_callback(ssl, &OfferKey);
    SSL_set_connect_state(ssl);
  } else {
    SSL_set_psk_find_session_callback(ssl, &FindKey);
    SSL_set_accept_state(ssl);
  }
  return channel;
}

TlsChannel::~TlsChannel() { SSL_free(ssl_); }

TlsChannel::State TlsChannel::Handshake() {
  ERR_clear_error();
  const State state = StateOf(SSL_do_handshake(ssl_));
  // Not before: what the peer sent behind its handshake stays in the socket, whose events tell of it.
  if (state == State::kDone) SSL_set_read_ahead(ssl_, 1);
  return state;
}

TlsChannel::Moved TlsChannel::Write(const void* data, size_t bytes) {
  ERR_clear_error();
  if (bytes_by_key_ >= bytes_per_key_) {
    bytes_by_key_ = 0;
    if (SSL_key_update(ssl_, SSL_KEY_UPDATE_NOT_REQUESTED) != 1) return {StateOf(0), 0};
  }
  size_t written = 0;
  const State state = StateOf(SSL_write_ex(ssl_, data, bytes, &written));
  bytes_by_key_ += written;
  return {state, written};
}

TlsChannel::Moved TlsChannel::Read(void* data, size_t bytes) {
  ERR_clear_error();
  size_t read = 0;
  const State state = StateOf(SSL_read_ex(ssl_, data, bytes, &read));
  return {state, read};
}

TlsChannel::State TlsChannel::StateOf(int result) {
  switch (SSL_get_error(ssl_, result)) {
    case SSL_ERROR_NONE:
      return State::kDone;
    case SSL_ERROR_WANT_READ:
      return State::kWantsRead;
    case SSL_ERROR_WANT_WRITE:
      return State::kWantsWrite;
    case SSL_ERROR_ZERO_RETURN:
    case SSL_ERROR_SYSCALL:
      return State::kEnded;
    default:
      error_ = absl::StrCat("TLS: ", LastReason());
      return State::kFailed;
  }
}

}  // namespace meshfill
