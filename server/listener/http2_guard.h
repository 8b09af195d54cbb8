// What a client may make of its HTTP/2 connection, read from the frames that pass on it (RFC 9113).
//
// gRPC 1.51 keeps what a client sends before a message or a header block is complete, without a bound that
// holds, and takes as many streams as a client can open and reset (RFC 9113 §10.5; CVE-2023-44487,
// VU#421644). This counts those bytes, paces resets, and says when a connection is to end. It keeps none of
// the bytes. Not thread-safe.
#ifndef MESHFILL_SERVER_LISTENER_HTTP2_GUARD_H_
#define MESHFILL_SERVER_LISTENER_HTTP2_GUARD_H_

#include <cstddef>
#include <cstdint>
#include <unordered_map>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

namespace meshfill {

// Walks the frames of one direction, in pieces as they come.
class Http2Frames {
 public:
  struct Head {
    uint32_t length = 0;  // bytes of the payload
    uint8_t type = 0, flags = 0;
    uint32_t stream = 0;
  };

  // Calls on_head(Head) for each frame, and on_payload(Head, bytes) for its payload's pieces.
  template <typename OnHead, typename OnPayload>
  void Feed(absl::Span<const uint8_t> bytes, OnHead on_head, OnPayload on_payload);
  bool between_frames() const { return left_ == 0 && head_bytes_ == 0; }

 private:
  static constexpr size_t kHeadBytes = 9;

  uint8_t head_[kHeadBytes] = {};
  size_t head_bytes_ = 0;  // of a head that is not whole yet
  Head frame_;
  uint32_t left_ = 0;  // bytes of the frame's payload that are to come
};

class Http2Guard {
 public:
  // Resets of streams, of a connection: so many at once, and then so many a second. The client's, and those
  // that it brings the server to.
  static constexpr int kMostResets = 200;
  static constexpr int kResetsPerSecond = 200;
  // A header block in bytes and in CONTINUATION frames. The server's bound on metadata is far below.
  static constexpr int kMostHeaderBytes = 64 << 10;
  static constexpr int kMostContinuations = 64;
  // What gRPC keeps of each frame of a message, besides its bytes.
  static constexpr int kFrameBytes = 64;

  // `most_streams`: what the server allows at a time.
  Http2Guard(int most_streams, absl::Time now);

  // Bytes of the client, before the server has them. RESOURCE_EXHAUSTED: the connection is to end; says why.
  absl::Status FromClient(absl::Span<const uint8_t> bytes, absl::Time now);
  // Bytes of the server, when the client gets them.
  void FromServer(absl::Span<const uint8_t> bytes, absl::Time now);

  // When more of the client's bytes may be read: InfinitePast for at once.
  absl::Time ReadAgainAt() const;
  // Memory that the client's incomplete messages take.
  int64_t held_bytes() const { return held_bytes_; }
  // Whether a frame of ours could go to the client now.
  bool ServerIsBetweenFrames() const { return from_server_.between_frames(); }

 private:
  // A stream's message that is not complete: of gRPC's prefix of five bytes, and of its body.
  struct Stream {
    uint8_t prefix_bytes = 0;
    uint32_t length = 0;  // of the body, as far as the prefix has come
    uint32_t left = 0;    // of the body
    int64_t held_bytes = 0;
  };

  absl::Status OnClientHead(const Http2Frames::Head& head, absl::Time now);
  void OnData(Stream& stream, absl::Span<const uint8_t> bytes);
  void Hold(Stream& stream, int64_t bytes);
  void End(uint32_t stream);
  void CountReset(absl::Time now);

  const size_t most_streams_;
  size_t preface_left_;  // the client's first bytes are no frames
  Http2Frames from_client_, from_server_;
  std::unordered_map<uint32_t, Stream> streams_;
  uint32_t last_stream_ = 0;  // the highest that the client has opened
  int64_t header_bytes_ = 0;  // of the header block that is under way
  int continuations_ = 0;
  int64_t held_bytes_ = 0;
  double resets_left_ = kMostResets;
  absl::Time resets_left_at_;
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_LISTENER_HTTP2_GUARD_H_
