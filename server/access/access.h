// The door of a port that serves the API: who calls, and what they may (docs/security.md).
//
// Without api.credentials every call is an admin's: whoever reaches the port, with the certificate that
// api.tls may want, does all. A file that changes is read anew; one with a mistake changes nothing, and the
// log tells of it. Thread-safe.
#ifndef MESHFILL_SERVER_ACCESS_ACCESS_H_
#define MESHFILL_SERVER_ACCESS_ACCESS_H_

#include <initializer_list>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "grpcpp/server_context.h"
#include "kernels/mutex.h"
#include "meshfill/v1/config.pb.h"
#include "server/access/callers.h"
#include "server/access/file_watch.h"
#include "server/access/peer_names.h"

namespace meshfill {

class Access {
 public:
  // `peers`: whose certificates the port has seen. INVALID_ARGUMENT: api.credentials cannot be read; or as
  // Callers::Parse has it.
  static absl::StatusOr<std::unique_ptr<Access>> Open(const v1::ApiSection& api,
                                                      std::shared_ptr<const PeerNames> peers);

  bool asks_for_credentials() const { return !path_.empty(); }

  // Who calls, by the bearer token or else the client's certificate. UNAUTHENTICATED: neither is known.
  // PERMISSION_DENIED: the caller has none of the roles. Costs one hash; reads nothing of the call.
  absl::StatusOr<Caller> Admit(const grpc::ServerContextBase& context,
                               std::initializer_list<Role> roles) const;
  // The same, for a call whose message names no tenant: the one that it is for, by its metadata (tenant.h).
  absl::StatusOr<std::string> AdmitTenant(const grpc::ServerContextBase& context,
                                          std::initializer_list<Role> roles) const;

 private:
  Access(const std::string& path, std::shared_ptr<const PeerNames> peers)
      : path_(path), peers_(std::move(peers)), watch_({path}) {}
  absl::Status Read();
  void Reload();
  absl::StatusOr<Caller> Identify(const grpc::ServerContextBase& context) const;

  const std::string path_;  // the credentials file; empty: no credentials are asked for
  const std::shared_ptr<const PeerNames> peers_;
  mutable Mutex mu_;
  std::shared_ptr<const Callers> callers_ ABSL_GUARDED_BY(mu_);
  FileWatch watch_;  // last: its thread uses all of the above
};

// The tenant that a call is for; `named`: what it says itself, "" for nothing. PERMISSION_DENIED: a client
// names another tenant than its own.
absl::StatusOr<std::string> TenantFor(const Caller& caller, absl::string_view named);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_ACCESS_ACCESS_H_
