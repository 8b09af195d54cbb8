#include "server/observe/worker_metrics.h"

#include <string>

#include "gtest/gtest.h"
#include "tests/server/observe/http_get.h"

namespace meshfill {
namespace {

TEST(WorkerMetricsTest, PagesTellTheWorker) {
  WorkerMetrics metrics;
  const auto pages = HttpPages::Listen("127.0.0.1:0", metrics.Pages());
  ASSERT_TRUE(pages.ok()) << pages.status();
  const std::string& address = (*pages)->address();
  EXPECT_NE(HttpGet(address, "/readyz").find(" 503 "), std::string::npos);

  metrics.Set({.member = true,
               .runs = 1,
               .kv_leases = 3,
               .kv_bytes = 4096,
               .kv_max_bytes = 8192,
               .shared_weight_bytes = 77});
  EXPECT_NE(HttpGet(address, "/readyz").find(" 200 "), std::string::npos);
  const std::string text = HttpBody(HttpGet(address, "/metrics"));
  for (const char* line :
       {"meshfill_worker_member 1\n", "meshfill_worker_runs 1\n", "meshfill_worker_kept_leases 3\n",
        "meshfill_worker_kept_bytes 4096\n", "meshfill_worker_kept_max_bytes 8192\n",
        "meshfill_worker_shared_weight_bytes 77\n", "meshfill_build_info{commit=\"",
        "version=\"" MESHFILL_VERSION "\"} 1\n", "\nprocess_open_fds "}) {
    EXPECT_NE(text.find(line), std::string::npos) << line << " is missing in\n" << text;
  }
  const std::string open =
      HttpBody(HttpSend(address, "GET /metrics HTTP/1.0\r\nAccept: application/openmetrics-text"));
  EXPECT_NE(open.find("meshfill_worker_kept_leases 3.0\n"), std::string::npos) << open;
  EXPECT_EQ(open.substr(open.size() - 6), "# EOF\n");

  metrics.Set({});
  EXPECT_NE(HttpGet(address, "/readyz").find(" 503 "), std::string::npos);
  EXPECT_NE(HttpBody(HttpGet(address, "/metrics")).find("meshfill_worker_member 0\n"), std::string::npos);
}

}  // namespace
}  // namespace meshfill
