#include "server/observe/span_exporter.h"

#include <curl/curl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/monotonic_time.h"
#include "kernels/return_if_error.h"
#include "server/observe/log.h"
#include "server/observe/otlp_json.h"

namespace meshfill {
namespace {

constexpr char kDefaultPath[] = "/v1/traces";
constexpr absl::Duration kCollect = absl::Seconds(1);  // how long spans wait for others to go with
constexpr absl::Duration kFirstRetry = absl::Seconds(1);
constexpr absl::Duration kLastRetry = absl::Seconds(30);  // each is twice the one before
constexpr absl::Duration kTellAgain = absl::Minutes(1);
constexpr int kLookMilliseconds = 50;  // whether to give up

std::string HostName() {
  char name[256] = {};
  return gethostname(name, sizeof(name) - 1) == 0 ? name : "unknown";
}

// The URL to post to.
absl::StatusOr<std::string> FullUrl(const std::string& endpoint) {
  const std::unique_ptr<CURLU, decltype(&curl_url_cleanup)> url(curl_url(), &curl_url_cleanup);
  const auto part = [&](CURLUPart which) -> std::string {
    char* text = nullptr;
    if (curl_url_get(url.get(), which, &text, 0) != CURLUE_OK) return "";
    const std::string copy = text;
    curl_free(text);
    return copy;
  };
  const bool good = curl_url_set(url.get(), CURLUPART_URL, endpoint.c_str(), 0) == CURLUE_OK;
  const std::string scheme = good ? part(CURLUPART_SCHEME) : "";
  if (scheme != "http" && scheme != "https") {
    return absl::InvalidArgumentError(absl::StrCat("\"", endpoint,
                                                   "\" is no URL of a collector; give one as "
                                                   "http://127.0.0.1:4318"));
  }
  if (part(CURLUPART_PATH) == "/") curl_url_set(url.get(), CURLUPART_PATH, kDefaultPath, 0);
  return part(CURLUPART_URL);
}

size_t BytesOf(const std::vector<TraceSpan>& spans) {
  size_t bytes = 0;
  for (const TraceSpan& span : spans) bytes += BytesOf(span);
  return bytes;
}

size_t Ignore(char*, size_t size, size_t count, void*) { return size * count; }

}  // namespace

// Posts of one thread, over one connection while the collector keeps it.
class SpanExporter::Connection {
 public:
  static absl::StatusOr<std::unique_ptr<Connection>> Make(const std::string& endpoint,
                                                          absl::Duration timeout) {
    static const CURLcode started = curl_global_init(CURL_GLOBAL_DEFAULT);
    if (started != CURLE_OK) return absl::InternalError("libcurl does not start");
    ASSIGN_OR_RETURN(const std::string url, FullUrl(endpoint));
    return std::unique_ptr<Connection>(new Connection(url, timeout));
  }
  ~Connection() {
    curl_multi_cleanup(multi_);
    curl_easy_cleanup(post_);
    curl_slist_free_all(headers_);
  }

  Sent Post(const std::string& body, std::string& why) {
    curl_easy_setopt(post_, CURLOPT_POSTFIELDS, body.data());
    curl_easy_setopt(post_, CURLOPT_POSTFIELDSIZE_LARGE, static_cast<curl_off_t>(body.size()));
    curl_multi_add_handle(multi_, post_);
    const CURLcode ended = Transfer();
    curl_multi_remove_handle(multi_, post_);
    if (ended != CURLE_OK) {
      why = curl_easy_strerror(ended);
      return Sent::kUnreachable;
    }
    long code = 0;
    curl_easy_getinfo(post_, CURLINFO_RESPONSE_CODE, &code);
    if (code >= 200 && code < 300) return Sent::kTaken;
    why = absl::StrCat("HTTP status ", code);
    const bool may_change = code == 429 || code == 502 || code == 503 || code == 504;
    return may_change ? Sent::kUnreachable : Sent::kRefused;
  }

  // The post under way ends soon, as do those to come. From any thread.
  void Abandon() { abandoned_ = true; }

  const std::string& url() const { return url_; }

 private:
  Connection(const std::string& url, absl::Duration timeout)
      : url_(url), multi_(curl_multi_init()), post_(curl_easy_init()) {
    headers_ = curl_slist_append(headers_, "Content-Type: application/json");
    headers_ = curl_slist_append(headers_, "Expect:");  // no round trip before the body
    curl_easy_setopt(post_, CURLOPT_URL, url.c_str());
    curl_easy_setopt(post_, CURLOPT_POST, 1L);
    curl_easy_setopt(post_, CURLOPT_HTTPHEADER, headers_);
    curl_easy_setopt(post_, CURLOPT_USERAGENT, "meshfill/" MESHFILL_VERSION);
    curl_easy_setopt(post_, CURLOPT_TIMEOUT_MS, static_cast<long>(absl::ToInt64Milliseconds(timeout)));
    curl_easy_setopt(post_, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(post_, CURLOPT_WRITEFUNCTION, &Ignore);
  }

  CURLcode Transfer() {
    for (int running = 1; !abandoned_;) {
      if (curl_multi_perform(multi_, &running) != CURLM_OK) return CURLE_FAILED_INIT;
      if (running == 0) break;
      curl_multi_poll(multi_, nullptr, 0, kLookMilliseconds, nullptr);
    }
    int left = 0;
    const CURLMsg* const message = curl_multi_info_read(multi_, &left);
    return message == nullptr ? CURLE_ABORTED_BY_CALLBACK : message->data.result;
  }

  const std::string url_;
  CURLM* const multi_;
  CURL* const post_;
  curl_slist* headers_ = nullptr;
  std::atomic<bool> abandoned_ = false;
};

absl::StatusOr<std::unique_ptr<SpanExporter>> SpanExporter::Start(const std::string& endpoint,
                                                                  absl::Duration timeout) {
  ASSIGN_OR_RETURN(std::unique_ptr<Connection> connection, Connection::Make(endpoint, timeout));
  return std::unique_ptr<SpanExporter>(new SpanExporter(std::move(connection)));
}

SpanExporter::SpanExporter(std::unique_ptr<Connection> connection)
    : connection_(std::move(connection)), host_(HostName()), thread_([this] { Run(); }) {}

SpanExporter::~SpanExporter() {
  connection_->Abandon();
  {
    const MutexLock lock(mu_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  thread_.join();
}

void SpanExporter::Export(std::vector<TraceSpan> spans) {
  const size_t bytes = BytesOf(spans);
  const MutexLock lock(mu_);
  if (queue_.size() + sending_ + spans.size() > kMaxSpans ||
      queue_bytes_ + sending_bytes_ + bytes > kMaxBytes) {
    counts_.dropped += spans.size();
    return;
  }
  queue_bytes_ += bytes;
  std::move(spans.begin(), spans.end(), std::back_inserter(queue_));
  changed_.NotifyAll();
}

void SpanExporter::Flush(absl::Time deadline) {
  MutexLock lock(mu_);
  flushing_ = true;
  changed_.NotifyAll();
  while (!queue_.empty() || sending_ > 0) {
    if (!changed_.WaitUntil(mu_, deadline)) break;
  }
  flushing_ = false;
}

SpanExporter::Counts SpanExporter::counts() const {
  const MutexLock lock(mu_);
  return counts_;
}

void SpanExporter::Run() {
  while (true) {
    const std::vector<TraceSpan> batch = NextBatch();
    if (batch.empty()) return;
    const std::string body = OtlpJson(batch, host_);
    std::string why;
    while (!Settle(batch.size(), connection_->Post(body, why), why)) {
    }
  }
}

std::vector<TraceSpan> SpanExporter::NextBatch() {
  MutexLock lock(mu_);
  while (queue_.empty() && !stopping_) changed_.Wait(mu_);
  const absl::Time full = MonotonicNow() + kCollect;
  while (queue_.size() < kBatchSpans && !flushing_ && !stopping_ && changed_.WaitUntil(mu_, full)) {
  }
  if (stopping_) return {};
  const auto end = queue_.begin() + static_cast<ptrdiff_t>(std::min(queue_.size(), kBatchSpans));
  std::vector<TraceSpan> batch(std::make_move_iterator(queue_.begin()), std::make_move_iterator(end));
  queue_.erase(queue_.begin(), end);
  sending_ = batch.size();
  sending_bytes_ = BytesOf(batch);
  queue_bytes_ -= sending_bytes_;
  return batch;
}

bool SpanExporter::Settle(size_t spans, Sent sent, const std::string& why) {
  MutexLock lock(mu_);
  TellOf(sent, why);
  failures_ = sent == Sent::kUnreachable ? failures_ + 1 : 0;
  if (sent == Sent::kUnreachable && !flushing_ && !stopping_) {
    const absl::Duration wait = std::min(kLastRetry, kFirstRetry * (1 << std::min(failures_ - 1, 10)));
    const absl::Time again = MonotonicNow() + wait;
    while (!flushing_ && !stopping_ && changed_.WaitUntil(mu_, again)) {
    }
    if (!stopping_) return false;
  }
  (sent == Sent::kTaken ? counts_.exported : counts_.dropped) += spans;
  sending_ = sending_bytes_ = 0;
  if (flushing_ && sent == Sent::kUnreachable) {  // nor will the others get there
    counts_.dropped += queue_.size();
    queue_.clear();
    queue_bytes_ = 0;
  }
  changed_.NotifyAll();
  return true;
}

void SpanExporter::TellOf(Sent sent, const std::string& why) {
  const absl::Time now = MonotonicNow();
  const bool told = told_at_ != absl::InfinitePast();
  if (sent == Sent::kTaken) {
    if (told) Log(absl::StrCat("trace.endpoint: ", connection_->url(), " takes spans again"));
    told_at_ = absl::InfinitePast();
    return;
  }
  if (stopping_ || now - told_at_ < kTellAgain) return;
  told_at_ = now;
  Log(absl::StrCat("trace.endpoint: ", connection_->url(), " takes no spans: ", why, "; ", counts_.dropped,
                   " were dropped so far"),
      {.level = LogLevel::kWarning});
}

}  // namespace meshfill
