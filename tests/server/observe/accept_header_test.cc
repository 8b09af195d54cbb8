#include "server/observe/accept_header.h"

#include "gtest/gtest.h"

namespace meshfill {
namespace {

TEST(AcceptHeaderTest, TakesElementsApart) {
  const auto elements =
      ParseAccept(" text/plain ; version=0.0.4;q=0.25, A/b;Escaping=\"allow-utf-8\" ;Q=0.5;x ,*/*");
  ASSERT_EQ(elements.size(), 3u);
  EXPECT_TRUE(elements[0].Is("TEXT/plain"));
  EXPECT_FALSE(elements[0].Is("text"));
  EXPECT_EQ(elements[0].weight, 0.25);
  EXPECT_EQ(elements[0].Parameter("version"), "0.0.4");
  EXPECT_EQ(elements[0].Parameter("VERSION"), "0.0.4");
  EXPECT_EQ(elements[0].Parameter("q"), std::nullopt) << "the weight";
  EXPECT_EQ(elements[1].Parameter("escaping"), "allow-utf-8");
  EXPECT_EQ(elements[1].Parameter("x"), "");
  EXPECT_EQ(elements[1].Parameter("version"), std::nullopt);
  EXPECT_EQ(elements[1].weight, 0.5);
  EXPECT_EQ(elements[2].name, "*/*");
  EXPECT_EQ(elements[2].weight, 1);
  EXPECT_EQ(ParseAccept("a;b=c=d").front().Parameter("b"), "c=d");
}

TEST(AcceptHeaderTest, AWeightThatIsNoNumberIsZero) {
  for (const char* header : {"a;q=", "a;q=often", "a;q=0", "a;q=0.000"}) {
    EXPECT_EQ(ParseAccept(header).front().weight, 0) << header;
  }
}

TEST(AcceptHeaderTest, HoldsNonsense) {
  for (const char* header : {"", ",,;;", ";", "q=1", "=", "a;=;\"", "a;b=\""}) {
    for (const AcceptedElement& element : ParseAccept(header)) {
      EXPECT_FALSE(element.Is("gzip")) << header;
      EXPECT_EQ(element.Parameter("version"), std::nullopt) << header;
    }
  }
}

}  // namespace
}  // namespace meshfill
