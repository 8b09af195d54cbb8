// One Prefill stream: reads header and tokens, waits in the queue, writes Accepted, Progress and Result.
//
//     header ──► tokens… ──► half-close ──► queued, runs ──► ended
//        └──────────┴────────────┴───────────────┴────────────► ended, by the first of: a refusal, the upload
//                                                                timeout, cancel, disconnect, the deadline
//
// A reactor of gRPC's callback API: no thread waits for a client. Progress that the client is too slow to
// read is replaced by newer progress, so that a stream holds one message at most beside its result.
#ifndef MESHFILL_SERVER_API_PREFILL_STREAM_H_
#define MESHFILL_SERVER_API_PREFILL_STREAM_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "engine/kv/block_hash.h"
#include "engine/kv/kv_prompt.h"
#include "engine/prefill_engine.h"
#include "grpcpp/server_context.h"
#include "grpcpp/support/server_callback.h"
#include "kernels/mutex.h"
#include "meshfill/v1/prefill.pb.h"
#include "server/access/callers.h"
#include "server/api/kv_leases.h"
#include "server/api/kv_service.h"
#include "server/api/live_streams.h"
#include "server/observe/log_line.h"
#include "server/observe/metrics.h"
#include "server/observe/prefill_trace.h"
#include "server/observe/span_exporter.h"
#include "server/queue/prefill_queue.h"

namespace meshfill {

// Messages are raw bytes (decoded.h).
using PrefillReactor = grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>;

// What all streams of a front-end share; it outlives them.
struct StreamEnvironment {
  const PrefillEngine& engine;
  PrefillQueue& queue;
  LiveStreams& live;
  Metrics& metrics;
  KvService* kv;        // null: this pool keeps no K and V
  SpanExporter* spans;  // null: there are none
  // What a request may ask for.
  int max_top_k;
  bool return_logits;
  int64_t max_message_bytes;
};

class PrefillStream final : public PrefillReactor,
                            public PrefillQueue::Waiter,
                            public LiveStreams::Stream,
                            public std::enable_shared_from_this<PrefillStream> {
 public:
  // The reactor of a new stream of an admitted caller; it lives until gRPC, the queue and the watch of idle
  // uploads have all let go of it.
  static PrefillReactor* Start(grpc::CallbackServerContext* context, const Caller& caller,
                               const StreamEnvironment& environment);

  // gRPC's reactions.
  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

  void OnPrefillBegin() override;
  void OnLayerDone(int layers_done, int layers, double seconds_since_begin) override;
  void OnPrefillDone(absl::StatusOr<PrefillResult> result, double queue_seconds) override;
  void OnUploadOverdue() override;
  void OnDrain() override;
  void OnUploadStopped() override;
  void OnResultUnread() override;
  bool IsOf(const std::string& request_id, const std::string* tenant) const override;
  bool CancelRequest(const std::string& request_id, const std::string* tenant) override;

 private:
  enum class Phase { kHeader, kTokens, kQueued, kEnded };

  PrefillStream(grpc::CallbackServerContext* context, const Caller& caller,
                const StreamEnvironment& environment);

  absl::Status TakeMessage() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status TakeHeader() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::StatusOr<PlanChoice> MakePlan(int64_t tokens) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status TakeOptions() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Of the predicted seconds, at most, by what is cached of the prompt, whose tokens are not known yet.
  double MaySaveSeconds() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // What the header's `kv` asks for: before the plan, and a lease before the request has its place. Room for
  // K and V is paid for as a place in the queue is: a long prompt is refused with its header where there is
  // none, and takes it when half of its tokens have come.
  absl::Status PrepareKv() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool PaysForKv() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool HasRoomForKv(const Plan& plan) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status AdmitKv(const Plan& plan) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The lease runs from now on.
  void GiveKv() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status TakeTokens() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool LiveAs(const std::string& request_id, const std::string* tenant) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status CheckIds() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);  // checks the last message's token ids
  // Names the prompt's blocks, and plans anew where the engine has some of them, or the header is long ago.
  void PlanComplete() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Accepted tells of it. Nothing happens where it is an error.
  void TakePlan(const absl::StatusOr<PlanChoice>& choice) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status FinishUpload() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status CancelReason() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // Ends the request, once: gives its place and its memory back, counts and logs it, and answers.
  void End(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void LogEnd() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  LogDetails DetailsOf(LogLevel level) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);  // details of its log lines
  // Starts the next write, or the finish, if none is under way.
  void Pump() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const StreamEnvironment environment_;
  const Caller caller_;
  grpc::CallbackServerContext* const context_;  // until OnDone
  const std::string traceparent_;               // empty: none
  const absl::Time begin_;
  const absl::Time deadline_;
  std::shared_ptr<PrefillStream> self_;  // gRPC's share, given up in OnDone

  grpc::ByteBuffer received_;  // gRPC's while a read is under way, and handled under mu_
  grpc::ByteBuffer sent_;      // gRPC's while a write is under way

  mutable Mutex mu_;
  Phase phase_ ABSL_GUARDED_BY(mu_) = Phase::kHeader;
  v1::PrefillRequest incoming_ ABSL_GUARDED_BY(mu_);  // kept: its memory is used again
  absl::Time last_message_at_ ABSL_GUARDED_BY(mu_);
  absl::Time complete_at_ ABSL_GUARDED_BY(mu_);  // its upload, once it is
  v1::PrefillHeader header_ ABSL_GUARDED_BY(mu_);
  int64_t token_count_ ABSL_GUARDED_BY(mu_) = 0;  // tokens that the header announces
  PrefillOptions options_ ABSL_GUARDED_BY(mu_);
  std::vector<uint32_t> tokens_ ABSL_GUARDED_BY(mu_);
  std::unique_ptr<PrefillQueue::Slot> slot_ ABSL_GUARDED_BY(mu_);
  std::shared_ptr<KvPrompt> kv_ ABSL_GUARDED_BY(mu_);        // null: K and V are not kept
  std::unique_ptr<HeldKvLease> lease_ ABSL_GUARDED_BY(mu_);  // lease on `kv_`, until the prefill ends
  // Hashes the prompt's blocks; none: this pool keeps no K and V.
  std::optional<BlockHasher> hasher_ ABSL_GUARDED_BY(mu_);
  std::optional<v1::Accepted> accepted_ ABSL_GUARDED_BY(mu_);  // the answer to the header, to be written
  std::optional<v1::Progress> progress_ ABSL_GUARDED_BY(mu_);  // the newest progress, to be written
  v1::PrefillResult result_ ABSL_GUARDED_BY(mu_);              // if ended with OK
  grpc::ByteBuffer result_event_ ABSL_GUARDED_BY(mu_);         // the result, to be written
  v1::PlanSummary plan_ ABSL_GUARDED_BY(mu_);
  double predicted_seconds_ ABSL_GUARDED_BY(mu_) = 0;
  double lone_seconds_ ABSL_GUARDED_BY(mu_) = 0;  // predicted of the complete prompt, alone on the whole pool
  absl::Time planned_at_ ABSL_GUARDED_BY(mu_);    // when `predicted_seconds_` was predicted
  absl::Status status_ ABSL_GUARDED_BY(mu_);      // if ended
  // Logged in place of the status' message, which tells of the prompt; empty: that message is logged.
  absl::string_view logged_message_ ABSL_GUARDED_BY(mu_);
  std::optional<PrefillTrace> trace_ ABSL_GUARDED_BY(mu_);  // none: nobody wants its spans
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  bool finished_ ABSL_GUARDED_BY(mu_) = false;
  bool done_ ABSL_GUARDED_BY(mu_) = false;  // the context is gone
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_API_PREFILL_STREAM_H_
