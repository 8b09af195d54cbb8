// Certificates made for a test: an authority, and what it signs, as PEM files in a folder of the test's own.
#ifndef MESHFILL_TESTS_SERVER_ACCESS_TEST_CERTIFICATES_H_
#define MESHFILL_TESTS_SERVER_ACCESS_TEST_CERTIFICATES_H_

#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/rand.h>
#include <openssl/x509v3.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "meshfill/v1/config.pb.h"

namespace meshfill {

class TestCertificates {
 public:
  using Key = std::shared_ptr<EVP_PKEY>;
  using Certificate = std::shared_ptr<X509>;

  struct Kind {
    std::string usage = "serverAuth,clientAuth";  // extended key usage; "": any
    std::string other_names = "";                 // subjectAltName; "": the DNS name
    long begins_in_seconds = -3600, ends_in_seconds = 86400;
    bool authority = false;
    int rsa_bits = 0;  // 0: P-256
  };

  TestCertificates() {
    char folder[] = "/tmp/meshfill_certificates_XXXXXX";
    folder_ = mkdtemp(folder);
    authority_key_ = MakeKey(0);
    // OpenSSL looks authorities up by name: no two have the same one.
    authority_ = Sign("authority of " + folder_, authority_key_, {.usage = "", .authority = true}, nullptr,
                      authority_key_);
    Write("ca.pem", Pem(authority_));
  }
  ~TestCertificates() { std::filesystem::remove_all(folder_); }
  TestCertificates(const TestCertificates&) = delete;
  TestCertificates& operator=(const TestCertificates&) = delete;

  std::string Path(const std::string& file) const { return absl::StrCat(folder_, "/", file); }
  std::string Write(const std::string& file, const std::string& text) const {
    const std::string next = Path(file) + ".next";
    std::ofstream(next, std::ios::binary) << text;
    std::filesystem::rename(next, Path(file));  // as programs do that renew certificates
    return Path(file);
  }
  static std::string Read(const std::string& path) {
    std::ostringstream text;
    text << std::ifstream(path, std::ios::binary).rdbuf();
    return text.str();
  }

  // NAME.pem and NAME.key of a host with this name. Made anew where they are there.
  void Make(const std::string& name, const Kind& kind) const {
    const Key key = MakeKey(kind.rsa_bits);
    Write(name + ".key", Pem(key));
    Write(name + ".pem", Pem(Sign(name, key, kind, authority_, authority_key_)));
  }
  v1::ApiSection::Tls Tls(const std::string& name) const {
    if (!std::filesystem::exists(Path(name + ".pem"))) Make(name, {});
    v1::ApiSection::Tls tls;
    tls.set_cert(Path(name + ".pem"));
    tls.set_key(Path(name + ".key"));
    tls.set_ca(Path("ca.pem"));
    return tls;
  }

  static Key MakeKey(int rsa_bits) {
    return {rsa_bits == 0 ? EVP_EC_gen("P-256") : EVP_RSA_gen(static_cast<unsigned>(rsa_bits)),
            EVP_PKEY_free};
  }
  static std::string Pem(const Key& key, const char* password = nullptr) {
    return Text([&](BIO* bio) {
      const auto* const cipher = password == nullptr ? nullptr : EVP_aes_128_cbc();
      PEM_write_bio_PKCS8PrivateKey(bio, key.get(), cipher, nullptr, 0, nullptr, const_cast<char*>(password));
    });
  }
  static std::string Pem(const Certificate& certificate) {
    return Text([&](BIO* bio) { PEM_write_bio_X509(bio, certificate.get()); });
  }
  Certificate Sign(const std::string& name, const Key& key, const Kind& kind) const {
    return Sign(name, key, kind, authority_, authority_key_);
  }
  // Null `issuer`: itself.
  static Certificate Sign(const std::string& name, const Key& key, const Kind& kind,
                          const Certificate& issuer, const Key& issuer_key) {
    Certificate made(X509_new(), X509_free);
    X509* const x = made.get();
    X509_set_version(x, 2);
    uint32_t serial = 0;
    RAND_bytes(reinterpret_cast<unsigned char*>(&serial), sizeof(serial));
    ASN1_INTEGER_set_uint64(X509_get_serialNumber(x), serial);
    X509_gmtime_adj(X509_getm_notBefore(x), kind.begins_in_seconds);
    X509_gmtime_adj(X509_getm_notAfter(x), kind.ends_in_seconds);
    X509_set_pubkey(x, key.get());
    X509_NAME_add_entry_by_txt(X509_get_subject_name(x), "CN", MBSTRING_UTF8,
                               reinterpret_cast<const unsigned char*>(name.c_str()), -1, -1, 0);
    X509* const by = issuer == nullptr ? x : issuer.get();
    X509_set_issuer_name(x, X509_get_subject_name(by));
    Extend(x, by, NID_basic_constraints, kind.authority ? "critical,CA:TRUE" : "CA:FALSE");
    if (!kind.usage.empty()) Extend(x, by, NID_ext_key_usage, kind.usage);
    if (!kind.authority) {
      Extend(x, by, NID_subject_alt_name, kind.other_names.empty() ? "DNS:" + name : kind.other_names);
    }
    X509_sign(x, issuer_key.get(), EVP_sha256());
    return made;
  }
  const Certificate& authority() const { return authority_; }

 private:
  template <typename Fill>
  static std::string Text(Fill fill) {
    const std::unique_ptr<BIO, decltype(&BIO_free)> bio(BIO_new(BIO_s_mem()), BIO_free);
    fill(bio.get());
    const char* text = nullptr;
    const auto size = BIO_get_mem_data(bio.get(), &text);
    return {text, static_cast<size_t>(size)};
  }
  static void Extend(X509* x, X509* issuer, int extension, const std::string& value) {
    X509V3_CTX context;
    X509V3_set_ctx(&context, issuer, x, nullptr, nullptr, 0);
    X509_EXTENSION* const made = X509V3_EXT_conf_nid(nullptr, &context, extension, value.c_str());
    X509_add_ext(x, made, -1);
    X509_EXTENSION_free(made);
  }

  std::string folder_;
  Key authority_key_;
  Certificate authority_;
};

}  // namespace meshfill

#endif  // MESHFILL_TESTS_SERVER_ACCESS_TEST_CERTIFICATES_H_
