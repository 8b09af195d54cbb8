// Random bands of every layout that the planner deals, for property tests.
#ifndef MESHFILL_TESTS_KERNELS_RANDOM_BAND_H_
#define MESHFILL_TESTS_KERNELS_RANDOM_BAND_H_

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/band.h"

namespace meshfill {

// A fresh seed at each run; MESHFILL_SEED replays one.
inline uint32_t TestSeed() {
  const char* replay = std::getenv("MESHFILL_SEED");
  return replay != nullptr ? static_cast<uint32_t>(std::strtoul(replay, nullptr, 10))
                           : std::random_device()();
}

inline int64_t Draw(std::mt19937& random, int64_t lowest, int64_t highest) {
  return std::uniform_int_distribution<int64_t>(lowest, highest)(random);
}

template <typename T>
T Pick(std::mt19937& random, std::initializer_list<T> choices) {
  return choices.begin()[Draw(random, 0, static_cast<int64_t>(choices.size()) - 1)];
}

// The band of Q chunk i and KV chunk j among n ranks: striped, zigzag, contiguous, or with a cached prefix;
// one in three has a sliding window, one in three a cached prefix of any length before its queries.
inline Band RandomBand(std::mt19937& random, int64_t q_tokens, int64_t k_tokens) {
  const int64_t n = Draw(random, 1, 5), i = Draw(random, 0, n - 1), j = Draw(random, 0, n - 1);
  const int64_t chunk = std::max<int64_t>({q_tokens, k_tokens, 1});
  Band band;
  switch (Draw(random, 0, 3)) {
    case 0: {  // striped
      const auto width = Pick<int64_t>(random, {1, 7, 16, 64});
      band.q = {.base = i, .stride = n, .width = width};
      band.k = {.base = j, .stride = n, .width = width};
      break;
    }
    case 1: {  // zigzag: stripes i and 2n - 1 - i
      const int64_t width = (chunk + 1) / 2;
      band.q = {.base = i, .stride = 2 * n - 1 - 2 * i, .width = width};
      band.k = {.base = j, .stride = 2 * n - 1 - 2 * j, .width = width};
      break;
    }
    case 2:  // contiguous
      band.q = {.base = i, .width = chunk};
      band.k = {.base = j, .width = chunk};
      break;
    case 3:  // cached prefix: the queries stand at its end
      band.q = {.base = std::max<int64_t>(0, k_tokens - q_tokens)};
      break;
  }
  if (Draw(random, 0, 2) == 0) band.first_q = Draw(random, 0, 2 * chunk);
  if (Draw(random, 0, 2) == 0) band.window = Draw(random, 1, 2 * n * chunk);
  return band;
}

inline std::string DebugString(const Band& band) {
  const auto slots = [](const SlotPositions& s) {
    return absl::StrCat(s.base, "+", s.stride, "x of ", s.width);
  };
  return absl::StrCat("q ", slots(band.q), ", k ", slots(band.k), ", window ", band.window, ", first q ",
                      band.first_q);
}

}  // namespace meshfill

#endif  // MESHFILL_TESTS_KERNELS_RANDOM_BAND_H_
