#include "engine/mesh/traffic.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <string>

namespace meshfill {
namespace {

TEST(Traffic, NamesAreDistinctAndThoseOfTheReports) {
  std::set<std::string> names, operations;
  for (Traffic traffic : kAllTraffics) {
    names.insert(TrafficName(traffic));
    operations.insert(OperationName(traffic));
  }
  EXPECT_EQ(names, (std::set<std::string>{"q", "kv", "o", "dq", "dkv", "all_to_all", "gather"}));
  EXPECT_EQ(operations, (std::set<std::string>{"recv_q", "recv_kv", "send_o", "send_dq", "send_dkv",
                                               "all_to_all", "gather"}));
}

TEST(PerTraffic, HoldsOneValueForEach) {
  PerTraffic<int64_t> bytes = {{Traffic::kO, 3}, {Traffic::kQ, 1}};
  EXPECT_EQ(bytes[Traffic::kQ], 1);
  EXPECT_EQ(bytes[Traffic::kKv], 0);
  bytes[Traffic::kGather] += 10;
  EXPECT_EQ(bytes.total(), 14);
  EXPECT_EQ(bytes, (PerTraffic<int64_t>{{Traffic::kQ, 1}, {Traffic::kO, 3}, {Traffic::kGather, 10}}));
  EXPECT_EQ(PerTraffic<int64_t>::Alike(2).total(), 2 * kTraffics);
}

}  // namespace
}  // namespace meshfill
