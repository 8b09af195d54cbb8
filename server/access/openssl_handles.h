// Owners of OpenSSL's objects, and its reasons.
#ifndef MESHFILL_SERVER_ACCESS_OPENSSL_HANDLES_H_
#define MESHFILL_SERVER_ACCESS_OPENSSL_HANDLES_H_

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>

#include <memory>
#include <string>

namespace meshfill {

template <auto Free>
struct Freed {
  template <typename T>
  void operator()(T* object) const {
    Free(object);
  }
};
using Bio = std::unique_ptr<BIO, Freed<BIO_free>>;
using Certificate = std::unique_ptr<X509, Freed<X509_free>>;
using Key = std::unique_ptr<EVP_PKEY, Freed<EVP_PKEY_free>>;
using TlsContext = std::unique_ptr<SSL_CTX, Freed<SSL_CTX_free>>;
using TlsConnection = std::unique_ptr<SSL, Freed<SSL_free>>;

// Why this thread's last call of OpenSSL failed; forgets it, and all before it.
inline std::string OpenSslReason() {
  const char* const reason = ERR_reason_error_string(ERR_peek_last_error());
  ERR_clear_error();
  return reason == nullptr ? "OpenSSL says not why" : reason;
}

// Reads PEM that is in memory; `text` outlives it.
inline Bio ReadFrom(const std::string& text) {
  return Bio(BIO_new_mem_buf(text.data(), static_cast<int>(text.size())));
}

}  // namespace meshfill

#endif  // MESHFILL_SERVER_ACCESS_OPENSSL_HANDLES_H_
