// One FetchKv stream: writes the parts of a lease's K and V, one at a time, as their layers are done.
//
//     checked ──► a part is there ──► written ──► … ──► all written: OK
//        └────────────┴──────────────────┴──────► the lease has ended, cancel, disconnect, the deadline,
//                                                 a part that its reader does not take in time, or
//                                                 that others need the memory of
//
// A reactor of gRPC's callback API: no thread waits for a client or for a layer. The stream has one part at
// most, so that a slow reader costs a part's memory, and what its KvReader says.
#ifndef MESHFILL_SERVER_API_KV_FETCH_STREAM_H_
#define MESHFILL_SERVER_API_KV_FETCH_STREAM_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "grpcpp/server_context.h"
#include "grpcpp/support/server_callback.h"
#include "kernels/mutex.h"
#include "meshfill/v1/prefill.pb.h"
#include "server/api/kv_reader.h"

namespace meshfill {

class KvStreams;

using KvFetchReactor = grpc::ServerWriteReactor<grpc::ByteBuffer>;  // messages are raw bytes (decoded.h)

class KvFetchStream final : public KvFetchReactor, public std::enable_shared_from_this<KvFetchStream> {
 public:
  // The context is not used after OnDone. `streams` outlives the stream.
  KvFetchStream(KvStreams& streams, grpc::CallbackServerContext* context, std::string tenant,
                v1::FetchKvRequest request);

  // A layer may be there, the lease may have ended, or the reader may have stood still for too long.
  void OnChange();
  // Others need the memory of the part whose write began then.
  void OnCrowdedOut(absl::Time write_begin);

  // gRPC's reactions.
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  // Writes the next part if it is there and none is on its way; finishes behind the last, and with an error.
  void Pump() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::StatusOr<KvReader::Next> TakePart(v1::KvPart& part) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The reader has not taken its part for too long.
  bool StandsStill() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // gRPC fails the write, once or more often told so.
  void GiveUp(const char* reason) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void EndCancelled() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void End(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  KvStreams& streams_;
  grpc::CallbackServerContext* const context_;
  const v1::FetchKvRequest request_;
  const std::string tenant_;
  const std::string traceparent_;  // empty: none
  const absl::Time begin_;
  grpc::ByteBuffer sent_;  // gRPC's while a write is under way

  Mutex mu_;
  std::unique_ptr<KvReader> reader_ ABSL_GUARDED_BY(mu_);  // null: not opened yet, or ended
  int64_t part_bytes_ ABSL_GUARDED_BY(mu_) = 0;            // of K and V in the last part that was taken
  int64_t bytes_ ABSL_GUARDED_BY(mu_) = 0;                 // of K and V written
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  absl::Time write_begin_ ABSL_GUARDED_BY(mu_);         // when the last write began
  const char* gave_up_ ABSL_GUARDED_BY(mu_) = nullptr;  // why the last write was given up
  bool cancelled_ ABSL_GUARDED_BY(mu_) = false;
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_API_KV_FETCH_STREAM_H_
