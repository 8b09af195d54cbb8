#include "server/api/kv_fetch_stream.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/monotonic_time.h"
#include "kernels/return_if_error.h"
#include "server/api/decoded.h"
#include "server/api/kv_streams.h"
#include "server/api/status_details.h"
#include "server/api/traceparent.h"
#include "server/observe/log.h"

namespace meshfill {
namespace {

constexpr size_t kLoggedLeaseCharacters = 8;  // who knows a lease's name may read it: the log has its begin

}  // namespace

KvFetchStream::KvFetchStream(KvStreams& streams, grpc::CallbackServerContext* context, std::string tenant,
                             v1::FetchKvRequest request)
    : streams_(streams),
      context_(context),
      request_(std::move(request)),
      tenant_(std::move(tenant)),
      traceparent_(TraceparentOf(*context)),
      begin_(MonotonicNow()) {}

void KvFetchStream::OnChange() {
  const MutexLock lock(mu_);
  if (StandsStill())
    GiveUp(
        "its reader stood still for longer than limits.result_timeout; ask for the rest while the lease "
        "lasts");
  Pump();
}

void KvFetchStream::OnCrowdedOut(absl::Time write_begin) {
  const MutexLock lock(mu_);
  if (!writing_ || write_begin_ != write_begin) return;  // that part was read meanwhile
  GiveUp(
      "its part has waited longest for its reader, and others need the memory (limits.unread_bytes); "
      "ask for the rest while the lease lasts");
}

void KvFetchStream::GiveUp(const char* reason) {
  gave_up_ = reason;
  context_->TryCancel();
}

bool KvFetchStream::StandsStill() const {
  const KvStreams::Limits& limits = streams_.limits();
  if (!writing_ || MonotonicNow() - write_begin_ <= limits.read_timeout) return false;
  return !limits.waits_for_lease ||
         !streams_.source().Open(request_, tenant_, limits.max_message_bytes, [] {}).ok();
}

absl::StatusOr<KvReader::Next> KvFetchStream::TakePart(v1::KvPart& part) {
  if (reader_ == nullptr) {
    const auto changed = [weak = weak_from_this()] {
      if (const std::shared_ptr<KvFetchStream> stream = weak.lock()) stream->OnChange();
    };
    ASSIGN_OR_RETURN(reader_,
                     streams_.source().Open(request_, tenant_, streams_.limits().max_message_bytes, changed));
  }
  return reader_->Take(part);
}

void KvFetchStream::Pump() {
  if (writing_ || ended_) return;
  v1::KvPart part;
  const absl::StatusOr<KvReader::Next> next = TakePart(part);
  if (!next.ok() || *next == KvReader::Next::kEnd) {
    End(next.status());
    return;
  }
  if (*next == KvReader::Next::kNotYet) return;  // OnChange will come
  writing_ = true;
  write_begin_ = MonotonicNow();
  part_bytes_ = static_cast<int64_t>(part.k().size() + part.v().size() + part.pages().size());
  Encode(part, sent_);
  streams_.OnWriteBegin(this, write_begin_, static_cast<int64_t>(sent_.Length()) + reader_->held_bytes());
  StartWrite(&sent_);
}

void KvFetchStream::OnWriteDone(bool ok) {
  const MutexLock lock(mu_);
  writing_ = false;
  sent_.Clear();  // the next part may be long in coming
  streams_.OnWriteEnd(this);
  if (ok) {
    bytes_ += part_bytes_;
    streams_.OnFetched(part_bytes_);
  }
  ok && !cancelled_ ? Pump() : EndCancelled();
}

void KvFetchStream::OnCancel() {
  const MutexLock lock(mu_);
  cancelled_ = true;  // a write that was under way may still go well
  if (!writing_) EndCancelled();
}

void KvFetchStream::EndCancelled() {
  End(absl::CancelledError(gave_up_ != nullptr ? gave_up_
                                               : "cancelled by the client, or its connection is gone"));
}

void KvFetchStream::End(const absl::Status& status) {
  if (ended_) return;
  ended_ = true;
  reader_.reset();
  if (!status.ok() && !absl::IsCancelled(status) && bytes_ == 0) streams_.OnRefused(status.code());
  std::string line =
      absl::StrCat("fetch lease=", LogQuote(request_.lease().substr(0, kLoggedLeaseCharacters)),
                   " tenant=", LogQuote(tenant_), " bytes=", bytes_);
  absl::StrAppendFormat(&line, " seconds=%.3f", absl::ToDoubleSeconds(MonotonicNow() - begin_));
  absl::StrAppend(&line, " code=", absl::StatusCodeToString(status.code()));
  if (!status.ok()) absl::StrAppend(&line, " message=", LogQuote(status.message()));
  const LogDetails details = {
      .level = LevelOfEnd(status.code()), .tenant = tenant_, .traceparent = traceparent_};
  status.ok() ? Log(line, details)
              : LogLimited(absl::StrCat("fetch ", absl::StatusCodeToString(status.code())), line, details);
  Finish(ToGrpcStatus(status));
}

void KvFetchStream::OnDone() { streams_.Remove(this); }

}  // namespace meshfill
