// What a config.json says of rotary embeddings: linear, llama3, yarn and longrope, in old and new spelling.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tests/engine/model/config_json.h"

namespace meshfill {
namespace {

using nlohmann::json;
using testing::ElementsAre;

TEST(ModelConfigTest, ReadsLongRope) {
  const ModelConfig config = ParseGood(Phi3With(LongRope()));
  EXPECT_EQ(config.rope.scaling, RopeScaling::kLongRope);
  EXPECT_THAT(config.rope.short_factors, ElementsAre(1, 1.01f, 1.02f, 1.03f, 1.04f, 1.05f, 1.06f, 1.07f));
  EXPECT_THAT(config.rope.long_factors, ElementsAre(1.5f, 2, 3, 4, 5, 6, 7, 8.25f));
  EXPECT_NEAR(config.rope.attention_factor, std::sqrt(1 + std::log(1024.0 / 256) / std::log(256.0)), 1e-12);
  EXPECT_EQ(config.shape.context_tokens, 1024);
  EXPECT_EQ(config.shape.long_rope_after, 256);
  EXPECT_FALSE(config.shape.HasLongRope(256));
  EXPECT_TRUE(config.shape.HasLongRope(257));

  const json stated = With(LongRope(), {{"factor", 16.0}, {"original_max_position_embeddings", 256}});
  EXPECT_NEAR(ParseGood(Phi3With(stated)).rope.attention_factor,
              std::sqrt(1 + std::log(16.0) / std::log(256.0)), 1e-12);
  EXPECT_EQ(ParseGood(Phi3With(With(stated, {{"attention_factor", 1.5}}))).rope.attention_factor, 1.5);
  for (const int original : {1024, 2048}) {  // nothing is stretched
    EXPECT_EQ(ParseGood(Phi3With(LongRope(), original)).rope.attention_factor, 1) << original;
  }
  EXPECT_EQ(ParseGood(Phi3With(With(LongRope(), {{"type", "su"}}))).shape.long_rope_after, 256);
  const json partial = {{"rope_type", "longrope"}, {"short_factor", {1, 1}}, {"long_factor", {2, 3}}};
  EXPECT_EQ(ParseGood(With(Phi3With(partial), {{"partial_rotary_factor", 0.25}})).shape.rope_dim, 4);

  EXPECT_EQ(
      ParseGood(Rope(With(LongRope(), {{"original_max_position_embeddings", 64}}))).shape.long_rope_after,
      64);
  EXPECT_EQ(ParseGood(Phi3()).shape.long_rope_after, 0);
  EXPECT_FALSE(ParseGood(Phi3()).shape.HasLongRope(1024));
}

TEST(ModelConfigTest, Gemma3HasTwoRopesInOldAndNewSpelling) {
  const ModelConfig old_spelling =
      ParseGood(With(Gemma3(), {{"rope_theta", 5e5},
                                {"rope_local_base_freq", 2e4},
                                {"rope_scaling", {{"rope_type", "linear"}, {"factor", 8.0}}}}));
  const json by_type = {{"full_attention", {{"rope_type", "linear"}, {"factor", 8.0}, {"rope_theta", 5e5}}},
                        {"sliding_attention", {{"rope_type", "default"}, {"rope_theta", 2e4}}}};
  const ModelConfig new_spelling = ParseGood(With(Gemma3(), {{"rope_parameters", by_type}}));
  for (const ModelConfig& config : {old_spelling, new_spelling}) {
    EXPECT_EQ(config.RopeOf(LayerRope::kMain).theta, 5e5);
    EXPECT_EQ(config.RopeOf(LayerRope::kMain).scaling, RopeScaling::kLinear);
    EXPECT_EQ(config.RopeOf(LayerRope::kMain).factor, 8);
    EXPECT_EQ(config.RopeOf(LayerRope::kLocal).theta, 2e4);
    EXPECT_EQ(config.RopeOf(LayerRope::kLocal).scaling, RopeScaling::kNone);
    EXPECT_EQ(config.shape.context_tokens, 1024);
  }
  const ModelConfig one_type =
      ParseGood(With(Gemma3(), {{"rope_parameters", Without(by_type, "full_attention")}}));
  EXPECT_EQ(one_type.rope.theta, 1e6);
  EXPECT_EQ(one_type.rope.scaling, RopeScaling::kNone);
  EXPECT_EQ(one_type.local_rope.theta, 2e4);

  // What has no place in an object of its own stands at the top.
  const json scaled = {{"full_attention", {{"rope_type", "linear"}, {"factor", 8.0}}},
                       {"sliding_attention", {{"rope_type", "default"}}}};
  const ModelConfig above = ParseGood(
      With(Gemma3(), {{"rope_theta", 5e5}, {"rope_local_base_freq", 2e4}, {"rope_parameters", scaled}}));
  EXPECT_EQ(above.rope.theta, 5e5);
  EXPECT_EQ(above.local_rope.theta, 2e4);
  EXPECT_EQ(ParseGood(With(Gemma3(), {{"rope_parameters", json::object()}})).rope.theta, 1e6);

  // The context is as long as the layers that see all keys reach.
  const json yarn = {{"rope_type", "yarn"}, {"factor", 4.0}};
  EXPECT_EQ(
      ParseGood(With(Gemma3(), {{"rope_parameters", {{"sliding_attention", yarn}}}})).shape.context_tokens,
      1024);
  EXPECT_EQ(ParseGood(With(Gemma3(), {{"rope_parameters", {{"full_attention", yarn}}}})).shape.context_tokens,
            4096);
}

TEST(ModelConfigTest, Llama3FactorsMayBeSmall) {
  const json small = {{"rope_type", "llama3"},
                      {"factor", 8.0},
                      {"low_freq_factor", 1e-6},
                      {"high_freq_factor", 2e-6},
                      {"original_max_position_embeddings", 512}};
  EXPECT_EQ(ParseGood(Rope(small)).rope.high_freq_factor, 2e-6);
}

TEST(ModelConfigTest, RopeInOldAndNewSpelling) {
  const json llama3 = {{"rope_type", "llama3"},
                       {"factor", 8.0},
                       {"low_freq_factor", 1.0},
                       {"high_freq_factor", 4.0},
                       {"original_max_position_embeddings", 512}};
  const ModelConfig old_spelling = ParseGood(Rope(llama3));
  const ModelConfig new_spelling =
      ParseGood(With(Llama(), {{"rope_parameters", With(llama3, {{"rope_theta", 500000.0}})}}));
  for (const ModelConfig& config : {old_spelling, new_spelling}) {
    EXPECT_EQ(config.rope.scaling, RopeScaling::kLlama3);
    EXPECT_EQ(config.rope.theta, 500000);
    EXPECT_EQ(config.rope.factor, 8);
    EXPECT_EQ(config.rope.low_freq_factor, 1);
    EXPECT_EQ(config.rope.high_freq_factor, 4);
    EXPECT_EQ(config.rope.original_context_tokens, 512);
    EXPECT_EQ(config.rope.attention_factor, 1);
    EXPECT_EQ(config.shape.context_tokens, 1024);
  }
  const ModelConfig linear = ParseGood(Rope({{"type", "linear"}, {"factor", 2}}));
  EXPECT_EQ(linear.rope.scaling, RopeScaling::kLinear);
  EXPECT_EQ(linear.rope.factor, 2);
  EXPECT_EQ(ParseGood(Rope(nullptr)).rope.scaling, RopeScaling::kNone);
  EXPECT_EQ(ParseGood(Rope({{"rope_type", "default"}})).rope.scaling, RopeScaling::kNone);
  EXPECT_EQ(ParseGood(Rope(json::object())).rope.scaling, RopeScaling::kNone);
  const ModelConfig both = ParseGood(With(Rope(llama3), {{"rope_parameters", llama3}}));  // they agree
  EXPECT_EQ(both.rope.scaling, RopeScaling::kLlama3);
  EXPECT_EQ(ParseGood(Rope(Without(llama3, "original_max_position_embeddings"))).rope.original_context_tokens,
            1024);  // max_position_embeddings
}

TEST(ModelConfigTest, YarnExtendsTheContext) {
  const json yarn = {{"rope_type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 1024}};
  const ModelConfig config = ParseGood(Rope(yarn));
  EXPECT_EQ(config.rope.scaling, RopeScaling::kYarn);
  EXPECT_EQ(config.shape.context_tokens, 4096);
  EXPECT_NEAR(config.rope.attention_factor, 0.1 * std::log(4.0) + 1, 1e-12);
  EXPECT_EQ(config.rope.beta_fast, 32);
  EXPECT_EQ(config.rope.beta_slow, 1);
  EXPECT_TRUE(config.rope.truncate);

  EXPECT_EQ(ParseGood(Rope(With(yarn, {{"original_max_position_embeddings", 64}}))).shape.context_tokens,
            1024);
  EXPECT_EQ(ParseGood(Rope(With(yarn, {{"attention_factor", 1.5}}))).rope.attention_factor, 1.5);
  EXPECT_NEAR(ParseGood(Rope(With(yarn, {{"mscale", 1.0}, {"mscale_all_dim", 0.5}}))).rope.attention_factor,
              (0.1 * std::log(4.0) + 1) / (0.05 * std::log(4.0) + 1), 1e-12);
  for (const json& one : {json{{"mscale", 2.0}}, json{{"mscale_all_dim", 2.0}},
                          json{{"mscale", 2.0}, {"mscale_all_dim", 0}}}) {  // one alone changes nothing
    EXPECT_EQ(ParseGood(Rope(With(yarn, one))).rope.attention_factor, config.rope.attention_factor) << one;
  }
  const ModelConfig derived =
      ParseGood(Rope({{"type", "yarn"}, {"factor", nullptr}, {"original_max_position_embeddings", 256}}));
  EXPECT_EQ(derived.rope.factor, 4);  // max_position_embeddings / original
  const ModelConfig shrunk = ParseGood(Rope({{"type", "yarn"}, {"original_max_position_embeddings", 2048}}));
  EXPECT_EQ(shrunk.rope.attention_factor, 1);  // nothing is stretched
  const ModelConfig zeros = ParseGood(Rope(With(yarn, {{"beta_fast", 0}, {"beta_slow", 0}})));
  EXPECT_EQ(zeros.rope.beta_fast, 32);  // 0 stands for absent
  EXPECT_EQ(zeros.rope.beta_slow, 1);
  EXPECT_EQ(ParseGood(Rope(With(yarn, {{"beta_fast", 1}, {"beta_slow", 1}}))).rope.beta_fast, 1);
}

}  // namespace
}  // namespace meshfill
