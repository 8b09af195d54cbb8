// Ranks that encrypt, and somebody who has the wire between them.
#include <atomic>
#include <cstddef>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "engine/comm/checksum.h"
#include "tests/engine/comm/gloo/gloo_ranks.h"
#include "tests/engine/comm/gloo/record_relay.h"
#include "tests/engine/random_seed.h"

namespace meshfill {
namespace {

constexpr size_t kMessageBytes = 200'000;  // 13 records
constexpr size_t kKeyOffset = 184;         // in an address: the last 32 bytes

// Two ranks that exchange three messages through a relay, and how it ends for each.
struct Exchange {
  Exchange(RecordRelay::Tamper tamper, bool encrypt) : endpoints(2, {.encrypt = encrypt}) {
    relay.emplace(endpoints.addresses[0], std::move(tamper));
    auto ranks = endpoints.ConnectAll();
    RunRanks(2, [&](int rank) {
      for (uint64_t round = 0; round < 3 && ends[rank].ok(); ++round) {
        auto receive =
            ranks[rank]->SendReceive(Traffic::kKv, 1 - rank, Message(rank, round), 1 - rank, kMessageBytes);
        const auto message = receive.ok() ? (*receive)->Wait(Soon()) : receive.status();
        ends[rank] = message.status();
        if (!message.ok()) {
          ranks[rank]->Abort(absl::AbortedError("over"));  // as who uses it does
        } else if (std::memcmp((*message)->data(), Message(1 - rank, round)->data(), kMessageBytes) != 0) {
          ends[rank] = absl::UnknownError("another message");
        }
      }
    });
    ranks.clear();
    tampered = relay->tampered();
  }

  static BufferRef Message(int rank, uint64_t round) {
    return PatternBuffer(kMessageBytes, 10 * rank + round);
  }

  GlooEndpoints endpoints;
  std::optional<RecordRelay> relay;
  absl::Status ends[2];
  int tampered = 0;
};

bool HasClearText(const std::string& heard) {
  for (int rank : {0, 1}) {
    const BufferRef message = Exchange::Message(rank, 1);
    const std::string piece(message->data<char>() + 1000, 16);
    if (heard.find(piece) != std::string::npos) return true;
  }
  return false;
}

TEST(GlooEncryption, NothingIsInClearOnTheWire) {
  Exchange exchange(nullptr, /*encrypt=*/true);
  for (const absl::Status& end : exchange.ends) EXPECT_TRUE(end.ok()) << end;
  const std::string& heard = exchange.relay->Heard();
  EXPECT_GT(heard.size(), 6 * kMessageBytes);
  EXPECT_LT(heard.size(), 6 * kMessageBytes * 1.01 + 10'000) << "what it costs";
  EXPECT_FALSE(HasClearText(heard));
  for (const std::string& address : exchange.endpoints.addresses) {
    EXPECT_EQ(heard.find(address.substr(kKeyOffset, 8)), std::string::npos) << "the key";
  }
}

TEST(GlooEncryption, WithoutItAllIsInClear) {
  Exchange exchange(nullptr, /*encrypt=*/false);
  for (const absl::Status& end : exchange.ends) EXPECT_TRUE(end.ok()) << end;
  EXPECT_TRUE(HasClearText(exchange.relay->Heard()));
}

// Where a record of rank 1's message to rank 0 is changed, rank 0 says so, and nobody takes anything for a
// message. What rank 1 then sees is the end of the connection, or TLS's word for it.
void ExpectDataLoss(const std::string& what, const RecordRelay::Tamper& tamper) {
  const Exchange exchange(tamper, /*encrypt=*/true);
  EXPECT_GE(exchange.tampered, 1) << what;
  ExpectStatus(exchange.ends[0], absl::StatusCode::kDataLoss,
               {"rank 0", "recv_kv", "rank 1", "is lost: TLS: "});
  EXPECT_TRUE(exchange.ends[1].code() == absl::StatusCode::kDataLoss ||
              exchange.ends[1].code() == absl::StatusCode::kUnavailable)
      << what << ": " << exchange.ends[1];
}

TEST(GlooEncryption, AnyChangeOnTheWireEndsTheRun) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  for (int draw = 0; draw < 4; ++draw) {
    const int at = Draw(random, 1, 23);  // of rank 1's first two messages: 12 each are large
    const std::string where = absl::StrCat(" at record ", at, ", seed ", seed);
    const auto on = [at](const std::function<std::vector<std::string>(const std::string&)>& change) {
      return [=](RecordRelay::Direction direction, int number, const std::string& record) {
        return direction == RecordRelay::kToServer && number == at ? change(record)
                                                                   : std::vector<std::string>{record};
      };
    };
    const int bit = Draw(random, 0, 8 * 4000 - 1);
    ExpectDataLoss("flipped" + where, on([=](std::string record) {
                     record[5 + bit / 8] = static_cast<char>(record[5 + bit / 8] ^ (1 << bit % 8));
                     return std::vector<std::string>{record};
                   }));
    ExpectDataLoss("repeated" + where, on([](const std::string& record) {
                     return std::vector<std::string>{record, record};
                   }));
    ExpectDataLoss("left out" + where, on([](const std::string&) { return std::vector<std::string>(); }));
    std::string kept;
    ExpectDataLoss("in another order" + where,
                   [&kept, at](RecordRelay::Direction direction, int number, const std::string& record) {
                     if (direction == RecordRelay::kToServer && number == at - 1) {
                       kept = record;
                       return std::vector<std::string>();
                     }
                     if (direction == RecordRelay::kToServer && number == at) {
                       return std::vector<std::string>{record, kept};
                     }
                     return std::vector<std::string>{record};
                   });
  }
}

// Rank 2 has lost a message to rank 0 when what rank 3 sends is changed.
TEST(GlooEncryption, AChangeIsToldAfterAMessageToAnotherWasLost) {
  GlooEndpoints endpoints(4, {.encrypt = true});
  RecordRelay relay(endpoints.addresses[2], [](RecordRelay::Direction direction, int, std::string record) {
    if (direction == RecordRelay::kToServer) record[100] = static_cast<char>(record[100] ^ 1);
    return std::vector<std::string>{record};
  });
  auto ranks = endpoints.ConnectAll();
  auto first = ranks[2]->SendReceive(Traffic::kQ, 0, PatternBuffer(20 << 20, 1), 3, 1).value();
  auto changed = ranks[2]->SendReceive(Traffic::kKv, 1, PatternBuffer(1, 2), 3, kMessageBytes).value();
  ranks[0]->Abort(absl::AbortedError("over"));
  ExpectStatus(first->Wait(Soon()).status(), absl::StatusCode::kUnavailable,
               {"rank 2", "the connection with rank 0 is lost"});
  ASSERT_TRUE(ranks[3]->SendReceive(Traffic::kKv, 2, PatternBuffer(kMessageBytes, 3), 2, 1).ok());
  const auto is_connected = [&] {  // with the sender
    return ranks[2]->SendReceive(Traffic::kO, 1, PatternBuffer(1, 4), 3, 1).ok();
  };
  const absl::Time deadline = Soon();
  while (is_connected() && MonotonicNow() < deadline) absl::SleepFor(absl::Milliseconds(1));
  ExpectStatus(changed->Wait(Soon()).status(), absl::StatusCode::kDataLoss,
               {"rank 2", "recv_kv", "the connection with rank 3 is lost: TLS: "});
  for (auto& rank : ranks) rank->Abort(absl::AbortedError("over"));
}

TEST(GlooEncryption, RanksOfDifferentKeysDoNotMeet) {
  GlooEndpoints endpoints(2, {.encrypt = true});
  std::vector<std::string> wrong = endpoints.addresses;
  wrong[0][kKeyOffset + 7] = static_cast<char>(wrong[0][kKeyOffset + 7] ^ 1);
  absl::Status of_client;
  std::thread client(
      [&] { of_client = endpoints.endpoints[1]->Connect(wrong, *endpoints.streams[1], Soon()).status(); });
  const absl::Status of_server = endpoints.Connect(0, MonotonicNow() + absl::Seconds(3)).status();
  client.join();
  ExpectStatus(of_client, absl::StatusCode::kUnavailable,
               {"rank 1", "rank 0", "it has not this run's key: TLS: "});
  ExpectStatus(of_server, absl::StatusCode::kDeadlineExceeded, {"rank 0", "rank 1"});
}

TEST(GlooEncryption, ARankThatDoesNotEncryptIsRefused) {
  for (bool encrypt : {true, false}) {
    GlooEndpoints endpoints(2, {.encrypt = encrypt}), others(2, {.encrypt = !encrypt});
    endpoints.addresses[1] = others.addresses[1];
    ExpectStatus(endpoints.Connect(0).status(), absl::StatusCode::kInvalidArgument,
                 {"rank 1", "pool.encrypt"});
  }
}

// Who has heard a hello and says it first is in nobody's way.
TEST(GlooEncryption, AHelloThatWasHeardIsWorthNothing) {
  GlooEndpoints endpoints(2, {.encrypt = true});
  const std::string& low = endpoints.addresses[0];
  const uint32_t from_to[] = {1, 0};
  const std::string hello = low.substr(0, 16) + std::string(reinterpret_cast<const char*>(from_to), 8) +
                            endpoints.addresses[1].substr(24, 16) + low.substr(24, 16);
  sockaddr_in address;
  std::memcpy(&address, low.data() + 40, sizeof(address));
  std::vector<FileDescriptor> thieves;
  for (const std::string then : {"", "GET / HTTP/1.1\r\n\r\n", "\x16\x03\x01", "\x17\x03\x03\x40"}) {
    thieves.emplace_back(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    ASSERT_EQ(connect(thieves.back().get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    const std::string said = hello + then;
    ASSERT_EQ(send(thieves.back().get(), said.data(), said.size(), MSG_NOSIGNAL), std::ssize(said));
  }
  auto ranks = endpoints.ConnectAll();
  EXPECT_EQ(endpoints.endpoints[0]->strangers(), std::ssize(thieves));
  auto receive = ranks[0]->SendReceive(Traffic::kQ, 1, PatternBuffer(9, 1), 1, 9).value();
  ASSERT_TRUE(ranks[1]->SendReceive(Traffic::kQ, 0, PatternBuffer(9, 2), 0, 9).ok());
  EXPECT_TRUE(HasPattern(**receive->Wait(Soon()), 9, 2));
  for (auto& rank : ranks) rank->Abort(absl::AbortedError("over"));
}

// ---- In clear text, where gloo's preamble and Meshfill's header go before each message.

constexpr uint64_t kClearRun = 0x5ca1ab1e0ddba11;
struct ClearHeader {
  uint64_t run;
  uint64_t sequence;
  uint32_t traffic;
  uint32_t from;
  uint64_t bytes;
  uint64_t has_checksum;
  uint64_t payload_checksum;
  uint64_t sum;
};
constexpr size_t kPreambleBytes = 48;
constexpr size_t kLengthBeforeHeader = 16;

// What rank 0 says of rank 1's message, in front of which `change` has been at work.
absl::Status ReceiveChanged(const std::function<void(char* header)>& change) {
  GlooEndpoints endpoints(2, {.run = kClearRun});
  std::atomic<bool> changed = false;  // by the relay's thread
  RecordRelay relay(endpoints.addresses[0], nullptr,
                    [&](RecordRelay::Direction direction, std::string& bytes) {
                      const std::string run(reinterpret_cast<const char*>(&kClearRun), sizeof(kClearRun));
                      const size_t at = bytes.rfind(run);
                      // A hello has the run, too, and nothing that long before it.
                      if (changed || direction != RecordRelay::kToServer || at == std::string::npos ||
                          at < kPreambleBytes || bytes.size() < at + sizeof(ClearHeader)) {
                        return;
                      }
                      change(bytes.data() + at);
                      changed = true;
                    });
  auto ranks = endpoints.ConnectAll();
  auto receive = ranks[0]->SendReceive(Traffic::kKv, 1, PatternBuffer(8, 0), 1, 8).value();
  EXPECT_TRUE(ranks[1]->SendReceive(Traffic::kKv, 0, PatternBuffer(8, 1), 0, 8).ok());
  const absl::Status end = receive->Wait(Soon()).status();
  EXPECT_TRUE(changed);
  for (auto& rank : ranks) rank->Abort(absl::AbortedError("over"));
  return end;
}

TEST(GlooInClear, AHeaderThatWasChangedOnItsWayIsFound) {
  std::mt19937_64 random(TestSeed());
  for (int draw = 0; draw < 8; ++draw) {
    const absl::Status end = ReceiveChanged([&](char* header) {
      header[Draw<size_t>(random, 0, sizeof(ClearHeader) - 1)] ^= static_cast<char>(1 << Draw(random, 0, 7));
    });
    ExpectStatus(end, absl::StatusCode::kDataLoss,
                 {"rank 0", "recv_kv", "rank 1", "the header of message 0"});
  }
}

// Whole, but not the one that is waited for.
TEST(GlooInClear, AMessageOfAnotherPlaceIsFound) {
  const std::function<void(ClearHeader&)> changes[] = {
      [](ClearHeader& header) { ++header.run; },
      [](ClearHeader& header) { ++header.sequence; },
      [](ClearHeader& header) { header.traffic = static_cast<uint32_t>(Traffic::kQ); },
      [](ClearHeader& header) { header.from = 0; },
  };
  for (const auto& change : changes) {
    const absl::Status end = ReceiveChanged([&](char* at) {
      ClearHeader header;
      std::memcpy(&header, at, sizeof(header));
      change(header);
      header.sum = Checksum(&header, offsetof(ClearHeader, sum));
      std::memcpy(at, &header, sizeof(header));
    });
    ExpectStatus(end, absl::StatusCode::kInternal,
                 {"rank 0", "recv_kv", "rank 1", "the ranks have diverged"});
  }
}

// gloo throws then, on the thread of its loop.
TEST(GlooInClear, AMessageThatIsTooLongForGlooEndsTheConnection) {
  const absl::Status end = ReceiveChanged([](char* header) {
    const uint64_t too_long = 1 << 20;
    std::memcpy(header - kLengthBeforeHeader, &too_long, sizeof(too_long));
  });
  ExpectStatus(end, absl::StatusCode::kUnavailable,
               {"rank 0", "recv_kv", "the connection with rank 1 is lost: "});
}

}  // namespace
}  // namespace meshfill
