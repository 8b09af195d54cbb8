// The tests' way to run a fuzz target: its seeds, what fuzzing has found before, and seeded mutations of
// both, the same ones every time.
//
// Usage: TARGET_fuzz [--write DIR] [CORPUS]
//   CORPUS  has an input in base64 on each line that does not begin with #
//   --write puts each of them into a file of DIR instead, for libFuzzer
// MESHFILL_FUZZ_ROUNDS: how many mutations, in place of the target's own number.
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <fstream>
#include <random>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "kernels/monotonic_time.h"
#include "tests/fuzz/fuzz_target.h"

namespace meshfill {
namespace {

constexpr absl::Duration kLongestRun = absl::Seconds(20);  // of one input, on a machine that is busy
constexpr size_t kLongestInput = 1 << 16;
constexpr rlim_t kMostMemory = rlim_t{4} << 30;  // what takes more fails here, and not the machine

std::string current_input;  // in base64, and a line break

// A crash tells its input.
void OnCrash(int signal) {
  static constexpr char kWord[] = "the input, in base64:\n";
  if (write(STDERR_FILENO, kWord, sizeof(kWord) - 1) < 0) _exit(1);
  if (write(STDERR_FILENO, current_input.data(), current_input.size()) < 0) _exit(1);
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

void LimitMemory() {
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // they map more than there is
  const rlimit limit = {.rlim_cur = kMostMemory, .rlim_max = kMostMemory};
  FUZZ_CHECK(setrlimit(RLIMIT_AS, &limit) == 0);
#endif
}

void RunOne(const std::string& input) {
  current_input = absl::Base64Escape(input) + "\n";
  const absl::Time begin = MonotonicNow();
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()), input.size());
  FUZZ_CHECK(MonotonicNow() - begin < kLongestRun);
}

class Mutator {
 public:
  explicit Mutator(const std::vector<std::string>& inputs) : inputs_(inputs) {}

  std::string Next() {
    std::string input = inputs_[Below(inputs_.size())];
    for (size_t changes = 1 + Below(4); changes > 0; --changes) Change(input);
    input.resize(std::min(input.size(), kLongestInput));
    return input;
  }

 private:
  // Numbers at which code forgets something, as text and as bytes.
  static constexpr std::array<std::string_view, 20> kWords = {
      "-1",
      "0",
      "1e308",
      "NaN",
      "null",
      "{}",
      "[]",
      "\"\"",
      "2147483648",
      "9223372036854775807",
      "18446744073709551615",
      "99999999999999999999",
      std::string_view("\0\0\0\0\0\0\0\0", 8),
      std::string_view("\xff\xff\xff\xff\xff\xff\xff\xff", 8),
      std::string_view("\x80\x80\x80\x80\x10", 5),                       // 2^32 as a varint
      std::string_view("\xff\xff\xff\xff\x07", 5),                       // 2^31 - 1
      std::string_view("\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", 10),  // -1
      std::string_view("\0\0\0\0\0\0\xf8\x7f", 8),                       // NaN as a double
      std::string_view("\0\0\0\0\0\0\xf0\x7f", 8),                       // infinity
      std::string_view("\xff\xff\xff\x7f", 4)};

  size_t Below(size_t bound) { return bound == 0 ? 0 : random_() % bound; }

  void Change(std::string& input) {
    const size_t at = Below(input.size() + 1);
    const size_t size = std::min(input.size() - at, 1 + Below(Below(4) == 0 ? 64 : 4));
    switch (Below(8)) {
      case 0:
        if (at < input.size()) input[at] = static_cast<char>(input[at] ^ (1 << Below(8)));
        break;
      case 1:
        if (at < input.size()) input[at] = static_cast<char>(random_());
        break;
      case 2:
        input.erase(at, size);
        break;
      case 3:
        input.insert(at, input.substr(at, size));
        break;
      case 4:
        input.replace(at, size, kWords[Below(kWords.size())]);
        break;
      case 5:
        input.insert(at, kWords[Below(kWords.size())]);
        break;
      case 6: {  // the rest of another
        const std::string& other = inputs_[Below(inputs_.size())];
        input.replace(at, std::string::npos, other.substr(Below(other.size() + 1)));
        break;
      }
      case 7: {  // a part of another, or of this one
        const std::string& other = inputs_[Below(inputs_.size())];
        input.insert(at, other.substr(Below(other.size() + 1), 1 + Below(64)));
        break;
      }
    }
  }

  const std::vector<std::string>& inputs_;
  std::mt19937_64 random_{1};
};

int Main(int argc, char** argv) {
  std::string write_to;
  std::vector<std::string> inputs = FuzzSeeds();
  for (int i = 1; i < argc; ++i) {
    if (std::string_view(argv[i]) == "--write" && i + 1 < argc) {
      write_to = argv[++i];
      continue;
    }
    std::ifstream corpus(argv[i]);
    FUZZ_CHECK(corpus.good());
    for (std::string line; std::getline(corpus, line);) {
      std::string input;
      if (line.empty() || line.front() == '#') continue;
      FUZZ_CHECK(absl::Base64Unescape(line, &input));
      inputs.push_back(std::move(input));
    }
  }
  for (size_t i = 0; !write_to.empty() && i < inputs.size(); ++i) {
    std::ofstream(absl::StrCat(write_to, "/seed", i), std::ios::binary) << inputs[i];
  }
  if (!write_to.empty()) return 0;

  LimitMemory();
  for (int signal : {SIGABRT, SIGSEGV, SIGFPE, SIGBUS, SIGILL}) std::signal(signal, OnCrash);
  int rounds = kFuzzRounds;
  if (const char* asked = std::getenv("MESHFILL_FUZZ_ROUNDS")) FUZZ_CHECK(absl::SimpleAtoi(asked, &rounds));
  inputs.emplace_back();  // nothing at all
  for (const std::string& input : inputs) RunOne(input);
  Mutator mutator(inputs);
  for (int round = 0; round < rounds; ++round) RunOne(mutator.Next());
  std::printf("%zu inputs and %d mutations of them\n", inputs.size(), rounds);
  return 0;
}

}  // namespace
}  // namespace meshfill

int main(int argc, char** argv) { return meshfill::Main(argc, argv); }
