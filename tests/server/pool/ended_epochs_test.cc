#include "server/pool/ended_epochs.h"

#include <set>

#include "absl/random/random.h"
#include "gtest/gtest.h"

namespace meshfill {
namespace {

TEST(EndedEpochsTest, TwoAtOnePlaceArePoison) {
  EndedEpochs ended;
  EXPECT_FALSE(ended.Blame({0, 9, 2, 3}));
  EXPECT_FALSE(ended.Blame({0, 9, 4, 5}));
  EXPECT_FALSE(ended.Blame({0, 9, 0, 1}));
  EXPECT_TRUE(ended.Blame({0, 9, 3, 3}));
}

TEST(EndedEpochsTest, AnotherPieceOfThePromptIsAnotherPlace) {
  EndedEpochs ended;
  EXPECT_FALSE(ended.Blame({0, 9, 2, 3}));
  EXPECT_FALSE(ended.Blame({10, 19, 2, 3}));
  EXPECT_TRUE(ended.Blame({19, 30, 3, 4})) << "the pieces were other ones before";
}

TEST(EndedEpochsTest, ASuspicionIsNoBlameAndCountsUntilItIsForgotten) {
  EndedEpochs ended;
  for (int i = 0; i < 3; ++i) ended.Suspect({0, 9, 1, 2});
  EXPECT_FALSE(ended.Blame({0, 9, 3, 4}));
  EndedEpochs other = ended;
  EXPECT_TRUE(ended.Blame({0, 9, 2, 2}));
  other.ForgetSuspicions();
  EXPECT_FALSE(other.Blame({0, 9, 2, 2}));
  EXPECT_TRUE(other.Blame({0, 9, 2, 2}));
}

// By the sets of what lies within them.
TEST(EndedEpochsTest, TwoPlacesMayBeOneWhereTheyOverlap) {
  absl::BitGen random;
  for (int i = 0; i < 3000; ++i) {
    const auto draw = [&] {
      PromptPlace place;
      place.first_token = absl::Uniform(random, 0, 6);
      place.last_token = absl::Uniform<int64_t>(random, place.first_token, 7);
      place.first_layer = absl::Uniform(random, 0, 6);
      place.last_layer = absl::Uniform(random, place.first_layer, 7);
      return place;
    };
    const auto points = [](const PromptPlace& place) {
      std::set<std::pair<int64_t, int>> within;
      for (int64_t token = place.first_token; token <= place.last_token; ++token) {
        for (int layer = place.first_layer; layer <= place.last_layer; ++layer) within.emplace(token, layer);
      }
      return within;
    };
    const PromptPlace a = draw(), b = draw();
    bool common = false;
    for (const auto& point : points(a)) common = common || points(b).contains(point);
    EXPECT_EQ(a.MayBe(b), common) << a.first_token << ".." << a.last_token << " × " << a.first_layer << ".."
                                  << a.last_layer << " and " << b.first_token << ".." << b.last_token << " × "
                                  << b.first_layer << ".." << b.last_layer;
  }
}

}  // namespace
}  // namespace meshfill
