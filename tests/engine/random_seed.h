// The seed of a test's random draws: $MESHFILL_SEED where set, to replay a failure, else new each time.
// Printed.
#ifndef MESHFILL_TESTS_ENGINE_RANDOM_SEED_H_
#define MESHFILL_TESTS_ENGINE_RANDOM_SEED_H_

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>

namespace meshfill {

inline uint64_t TestSeed() {
  const char* fixed = std::getenv("MESHFILL_SEED");
  const uint64_t seed = fixed != nullptr ? std::strtoull(fixed, nullptr, 10) : std::random_device{}();
  std::printf("seed %llu (replay with MESHFILL_SEED)\n", static_cast<unsigned long long>(seed));
  return seed;
}

// Uniform in [low, high].
template <typename T>
T Draw(std::mt19937_64& random, T low, T high) {
  return std::uniform_int_distribution<T>(low, high)(random);
}

}  // namespace meshfill

#endif  // MESHFILL_TESTS_ENGINE_RANDOM_SEED_H_
