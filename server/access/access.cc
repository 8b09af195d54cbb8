#include "server/access/access.h"

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/return_if_error.h"
#include "server/access/small_file.h"
#include "server/access/tenant.h"
#include "server/observe/log.h"

namespace meshfill {
namespace {

constexpr char kHowToCall[] =
    "send `authorization: Bearer TOKEN`, or a client certificate that the server knows";
constexpr absl::string_view kScheme = "Bearer ";
constexpr size_t kShownBytes = 128;

const char* RoleName(Role role) {
  switch (role) {
    case Role::kClient:
      return "client";
    case Role::kWorker:
      return "worker";
    case Role::kAdmin:
      return "admin";
  }
  return "?";
}

}  // namespace

absl::StatusOr<std::unique_ptr<Access>> Access::Open(const v1::ApiSection& api,
                                                     std::shared_ptr<const PeerNames> peers) {
  std::unique_ptr<Access> access(new Access(api.credentials(), std::move(peers)));
  if (!access->asks_for_credentials()) return access;
  RETURN_IF_ERROR(access->Read());
  access->watch_.Start([access = access.get()] { access->Reload(); });
  return access;
}

absl::Status Access::Read() {
  ASSIGN_OR_RETURN(const std::string text, ReadSmallFile("api.credentials", path_));
  ASSIGN_OR_RETURN(Callers callers, Callers::Parse(path_, text));
  auto shared = std::make_shared<const Callers>(std::move(callers));
  const MutexLock lock(mu_);
  callers_ = std::move(shared);
  return absl::OkStatus();
}

void Access::Reload() {
  const absl::Status read = Read();
  if (read.ok()) return Log(absl::StrCat("callers are now those in ", path_));
  Log(absl::StrCat("callers stay as they were: ", read.message()), {.level = LogLevel::kWarning});
}

absl::StatusOr<Caller> Access::Identify(const grpc::ServerContextBase& context) const {
  std::shared_ptr<const Callers> callers;
  {
    const MutexLock lock(mu_);
    callers = callers_;
  }
  const auto [begin, end] = context.client_metadata().equal_range("authorization");
  if (begin != end) {
    absl::string_view header(begin->second.data(), begin->second.size());
    if (std::next(begin) != end || !absl::StartsWithIgnoreCase(header, kScheme)) {
      return absl::UnauthenticatedError(
          absl::StrCat("the authorization is no single bearer token; ", kHowToCall));
    }
    if (const Caller* const caller = callers->OfToken(header.substr(kScheme.size()))) return *caller;
    return absl::UnauthenticatedError(
        "this bearer token is not known here; ask the server's operator for one");
  }
  const PeerNames::Names names = peers_->Of(context.peer());
  for (const std::string& name : names) {
    if (const Caller* const caller = callers->OfCertificate(name)) return *caller;
  }
  return absl::UnauthenticatedError(
      names.empty() ? absl::StrCat("no credential; ", kHowToCall)
                    : "nobody of this certificate's name is known here; ask the server's operator to add it");
}

absl::StatusOr<Caller> Access::Admit(const grpc::ServerContextBase& context,
                                     std::initializer_list<Role> roles) const {
  if (!asks_for_credentials()) return Caller{.name = "", .role = Role::kAdmin, .tenant = ""};
  ASSIGN_OR_RETURN(Caller caller, Identify(context));
  for (const Role role : roles) {
    if (caller.role == role) return caller;
  }
  return absl::PermissionDeniedError(
      absl::StrCat("\"", caller.name, "\" has the role ", RoleName(caller.role),
                   ", which may not call this; use a credential of another role"));
}

absl::StatusOr<std::string> Access::AdmitTenant(const grpc::ServerContextBase& context,
                                                std::initializer_list<Role> roles) const {
  ASSIGN_OR_RETURN(const Caller caller, Admit(context, roles));
  return TenantFor(caller, TenantOf(context));
}

absl::StatusOr<std::string> TenantFor(const Caller& caller, absl::string_view named) {
  if (caller.role != Role::kClient) return std::string(named);
  if (named.empty() || named == caller.tenant) return caller.tenant;
  return absl::PermissionDeniedError(absl::StrCat("\"", caller.name, "\" calls for the tenant \"",
                                                  caller.tenant, "\" alone, not for \"",
                                                  named.substr(0, kShownBytes), "\"; leave the tenant out"));
}

}  // namespace meshfill
