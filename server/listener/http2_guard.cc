#include "server/listener/http2_guard.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace meshfill {
namespace {

constexpr size_t kPrefaceBytes = 24;  // RFC 9113 §3.4
constexpr int kPrefixBytes = 5;       // of a gRPC message: a flag, and its length
enum FrameType : uint8_t { kData = 0, kHeaders = 1, kResetStream = 3, kContinuation = 9 };
constexpr uint8_t kEndStream = 0x1;
// A client may open streams before it has heard the server's bound.
constexpr size_t kUnheardStreams = 128;

}  // namespace

template <typename OnHead, typename OnPayload>
void Http2Frames::Feed(absl::Span<const uint8_t> bytes, OnHead on_head, OnPayload on_payload) {
  while (!bytes.empty()) {
    if (left_ > 0) {
      const size_t count = std::min<size_t>(left_, bytes.size());
      on_payload(frame_, bytes.first(count));
      left_ -= static_cast<uint32_t>(count);
      bytes.remove_prefix(count);
      continue;
    }
    head_[head_bytes_++] = bytes.front();
    bytes.remove_prefix(1);
    if (head_bytes_ < kHeadBytes) continue;
    head_bytes_ = 0;
    const auto word = [this](int at) { return static_cast<uint32_t>(head_[at]); };
    frame_ = {.length = word(0) << 16 | word(1) << 8 | word(2),
              .type = head_[3],
              .flags = head_[4],
              .stream = (word(5) & 0x7f) << 24 | word(6) << 16 | word(7) << 8 | word(8)};
    left_ = frame_.length;
    on_head(frame_);
  }
}

Http2Guard::Http2Guard(int most_streams, absl::Time now)
    : most_streams_(static_cast<size_t>(most_streams) + kUnheardStreams),
      preface_left_(kPrefaceBytes),
      resets_left_at_(now) {}

absl::Status Http2Guard::FromClient(absl::Span<const uint8_t> bytes, absl::Time now) {
  const size_t preface = std::min(preface_left_, bytes.size());
  preface_left_ -= preface;
  bytes.remove_prefix(preface);
  absl::Status status;
  from_client_.Feed(
      bytes,
      [&](const Http2Frames::Head& head) {
        if (status.ok()) status = OnClientHead(head, now);
      },
      [&](const Http2Frames::Head& head, absl::Span<const uint8_t> payload) {
        if (head.type != kData) return;
        if (const auto stream = streams_.find(head.stream); stream != streams_.end()) {
          OnData(stream->second, payload);
        }
      });
  return status;
}

absl::Status Http2Guard::OnClientHead(const Http2Frames::Head& head, absl::Time now) {
  switch (head.type) {
    case kData:
      if (const auto stream = streams_.find(head.stream); stream != streams_.end()) {
        Hold(stream->second, kFrameBytes);
      }
      return absl::OkStatus();
    case kHeaders:
      header_bytes_ = head.length;
      continuations_ = 0;
      if (head.stream > last_stream_) {
        last_stream_ = head.stream;
        streams_.try_emplace(head.stream);
        if (streams_.size() > most_streams_) {
          return absl::ResourceExhaustedError(
              absl::StrCat(streams_.size(), " streams at a time (limits.max_streams)"));
        }
      }
      break;
    case kContinuation:
      header_bytes_ += head.length;
      if (++continuations_ > kMostContinuations) {
        return absl::ResourceExhaustedError(
            absl::StrCat("a header block of more than ", kMostContinuations, " CONTINUATION frames"));
      }
      break;
    case kResetStream:
      End(head.stream);
      CountReset(now);
      return absl::OkStatus();
    default:
      return absl::OkStatus();
  }
  if (header_bytes_ > kMostHeaderBytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat("a header block of more than ", kMostHeaderBytes, " bytes"));
  }
  return absl::OkStatus();
}

void Http2Guard::OnData(Stream& stream, absl::Span<const uint8_t> bytes) {
  while (!bytes.empty()) {
    if (stream.prefix_bytes < kPrefixBytes) {
      // The first byte shifts out again: the length is the last four.
      stream.length = stream.length << 8 | bytes.front();
      bytes.remove_prefix(1);
      if (++stream.prefix_bytes < kPrefixBytes) continue;
      stream.left = stream.length;
    } else {
      const size_t count = std::min<size_t>(stream.left, bytes.size());
      Hold(stream, static_cast<int64_t>(count));
      stream.left -= static_cast<uint32_t>(count);
      bytes.remove_prefix(count);
    }
    if (stream.left > 0) continue;
    Hold(stream, -stream.held_bytes);
    stream = {};
  }
}

void Http2Guard::Hold(Stream& stream, int64_t bytes) {
  stream.held_bytes += bytes;
  held_bytes_ += bytes;
}

void Http2Guard::End(uint32_t stream) {
  const auto found = streams_.find(stream);
  if (found == streams_.end()) return;
  held_bytes_ -= found->second.held_bytes;
  streams_.erase(found);
}

void Http2Guard::FromServer(absl::Span<const uint8_t> bytes, absl::Time now) {
  from_server_.Feed(
      bytes,
      [&](const Http2Frames::Head& head) {
        const bool ends = (head.type == kData || head.type == kHeaders) && (head.flags & kEndStream) != 0;
        if (!ends && head.type != kResetStream) return;
        // gRPC resets a stream, too, that it has answered early: that one is gone by then.
        if (head.type == kResetStream && streams_.contains(head.stream)) CountReset(now);
        End(head.stream);
      },
      [](const Http2Frames::Head&, absl::Span<const uint8_t>) {});
}

void Http2Guard::CountReset(absl::Time now) {
  const double more = absl::ToDoubleSeconds(now - resets_left_at_) * kResetsPerSecond;
  resets_left_ = std::min<double>(kMostResets, resets_left_ + std::max(more, 0.0)) - 1;
  resets_left_at_ = now;
}

absl::Time Http2Guard::ReadAgainAt() const {
  if (resets_left_ >= 0) return absl::InfinitePast();
  return resets_left_at_ + absl::Seconds(-resets_left_ / kResetsPerSecond);
}

}  // namespace meshfill
