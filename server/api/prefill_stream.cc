#include "server/api/prefill_stream.h"

#include <algorithm>
#include <new>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/prefill_request.h"
#include "grpc/support/time.h"
#include "kernels/monotonic_time.h"
#include "kernels/mutex.h"
#include "kernels/return_if_error.h"
#include "server/access/access.h"
#include "server/api/decoded.h"
#include "server/api/end_line.h"
#include "server/api/header_check.h"
#include "server/api/plan_proto.h"
#include "server/api/request_id.h"
#include "server/api/result_proto.h"
#include "server/api/status_details.h"
#include "server/api/traceparent.h"
#include "server/api/wide_token.h"
#include "server/observe/log.h"
#include "server/queue/queue_room.h"
#include "server/queue/refusal.h"

namespace meshfill {
namespace {

constexpr absl::Duration kPlanAgain = absl::Seconds(1);  // speeds may have been corrected in that time

// gRPC's own deadline(), a count of nanoseconds, overflows at the longest timeouts that it takes.
absl::Time DeadlineOf(const grpc::CallbackServerContext& context) {
  constexpr int64_t kForEver = int64_t{100} * 365 * 24 * 3600;  // seconds
  const gpr_timespec left = gpr_time_sub(gpr_convert_clock_type(context.raw_deadline(), GPR_CLOCK_MONOTONIC),
                                         gpr_now(GPR_CLOCK_MONOTONIC));
  if (left.tv_sec > kForEver) return absl::InfiniteFuture();
  return MonotonicNow() + absl::Seconds(left.tv_sec) + absl::Nanoseconds(left.tv_nsec);
}

}  // namespace

PrefillReactor* PrefillStream::Start(grpc::CallbackServerContext* context, const Caller& caller,
                                     const StreamEnvironment& environment) {
  std::shared_ptr<PrefillStream> stream(new PrefillStream(context, caller, environment));
  stream->self_ = stream;
  environment.live.Add(stream);
  stream->StartRead(&stream->received_);
  return stream.get();
}

PrefillStream::PrefillStream(grpc::CallbackServerContext* context, const Caller& caller,
                             const StreamEnvironment& environment)
    : environment_(environment),
      caller_(caller),
      context_(context),
      traceparent_(TraceparentOf(*context)),
      begin_(MonotonicNow()),
      deadline_(DeadlineOf(*context)),
      last_message_at_(begin_) {
  if (environment_.spans == nullptr) return;
  trace_.emplace(traceparent_, begin_);
  if (!trace_->recorded()) trace_.reset();
}

void PrefillStream::OnReadDone(bool ok) {
  const MutexLock lock(mu_);
  if (phase_ == Phase::kEnded) return;
  if (!ok) {  // half-closed, or the connection is gone
    const absl::Status status = context_->IsCancelled() ? CancelReason() : FinishUpload();
    status.ok() ? Pump() : End(status);
    return;
  }
  const absl::Status status = TakeMessage();
  received_.Clear();
  last_message_at_ = MonotonicNow();
  environment_.live.OnMessage(this, std::ssize(tokens_));
  if (!status.ok()) {
    End(status);
    return;
  }
  StartRead(&received_);
}

absl::Status PrefillStream::TakeMessage() {
  RETURN_IF_ERROR(Decode(absl::StrCat("a message after ", tokens_.size(), " tokens"), received_,
                         environment_.max_message_bytes, incoming_));
  const bool has_header = phase_ != Phase::kHeader;
  switch (incoming_.part_case()) {
    case v1::PrefillRequest::kHeader:
      if (has_header) return absl::InvalidArgumentError("a second header; send one, before the tokens");
      return TakeHeader();
    case v1::PrefillRequest::kTokens:
      if (!has_header) return absl::InvalidArgumentError("tokens before the header; send the header first");
      return TakeTokens();
    case v1::PrefillRequest::PART_NOT_SET:
      break;
  }
  return absl::InvalidArgumentError("a message with neither header nor tokens");
}

absl::Status PrefillStream::TakeHeader() {
  header_ = std::move(*incoming_.mutable_header());
  ASSIGN_OR_RETURN(*header_.mutable_tenant(), TenantFor(caller_, header_.tenant()));
  RETURN_IF_ERROR(environment_.queue.CheckId(header_.tenant(), header_.request_id()));
  RETURN_IF_ERROR(CheckHeader(header_, environment_.engine.model_name()));
  ASSIGN_OR_RETURN(token_count_, ToTokenCount(header_.token_count(), environment_.engine));
  if (header_.request_id().empty()) header_.set_request_id(NewRequestId());

  RETURN_IF_ERROR(TakeOptions());
  RETURN_IF_ERROR(PrepareKv());
  ASSIGN_OR_RETURN(const auto choice, MakePlan(token_count_));
  plan_ = SummaryOf(choice);
  predicted_seconds_ = choice.plan.predicted.seconds;
  planned_at_ = MonotonicNow();
  RETURN_IF_ERROR(AdmitKv(choice.plan));  // what is refused for its K and V takes nobody's place

  ASSIGN_OR_RETURN(auto slot, environment_.queue.Reserve({.id = header_.request_id(),
                                                          .tenant = header_.tenant(),
                                                          .tokens = token_count_,
                                                          .priority = header_.priority(),
                                                          .predicted_seconds = predicted_seconds_,
                                                          .deadline = deadline_,
                                                          .may_save_seconds = MaySaveSeconds()}));
  slot_ = std::move(slot);
  slot_->SetPredictedSeconds(predicted_seconds_, environment_.engine.Submeshes(token_count_, options_),
                             environment_.engine.ShareOfPack(token_count_, options_));
  try {
    tokens_.reserve(token_count_);
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError(
        absl::StrCat("no memory for ", token_count_, " token ids; send fewer"));
  }
  phase_ = Phase::kTokens;
  return absl::OkStatus();
}

absl::StatusOr<PlanChoice> PrefillStream::MakePlan(int64_t tokens) {
  const absl::Time begin = MonotonicNow();
  absl::StatusOr<PlanChoice> choice = environment_.engine.MakePlan(tokens, options_);
  if (trace_.has_value()) trace_->OnPlanned(begin, MonotonicNow());
  return choice;
}

absl::Status PrefillStream::TakeOptions() {
  ASSIGN_OR_RETURN(options_, ToPrefillOptions(header_.plan()));
  options_.keep_timeline = true;  // for the status page
  options_.ignore_cache = header_.kv().ignore_cache();
  if (header_.top_k() > static_cast<uint32_t>(environment_.max_top_k)) {
    return absl::InvalidArgumentError(absl::StrCat("top_k is ", header_.top_k(), "; this server answers ",
                                                   environment_.max_top_k,
                                                   " at most (limits.max_top_k); ask for fewer"));
  }
  options_.top_k = std::max(1, static_cast<int>(header_.top_k()));
  if (header_.return_logits() && !environment_.return_logits) {
    return absl::InvalidArgumentError(
        "return_logits is set, but this server returns none (limits.return_logits); use top_k");
  }
  return absl::OkStatus();
}

// A token takes no less than one before it: a prefix saves its share at most. Its last token is computed.
double PrefillStream::MaySaveSeconds() const {
  if (environment_.kv == nullptr || options_.ignore_cache) return 0;
  const KvShape shape = KvShapeOf(environment_.engine.model());
  const int64_t cached_tokens = environment_.kv->cached_bytes() / (shape.layers * shape.LayerBytes(1));
  return predicted_seconds_ * static_cast<double>(std::min(cached_tokens, token_count_ - 1)) /
         static_cast<double>(token_count_);
}

absl::Status PrefillStream::PrepareKv() {
  if (environment_.kv != nullptr) {
    hasher_.emplace(environment_.kv->options().block_tokens, header_.cache_salt());
  }
  if (!header_.kv().keep()) return absl::OkStatus();
  if (environment_.kv == nullptr) {
    return absl::FailedPreconditionError("kv.keep is set, but this pool keeps no K and V; leave it out");
  }
  kv_ = std::make_shared<KvPrompt>(KvShapeOf(environment_.engine.model()), token_count_);
  options_.kv = kv_;
  return absl::OkStatus();
}

bool PrefillStream::HasRoomForKv(const Plan& plan) const {
  return kv_ == nullptr || environment_.kv->HasRoom(*kv_, plan, header_.tenant());
}

absl::Status PrefillStream::AdmitKv(const Plan& plan) {
  if (kv_ == nullptr || lease_ != nullptr) return absl::OkStatus();
  if (!PaysForKv() && HasRoomForKv(plan)) return absl::OkStatus();
  ASSIGN_OR_RETURN(lease_, environment_.kv->Admit(kv_, plan, header_.tenant(), header_.kv().lease_seconds()));
  options_.kv_lease = lease_->id();
  return absl::OkStatus();
}

bool PrefillStream::PaysForKv() const {
  return QueueRoom::UploadClaim(token_count_, std::ssize(tokens_)) == token_count_;
}

void PrefillStream::GiveKv() {
  const absl::StatusOr<absl::Duration> rest = lease_->Keep();
  if (!rest.ok()) return;  // it was released meanwhile
  *result_.mutable_kv() = ToProto(*kv_, lease_->id(), *rest);
  lease_->AddHolders(*result_.mutable_kv());
  result_.mutable_kv()->set_block_tokens(static_cast<uint32_t>(environment_.kv->options().block_tokens));
  result_.mutable_kv()->set_block_hashes(options_.block_names->hashes);
}

absl::Status PrefillStream::TakeTokens() {
  const auto& ids = incoming_.tokens().ids();
  if (tokens_.size() + ids.size() > header_.token_count()) {
    return absl::InvalidArgumentError(absl::StrCat("the header announced ", header_.token_count(),
                                                   " tokens, but ", tokens_.size() + ids.size(),
                                                   " have come; announce the real count"));
  }
  if (const absl::Status good = CheckIds(); !good.ok()) {
    logged_message_ = "a token id is outside the vocabulary";
    return good;
  }
  tokens_.insert(tokens_.end(), ids.begin(), ids.end());
  if (hasher_.has_value()) hasher_->Append({ids.data(), static_cast<size_t>(ids.size())});
  if (kv_ != nullptr && lease_ == nullptr && PaysForKv()) {  // before it may take another's place, too
    ASSIGN_OR_RETURN(const PlanChoice choice, MakePlan(token_count_));
    RETURN_IF_ERROR(AdmitKv(choice.plan));
  }
  return slot_->Pay(std::ssize(tokens_));
}

absl::Status PrefillStream::CheckIds() const {
  const PrefillEngine& engine = environment_.engine;
  if (const auto wide = FindWideToken(received_, incoming_); wide.has_value()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "token ", std::ssize(tokens_) + wide->index, " has id ", wide->id, ", outside the vocabulary of ",
        engine.model().vocab, "; use the tokenizer of model ", engine.model_name()));
  }
  const auto& ids = incoming_.tokens().ids();
  return CheckTokenIds(engine.model(), engine.model_name(), {ids.data(), static_cast<size_t>(ids.size())},
                       std::ssize(tokens_));
}

absl::Status PrefillStream::FinishUpload() {
  if (phase_ == Phase::kHeader) {
    return absl::InvalidArgumentError("the stream ended without a header; send a header, then the tokens");
  }
  if (tokens_.size() != header_.token_count()) {
    return absl::InvalidArgumentError(absl::StrCat("the header announced ", header_.token_count(),
                                                   " tokens, but only ", tokens_.size(),
                                                   " came; announce the real count"));
  }
  complete_at_ = MonotonicNow();
  if (trace_.has_value()) trace_->OnUploaded(complete_at_);
  environment_.live.UploadDone(this);
  incoming_ = v1::PrefillRequest();
  PlanComplete();
  lone_seconds_ = predicted_seconds_;
  ASSIGN_OR_RETURN(const PrefillQueue::Turn turn,
                   slot_->Submit(std::move(tokens_), options_, shared_from_this()));
  options_.submeshes = turn.submeshes;
  if (turn.submeshes > 1) TakePlan(MakePlan(token_count_));
  if (turn.pass_seconds > 0) predicted_seconds_ = turn.pass_seconds;
  phase_ = Phase::kQueued;
  accepted_.emplace();
  accepted_->set_request_id(header_.request_id());
  accepted_->set_queue_position(static_cast<uint32_t>(turn.before));
  accepted_->set_predicted_queue_seconds(turn.wait_seconds);
  accepted_->set_predicted_seconds(predicted_seconds_);
  *accepted_->mutable_plan() = plan_;
  if (lease_ != nullptr) accepted_->set_kv_lease(lease_->id());
  return absl::OkStatus();
}

void PrefillStream::PlanComplete() {
  const int64_t tokens = std::ssize(tokens_);
  if (hasher_.has_value()) {
    options_.block_names = std::make_shared<const KvBlockNames>(
        KvBlockNames{.tenant = header_.tenant(),
                     .block_tokens = environment_.kv->options().block_tokens,
                     .hashes = hasher_->hashes(),
                     .long_rope = environment_.engine.model().HasLongRope(tokens)});
  }
  const bool is_new = complete_at_ - planned_at_ < kPlanAgain;
  if (is_new && environment_.engine.CachedTokens(tokens, options_) == 0) return;
  TakePlan(MakePlan(tokens));
  slot_->SetPredictedSeconds(predicted_seconds_, environment_.engine.Submeshes(tokens, options_),
                             environment_.engine.ShareOfPack(tokens, options_));
}

void PrefillStream::TakePlan(const absl::StatusOr<PlanChoice>& choice) {
  if (!choice.ok()) return;  // the engine will say what is wrong
  plan_ = SummaryOf(*choice);
  predicted_seconds_ = choice->plan.predicted.seconds;
}

absl::Status PrefillStream::CancelReason() const {
  // A client gives up at its own deadline, a little before ours: gRPC rounds the timeout up on its way.
  const absl::Duration slack = absl::Milliseconds(100) + (deadline_ - begin_) / 100;
  const char* when = phase_ == Phase::kQueued ? "while the prefill waited or ran" : "during the upload";
  const bool passed = MonotonicNow() >= deadline_ - slack;
  if (passed) return absl::DeadlineExceededError(absl::StrCat("the deadline passed ", when));
  return absl::CancelledError(absl::StrCat("cancelled by the client, or its connection is gone, ", when));
}

void PrefillStream::OnCancel() {
  const MutexLock lock(mu_);
  if (phase_ != Phase::kEnded) End(CancelReason());
}

void PrefillStream::OnUploadOverdue() {
  const MutexLock lock(mu_);
  if (phase_ != Phase::kHeader && phase_ != Phase::kTokens) return;
  const LiveStreams::Limits& limits = environment_.live.limits();
  const std::string progress = absl::StrCat(" after ", tokens_.size(), " of ", header_.token_count(),
                                            " tokens; upload without pauses");
  const bool idle = MonotonicNow() - last_message_at_ >= limits.upload_timeout;
  End(absl::DeadlineExceededError(
      idle ? absl::StrCat("no message for ", absl::FormatDuration(limits.upload_timeout),
                          " (limits.upload_timeout)", progress)
           : absl::StrCat("the upload is slower than ", limits.upload_tokens_per_second,
                          " tokens/s (limits.upload_tokens_per_second)", progress)));
}

void PrefillStream::OnDrain() {
  const MutexLock lock(mu_);
  if (phase_ == Phase::kHeader) End(absl::UnavailableError("the server is draining; try another one"));
}

void PrefillStream::OnUploadStopped() {
  const MutexLock lock(mu_);
  if (phase_ != Phase::kHeader && phase_ != Phase::kTokens) return;
  End(absl::UnavailableError("the server is shutting down; try another one"));
}

void PrefillStream::OnResultUnread() {
  const MutexLock lock(mu_);
  if (done_) return;
  LogLimited("results that are not read",
             absl::StrCat("request id=", LogQuote(ShownName(header_.request_id())),
                          " was answered, but its client does not read (limits.result_timeout, "
                          "limits.unread_bytes): the answer is dropped"),
             DetailsOf(LogLevel::kWarning));
  context_->TryCancel();
  environment_.metrics.OnResultDropped();
}

bool PrefillStream::IsOf(const std::string& request_id, const std::string* tenant) const {
  const MutexLock lock(mu_);
  return LiveAs(request_id, tenant);
}

bool PrefillStream::LiveAs(const std::string& request_id, const std::string* tenant) const {
  const bool live = phase_ == Phase::kTokens || phase_ == Phase::kQueued;
  return live && header_.request_id() == request_id && (tenant == nullptr || header_.tenant() == *tenant);
}

bool PrefillStream::CancelRequest(const std::string& request_id, const std::string* tenant) {
  const MutexLock lock(mu_);
  if (!LiveAs(request_id, tenant)) return false;
  End(absl::CancelledError("cancelled by a call of Cancel"));
  return true;
}

void PrefillStream::OnPrefillBegin() {
  const MutexLock lock(mu_);
  if (trace_.has_value()) trace_->OnComputeBegin(MonotonicNow());
}

void PrefillStream::OnLayerDone(int layers_done, int layers, double seconds_since_begin) {
  const MutexLock lock(mu_);
  if (phase_ == Phase::kEnded) return;
  if (trace_.has_value()) trace_->OnLayerDone(layers_done, MonotonicNow());
  progress_.emplace();
  progress_->set_layers_done(layers_done);
  progress_->set_layers(layers);
  progress_->set_seconds(seconds_since_begin);
  Pump();
}

void PrefillStream::OnPrefillDone(absl::StatusOr<PrefillResult> result, double queue_seconds) {
  const MutexLock lock(mu_);
  if (phase_ == Phase::kEnded) return;
  if (trace_.has_value()) trace_->OnComputed(result, MonotonicNow());
  if (result.ok()) {
    result_ = ToProto(*result, header_.request_id());
    result_.mutable_seconds()->set_queue(queue_seconds);
    if (lease_ != nullptr) GiveKv();
    // At once: it may wait for its reader behind an event before it.
    result_event_ = ResultEvent(
        result_, header_.return_logits() ? std::span<const float>(result->logits) : std::span<const float>());
  }
  End(result.status());
}

void PrefillStream::End(const absl::Status& status) {
  const bool had_place = phase_ == Phase::kQueued;
  phase_ = Phase::kEnded;
  status_ = status;
  slot_.reset();
  tokens_ = {};
  lease_.reset();
  options_.kv.reset();
  kv_.reset();
  environment_.live.Ended(this, static_cast<int64_t>(result_event_.Length()));
  if (status.ok()) {
    const absl::Time now = MonotonicNow();
    environment_.metrics.OnFirstToken(
        {.seconds = absl::ToDoubleSeconds(now - begin_),
         .upload_seconds = absl::ToDoubleSeconds(complete_at_ - begin_),
         .slowdown = absl::ToDoubleSeconds(now - complete_at_) / std::max(1e-9, lone_seconds_),
         .prompt_tokens = static_cast<int64_t>(header_.token_count()),
         .trace_id = trace_.has_value() ? trace_->trace_id() : RecordedTraceId(traceparent_)});
  } else {
    accepted_.reset();
    progress_.reset();
  }
  environment_.metrics.OnRequestDone(status.code());
  const bool refused = !had_place && !status.ok() && !absl::IsCancelled(status);
  const bool lost_place = had_place && RefusalOf(status) == Refusal::kTenantShare;  // to another tenant
  if (refused || lost_place) environment_.metrics.OnRequestRefused(RefusalOf(status));
  LogEnd();
  Pump();
}

void PrefillStream::LogEnd() const {
  const std::string line = EndLine({.header = header_,
                                    .plan = plan_,
                                    .result = result_,
                                    .seconds = absl::ToDoubleSeconds(MonotonicNow() - begin_),
                                    .status = status_,
                                    .message = logged_message_});
  const LogDetails details = DetailsOf(LevelOfEnd(status_.code()));
  status_.ok() ? Log(line, details) : LogLimited(absl::StatusCodeToString(status_.code()), line, details);
}

LogDetails PrefillStream::DetailsOf(LogLevel level) const {
  return {.level = level,
          .request_id = header_.request_id(),
          .tenant = header_.tenant(),
          .traceparent = traceparent_};
}

void PrefillStream::Pump() {
  if (writing_ || finished_) return;
  v1::PrefillEvent event;
  if (accepted_.has_value()) {
    *event.mutable_accepted() = *std::exchange(accepted_, std::nullopt);
  } else if (progress_.has_value()) {
    *event.mutable_progress() = *std::exchange(progress_, std::nullopt);
  } else if (phase_ == Phase::kEnded) {
    finished_ = true;
    if (!status_.ok()) {
      Finish(ToGrpcStatus(status_));
      return;
    }
    sent_.Swap(&result_event_);
    StartWriteAndFinish(&sent_, grpc::WriteOptions(), grpc::Status::OK);
    return;
  } else {
    return;
  }
  writing_ = true;
  Encode(event, sent_);
  StartWrite(&sent_);
}

void PrefillStream::OnWriteDone(bool ok) {
  const MutexLock lock(mu_);
  writing_ = false;
  if (!ok && phase_ != Phase::kEnded) {
    End(CancelReason());  // nobody reads any more
    return;
  }
  Pump();
}

void PrefillStream::OnDone() {
  std::vector<TraceSpan> spans;
  {
    const MutexLock lock(mu_);
    done_ = true;
    if (trace_.has_value()) {
      spans = trace_->Finish({.id = ShownName(header_.request_id()),
                              .tenant = ShownName(header_.tenant()),
                              .tokens = token_count_},
                             status_, MonotonicNow(), absl::Now());
    }
  }
  if (!spans.empty()) environment_.spans->Export(std::move(spans));
  environment_.live.Remove(this);
  self_.reset();  // may destroy this
}

}  // namespace meshfill
