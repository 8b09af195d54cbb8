#include "server/listener/http2_guard.h"

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/server/listener/http2_frame.h"

namespace meshfill {
namespace {

constexpr int kStreams = 16;
constexpr uint8_t kData = 0, kHeaders = 1, kReset = 3, kContinuation = 9;
constexpr uint8_t kEndStream = 1, kEndHeaders = 4;
const absl::Time kBegin = absl::UnixEpoch();

Bytes Message(uint32_t size, uint32_t sent) {
  Bytes bytes = {0, static_cast<uint8_t>(size >> 24), static_cast<uint8_t>(size >> 16),
                 static_cast<uint8_t>(size >> 8), static_cast<uint8_t>(size)};
  bytes.resize(bytes.size() + sent, 0x55);
  return bytes;
}

class Http2GuardTest : public testing::Test {
 protected:
  Http2GuardTest() { EXPECT_TRUE(guard_.FromClient(Bytes(24, 'P'), kBegin).ok()); }

  absl::Status Client(const Bytes& bytes, absl::Time now = kBegin) { return guard_.FromClient(bytes, now); }
  absl::Status Open(uint32_t stream) { return Client(Frame(kHeaders, kEndHeaders, stream, Bytes(10))); }

  Http2Guard guard_{kStreams, kBegin};
};

TEST_F(Http2GuardTest, CountsWhatIsIncomplete) {
  ASSERT_TRUE(Open(1).ok());
  ASSERT_TRUE(Open(3).ok());
  EXPECT_EQ(guard_.held_bytes(), 0);
  ASSERT_TRUE(Client(Frame(kData, 0, 1, Message(1000, 600))).ok());
  EXPECT_EQ(guard_.held_bytes(), 600 + Http2Guard::kFrameBytes);
  ASSERT_TRUE(Client(Frame(kData, 0, 3, Message(100, 99))).ok());
  ASSERT_TRUE(Client(Frame(kData, 0, 1, Bytes(400))).ok());
  EXPECT_EQ(guard_.held_bytes(), 99 + Http2Guard::kFrameBytes);
  ASSERT_TRUE(Client(Frame(kReset, 0, 3, Bytes(4))).ok());
  EXPECT_EQ(guard_.held_bytes(), 0);
}

// A frame may have the end of a message, whole ones, and the beginning of the next, its prefix in halves.
TEST_F(Http2GuardTest, MessagesNeedNotBeginWithFrames) {
  ASSERT_TRUE(Open(1).ok());
  Bytes all = Message(0, 0);
  for (const Bytes& more : {Message(7, 7), Message(300, 300), Bytes{0, 0, 0}}) {
    all.insert(all.end(), more.begin(), more.end());
  }
  ASSERT_TRUE(Client(Frame(kData, 0, 1, all)).ok());
  EXPECT_LE(guard_.held_bytes(), Http2Guard::kFrameBytes);
  ASSERT_TRUE(Client(Frame(kData, 0, 1, Bytes{0, 50, 1, 2})).ok());  // of 50 bytes
  EXPECT_EQ(guard_.held_bytes() % Http2Guard::kFrameBytes, 2);
  ASSERT_TRUE(Client(Frame(kData, 0, 1, Bytes(48))).ok());
  EXPECT_EQ(guard_.held_bytes(), 0);
}

TEST_F(Http2GuardTest, AMessageInTinyFramesCountsTheFrames) {
  ASSERT_TRUE(Open(1).ok());
  ASSERT_TRUE(Client(Frame(kData, 0, 1, Message(1000, 0))).ok());
  for (int i = 0; i < 100; ++i) ASSERT_TRUE(Client(Frame(kData, 0, 1, Bytes(1))).ok());
  EXPECT_EQ(guard_.held_bytes(), 101 * Http2Guard::kFrameBytes + 100);
}

// However the bytes are cut, the guard knows the same.
TEST_F(Http2GuardTest, BytesMayComeInAnyPieces) {
  std::mt19937 random(std::random_device{}());
  for (int trial = 0; trial < 50; ++trial) {
    Http2Guard whole(kStreams, kBegin), cut(kStreams, kBegin);
    Bytes bytes(24, 'P');
    const auto add = [&bytes](const Bytes& more) { bytes.insert(bytes.end(), more.begin(), more.end()); };
    for (uint32_t stream = 1; stream < 2 * kStreams; stream += 2) {
      add(Frame(kHeaders, kEndHeaders, stream, Bytes(random() % 40)));
      const uint32_t size = random() % 5000, sent = random() % (size + 1);
      const Bytes message = Message(size, sent);
      const auto middle = message.begin() + static_cast<int>(random() % message.size());
      add(Frame(kData, 0, stream, Bytes(message.begin(), middle)));
      add(Frame(kData, 0, stream, Bytes(middle, message.end())));
      if (random() % 4 == 0) add(Frame(kReset, 0, stream, Bytes(4)));
    }
    ASSERT_TRUE(whole.FromClient(bytes, kBegin).ok());
    for (size_t at = 0; at < bytes.size();) {
      const size_t count = std::min<size_t>(1 + random() % 30, bytes.size() - at);
      ASSERT_TRUE(cut.FromClient(absl::MakeConstSpan(bytes).subspan(at, count), kBegin).ok());
      at += count;
    }
    EXPECT_EQ(whole.held_bytes(), cut.held_bytes());
  }
}

TEST_F(Http2GuardTest, TheServersAnswerEndsAStream) {
  for (const uint8_t type : {kHeaders, kData}) {
    const uint32_t stream = type == kHeaders ? 1 : 3;
    ASSERT_TRUE(Open(stream).ok());
    ASSERT_TRUE(Client(Frame(kData, 0, stream, Message(1000, 600))).ok());
    guard_.FromServer(Frame(kHeaders, kEndHeaders, stream, Bytes(5)), kBegin);
    EXPECT_GT(guard_.held_bytes(), 0) << "it has only begun to answer";
    guard_.FromServer(Frame(type, kEndStream, stream, Bytes(5)), kBegin);
    EXPECT_EQ(guard_.held_bytes(), 0);
    ASSERT_TRUE(Client(Frame(kData, 0, stream, Bytes(300))).ok());
    EXPECT_EQ(guard_.held_bytes(), 0) << "bytes of a stream that has ended";
  }
}

TEST_F(Http2GuardTest, ResetsArePaced) {
  uint32_t stream = 1;
  const auto reset = [&](absl::Time now) {
    ASSERT_TRUE(Open(stream).ok());
    ASSERT_TRUE(Client(Frame(kReset, 0, stream, Bytes(4)), now).ok());
    stream += 2;
  };
  for (int i = 0; i < Http2Guard::kMostResets; ++i) reset(kBegin);
  EXPECT_EQ(guard_.ReadAgainAt(), absl::InfinitePast());
  for (int i = 0; i < Http2Guard::kResetsPerSecond; ++i) reset(kBegin);
  EXPECT_EQ(guard_.ReadAgainAt(), kBegin + absl::Seconds(1));
  reset(kBegin + absl::Seconds(3));  // it has waited: there are some again
  EXPECT_EQ(guard_.ReadAgainAt(), absl::InfinitePast());
  const absl::Time later = kBegin + absl::Hours(1);  // who was quiet has no more than at the begin
  for (int i = 0; i < Http2Guard::kMostResets; ++i) reset(later);
  EXPECT_EQ(guard_.ReadAgainAt(), absl::InfinitePast());
  reset(later);
  EXPECT_GT(guard_.ReadAgainAt(), later);
}

// A client can bring the server to reset streams as well.
TEST_F(Http2GuardTest, TheServersResetsCount) {
  uint32_t stream = 1;
  for (int i = 0; i <= Http2Guard::kMostResets; ++i, stream += 2) {
    ASSERT_TRUE(Open(stream).ok());
    guard_.FromServer(Frame(kReset, 0, stream, Bytes(4)), kBegin);
  }
  EXPECT_GT(guard_.ReadAgainAt(), kBegin);
}

// gRPC answers early with trailers, and resets the stream afterwards: no fault of the client.
TEST_F(Http2GuardTest, EarlyAnswersAreNoResets) {
  uint32_t stream = 1;
  for (int i = 0; i < 3 * Http2Guard::kMostResets; ++i, stream += 2) {
    ASSERT_TRUE(Open(stream).ok());
    guard_.FromServer(Frame(kHeaders, kEndHeaders | kEndStream, stream, Bytes(4)), kBegin);
    guard_.FromServer(Frame(kReset, 0, stream, Bytes(4)), kBegin);
  }
  EXPECT_EQ(guard_.ReadAgainAt(), absl::InfinitePast());
}

TEST_F(Http2GuardTest, HeaderBlocksAreBounded) {
  ASSERT_TRUE(Client(Frame(kHeaders, 0, 1, Bytes(16'384))).ok());
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(Client(Frame(kContinuation, 0, 1, Bytes(16'384))).ok());
  const absl::Status above = Client(Frame(kContinuation, kEndHeaders, 1, Bytes(1)));
  EXPECT_EQ(above.code(), absl::StatusCode::kResourceExhausted);
}

TEST_F(Http2GuardTest, EmptyContinuationsAreBounded) {
  for (uint32_t stream = 1; stream < 7; stream += 2) {  // each block has its own count
    ASSERT_TRUE(Client(Frame(kHeaders, 0, stream, Bytes(9))).ok());
    for (int i = 0; i < Http2Guard::kMostContinuations; ++i) {
      ASSERT_TRUE(Client(Frame(kContinuation, 0, stream, {})).ok());
    }
  }
  EXPECT_EQ(Client(Frame(kContinuation, 0, 5, {})).code(), absl::StatusCode::kResourceExhausted);
}

TEST_F(Http2GuardTest, StreamsAreBounded) {
  uint32_t stream = 1;
  int open = 0;
  while (Open(stream).ok() && open < 10'000) ++open, stream += 2;
  EXPECT_EQ(open, kStreams + 128) << "a client opens some before it knows the bound";
}

// The bit above a stream's number is reserved, and counts for nothing (RFC 9113 §4.1).
TEST_F(Http2GuardTest, TheReservedBitIsNoPartOfAStream) {
  constexpr uint32_t kReserved = 1u << 31;
  ASSERT_TRUE(Open(1 | kReserved).ok());
  ASSERT_TRUE(Client(Frame(kData, 0, 1, Message(1000, 600))).ok());
  EXPECT_EQ(guard_.held_bytes(), 600 + Http2Guard::kFrameBytes);
  guard_.FromServer(Frame(kData, kEndStream, 1 | kReserved, Bytes(5)), kBegin);
  EXPECT_EQ(guard_.held_bytes(), 0);
}

// Trailers, and a block for a stream that has ended, open nothing.
TEST_F(Http2GuardTest, AStreamIsOpenedOnce) {
  ASSERT_TRUE(Open(3).ok());
  guard_.FromServer(Frame(kData, kEndStream, 3, Bytes(5)), kBegin);
  for (const uint32_t old : {1u, 3u}) {
    ASSERT_TRUE(Open(old).ok());
    ASSERT_TRUE(Client(Frame(kData, 0, old, Message(1000, 600))).ok());
    EXPECT_EQ(guard_.held_bytes(), 0) << old;
  }
}

// Flags mean an end where frames have ends, and nowhere else.
TEST_F(Http2GuardTest, OtherFramesEndNoStream) {
  constexpr uint8_t kWindowUpdate = 8;
  ASSERT_TRUE(Open(1).ok());
  ASSERT_TRUE(Client(Frame(kData, 0, 1, Message(1000, 600))).ok());
  guard_.FromServer(Frame(kWindowUpdate, kEndStream, 1, Bytes(4)), kBegin);
  EXPECT_GT(guard_.held_bytes(), 0);
}

TEST_F(Http2GuardTest, TellsWhereTheServersFramesEnd) {
  const Bytes frame = Frame(kData, 0, 1, Bytes(20));
  EXPECT_TRUE(guard_.ServerIsBetweenFrames());
  for (size_t i = 0; i < frame.size(); ++i) {
    guard_.FromServer({&frame[i], 1}, kBegin);
    EXPECT_EQ(guard_.ServerIsBetweenFrames(), i + 1 == frame.size());
  }
}

}  // namespace
}  // namespace meshfill
