#include "server/config/tenant_name.h"

#include <gtest/gtest.h>

#include <string>

namespace meshfill {
namespace {

TEST(TenantNameTest, HasPrintableAsciiAlone) {
  for (int byte = 0; byte < 256; ++byte) {
    const std::string name = {'a', static_cast<char>(byte), 'b'};
    EXPECT_EQ(CheckTenantName(name).ok(), 0x20 <= byte && byte <= 0x7e) << byte;
  }
}

TEST(TenantNameTest, HasAtMost128Characters) {
  EXPECT_TRUE(CheckTenantName("").ok()) << "the tenant of those who name none";
  EXPECT_TRUE(CheckTenantName(std::string(128, 'x')).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(CheckTenantName(std::string(129, 'x'))));
}

}  // namespace
}  // namespace meshfill
