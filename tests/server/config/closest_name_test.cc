#include "server/config/closest_name.h"

#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace meshfill {
namespace {

TEST(DidYouMean, NamesTheNearest) {
  const std::vector<std::string> known = {"--server", "--cert", "--config", "--set"};
  EXPECT_EQ(DidYouMean("--sever", known), "did you mean --server? ");
  EXPECT_EQ(DidYouMean("--confg", known), "did you mean --config? ");
  EXPECT_EQ(DidYouMean("--crt", known), "did you mean --cert? ");
  EXPECT_EQ(DidYouMean("--serverr", known), "did you mean --server? ");
  EXPECT_EQ(DidYouMean("--sorver", known), "did you mean --server? ");
  EXPECT_EQ(DidYouMean("-certt", known), "did you mean --cert? ") << "two letters of five";
  const std::vector<std::string> keys = {"embedded", "control_listen"};
  EXPECT_EQ(DidYouMean("control_lsiten", keys), "did you mean control_listen? ");
  EXPECT_EQ(DidYouMean("xxxxrol_listen", keys), "did you mean control_listen? ") << "a third of its letters";
  EXPECT_EQ(DidYouMean("xxxxxol_listen", keys), "");
  EXPECT_EQ(DidYouMean("embxxded", keys), "did you mean embedded? ");
  EXPECT_EQ(DidYouMean("embxxxed", keys), "") << "three letters of eight";
}

TEST(DidYouMean, NamesNothingWhereHalfOfTheLettersDiffer) {
  const std::vector<std::string> known = {"--server", "--cert", "--config", "--set"};
  EXPECT_EQ(DidYouMean("--text", known), "");  // two letters of four from --cert
  EXPECT_EQ(DidYouMean("--port", known), "");
  EXPECT_EQ(DidYouMean("--x", known), "");
  EXPECT_EQ(DidYouMean("--", known), "");
  EXPECT_EQ(DidYouMean("", known), "");
  EXPECT_EQ(DidYouMean("--server", {}), "");
}

}  // namespace
}  // namespace meshfill
