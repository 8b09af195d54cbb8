// A stream that is refused before anything is read of it, or written to it.
#ifndef MESHFILL_SERVER_API_REFUSED_STREAM_H_
#define MESHFILL_SERVER_API_REFUSED_STREAM_H_

#include "absl/status/status.h"
#include "server/api/status_details.h"

namespace meshfill {

template <typename Reactor>
class RefusedStream final : public Reactor {
 public:
  explicit RefusedStream(const absl::Status& status) { this->Finish(ToGrpcStatus(status)); }
  void OnDone() override { delete this; }
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_API_REFUSED_STREAM_H_
