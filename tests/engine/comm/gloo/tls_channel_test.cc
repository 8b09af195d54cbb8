// Two channels over a pair of sockets: what arrives, and what ends them.
#include "engine/comm/gloo/tls_channel.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "engine/comm/gloo/gloo_rendezvous.h"
#include "gtest/gtest.h"
#include "tests/engine/random_seed.h"

namespace meshfill {
namespace {

using State = TlsChannel::State;

TlsChannel::Key KeyOf(uint8_t byte) {
  TlsChannel::Key key;
  key.fill(byte);
  return key;
}

// A client and a server, whose sockets the test can reach.
struct Pair {
  explicit Pair(const TlsChannel::Key& of_client = KeyOf(1), const TlsChannel::Key& of_server = KeyOf(1),
                uint64_t bytes_per_key = TlsChannel::kBytesPerKey) {
    int ends[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends), 0);
    for (int side : {0, 1}) sockets[side] = FileDescriptor(ends[side]);
    client = *TlsChannel::Make(TlsChannel::Side::kClient, ends[0], of_client, bytes_per_key);
    server = *TlsChannel::Make(TlsChannel::Side::kServer, ends[1], of_server, bytes_per_key);
  }

  // To the end of both; false: one has failed.
  bool ShakeHands() {
    State of_client = State::kWantsRead, of_server = State::kWantsRead;
    for (int i = 0; i < 10 && (of_client != State::kDone || of_server != State::kDone); ++i) {
      if (of_client != State::kDone) of_client = client->Handshake();
      if (of_server != State::kDone) of_server = server->Handshake();
      if (of_client == State::kFailed || of_server == State::kFailed) return false;
    }
    return of_client == State::kDone && of_server == State::kDone;
  }

  FileDescriptor sockets[2];  // of the client, of the server
  std::unique_ptr<TlsChannel> client, server;
};

std::string Random(std::mt19937_64& random, size_t size) {
  std::string bytes(size, 0);
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

// Sends `message` in random pieces, and returns what has arrived.
std::string Carry(std::mt19937_64& random, TlsChannel& from, TlsChannel& to, const std::string& message) {
  std::string arrived(message.size(), 0);
  size_t sent = 0, received = 0;
  size_t piece_bytes = 0;  // of the write under way: it is repeated as it was
  while (received < message.size()) {
    if (sent < message.size()) {
      if (piece_bytes == 0)
        piece_bytes = Draw<size_t>(random, 1, std::min<size_t>(message.size() - sent, 100'000));
      const std::string piece = message.substr(sent, piece_bytes);  // at another place each time
      const TlsChannel::Moved moved = from.Write(piece.data(), piece_bytes);
      if (moved.state == State::kDone) {
        sent += moved.bytes;
        piece_bytes = 0;
      } else if (moved.state != State::kWantsWrite) {
        return "";
      }
    }
    const size_t room = Draw<size_t>(random, 1, message.size() - received);
    const TlsChannel::Moved moved = to.Read(arrived.data() + received, room);
    if (moved.state == State::kDone) {
      received += moved.bytes;
    } else if (moved.state != State::kWantsRead) {
      return "";
    }
  }
  return arrived;
}

TEST(TlsChannel, CarriesBytesBothWaysThroughChangesOfKeys) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  for (uint64_t bytes_per_key : {TlsChannel::kBytesPerKey, uint64_t{1}, uint64_t{50'000}}) {
    Pair pair(KeyOf(1), KeyOf(1), bytes_per_key);
    ASSERT_TRUE(pair.ShakeHands());
    for (size_t size : {size_t{1}, size_t{16'384}, size_t{16'385}, Draw<size_t>(random, 1, 3'000'000)}) {
      const std::string message = Random(random, size), answer = Random(random, size);
      ASSERT_EQ(Carry(random, *pair.client, *pair.server, message), message) << "seed " << seed;
      ASSERT_EQ(Carry(random, *pair.server, *pair.client, answer), answer) << "seed " << seed;
    }
  }
}

// Who waits for events of the socket would not hear of what the handshake had read along.
TEST(TlsChannel, AHandshakeLeavesTheFirstMessageInTheSocket) {
  Pair pair;
  EXPECT_EQ(pair.client->Handshake(), State::kWantsRead);
  EXPECT_EQ(pair.server->Handshake(), State::kWantsRead);
  ASSERT_EQ(pair.client->Handshake(), State::kDone);
  ASSERT_EQ(pair.client->Write("first", 5).bytes, 5u);
  ASSERT_EQ(pair.server->Handshake(), State::kDone);
  pollfd events = {.fd = pair.sockets[1].get(), .events = POLLIN, .revents = 0};
  EXPECT_EQ(poll(&events, 1, /*timeout=*/0), 1);
  char bytes[8];
  EXPECT_EQ(pair.server->Read(bytes, sizeof(bytes)).bytes, 5u);
}

// A change of keys is a record of its own: seen on the wire, where a record begins with its length.
TEST(TlsChannel, ChangesItsKeyAfterSoManyBytes) {
  for (const auto& [bytes_per_key, changes] :
       {std::pair<uint64_t, int>{TlsChannel::kBytesPerKey, 0}, {1000, 2}}) {
    Pair pair(KeyOf(1), KeyOf(1), bytes_per_key);
    ASSERT_TRUE(pair.ShakeHands());
    const std::string piece(100, 'x');
    for (int i = 0; i < 25; ++i) {
      ASSERT_EQ(pair.client->Write(piece.data(), piece.size()).bytes, piece.size());
    }
    std::string wire(100'000, 0);
    const ssize_t bytes = recv(pair.sockets[1].get(), wire.data(), wire.size(), 0);
    int records = 0;
    for (ssize_t at = 0; at < bytes; ++records) {
      at += 5 + static_cast<uint8_t>(wire[at + 3]) * 256 + static_cast<uint8_t>(wire[at + 4]);
    }
    EXPECT_EQ(records, 25 + changes);
  }
}

TEST(TlsChannel, SidesOfDifferentKeysDoNotMeet) {
  TlsChannel::Key almost = KeyOf(1);
  almost[31] ^= 1;
  Pair pair(KeyOf(1), almost);
  EXPECT_FALSE(pair.ShakeHands());
  EXPECT_NE(pair.server->error().find("TLS: "), std::string::npos);
  EXPECT_EQ(pair.client->Handshake(), State::kFailed) << "it hears of it";
}

TEST(TlsChannel, NoByteThatIsChangedArrives) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  for (int draw = 0; draw < 30; ++draw) {
    Pair pair;
    ASSERT_TRUE(pair.ShakeHands());
    const std::string message = Random(random, Draw<size_t>(random, 1, 10'000));
    ASSERT_EQ(pair.client->Write(message.data(), message.size()).bytes, message.size());
    // Take the record off the wire, and put it there again with one bit changed.
    std::vector<char> record(20'000);
    const ssize_t size = recv(pair.sockets[1].get(), record.data(), record.size(), 0);
    ASSERT_GT(size, std::ssize(message));
    EXPECT_EQ(std::search(record.begin(), record.begin() + size, message.begin(), message.end()),
              record.begin() + size)
        << "in clear";
    const ssize_t at = Draw<ssize_t>(random, 5, size - 1);  // behind type, version and length
    record[at] = static_cast<char>(record[at] ^ (1 << Draw(random, 0, 7)));
    ASSERT_EQ(send(pair.sockets[0].get(), record.data(), size, 0), size);
    char byte;
    EXPECT_EQ(pair.server->Read(&byte, 1).state, State::kFailed) << "seed " << seed;
    EXPECT_NE(pair.server->error().find("TLS: "), std::string::npos);
  }
}

TEST(TlsChannel, AnEndIsAnEnd) {
  Pair pair;
  ASSERT_TRUE(pair.ShakeHands());
  ASSERT_EQ(pair.client->Write("last", 4).state, State::kDone);
  pair.client.reset();
  pair.sockets[0] = FileDescriptor();
  char bytes[8];
  EXPECT_EQ(pair.server->Read(bytes, sizeof(bytes)).bytes, 4u);
  EXPECT_EQ(pair.server->Read(bytes, sizeof(bytes)).state, State::kEnded);
}

// RFC 5869, appendix A.3 (without salt and info), as far as a key goes.
TEST(TlsChannel, DerivesKeysByHkdf) {
  const std::vector<uint8_t> secret(22, 0x0b);
  const TlsChannel::Key key = *TlsChannel::DeriveKey(secret, "");
  const uint8_t expected[] = {0x8d, 0xa4, 0xe7, 0x75, 0xa5, 0x63, 0xc1, 0x8f, 0x71, 0x5f, 0x80,
                              0x2a, 0x06, 0x3c, 0x5a, 0x31, 0xb8, 0xa1, 0x1f, 0x5c, 0x5e, 0xe1,
                              0x87, 0x9e, 0xc3, 0x45, 0x4e, 0x5f, 0x3c, 0x73, 0x8d, 0x2d};
  EXPECT_TRUE(std::equal(key.begin(), key.end(), std::begin(expected)));
  EXPECT_NE(*TlsChannel::DeriveKey(secret, "a"), key);
  EXPECT_NE(*TlsChannel::DeriveKey(secret, "a"), *TlsChannel::DeriveKey(secret, "b"));
}

}  // namespace
}  // namespace meshfill
