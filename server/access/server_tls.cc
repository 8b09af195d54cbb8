#include "server/access/server_tls.h"

#include <openssl/pem.h>
#include <openssl/x509v3.h>

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/return_if_error.h"
#include "server/observe/log.h"

namespace meshfill {
namespace {

constexpr unsigned char kProtocols[] = {2, 'h', '2'};  // ALPN, RFC 7301
// What RFC 9113 §9.2.2 allows of TLS 1.2. Those of TLS 1.3 are OpenSSL's own choice.
constexpr char kCiphers[] = "ECDHE+AESGCM:ECDHE+CHACHA20";

using Names = std::unique_ptr<GENERAL_NAMES, Freed<GENERAL_NAMES_free>>;

// Takes HTTP/2 of what the client offers; refuses a client that offers other protocols alone.
int ChooseProtocol(SSL* /*connection*/, const unsigned char** chosen, unsigned char* chosen_size,
                   const unsigned char* offered, unsigned offered_size, void* /*unused*/) {
  unsigned char* found = nullptr;
  if (SSL_select_next_proto(&found, chosen_size, kProtocols, sizeof(kProtocols), offered, offered_size) !=
      OPENSSL_NPN_NEGOTIATED) {
    return SSL_TLSEXT_ERR_ALERT_FATAL;
  }
  *chosen = found;
  return SSL_TLSEXT_ERR_OK;
}

Certificate NextCertificate(BIO* pem) {
  return Certificate(PEM_read_bio_X509(pem, nullptr, nullptr, nullptr));
}

bool UseIdentity(SSL_CTX* context, const TlsPems& pems) {
  const Bio chain = ReadFrom(pems.cert);
  const Certificate own = NextCertificate(chain.get());
  if (own == nullptr || SSL_CTX_use_certificate(context, own.get()) != 1) return false;
  while (const Certificate next = NextCertificate(chain.get())) {
    if (SSL_CTX_add1_chain_cert(context, next.get()) != 1) return false;
  }
  const Key key(PEM_read_bio_PrivateKey(ReadFrom(pems.key).get(), nullptr, nullptr, nullptr));
  return key != nullptr && SSL_CTX_use_PrivateKey(context, key.get()) == 1;
}

bool TrustAuthorities(SSL_CTX* context, const std::string& pem) {
  const Bio authorities = ReadFrom(pem);
  X509_STORE* const trusted = SSL_CTX_get_cert_store(context);
  X509_STORE_set_flags(trusted, X509_V_FLAG_PARTIAL_CHAIN | X509_V_FLAG_TRUSTED_FIRST);
  while (const Certificate next = NextCertificate(authorities.get())) {
    if (X509_STORE_add_cert(trusted, next.get()) != 1 || SSL_CTX_add_client_CA(context, next.get()) != 1) {
      return false;
    }
  }
  SSL_CTX_set_verify(context, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
  return true;
}

absl::StatusOr<TlsContext> MakeContext(const TlsPems& pems, bool client_certificates) {
  ERR_clear_error();
  TlsContext context(SSL_CTX_new(TLS_server_method()));
  bool made = context != nullptr;
  if (made) {
    SSL_CTX_set_alpn_select_cb(context.get(), ChooseProtocol, nullptr);
    // Frames have their sizes within: an end of the connection need not be announced.
    SSL_CTX_set_options(context.get(),
                        SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_TICKET | SSL_OP_IGNORE_UNEXPECTED_EOF);
    SSL_CTX_set_session_cache_mode(context.get(), SSL_SESS_CACHE_OFF);
    SSL_CTX_set_mode(context.get(), SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER |
                                        SSL_MODE_RELEASE_BUFFERS);
    made = SSL_CTX_set_min_proto_version(context.get(), TLS1_2_VERSION) == 1 &&
           SSL_CTX_set_cipher_list(context.get(), kCiphers) == 1 &&
           SSL_CTX_set_num_tickets(context.get(), 0) == 1 && UseIdentity(context.get(), pems) &&
           (!client_certificates || TrustAuthorities(context.get(), pems.ca));
  }
  if (!made) return absl::InternalError(absl::StrCat("TLS cannot be set up: ", OpenSslReason()));
  ERR_clear_error();  // each file's end counts as one
  return context;
}

void AddName(std::vector<std::string>& names, const ASN1_STRING* name) {
  unsigned char* text = nullptr;
  const int size = ASN1_STRING_to_UTF8(&text, name);
  if (size < 0) return;
  names.emplace_back(reinterpret_cast<const char*>(text), static_cast<size_t>(size));
  OPENSSL_free(text);
}

}  // namespace

absl::StatusOr<std::unique_ptr<ServerTls>> ServerTls::Open(const TlsFiles& files, bool client_certificates) {
  std::unique_ptr<ServerTls> tls(new ServerTls(files, client_certificates));
  ASSIGN_OR_RETURN(TlsPems pems, ReadTlsFiles(files, TlsSide::kServer));
  RETURN_IF_ERROR(tls->Take(std::move(pems)));
  tls->watch_.Start([tls = tls.get()] { tls->Reload(); });
  return tls;
}

TlsConnection ServerTls::Accept(int socket) const {
  TlsConnection connection;
  {
    const MutexLock lock(mu_);
    connection.reset(SSL_new(context_.get()));
  }
  if (connection == nullptr || SSL_set_fd(connection.get(), socket) != 1) return nullptr;
  SSL_set_accept_state(connection.get());
  return connection;
}

std::vector<std::string> ServerTls::NamesOfClient(const SSL& connection) {
  std::vector<std::string> names;
  X509* const certificate = SSL_get0_peer_certificate(&connection);
  if (certificate == nullptr) return names;
  const X509_NAME* const subject = X509_get_subject_name(certificate);
  if (const int at = X509_NAME_get_index_by_NID(subject, NID_commonName, -1); at >= 0) {
    AddName(names, X509_NAME_ENTRY_get_data(X509_NAME_get_entry(subject, at)));
  }
  const Names others(
      static_cast<GENERAL_NAMES*>(X509_get_ext_d2i(certificate, NID_subject_alt_name, nullptr, nullptr)));
  for (int i = 0; i < sk_GENERAL_NAME_num(others.get()); ++i) {
    const GENERAL_NAME* const name = sk_GENERAL_NAME_value(others.get(), i);
    if (name->type == GEN_DNS) AddName(names, name->d.dNSName);
  }
  return names;
}

absl::Status ServerTls::Take(TlsPems pems) {
  ASSIGN_OR_RETURN(TlsContext context, MakeContext(pems, client_certificates_));
  pems_ = std::move(pems);
  const MutexLock lock(mu_);
  context_ = std::move(context);
  return absl::OkStatus();
}

void ServerTls::Reload() {
  absl::StatusOr<TlsPems> pems = ReadTlsFiles(files_, TlsSide::kServer);
  if (pems.ok() && *pems == pems_) return;
  const absl::Status taken = pems.ok() ? Take(*std::move(pems)) : pems.status();
  if (taken.ok())
    return Log(absl::StrCat("new connections get the certificate that is now in ", files_.cert));
  Log(absl::StrCat("the certificate stays as it was: ", taken.message()), {.level = LogLevel::kWarning});
}

}  // namespace meshfill
