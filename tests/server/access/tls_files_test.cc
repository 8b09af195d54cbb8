// Mistakes of setting TLS up, each with the line that says which it is.
#include "server/access/tls_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <functional>
#include <string>

#include "tests/server/access/test_certificates.h"

namespace meshfill {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

class TlsFilesTest : public testing::Test {
 protected:
  TlsFiles Good(const std::string& name = "host") const {
    const v1::ApiSection::Tls tls = made_.Tls(name);
    return {.prefix = "api.tls.", .cert = tls.cert(), .key = tls.key(), .ca = tls.ca()};
  }
  static std::string Problem(const TlsFiles& files, TlsSide side = TlsSide::kServer) {
    const auto pems = ReadTlsFiles(files, side);
    if (pems.ok()) return "none";
    EXPECT_EQ(pems.status().code(), absl::StatusCode::kInvalidArgument);
    return std::string(pems.status().message());
  }
  std::string Cert(const std::string& text) const { return Changed(&TlsFiles::cert, "changed.pem", text); }
  std::string Key(const std::string& text) const { return Changed(&TlsFiles::key, "changed.key", text); }
  std::string Ca(const std::string& text) const { return Changed(&TlsFiles::ca, "changed_ca.pem", text); }
  std::string OfKind(const TestCertificates::Kind& kind, TlsSide side = TlsSide::kServer) const {
    made_.Make("other", kind);
    return Problem(Good("other"), side);
  }

  const TestCertificates made_;

 private:
  std::string Changed(std::string TlsFiles::*which, const char* name, const std::string& text) const {
    TlsFiles files = Good();
    files.*which = made_.Write(name, text);
    return Problem(files);
  }
};

TEST_F(TlsFilesTest, GoodFilesAreReadAsTheyAre) {
  const TlsFiles files = Good();
  for (const TlsSide side : {TlsSide::kServer, TlsSide::kClient}) {
    const auto pems = ReadTlsFiles(files, side);
    ASSERT_TRUE(pems.ok()) << pems.status();
    EXPECT_EQ(pems->cert, TestCertificates::Read(files.cert));
    EXPECT_EQ(pems->key, TestCertificates::Read(files.key));
    EXPECT_EQ(pems->ca, TestCertificates::Read(files.ca));
  }
  EXPECT_EQ(Problem({.prefix = "", .cert = "", .key = "", .ca = ""}), "none");
  EXPECT_EQ(OfKind({.usage = ""}), "none");
  EXPECT_EQ(OfKind({.rsa_bits = 2048}), "none");
  // A self-signed certificate is trusted by name of its file.
  const auto key = TestCertificates::MakeKey(0);
  EXPECT_EQ(Ca(TestCertificates::Pem(TestCertificates::Sign("alone", key, {}, nullptr, key))), "none");
  // An authority that has expired stands in the way of nothing while another is there.
  const auto old =
      TestCertificates::Sign("old", key, {.ends_in_seconds = -60, .authority = true}, nullptr, key);
  EXPECT_EQ(Ca(TestCertificates::Pem(old) + TestCertificates::Pem(made_.authority())), "none");
}

TEST_F(TlsFilesTest, FilesThatCannotBeReadAreNamedWithTheReason) {
  for (const auto& [which, name] : {std::pair(&TlsFiles::cert, "cert"), std::pair(&TlsFiles::key, "key"),
                                    std::pair(&TlsFiles::ca, "ca")}) {
    const auto problem = [&, which = which](const std::string& path) {
      TlsFiles files = Good();
      files.*which = path;
      return Problem(files);
    };
    const std::string key = absl::StrCat("api.tls.", name, ": ");
    EXPECT_EQ(
        problem("/nowhere"),
        key + "/nowhere cannot be read: No such file or directory; name a file that this user may read");
    EXPECT_EQ(problem("/tmp"),
              key + "/tmp cannot be read: not a regular file; name a file that this user may read");
    const std::string empty = made_.Write("empty", "");
    EXPECT_EQ(problem(empty),
              key + empty + " cannot be read: it is empty; name a file that this user may read");
    const std::string large = made_.Write("large", std::string((1 << 20) + 1, 'x'));
    EXPECT_THAT(problem(large), HasSubstr("more than 1 MiB"));
    EXPECT_THAT(problem(made_.Write("largest", std::string(1 << 20, 'x'))), Not(HasSubstr("1 MiB")));
    const std::string fifo = made_.Path("fifo");
    mkfifo(fifo.c_str(), 0600);
    EXPECT_THAT(problem(fifo), HasSubstr("not a regular file"));
    const std::string locked = made_.Write("locked", "x");
    chmod(locked.c_str(), 0);
    if (geteuid() != 0) {
      EXPECT_THAT(problem(locked), HasSubstr("Permission denied"));
    }
    EXPECT_THAT(problem(made_.Write("junk", "no PEM at all\n")), HasSubstr(key));
    std::filesystem::remove(fifo);
  }
}

TEST_F(TlsFilesTest, CertificatesThatCannotServeAreRefused) {
  const std::string good = TestCertificates::Read(Good().cert);
  const std::string key = TestCertificates::Read(Good().key);
  EXPECT_THAT(Cert(key), HasSubstr("has a private key and no certificate"));
  EXPECT_THAT(Cert("\x30\x82\x01"), HasSubstr("no certificate in PEM"));
  EXPECT_THAT(Cert("-----BEGIN CERTIFICATE REQUEST-----\nMIIH\n-----END CERTIFICATE REQUEST-----\n"),
              HasSubstr("is a signing request"));
  EXPECT_EQ(Cert("\xef\xbb\xbf# of the host\r\n" + good), "none");  // text before it, as tools write it
  EXPECT_THAT(Cert(good + good), HasSubstr("chain out of order"));
  EXPECT_THAT(Cert(good.substr(0, good.size() / 2)), HasSubstr("damaged certificate, number 1"));
  EXPECT_THAT(Cert(good + good.substr(0, good.size() / 2)), HasSubstr("damaged certificate, number 2"));
  std::string flipped = good;
  flipped[80] = '!';
  EXPECT_THAT(Cert(flipped), HasSubstr("damaged certificate, number 1"));
  EXPECT_THAT(OfKind({.begins_in_seconds = -7200, .ends_in_seconds = -3600}),
              AllOf(HasSubstr("api.tls.cert: "), HasSubstr("has expired at "), HasSubstr("/CN=other")));
  EXPECT_THAT(OfKind({.begins_in_seconds = 3600}), HasSubstr("is not valid before "));
  EXPECT_THAT(OfKind({.usage = "clientAuth"}), HasSubstr("make one with serverAuth"));
  EXPECT_EQ(OfKind({.usage = "clientAuth"}, TlsSide::kClient), "none");
  EXPECT_THAT(OfKind({.usage = "serverAuth"}, TlsSide::kClient), HasSubstr("make one with clientAuth"));
  EXPECT_THAT(OfKind({.rsa_bits = 512}), HasSubstr("key too small; make a stronger one"));
}

TEST_F(TlsFilesTest, AChainBeginsWithOnesOwnCertificate) {
  const auto middle_key = TestCertificates::MakeKey(0), key = TestCertificates::MakeKey(0);
  const auto middle = made_.Sign("middle", middle_key, {.usage = "", .authority = true});
  const auto leaf = TestCertificates::Sign("leaf", key, {}, middle, middle_key);
  TlsFiles files = Good();
  files.key = made_.Write("leaf.key", TestCertificates::Pem(key));
  files.cert = made_.Write("leaf.pem", TestCertificates::Pem(leaf) + TestCertificates::Pem(middle));
  EXPECT_EQ(Problem(files), "none");
  made_.Write("leaf.pem", TestCertificates::Pem(middle) + TestCertificates::Pem(leaf));
  EXPECT_THAT(Problem(files), HasSubstr("chain out of order: certificate 2 did not sign the one before it"));
  const auto old = made_.Sign("middle", middle_key, {.usage = "", .ends_in_seconds = -9, .authority = true});
  made_.Write("leaf.pem", TestCertificates::Pem(leaf) + TestCertificates::Pem(old));
  EXPECT_THAT(Problem(files), AllOf(HasSubstr("has expired"), HasSubstr("/CN=middle")));
}

TEST_F(TlsFilesTest, KeysThatCannotServeAreRefused) {
  const std::string good = TestCertificates::Read(Good().key);
  const auto another = TestCertificates::MakeKey(0);
  EXPECT_EQ(Key(TestCertificates::Pem(another)),
            absl::StrCat("api.tls.key: ", made_.Path("changed.key"), " is not the key of the certificate in ",
                         Good().cert, "; name the one it was made with"));
  EXPECT_THAT(Key(TestCertificates::Pem(TestCertificates::MakeKey(2048))), HasSubstr("is not the key of"));
  EXPECT_THAT(Key(TestCertificates::Pem(another, "password")), HasSubstr("is encrypted"));
  EXPECT_THAT(Key(TestCertificates::Read(Good().cert)), HasSubstr("has a certificate and no private key"));
  EXPECT_THAT(Key(good.substr(0, good.size() / 2)), HasSubstr("damaged private key"));
  EXPECT_THAT(Key("-----BEGIN OPENSSH PRIVATE KEY-----\nb3Bl\n-----END OPENSSH PRIVATE KEY-----\n"),
              HasSubstr("is a key of OpenSSH's"));
  EXPECT_THAT(Key("-----BEGIN PUBLIC KEY-----\nMCow\n-----END PUBLIC KEY-----\n"),
              HasSubstr("has a public key; name the private one"));
  EXPECT_THAT(Key("-----BEGIN EC PARAMETERS-----\nBggq\n-----END EC PARAMETERS-----\n"),
              HasSubstr("no private key in PEM"));
  EXPECT_THAT(Key("secret words"), AllOf(HasSubstr("no private key in PEM"), Not(HasSubstr("secret"))));
}

TEST_F(TlsFilesTest, AuthoritiesThatSignNothingAreRefused) {
  EXPECT_THAT(Ca(TestCertificates::Read(Good().cert)),
              AllOf(HasSubstr("is no authority's certificate"), HasSubstr("/CN=host")));
  EXPECT_THAT(Ca("-----BEGIN X509 CRL-----\nMIIH\n-----END X509 CRL-----\n"),
              HasSubstr("no certificate in PEM"));
  EXPECT_THAT(Ca(TestCertificates::Pem(made_.authority()).substr(0, 200)), HasSubstr("damaged certificate"));
  EXPECT_THAT(Ca(TestCertificates::Read(Good().key)), HasSubstr("has a private key and no certificate"));
  const auto key = TestCertificates::MakeKey(0);
  const auto old =
      TestCertificates::Sign("old", key, {.ends_in_seconds = -60, .authority = true}, nullptr, key);
  EXPECT_THAT(Ca(TestCertificates::Pem(old)), AllOf(HasSubstr("has expired"), HasSubstr("/CN=old")));
}

}  // namespace
}  // namespace meshfill
