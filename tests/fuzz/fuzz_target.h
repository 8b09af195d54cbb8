// What a fuzz target is: a function that takes any bytes and returns. It may refuse them; it may not crash,
// hang, read what is not its own, or break a promise that FUZZ_CHECK names.
//
// libFuzzer calls it in the long mode (run.sh), replay.cc in the tests.
#ifndef MESHFILL_TESTS_FUZZ_FUZZ_TARGET_H_
#define MESHFILL_TESTS_FUZZ_FUZZ_TARGET_H_

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

// In every build, unlike assert.
#define FUZZ_CHECK(condition)                                                                         \
  do {                                                                                                \
    if (!(condition)) {                                                                               \
      std::fprintf(stderr, "%s:%d: broken promise: %s (last system error: %s)\n", __FILE__, __LINE__, \
                   #condition, std::strerror(errno));                                                 \
      std::abort();                                                                                   \
    }                                                                                                 \
  } while (false)

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace meshfill {

// Each target has these two. Good inputs, which mutations begin with:
std::vector<std::string> FuzzSeeds();
// How many mutations a test runs: a second's or two.
extern const int kFuzzRounds;

// Takes an input apart, from its begin; what is missing at its end reads as 0 and as nothing.
class FuzzInput {
 public:
  FuzzInput(const uint8_t* data, size_t size) : rest_(reinterpret_cast<const char*>(data), size) {}

  bool empty() const { return rest_.empty(); }
  uint8_t Byte() {
    if (rest_.empty()) return 0;
    const auto byte = static_cast<uint8_t>(rest_.front());
    rest_.remove_prefix(1);
    return byte;
  }
  uint16_t Word() {
    const uint16_t low = Byte();
    return static_cast<uint16_t>(low | Byte() << 8);
  }
  // Of a word's length.
  std::string Piece() {
    const size_t size = Word();
    return Take(size);
  }
  std::string Rest() { return Take(rest_.size()); }

 private:
  std::string Take(size_t size) {
    std::string taken(rest_.substr(0, size));
    rest_.remove_prefix(taken.size());
    return taken;
  }

  std::string_view rest_;
};

// What FuzzInput::Piece reads.
inline std::string FuzzPiece(std::string_view bytes) {
  std::string piece = {static_cast<char>(bytes.size() & 0xff), static_cast<char>(bytes.size() >> 8)};
  return piece.append(bytes);
}

}  // namespace meshfill

#endif  // MESHFILL_TESTS_FUZZ_FUZZ_TARGET_H_
