#include "server/api/kv_fetch_stream.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/monotonic_time.h"
#include "kernels/return_if_error.h"
#include "server/api/kv_service.h"
#include "server/api/status_details.h"
#include "server/api/tenant.h"
#include "server/observe/log.h"

namespace meshfill {
namespace {

constexpr size_t kLoggedLeaseCharacters = 8;  // who knows a lease's name may read it: the log has its begin

}  // namespace

KvFetchStream::KvFetchStream(KvService& service, grpc::CallbackServerContext* context,
                             const v1::FetchKvRequest* request)
    : service_(service), request_(*request), tenant_(TenantOf(*context)), begin_(MonotonicNow()) {}

void KvFetchStream::OnChange() {
  const MutexLock lock(mu_);
  Pump();
}

absl::StatusOr<bool> KvFetchStream::TakePart() {
  ASSIGN_OR_RETURN(const std::shared_ptr<const KvPrompt> prompt,
                   service_.store().Find(request_.lease(), tenant_));
  if (!fetch_.has_value()) {
    ASSIGN_OR_RETURN(fetch_, CheckFetch(request_, prompt->shape(), prompt->tokens(),
                                        service_.options().max_message_bytes));
    layer_ = fetch_->first_layer;
    token_ = fetch_->range.first_token;
  }
  const std::shared_ptr<const KvSlabs> slabs = prompt->Layer(layer_);
  if (slabs == nullptr) return false;
  FillPart(*fetch_, *slabs, layer_, token_, outgoing_);
  token_ += static_cast<int64_t>(outgoing_.tokens());
  if (token_ == fetch_->range.first_token + fetch_->range.tokens) {
    token_ = fetch_->range.first_token;
    ++layer_;
  }
  return true;
}

void KvFetchStream::Pump() {
  if (writing_ || ended_) return;
  if (fetch_.has_value() && layer_ == fetch_->first_layer + fetch_->layers) {
    End(absl::OkStatus());
    return;
  }
  const absl::StatusOr<bool> taken = TakePart();
  if (!taken.ok()) {
    End(taken.status());
    return;
  }
  if (!*taken) return;  // OnChange will come
  writing_ = true;
  StartWrite(&outgoing_);
}

void KvFetchStream::OnWriteDone(bool ok) {
  const MutexLock lock(mu_);
  writing_ = false;
  if (!ok) {
    End(absl::CancelledError("nobody reads any more"));
    return;
  }
  const auto bytes =
      static_cast<int64_t>(outgoing_.k().size() + outgoing_.v().size() + outgoing_.pages().size());
  bytes_ += bytes;
  service_.OnFetched(bytes);
  Pump();
}

void KvFetchStream::OnCancel() {
  const MutexLock lock(mu_);
  if (!writing_) End(absl::CancelledError("cancelled by the client, or its connection is gone"));
}

void KvFetchStream::End(const absl::Status& status) {
  if (ended_) return;
  ended_ = true;
  std::string line =
      absl::StrCat("fetch lease=", LogQuote(request_.lease().substr(0, kLoggedLeaseCharacters)),
                   " tenant=", LogQuote(tenant_), " bytes=", bytes_);
  absl::StrAppendFormat(&line, " seconds=%.3f", absl::ToDoubleSeconds(MonotonicNow() - begin_));
  absl::StrAppend(&line, " code=", absl::StatusCodeToString(status.code()));
  if (!status.ok()) absl::StrAppend(&line, " message=", LogQuote(status.message()));
  Log(line);
  Finish(ToGrpcStatus(status));
}

void KvFetchStream::OnDone() { service_.Remove(this); }

}  // namespace meshfill
