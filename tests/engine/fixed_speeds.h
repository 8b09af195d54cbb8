// Plans that no busy machine changes, for tests of what is planned.
#ifndef MESHFILL_TESTS_ENGINE_FIXED_SPEEDS_H_
#define MESHFILL_TESTS_ENGINE_FIXED_SPEEDS_H_

#include <string>

#include "engine/speed/pool_profile.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/engine/temp_folder.h"

namespace meshfill {

// Replaces the speeds that were measured into a profile: a busy machine may measure that a prefix gains
// nothing.
inline void FixSpeeds(const std::string& profile, PoolSpeed speed = {}) {
  const auto pools = nlohmann::json::parse(ReadWholeFile(profile)).at("pools");
  for (const auto& pool : pools) {
    const auto key = pool.at("pool").get<std::string>();
    const auto measured = ReadPoolProfile(profile, key);
    ASSERT_TRUE(measured.ok() && measured->has_value()) << measured.status();
    speed.slice_tokens = (*measured)->slice_tokens;
    speed.lm_head_bytes_per_second = 5e9;
    ASSERT_TRUE(StorePoolProfile(profile, key, speed).ok());
  }
}

}  // namespace meshfill

#endif  // MESHFILL_TESTS_ENGINE_FIXED_SPEEDS_H_
