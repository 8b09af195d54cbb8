#include "engine/plan/rank_speed.h"

#include <gtest/gtest.h>

#include <cmath>
#include <iterator>
#include <limits>
#include <random>
#include <string>

#include "engine/plan/planner.h"
#include "tests/engine/random_seed.h"

namespace meshfill {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

// Refused, and the field and its value are named.
void ExpectRefused(const PoolSpeed& speed, const std::string& field_and_value) {
  const absl::Status status = CheckPoolSpeed(speed);
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << field_and_value;
  EXPECT_NE(status.message().find(field_and_value), std::string::npos) << status;
}

TEST(CheckPoolSpeed, TakesWhatCanBeMeasured) {
  std::mt19937_64 random(TestSeed());
  std::uniform_real_distribution<double> exponent(-12, 20);
  for (int draw = 0; draw < 200; ++draw) {
    PoolSpeed speed;
    for (const SpeedField& field : kSpeedFields) {
      speed.*field.value = std::pow(10, exponent(random)) + (field.kind == SpeedField::Kind::kFactor ? 1 : 0);
      if (field.kind == SpeedField::Kind::kRate && random() % 8 == 0) speed.*field.value = kInfinity;
      if (field.kind == SpeedField::Kind::kSeconds && random() % 8 == 0) speed.*field.value = 0;
    }
    speed.slice_tokens = static_cast<int64_t>(1 + random() % (1 << 20));
    EXPECT_TRUE(CheckPoolSpeed(speed).ok()) << CheckPoolSpeed(speed);
  }
  EXPECT_TRUE(CheckPoolSpeed({}).ok());
}

TEST(CheckPoolSpeed, NamesTheFieldAndItsValue) {
  for (const SpeedField& field : kSpeedFields) {
    const std::string name = field.name;
    const auto with = [&](double value) {
      PoolSpeed speed;
      speed.*field.value = value;
      return speed;
    };
    const std::string range = field.kind == SpeedField::Kind::kRate      ? "above 0"
                              : field.kind == SpeedField::Kind::kSeconds ? "finite, and 0 or more"
                                                                         : "finite, and 1 or more";
    ExpectRefused(with(-1), name + " is -1; it must be " + range);
    ExpectRefused(with(kNone), name + " is nan");
    if (field.kind != SpeedField::Kind::kSeconds) ExpectRefused(with(0), name + " is 0");
    if (field.kind != SpeedField::Kind::kRate) ExpectRefused(with(kInfinity), name + " is inf");
    if (field.kind == SpeedField::Kind::kFactor) ExpectRefused(with(0.5), name + " is 0.5");
  }
  for (const int64_t tokens : {int64_t{-1}, int64_t{0}, (int64_t{1} << 20) + 1}) {
    ExpectRefused({.slice_tokens = tokens}, "slice_tokens is " + std::to_string(tokens));
  }
}

// The table has every number: nothing but a double fits between two of them.
TEST(CheckPoolSpeed, KnowsEveryField) {
  EXPECT_EQ(sizeof(PoolSpeed), std::size(kSpeedFields) * sizeof(double) + sizeof(int64_t));
}

TEST(CheckPoolSpeed, IsAskedByThePlanner) {
  const ModelShape model{
      .layers = 1, .hidden = 8, .intermediate = 8, .q_heads = 1, .kv_heads = 1, .head_dim = 8, .vocab = 8};
  const PoolSpeed speed{.token_seconds = -2};
  EXPECT_EQ(MakePlan(model, speed, {.tokens = 10}).status(), CheckPoolSpeed(speed));
}

}  // namespace
}  // namespace meshfill
