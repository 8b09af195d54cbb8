#include "server/access/tls_files.h"

#include <openssl/pem.h>
#include <openssl/x509v3.h>

#include <ctime>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/return_if_error.h"
#include "server/access/openssl_handles.h"
#include "server/access/small_file.h"

namespace meshfill {
namespace {

// One of the files: "pool.tls.cert: /etc/tls.crt".
struct File {
  std::string key, path, text;

  absl::Status Error(absl::string_view problem) const {
    return absl::InvalidArgumentError(absl::StrCat(key, ": ", path, " ", problem));
  }
};

absl::StatusOr<File> Read(const TlsFiles& files, const char* name, const std::string& path) {
  File file{.key = files.prefix + name, .path = path, .text = ""};
  ASSIGN_OR_RETURN(file.text, ReadSmallFile(file.key, path));
  return file;
}

std::string Date(const ASN1_TIME* time) {
  const Bio bio(BIO_new(BIO_s_mem()));
  ASN1_TIME_print(bio.get(), time);
  const char* text = nullptr;
  const auto size = BIO_get_mem_data(bio.get(), &text);
  return {text, static_cast<size_t>(size)};
}

std::string Subject(X509* certificate) {
  char name[256] = {};
  X509_NAME_oneline(X509_get_subject_name(certificate), name, sizeof(name));
  return name;
}

int NoPassword(char*, int, int, void* asked) {
  *static_cast<bool*>(asked) = true;
  return -1;
}

absl::StatusOr<std::vector<Certificate>> Certificates(const File& file) {
  const Bio bio = ReadFrom(file.text);
  std::vector<Certificate> found;
  while (X509* const next = PEM_read_bio_X509(bio.get(), nullptr, nullptr, nullptr)) found.emplace_back(next);
  const bool at_end = ERR_GET_REASON(ERR_peek_last_error()) == PEM_R_NO_START_LINE;
  const std::string reason = OpenSslReason();
  if (!at_end) {
    return file.Error(
        absl::StrCat("has a damaged certificate, number ", found.size() + 1, ": ", reason, "; copy it anew"));
  }
  if (!found.empty()) return found;
  if (absl::StrContains(file.text, "CERTIFICATE REQUEST-----")) {
    return file.Error("is a signing request; name the certificate that an authority made of it");
  }
  return file.Error(
      absl::StrContains(file.text, "PRIVATE KEY-----")
          ? "has a private key and no certificate; name the certificate's file here"
          : "has no certificate in PEM (-----BEGIN CERTIFICATE-----); `openssl x509 -inform der` "
            "makes one of DER");
}

absl::StatusOr<Key> PrivateKey(const File& file) {
  const Bio bio = ReadFrom(file.text);
  bool encrypted = false;
  Key key(PEM_read_bio_PrivateKey(bio.get(), nullptr, NoPassword, &encrypted));
  const std::string reason = OpenSslReason();
  if (key != nullptr) return key;
  if (encrypted) {
    return file.Error("is encrypted, and nobody is there to give its password; `openssl pkey` decrypts it");
  }
  if (absl::StrContains(file.text, "BEGIN OPENSSH PRIVATE KEY-----"))
    return file.Error("is a key of OpenSSH's; `openssl genpkey -algorithm ED25519` makes one for TLS");
  if (absl::StrContains(file.text, "PRIVATE KEY-----"))
    return file.Error(absl::StrCat("has a damaged private key: ", reason, "; copy it anew"));
  if (absl::StrContains(file.text, "BEGIN PUBLIC KEY-----"))
    return file.Error("has a public key; name the private one, which stays on this machine");
  return file.Error(
      absl::StrContains(file.text, "BEGIN CERTIFICATE-----")
          ? "has a certificate and no private key; name the key's file here"
          : "has no private key in PEM (-----BEGIN PRIVATE KEY-----); `openssl pkey -inform der` "
            "makes one of DER");
}

// What is wrong with a certificate's time; none: nothing.
std::optional<std::string> OutOfTime(X509* certificate) {
  const time_t now = absl::ToTimeT(absl::Now());
  const ASN1_TIME* const end = X509_get0_notAfter(certificate);
  if (ASN1_TIME_cmp_time_t(end, now) < 0) {
    return absl::StrCat("has expired at ", Date(end), " (", Subject(certificate), "); renew it");
  }
  const ASN1_TIME* const begin = X509_get0_notBefore(certificate);
  if (ASN1_TIME_cmp_time_t(begin, now) > 0) {
    return absl::StrCat("is not valid before ", Date(begin), " (", Subject(certificate),
                        "); wait, or set this machine's clock");
  }
  return std::nullopt;
}

absl::Status CheckSide(const File& file, X509* certificate, TlsSide side) {
  for (const auto& [purpose, of, name, usage] :
       {std::tuple(X509_PURPOSE_SSL_SERVER, TlsSide::kServer, "server", "serverAuth"),
        std::tuple(X509_PURPOSE_SSL_CLIENT, TlsSide::kClient, "client", "clientAuth")}) {
    if (side != of) continue;
    if (X509_check_purpose(certificate, purpose, 0) == 1) continue;
    return file.Error(
        absl::StrCat("must not be a ", name, "'s certificate, as its key usage says; make one with ", usage));
  }
  return absl::OkStatus();
}

absl::Status CheckIdentity(const File& cert_file, const File& key_file, TlsSide side) {
  ASSIGN_OR_RETURN(const auto chain, Certificates(cert_file));
  X509* const certificate = chain.front().get();
  for (const Certificate& each : chain) {
    if (const auto problem = OutOfTime(each.get())) return cert_file.Error(*problem);
  }
  for (size_t i = 0; i + 1 < chain.size(); ++i) {
    if (X509_check_issued(chain[i + 1].get(), chain[i].get()) == X509_V_OK) continue;
    return cert_file.Error(absl::StrCat("has a chain out of order: certificate ", i + 2,
                                        " did not sign the one before it; begin with one's own, end with the "
                                        "authority's"));
  }
  ASSIGN_OR_RETURN(const auto key, PrivateKey(key_file));
  if (X509_check_private_key(certificate, key.get()) != 1) {
    OpenSslReason();
    return key_file.Error(absl::StrCat("is not the key of the certificate in ", cert_file.path,
                                       "; name the one it was made with"));
  }
  const TlsContext context(SSL_CTX_new(TLS_method()));
  if (SSL_CTX_use_certificate(context.get(), certificate) != 1) {
    return cert_file.Error(absl::StrCat("cannot be used: ", OpenSslReason(), "; make a stronger one"));
  }
  return CheckSide(cert_file, certificate, side);
}

absl::Status CheckAuthorities(const File& file) {
  ASSIGN_OR_RETURN(const auto authorities, Certificates(file));
  std::optional<std::string> problem;
  for (const Certificate& each : authorities) {
    // A certificate that has signed itself is trusted as it is.
    const bool signs =
        X509_check_ca(each.get()) != 0 || X509_check_issued(each.get(), each.get()) == X509_V_OK;
    problem = signs ? OutOfTime(each.get())
                    : absl::StrCat("is no authority's certificate (", Subject(each.get()),
                                   "); name the one that signed it");
    if (!problem.has_value()) return absl::OkStatus();  // one that can be used is enough
  }
  return file.Error(*problem);
}

}  // namespace

absl::StatusOr<TlsPems> ReadTlsFiles(const TlsFiles& files, TlsSide side) {
  TlsPems pems;
  ERR_clear_error();
  if (!files.cert.empty()) {
    ASSIGN_OR_RETURN(File cert, Read(files, "cert", files.cert));
    ASSIGN_OR_RETURN(File key, Read(files, "key", files.key));
    RETURN_IF_ERROR(CheckIdentity(cert, key, side));
    pems.cert = std::move(cert.text);
    pems.key = std::move(key.text);
  }
  if (!files.ca.empty()) {
    ASSIGN_OR_RETURN(File ca, Read(files, "ca", files.ca));
    RETURN_IF_ERROR(CheckAuthorities(ca));
    pems.ca = std::move(ca.text);
  }
  return pems;
}

}  // namespace meshfill
