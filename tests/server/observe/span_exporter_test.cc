// Spans on their way to a collector that takes them, refuses them, is busy or is not there.
#include "server/observe/span_exporter.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "kernels/monotonic_time.h"
#include "server/observe/log.h"

namespace meshfill {
namespace {

// Answers each POST with the next of its statuses; with the last one again and again.
class Collector {
 public:
  explicit Collector(std::deque<int> statuses) : statuses_(std::move(statuses)) {
    listener_ = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(bind(listener_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    EXPECT_EQ(listen(listener_, 16), 0);
    socklen_t size = sizeof(address);
    getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size);
    port_ = ntohs(address.sin_port);
    thread_ = std::thread([this] { Run(); });
  }
  ~Collector() {
    Hold(false);
    shutdown(listener_, SHUT_RDWR);
    thread_.join();
    close(listener_);
  }
  std::string url() const { return absl::StrCat("http://127.0.0.1:", port_); }
  // No post is answered while it is held.
  void Hold(bool held) {
    const std::lock_guard<std::mutex> lock(mu_);
    held_ = held;
    changed_.notify_all();
  }
  // All lines of the first post's head, each with its end.
  std::string FirstHead() {
    const std::lock_guard<std::mutex> lock(mu_);
    return first_head_;
  }
  // The first lines and bodies of so many posts; fewer after 20 s.
  std::vector<std::string> Posts(size_t count) {
    std::unique_lock<std::mutex> lock(mu_);
    changed_.wait_for(lock, std::chrono::seconds(20), [&] { return posts_.size() >= count; });
    return posts_;
  }

 private:
  void Run() {
    for (int fd; (fd = accept(listener_, nullptr, nullptr)) >= 0; close(fd)) {
      std::string text;
      char buffer[65536];
      size_t head = std::string::npos, whole = std::string::npos;
      while (text.size() < whole) {
        const ssize_t got = read(fd, buffer, sizeof(buffer));
        if (got <= 0) break;
        text.append(buffer, static_cast<size_t>(got));
        if (head == std::string::npos && (head = text.find("\r\n\r\n")) != std::string::npos) {
          whole = head + 4 + std::stoul(text.substr(text.find("Content-Length: ") + 16));
        }
      }
      if (text.size() < whole) continue;
      int status = 0;
      {
        std::unique_lock<std::mutex> lock(mu_);
        status = statuses_.front();
        if (statuses_.size() > 1) statuses_.pop_front();
        if (posts_.empty()) first_head_ = text.substr(0, head + 2);
        posts_.push_back(absl::StrCat(text.substr(0, text.find("\r\n")), "\n", text.substr(head + 4)));
        changed_.notify_all();
        changed_.wait(lock, [&] { return !held_; });
      }
      const std::string answer =
          absl::StrCat("HTTP/1.1 ", status, " X\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
      EXPECT_EQ(write(fd, answer.data(), answer.size()), static_cast<ssize_t>(answer.size()));
    }
  }

  int listener_ = -1;
  int port_ = 0;
  std::mutex mu_;
  std::condition_variable changed_;
  std::deque<int> statuses_;
  bool held_ = false;
  std::string first_head_;
  std::vector<std::string> posts_;
  std::thread thread_;
};

// Takes connections, and says nothing.
class SilentCollector {
 public:
  SilentCollector() {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    EXPECT_EQ(bind(listener_, reinterpret_cast<sockaddr*>(&address), size), 0);
    EXPECT_EQ(listen(listener_, 16), 0);
    getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size);
    port_ = ntohs(address.sin_port);
  }
  ~SilentCollector() { close(listener_); }
  std::string url() const { return absl::StrCat("http://127.0.0.1:", port_); }

 private:
  const int listener_ = socket(AF_INET, SOCK_STREAM, 0);
  int port_ = 0;
};

std::vector<TraceSpan> Spans(size_t count, const std::string& name = "compute") {
  return std::vector<TraceSpan>(count, TraceSpan{.trace_id = NewTraceId(), .id = NewSpanId(), .name = name});
}

std::unique_ptr<SpanExporter> Exporter(const std::string& endpoint,
                                       absl::Duration timeout = absl::Seconds(10)) {
  auto exporter = SpanExporter::Start(endpoint, timeout);
  EXPECT_TRUE(exporter.ok()) << exporter.status();
  return *std::move(exporter);
}

// Ends once all is sent or dropped, and not only when it gives up.
void FlushInTime(SpanExporter& exporter) {
  const absl::Time deadline = MonotonicNow() + absl::Minutes(1);
  exporter.Flush(deadline);
  EXPECT_LT(MonotonicNow(), deadline);
}

int CountOf(const std::string& part, const std::string& text) {
  int count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

// The counts, once as many are done with; as they are after 20 s.
SpanExporter::Counts CountsOf(const SpanExporter& exporter, uint64_t all) {
  const absl::Time deadline = MonotonicNow() + absl::Seconds(20);
  SpanExporter::Counts counts;
  while ((counts = exporter.counts()).exported + counts.dropped < all && MonotonicNow() < deadline) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  return counts;
}

TEST(SpanExporterTest, SpansAreTakenTogether) {
  Collector collector({200});
  const auto exporter = Exporter(collector.url());
  exporter->Export(Spans(2, "first"));
  exporter->Export(Spans(1, "second"));
  FlushInTime(*exporter);
  EXPECT_EQ(exporter->counts().exported, 3u);
  EXPECT_EQ(exporter->counts().dropped, 0u);
  const std::vector<std::string> posts = collector.Posts(1);
  ASSERT_EQ(posts.size(), 1u);
  EXPECT_EQ(posts[0].find("POST /v1/traces HTTP/1.1\n{\"resourceSpans\":"), 0u) << posts[0];
  EXPECT_NE(posts[0].find("\"name\":\"first\""), std::string::npos);
  EXPECT_NE(posts[0].find("\"name\":\"second\""), std::string::npos);
  const std::string head = collector.FirstHead();
  EXPECT_NE(head.find("\r\nContent-Type: application/json\r\n"), std::string::npos) << head;
  EXPECT_NE(head.find("\r\nUser-Agent: meshfill/" MESHFILL_VERSION "\r\n"), std::string::npos) << head;
}

TEST(SpanExporterTest, ManySpansGoInBatches) {
  Collector collector({202});
  const auto exporter = Exporter(absl::StrCat(collector.url(), "/elsewhere"));
  exporter->Export(Spans(SpanExporter::kBatchSpans + 1));
  FlushInTime(*exporter);
  EXPECT_EQ(exporter->counts().exported, SpanExporter::kBatchSpans + 1);
  const std::vector<std::string> posts = collector.Posts(2);
  ASSERT_EQ(posts.size(), 2u);
  EXPECT_EQ(posts[0].find("POST /elsewhere HTTP/1.1\n"), 0u);
}

TEST(SpanExporterTest, WhatIsRefusedIsDroppedAndTheNextGoes) {
  Collector collector({400, 200});
  const auto exporter = Exporter(collector.url());
  exporter->Export(Spans(2));
  EXPECT_EQ(CountsOf(*exporter, 2).dropped, 2u);
  exporter->Export(Spans(3));
  const SpanExporter::Counts counts = CountsOf(*exporter, 5);
  EXPECT_EQ(counts.exported, 3u);
  EXPECT_EQ(counts.dropped, 2u);
  EXPECT_EQ(collector.Posts(2).size(), 2u);
}

// The busy ones are asked at the same time: each has its second until it is asked again.
TEST(SpanExporterTest, ABusyCollectorIsAskedAgain) {
  FlushLog();
  testing::internal::CaptureStderr();
  std::deque<Collector> collectors;
  std::vector<std::unique_ptr<SpanExporter>> exporters;
  for (const int busy : {429, 502, 503, 504}) {
    Collector& collector = collectors.emplace_back(std::deque<int>{200, busy, busy, 200});
    exporters.push_back(Exporter(collector.url()));
    exporters.back()->Export(Spans(1));
    FlushInTime(*exporters.back());  // a flush ends, and what comes later is tried again
    exporters.back()->Export(Spans(2));
  }
  for (size_t i = 0; i < exporters.size(); ++i) {
    EXPECT_EQ(CountsOf(*exporters[i], 3).exported, 3u) << i;
    const std::vector<std::string> posts = collectors[i].Posts(4);
    ASSERT_EQ(posts.size(), 4u) << i;
    EXPECT_EQ(posts[1], posts[2]) << "the same spans";
    EXPECT_EQ(posts[1], posts[3]) << "the same spans";
  }
  FlushLog();
  const std::string log = testing::internal::GetCapturedStderr();
  for (const Collector& collector : collectors) {
    EXPECT_EQ(CountOf(absl::StrCat(collector.url(), "/v1/traces takes no spans: HTTP status "), log), 1)
        << log;
    EXPECT_EQ(CountOf(absl::StrCat(collector.url(), "/v1/traces takes spans again\n"), log), 1) << log;
  }
}

TEST(SpanExporterTest, ACollectorThatDoesNotAnswerIsUnreachable) {
  const SilentCollector collector;
  const auto exporter = Exporter(collector.url(), absl::Milliseconds(20));
  exporter->Export(Spans(2));
  FlushInTime(*exporter);
  EXPECT_EQ(exporter->counts().dropped, 2u);
}

TEST(SpanExporterTest, NobodyWaitsForACollectorThatDoesNotAnswer) {
  const SilentCollector collector;
  auto exporter = Exporter(collector.url(), absl::Hours(1));
  exporter->Export(Spans(2));
  exporter->Flush(MonotonicNow() + absl::Milliseconds(20));
  EXPECT_EQ(exporter->counts().dropped, 0u);
  exporter.reset();
}

TEST(SpanExporterTest, WithoutACollectorSpansAreBoundedAndAFlushGivesUp) {
  std::string nowhere;
  {
    Collector gone({200});
    nowhere = gone.url();
  }
  const auto exporter = Exporter(nowhere);
  exporter->Export(Spans(SpanExporter::kMaxSpans));
  EXPECT_EQ(exporter->counts().dropped, 0u);
  exporter->Export(Spans(3));
  EXPECT_EQ(exporter->counts().dropped, 3u) << "a request's, all or none";
  FlushInTime(*exporter);
  EXPECT_EQ(exporter->counts().exported, 0u);
  EXPECT_EQ(exporter->counts().dropped, SpanExporter::kMaxSpans + 3);
  exporter->Export(Spans(1));
  EXPECT_EQ(exporter->counts().dropped, SpanExporter::kMaxSpans + 3) << "there is room again";
}

TEST(SpanExporterTest, LongTextsAreBoundedByTheirBytes) {
  Collector collector({200, 400, 200});
  const auto exporter = Exporter(collector.url(), absl::Minutes(1));
  const auto with_text = [](size_t bytes) {
    std::vector<TraceSpan> spans = Spans(1);
    spans.front().attributes = {{"meshfill.request_id", std::string(bytes, 'x')}};
    return spans;
  };
  for (size_t round = 0; round < 2; ++round) {
    collector.Hold(true);
    exporter->Export(Spans(SpanExporter::kBatchSpans));  // go at once: what comes next stays in the queue
    ASSERT_EQ(collector.Posts(3 * round + 1).size(), 3 * round + 1);
    exporter->Export(with_text(SpanExporter::kMaxBytes / 2));
    const uint64_t dropped = exporter->counts().dropped;
    exporter->Export(with_text(SpanExporter::kMaxBytes / 2));
    EXPECT_EQ(exporter->counts().dropped, dropped + 1) << round;
    exporter->Export(with_text(SpanExporter::kMaxBytes / 4));
    collector.Hold(false);
    FlushInTime(*exporter);
    exporter->Export(with_text(SpanExporter::kMaxBytes / 2));  // what was sent or dropped has left room
    FlushInTime(*exporter);
  }
  EXPECT_EQ(exporter->counts().exported, 2 * SpanExporter::kBatchSpans + 1 + 3);
  EXPECT_EQ(exporter->counts().dropped, 4u);
}

TEST(SpanExporterTest, EndpointsThatAreNoneAreRefused) {
  for (const char* endpoint : {"", "collector", "ftp://127.0.0.1:1", "http://"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(SpanExporter::Start(endpoint, absl::Seconds(1)).status()))
        << endpoint;
  }
  EXPECT_TRUE(SpanExporter::Start("https://127.0.0.1:1", absl::Seconds(1)).ok());
}

}  // namespace
}  // namespace meshfill
