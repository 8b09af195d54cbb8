// A client of a Meshfill server's PrefillService: what `meshfill prefill --server` runs.
#ifndef MESHFILL_SERVER_CLI_CLIENT_H_
#define MESHFILL_SERVER_CLI_CLIENT_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "meshfill/v1/prefill.pb.h"
#include "server/cli/server_channel.h"

namespace meshfill {

inline constexpr absl::Duration kCallTimeout = absl::Seconds(30);  // of calls that compute nothing

// Called from the thread that called PrefillClient::Prefill.
class PrefillEvents {
 public:
  virtual ~PrefillEvents() = default;
  virtual void OnAccepted(const v1::Accepted& accepted) = 0;
  virtual void OnProgress(const v1::Progress& progress) = 0;
};

class PrefillClient {
 public:
  PrefillClient();  // starts nothing: Prefill connects
  ~PrefillClient();

  // Sends one prompt and waits for its result; blocks; call it once. The header's token_count is filled in
  // here. Errors: the server's own status, with the address and when to try again (status_details.h);
  // UNAVAILABLE where nothing listens there.
  absl::StatusOr<v1::PrefillResult> Prefill(const ServerChannel& server, v1::PrefillHeader header,
                                            std::span<const uint32_t> tokens, absl::Time deadline,
                                            PrefillEvents& events);

  // Ends Prefill with CANCELLED, also one that has not begun. From any thread.
  void Cancel();

 private:
  class Call;  // keeps gRPC's headers out of this one
  std::unique_ptr<Call> call_;
};

// Who is there, what runs and what waits. Errors as Prefill's; DEADLINE_EXCEEDED: no answer in time.
absl::StatusOr<v1::PoolStatus> GetPool(const ServerChannel& server, absl::Duration timeout);
// What the server would run. Errors as GetPool's.
absl::StatusOr<v1::PlanReply> PlanOnServer(const ServerChannel& server, const v1::PlanRequest& request,
                                           absl::Duration timeout);
// Ends a request, its own tenant's, or anybody's where the caller is an admin. NOT_FOUND: it does not live.
absl::Status CancelOnServer(const ServerChannel& server, const std::string& request_id,
                            absl::Duration timeout);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_CLI_CLIENT_H_
