// FetchKv calls from the front-end to the workers that hold K and V.
//
// A call holds one part at most, besides what HTTP/2's window lets its holder send ahead: whoever is slow to
// take parts makes the holder wait.
#ifndef MESHFILL_SERVER_POOL_HOLDER_CALL_H_
#define MESHFILL_SERVER_POOL_HOLDER_CALL_H_

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/mutex.h"
#include "meshfill/v1/config.pb.h"
#include "meshfill/v1/prefill.pb.h"

namespace meshfill {

// One call. Of one thread at a time. Destroying it ends the call, without waiting.
class HolderCall {
 public:
  class Impl;  // keeps gRPC's headers out of this one
  explicit HolderCall(std::shared_ptr<Impl> impl);
  ~HolderCall();
  HolderCall(const HolderCall&) = delete;
  HolderCall& operator=(const HolderCall&) = delete;

  // The next part, until Next; null: it has not come yet, or there is none.
  const v1::KvPart* part() const;
  void Next();
  // Why there will be no more parts; none: there may be. OK: all have come.
  std::optional<absl::Status> end() const;

 private:
  const std::shared_ptr<Impl> impl_;
};

// Connections to holders, by address. Thread-safe.
class HolderChannels {
 public:
  // Protected as `api` says. Errors: those of HolderChannelCredentials and of ReadBearerToken.
  static absl::StatusOr<std::unique_ptr<HolderChannels>> Make(const v1::ApiSection& api);
  ~HolderChannels();  // waits for the calls, which have all been let go of
  HolderChannels(const HolderChannels&) = delete;
  HolderChannels& operator=(const HolderChannels&) = delete;

  // `changed` is called, from gRPC's threads, when a part has come and when the call has ended; perhaps once
  // more after the call's destruction.
  std::unique_ptr<HolderCall> Fetch(const std::string& address, const v1::FetchKvRequest& request,
                                    const std::string& tenant, std::function<void()> changed);

 private:
  class Connections;
  explicit HolderChannels(std::unique_ptr<Connections> connections);
  const std::unique_ptr<Connections> connections_;
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_POOL_HOLDER_CALL_H_
