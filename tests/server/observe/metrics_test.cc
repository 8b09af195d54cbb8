#include "server/observe/metrics.h"

#include <algorithm>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/monotonic_time.h"
#include "server/observe/build_name.h"
#include "tests/server/fake_engine.h"

namespace meshfill {
namespace {

// Samples of the text format: "name{labels}" to value.
std::map<std::string, double> Samples(const std::string& text) {
  std::map<std::string, double> samples;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.empty() || line.front() == '#') continue;
    const size_t space = line.rfind(' ');
    EXPECT_TRUE(samples.emplace(line.substr(0, space), std::stod(line.substr(space + 1))).second) << line;
  }
  return samples;
}

PrefillResult RunOnce(FakeEngine& engine, int64_t tokens, const PrefillOptions& options = {}) {
  const std::vector<uint32_t> ids(tokens, 1);
  auto result = RunPrefill(engine, {ids, options});
  EXPECT_TRUE(result.ok()) << result.status();
  result->prefill_seconds = 2;
  result->plan.predicted.peak_bytes = 3 << 20;
  return *std::move(result);
}

TEST(MetricsTest, TellsAPrefill) {
  Metrics metrics;
  FakeEngine engine;
  engine.PredictSeconds(1.6);
  metrics.SetPool(PoolState::kReady, FakeEngine::kRanks);
  metrics.SetPeakFlops(2e12);
  metrics.SetQueueLimits(/*max_requests=*/16, /*max_tokens=*/8192, absl::Minutes(5));
  metrics.SetQueue({.requests = 3,
                    .tokens = 4096,
                    .requests_by_class = {0, 0, 1, 0, 2},
                    .requests_by_tenant = {{"batch", 2}, {"other", 1}},
                    .running_tokens = 1000});
  metrics.OnPrefillStart(0.02);
  metrics.OnPrefillDone(RunOnce(engine, 1000));
  metrics.OnComputed(3, /*others=*/true);
  metrics.OnComputed(0.5, /*others=*/false);
  metrics.OnComputed(2, /*others=*/true);
  metrics.OnFirstToken({.seconds = 2.25, .upload_seconds = 0.125, .slowdown = 7, .prompt_tokens = 100000});
  metrics.OnRequestDone(absl::StatusCode::kOk);
  metrics.OnRequestDone(absl::StatusCode::kResourceExhausted);
  metrics.OnRequestRefused(Refusal::kQueueTokens);

  const std::string text = metrics.Text();
  const auto samples = Samples(text);
  const std::map<std::string, double> expected = {
      {"meshfill_requests_total{code=\"OK\"}", 1},
      {"meshfill_requests_total{code=\"RESOURCE_EXHAUSTED\"}", 1},
      {"meshfill_requests_total{code=\"INTERNAL\"}", 0},
      {"meshfill_requests_refused_total{reason=\"queue_tokens\"}", 1},
      {"meshfill_requests_refused_total{reason=\"other\"}", 0},
      {"meshfill_queue_requests", 3},
      {"meshfill_queue_tokens", 4096},
      {"meshfill_queue_max_requests", 16},
      {"meshfill_queue_max_tokens", 8192},
      {"meshfill_queue_max_wait_seconds", 300},
      {"meshfill_queue_oldest_seconds", 0},
      {"meshfill_running_tokens", 1000},
      {"meshfill_queue_wait_seconds_count", 1},
      {"meshfill_queue_wait_seconds_bucket{le=\"0.01\"}", 0},
      {"meshfill_queue_wait_seconds_bucket{le=\"0.1\"}", 1},
      {"meshfill_upload_seconds_sum", 0.125},
      {"meshfill_upload_seconds_bucket{le=\"0.1\"}", 0},
      {"meshfill_upload_seconds_bucket{le=\"0.5\"}", 1},
      {"meshfill_ttft_seconds_sum", 2.25},
      {"meshfill_ttft_seconds_bucket{le=\"0.1\"}", 0},
      {"meshfill_ttft_seconds_bucket{le=\"3600\"}", 1},
      {"meshfill_ttft_by_prompt_seconds_count{up_to=\"65536\"}", 0},
      {"meshfill_ttft_by_prompt_seconds_sum{up_to=\"524288\"}", 2.25},
      {"meshfill_ttft_by_prompt_seconds_bucket{up_to=\"524288\",le=\"14400\"}", 1},
      {"meshfill_ttft_by_prompt_seconds_count{up_to=\"+Inf\"}", 0},
      {"meshfill_slowdown_bucket{up_to=\"524288\",le=\"5\"}", 0},
      {"meshfill_slowdown_bucket{up_to=\"524288\",le=\"10\"}", 1},
      {"meshfill_slowdown_count{up_to=\"8192\"}", 0},
      {"meshfill_computing_seconds_total{others=\"no\"}", 0.5},
      {"meshfill_computing_seconds_total{others=\"yes\"}", 5},
      {"meshfill_queue_class_requests{class=\"0\"}", 1},
      {"meshfill_queue_class_requests{class=\"2\"}", 2},
      {"meshfill_queue_class_requests{class=\"-2\"}", 0},
      {"meshfill_queue_tenant_requests{tenant=\"batch\"}", 2},
      {"meshfill_queue_tenant_requests{tenant=\"other\"}", 1},
      {"meshfill_request_prompt_tokens_bucket{le=\"65536\"}", 0},
      {"meshfill_request_prompt_tokens_bucket{le=\"262144\"}", 1},
      {"meshfill_request_prompt_tokens_bucket{le=\"16777216\"}", 1},
      {"meshfill_request_prompt_tokens_sum", 100000},
      {"meshfill_prefill_seconds_sum", 2},
      {"meshfill_prompt_tokens_total", 1000},
      {"meshfill_comm_wait_seconds_total{op=\"recv_q\",rank=\"0\"}", 0.125},
      {"meshfill_comm_wait_seconds_total{op=\"recv_kv\",rank=\"3\"}", 0.25},
      {"meshfill_comm_wait_seconds_total{op=\"send_o\",rank=\"1\"}", 0.0625},
      {"meshfill_comm_wait_seconds_total{op=\"all_to_all\",rank=\"2\"}", 0},
      {"meshfill_attention_compute_seconds_total{rank=\"3\"}", 1.25},
      {"meshfill_attention_seconds_total{rank=\"1\"}", 2},
      {"meshfill_rank_busy_seconds_total{rank=\"2\"}", 5 - 0.4375},
      {"meshfill_mesh_busy_seconds_total{rank=\"2\"}", 4.5 - 0.4375},
      {"meshfill_largest_rank_comm_bytes_total{op=\"kv\"}", 2},
      {"meshfill_predicted_comm_bytes_total{op=\"o\"}", 0},
      {"meshfill_predicted_prefill_seconds_total", 1.6},
      {"meshfill_peak_flops_per_second", 2e12},
      {"meshfill_comm_bytes_total{op=\"q\"}", 40},
      {"meshfill_comm_bytes_total{op=\"kv\"}", 80},
      {"meshfill_comm_bytes_total{op=\"o\"}", 120},
      {"meshfill_comm_bytes_total{op=\"all_to_all\"}", 160},
      {"meshfill_overlap_ratio", 1 - 0.4375 / 2},
      {"meshfill_mfu", 0.5},
      {"meshfill_attention_mfu", 0.25},
      {"meshfill_predicted_seconds", 1.6},
      {"meshfill_predicted_peak_bytes", 3 << 20},
      {"meshfill_prediction_ratio", 1.25},
      {"meshfill_straggler_spread_seconds", 3},
      {"meshfill_ranks{state=\"ready\"}", 4},
      {"meshfill_ranks{state=\"loading\"}", 0},
      {absl::StrCat("meshfill_build_info{commit=\"", kBuildCommit, "\",version=\"" MESHFILL_VERSION "\"}"),
       1},
  };
  for (const auto& [name, value] : expected) {
    ASSERT_TRUE(samples.contains(name)) << name << " is missing in\n" << text;
    EXPECT_DOUBLE_EQ(samples.at(name), value) << name;
  }
  EXPECT_GT(samples.at("meshfill_peak_memory_bytes"), 1 << 20);
  EXPECT_GT(samples.at("process_resident_memory_bytes"), 1 << 20);
}

TEST(MetricsTest, TheBuildKnowsItsCommit) {
  EXPECT_TRUE(std::regex_match(kBuildCommit, std::regex("[0-9a-f]{7,40}|unknown"))) << kBuildCommit;
}

TEST(MetricsTest, CountersAddUpAndKeepTheirSeries) {
  Metrics metrics;
  FakeEngine engine;
  metrics.OnPrefillDone(RunOnce(engine, 10));
  const auto once = Samples(metrics.Text());
  metrics.OnPrefillDone(RunOnce(engine, 10));
  const auto twice = Samples(metrics.Text());
  EXPECT_EQ(once.size(), twice.size());
  for (const char* name : {"meshfill_prompt_tokens_total", "meshfill_prefill_seconds_count",
                           "meshfill_comm_bytes_total{op=\"kv\"}",
                           "meshfill_comm_wait_seconds_total{op=\"recv_q\",rank=\"2\"}"}) {
    EXPECT_GT(once.at(name), 0) << name;
    EXPECT_DOUBLE_EQ(twice.at(name), 2 * once.at(name)) << name;
  }
}

TEST(MetricsTest, ABucketNamesTheTraceOfItsLatestRequest) {
  Metrics metrics;
  metrics.OnFirstToken({.seconds = 2.5, .trace_id = "aa"});
  metrics.OnFirstToken({.seconds = 2.25, .trace_id = "bb"});
  metrics.OnFirstToken({.seconds = 2.4});
  metrics.OnFirstToken({.seconds = 99'999, .trace_id = "cc"});
  EXPECT_EQ(metrics.Text().find("trace_id"), std::string::npos);
  const std::string text = metrics.Text(MetricsFormat::kOpenMetrics);
  EXPECT_NE(text.find("\nmeshfill_ttft_seconds_bucket{le=\"2.5\"} 3 # {trace_id=\"bb\"} 2.25 "),
            std::string::npos);
  EXPECT_NE(text.find("\nmeshfill_ttft_seconds_bucket{le=\"+Inf\"} 4 # {trace_id=\"cc\"} 99999.0 "),
            std::string::npos);
  EXPECT_EQ(text.find("trace_id=\"aa\""), std::string::npos) << "2.5 is in the same bucket, and earlier";
}

// Classes reach up to their bound, which is in them.
TEST(MetricsTest, APromptIsInTheClassOfItsLength) {
  Metrics metrics;
  for (const int64_t tokens : {1, 8192, 8193, 65536, 524288, 524289}) {
    metrics.OnFirstToken({.seconds = 1, .upload_seconds = 0.5, .slowdown = 2, .prompt_tokens = tokens});
  }
  const auto samples = Samples(metrics.Text());
  const std::map<std::string, int> expected = {{"8192", 2}, {"65536", 2}, {"524288", 1}, {"+Inf", 1}};
  for (const auto& [up_to, count] : expected) {
    for (const char* family : {"meshfill_ttft_by_prompt_seconds", "meshfill_slowdown"}) {
      EXPECT_EQ(samples.at(absl::StrCat(family, "_count{up_to=\"", up_to, "\"}")), count) << family << up_to;
    }
  }
}

// Whichever rank is the busiest, and whatever the others did before.
TEST(MetricsTest, FiguresOfThreePrefillsAddUpByRank) {
  Metrics metrics;
  FakeEngine engine;
  double attention = 0, compute = 0, busy = 0, waited = 0, paused = 0;
  for (int turn = 0; turn < 3; ++turn) {
    PrefillResult result = RunOnce(engine, 100);
    std::rotate(result.ranks.begin(), result.ranks.begin() + 1 + turn, result.ranks.end());
    result.paused_seconds = 0.5 * turn;
    const RankStats& second = result.ranks[1];
    attention += second.attention_seconds;
    compute += second.block_seconds + second.merge_seconds;
    waited += second.wait_seconds[Traffic::kKv];
    busy += second.total_seconds - second.comm_wait_seconds();
    paused += result.paused_seconds;
    metrics.OnPrefillDone(result);
    const auto samples = Samples(metrics.Text());
    EXPECT_DOUBLE_EQ(samples.at("meshfill_straggler_spread_seconds"), 3) << "of ranks that took 3 to 6 s";
    EXPECT_DOUBLE_EQ(samples.at("meshfill_attention_seconds_total{rank=\"1\"}"), attention);
    EXPECT_DOUBLE_EQ(samples.at("meshfill_attention_compute_seconds_total{rank=\"1\"}"), compute);
    EXPECT_DOUBLE_EQ(samples.at("meshfill_comm_wait_seconds_total{op=\"recv_kv\",rank=\"1\"}"), waited);
    EXPECT_DOUBLE_EQ(samples.at("meshfill_rank_busy_seconds_total{rank=\"1\"}"), busy);
    EXPECT_DOUBLE_EQ(samples.at("meshfill_paused_seconds_total"), paused);
    EXPECT_DOUBLE_EQ(samples.at("meshfill_prefill_seconds_count"), turn + 1);
    EXPECT_DOUBLE_EQ(samples.at("meshfill_prompt_tokens_total"), 100 * (turn + 1));
  }
}

// A rank of a sub-mesh is counted as the pool's rank that it is, beside those of its own mesh.
TEST(MetricsTest, CountsRanksOfSubmeshesAsThePools) {
  Metrics metrics;
  metrics.SetPool(PoolState::kReady, 4);
  FakeEngine engine;
  PrefillResult result = RunOnce(engine, 100);
  result.ranks = {{.total_seconds = 2}, {.total_seconds = 4}};
  result.pool_ranks = {2, 3};
  metrics.OnPrefillDone(result);
  result.ranks = {{.total_seconds = 8}};
  result.pool_ranks = {3};
  metrics.OnPrefillDone(result);
  // Of several prompts that share a pass some ranks have more.
  result.ranks = {{.total_seconds = 1}, {}, {}, {.total_seconds = 5}};
  result.pool_ranks = {};
  result.pack_prompts = 2;
  metrics.OnPrefillDone(result);
  const auto samples = Samples(metrics.Text());
  const double busy[] = {1, 0, 2, 17}, of_mesh[] = {1, 0, 3, 16};
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_DOUBLE_EQ(samples.at(absl::StrCat("meshfill_rank_busy_seconds_total{rank=\"", rank, "\"}")),
                     busy[rank]);
    EXPECT_DOUBLE_EQ(samples.at(absl::StrCat("meshfill_mesh_busy_seconds_total{rank=\"", rank, "\"}")),
                     of_mesh[rank]);
  }
}

// A layer is one observation, so that no model has more series than another.
TEST(MetricsTest, TellsHowEvenlyExpertsAreUsedInAFewSeries) {
  Metrics metrics;
  FakeEngine engine;
  PrefillResult result = RunOnce(engine, 100);
  const auto expert_series = [](const std::map<std::string, double>& samples) {
    return std::count_if(samples.begin(), samples.end(),
                         [](const auto& sample) { return sample.first.starts_with("meshfill_expert"); });
  };
  const auto before = expert_series(Samples(metrics.Text()));
  result.expert_loads = {{.layer = 1, .imbalance = 1, .idle = 0},
                         {.layer = 2, .imbalance = 2.25, .idle = 0.5},
                         {.layer = 3, .imbalance = 1.5, .idle = 0.02}};
  metrics.OnPrefillDone(result);
  result.expert_loads.clear();
  for (int layer = 3; layer < 94; ++layer) {
    result.expert_loads.push_back({.layer = layer, .imbalance = 16 - 0.1 * layer, .idle = 0.3});
  }
  result.expert_loads.push_back(
      {.layer = 94, .imbalance = result.expert_loads.front().imbalance, .idle = 0.3});
  const auto samples = Samples(metrics.Text());
  metrics.OnPrefillDone(result);
  const auto later = Samples(metrics.Text());
  const std::map<std::string, double> expected = {
      {"meshfill_expert_imbalance_count", 3},
      {"meshfill_expert_imbalance_sum", 4.75},
      {"meshfill_expert_imbalance_bucket{le=\"1.1\"}", 1},
      {"meshfill_expert_imbalance_bucket{le=\"1.5\"}", 2},
      {"meshfill_expert_imbalance_bucket{le=\"2\"}", 2},
      {"meshfill_expert_imbalance_bucket{le=\"2.5\"}", 3},
      {"meshfill_expert_idle_ratio_count", 3},
      {"meshfill_expert_idle_ratio_bucket{le=\"0\"}", 1},
      {"meshfill_expert_idle_ratio_bucket{le=\"0.05\"}", 2},
      {"meshfill_expert_idle_ratio_bucket{le=\"0.25\"}", 2},
      {"meshfill_expert_idle_ratio_bucket{le=\"0.5\"}", 3},
      {"meshfill_expert_worst_imbalance", 2.25},
      {"meshfill_expert_worst_layer", 2},
  };
  for (const auto& [name, value] : expected) {
    ASSERT_TRUE(samples.contains(name)) << name;
    EXPECT_DOUBLE_EQ(samples.at(name), value) << name;
  }
  EXPECT_EQ(later.at("meshfill_expert_imbalance_count"), 95);
  EXPECT_DOUBLE_EQ(later.at("meshfill_expert_worst_imbalance"), 15.7);
  EXPECT_EQ(later.at("meshfill_expert_worst_layer"), 3) << "the first of those that are equally bad";
  EXPECT_EQ(expert_series(later), before);
  EXPECT_LE(before, 32);
}

// A rate needs a sample before the first event.
TEST(MetricsTest, SeriesAreThereBeforeTheirFirstEvent) {
  Metrics metrics;
  metrics.SetPool(PoolState::kReady, FakeEngine::kRanks);
  std::set<std::string> before;
  for (const auto& [name, value] : Samples(metrics.Text())) before.insert(name);

  FakeEngine engine;
  metrics.OnPrefillDone(RunOnce(engine, 1000));
  metrics.OnPrefillStart(1);
  metrics.OnComputed(1, /*others=*/false);
  metrics.OnPreempted();
  metrics.OnResultDropped();
  metrics.OnKvFetched(1);
  for (const int64_t tokens : {1, 10'000, 100'000, 1'000'000}) {
    metrics.OnFirstToken({.seconds = 1, .upload_seconds = 1, .slowdown = 1, .prompt_tokens = tokens});
  }
  for (int code = 0; code <= static_cast<int>(absl::StatusCode::kUnauthenticated); ++code) {
    metrics.OnRequestDone(static_cast<absl::StatusCode>(code));
  }
  for (int refusal = 0; refusal <= static_cast<int>(Refusal::kOther); ++refusal) {
    metrics.OnRequestRefused(static_cast<Refusal>(refusal));
  }
  for (const char* call : {"FetchKv", "RenewKv", "ReleaseKv", "Cancel", "Plan", "GetPool"}) {
    for (const absl::StatusCode code :
         {absl::StatusCode::kInvalidArgument, absl::StatusCode::kNotFound, absl::StatusCode::kUnauthenticated,
          absl::StatusCode::kPermissionDenied}) {
      metrics.OnCallRefused(call, code);
    }
  }
  int reasons = 0;
  for (const auto& [name, value] : Samples(metrics.Text())) {
    if (name.starts_with("meshfill_plan_info")) continue;  // of the last prefill
    EXPECT_TRUE(before.contains(name)) << name;
    EXPECT_EQ(name.find('?'), std::string::npos) << name;
    if (name.starts_with("meshfill_requests_refused_total{")) {
      ++reasons;
      EXPECT_EQ(value, 1) << name;
    }
    if (name.starts_with("meshfill_requests_total{") || name == "meshfill_preemptions_total" ||
        name == "meshfill_results_dropped_total") {
      EXPECT_EQ(value, 1) << name;
    }
  }
  EXPECT_EQ(reasons, static_cast<int>(Refusal::kOther) + 1) << "no two have one name";
}

// Of ranks that others shared, one prompt cannot say how evenly they worked.
TEST(MetricsTest, CountsPromptsThatSharedTheirPass) {
  Metrics metrics;
  FakeEngine engine;
  metrics.OnPrefillDone(RunOnce(engine, 10));
  const auto before = Samples(metrics.Text());
  EXPECT_EQ(before.at("meshfill_packed_prefills_total"), 0);
  PrefillResult result = RunOnce(engine, 10);
  result.pack_prompts = 2;
  result.ranks.front().total_seconds += 1;
  metrics.OnPrefillDone(result);
  const auto samples = Samples(metrics.Text());
  EXPECT_EQ(samples.at("meshfill_packed_prefills_total"), 1);
  EXPECT_EQ(samples.at("meshfill_straggler_spread_seconds"), before.at("meshfill_straggler_spread_seconds"));
}

TEST(MetricsTest, WhatThereIsNotDividesNothing) {
  Metrics metrics;
  FakeEngine engine;
  engine.PredictSeconds(4);
  metrics.OnPrefillDone(RunOnce(engine, 10));
  engine.PredictSeconds(0);
  PrefillResult result = RunOnce(engine, 10);
  result.ranks.clear();
  metrics.OnPrefillDone(result);
  const auto samples = Samples(metrics.Text());
  EXPECT_EQ(samples.at("meshfill_prediction_ratio"), 0.5) << "of the last prefill that had a prediction";
  EXPECT_EQ(samples.at("meshfill_overlap_ratio"), 1);
  EXPECT_EQ(samples.at("meshfill_straggler_spread_seconds"), 0);
}

// Each bound is at most ten times the one before: a quantile between them means something.
TEST(MetricsTest, BucketsLieCloseTogether) {
  const auto families = Samples(Metrics().Text());
  std::map<std::string, std::vector<double>> bounds;
  for (const auto& [name, value] : families) {
    const size_t bound = name.find("le=\"");
    if (bound == std::string::npos || name.find("+Inf", bound) != std::string::npos) continue;
    bounds[name.substr(0, bound)].push_back(std::stod(name.substr(bound + 4)));
  }
  EXPECT_GE(bounds.size(), 8u);
  for (auto& [family, all] : bounds) {
    std::sort(all.begin(), all.end());
    for (size_t i = 1; i < all.size(); ++i) {
      EXPECT_TRUE(all[i - 1] == 0 || all[i] <= 10.001 * all[i - 1]) << family;
    }
  }
}

// Counts that others keep are told again and again, and may come late.
TEST(MetricsTest, CountsOfOthersOnlyGrow) {
  Metrics metrics;
  const PoolLoad pool = {.ranks_by_state = {{"running", 3}, {"draining", 1}},
                         .epochs = 4,
                         .joins = 5,
                         .losses = 6,
                         .refusals = 7,
                         .retries = 8};
  const KvLoad kv = {.leases = 1,
                     .bytes = 2,
                     .max_bytes = 3,
                     .lapsed = 4,
                     .refused = 5,
                     .cached_bytes = 6,
                     .hit_tokens = 7,
                     .miss_tokens = 8,
                     .evictions = 9,
                     .evicted_bytes = 10,
                     .device_bytes = 11};
  const SpanExporter::Counts spans = {.exported = 12, .dropped = 13};
  for (int time = 0; time < 3; ++time) {
    metrics.SetWorkers(pool);
    metrics.SetKv(kv);
    metrics.SetTraceSpans(spans);
  }
  metrics.SetWorkers({.ranks_by_state = {{"ready", 2}}});
  metrics.SetTraceSpans({});
  metrics.OnKvFetched(100);
  metrics.OnKvFetched(20);
  metrics.OnCallRefused("Plan", absl::StatusCode::kNotFound);
  const auto samples = Samples(metrics.Text());
  const std::map<std::string, double> expected = {
      {"meshfill_ranks{state=\"ready\"}", 2},
      {"meshfill_ranks{state=\"running\"}", 0},
      {"meshfill_ranks{state=\"draining\"}", 0},
      {"meshfill_rank_busy_seconds_total{rank=\"3\"}", 0},  // of each rank that there has been
      {"meshfill_epochs_total", 4},
      {"meshfill_worker_joins_total", 5},
      {"meshfill_worker_losses_total", 6},
      {"meshfill_worker_refusals_total", 7},
      {"meshfill_requests_retried_total", 8},
      {"meshfill_kv_leases", 1},
      {"meshfill_kv_bytes", 2},
      {"meshfill_kv_max_bytes", 3},
      {"meshfill_kv_leases_lapsed_total", 4},
      {"meshfill_kv_refused_total", 5},
      {"meshfill_kv_cached_bytes", 6},
      {"meshfill_kv_cache_hit_tokens_total", 7},
      {"meshfill_kv_cache_miss_tokens_total", 8},
      {"meshfill_kv_cache_evictions_total", 9},
      {"meshfill_kv_cache_evicted_bytes_total", 10},
      {"meshfill_kv_device_bytes", 11},
      {"meshfill_trace_spans_total{result=\"exported\"}", 12},
      {"meshfill_trace_spans_total{result=\"dropped\"}", 13},
      {"meshfill_kv_fetched_bytes_total", 120},
      {"meshfill_calls_refused_total{call=\"Plan\",code=\"NOT_FOUND\"}", 1},
      {"meshfill_calls_refused_total{call=\"Plan\",code=\"INVALID_ARGUMENT\"}", 0},
  };
  for (const auto& [name, value] : expected) {
    ASSERT_TRUE(samples.contains(name)) << name;
    EXPECT_DOUBLE_EQ(samples.at(name), value) << name;
  }
}

TEST(MetricsTest, WorkersThatAreGoneHaveNoKv) {
  Metrics metrics;
  metrics.SetKvOfWorkers({{"a", {.leases = 1, .bytes = 2, .max_bytes = 3}}, {"b", {.bytes = 7}}});
  metrics.SetKvOfWorkers({{"b", {.leases = 4, .bytes = 5, .max_bytes = 6}}});
  std::map<std::string, double> of_workers;
  for (const auto& [name, value] : Samples(metrics.Text())) {
    if (name.starts_with("meshfill_kv_worker_")) of_workers[name] = value;
  }
  EXPECT_EQ(of_workers, (std::map<std::string, double>{{"meshfill_kv_worker_leases{worker=\"b\"}", 4},
                                                       {"meshfill_kv_worker_bytes{worker=\"b\"}", 5},
                                                       {"meshfill_kv_worker_max_bytes{worker=\"b\"}", 6}}));
}

TEST(MetricsTest, PlanInfoHasOneSeriesOnly) {
  Metrics metrics;
  FakeEngine engine;
  std::set<std::string> seen;
  for (const Tile tile : {Tile{1, 4}, Tile{2, 2}, Tile{2, 2}, Tile{4, 1}}) {
    metrics.OnPrefillDone(RunOnce(engine, 1000, {.tile = tile}));
    int series = 0;
    for (const auto& [name, value] : Samples(metrics.Text())) {
      if (name.rfind("meshfill_plan_info{", 0) != 0) continue;
      ++series;
      seen.insert(name);
      EXPECT_EQ(value, 1);
      EXPECT_NE(name.find("a=\"" + std::to_string(tile.a) + "\""), std::string::npos) << name;
      EXPECT_NE(name.find("b=\"" + std::to_string(tile.b) + "\""), std::string::npos) << name;
      for (const char* label : {"ranks=\"4\"", "heads=\"1\"", "layout=\"striped\"", "stripe=\"64\""}) {
        EXPECT_NE(name.find(label), std::string::npos) << name;
      }
    }
    EXPECT_EQ(series, 1);
  }
  EXPECT_EQ(seen.size(), 3u);
}

TEST(MetricsTest, EveryFamilyHasAHelpText) {
  Metrics metrics;
  FakeEngine engine;
  metrics.OnPrefillDone(RunOnce(engine, 10));
  const std::string text = metrics.Text();
  for (const auto& [name, value] : Samples(text)) {
    std::string family = name.substr(0, name.find('{'));
    EXPECT_TRUE(family.starts_with("meshfill_") || family.starts_with("process_")) << family;
    for (const std::string suffix : {"_bucket", "_sum", "_count"}) {
      if (family.ends_with(suffix)) family.resize(family.size() - suffix.size());
    }
    const size_t help = text.find("# HELP " + family + " ");
    ASSERT_NE(help, std::string::npos) << family;
    EXPECT_GT(text.find('\n', help) - help, family.size() + 20) << family;
  }
}

TEST(MetricsTest, TheOldestRequestAgesByItself) {
  Metrics metrics;
  metrics.SetQueue({.requests = 1, .tokens = 10, .oldest = MonotonicNow() - absl::Seconds(90)});
  EXPECT_NEAR(Samples(metrics.Text()).at("meshfill_queue_oldest_seconds"), 90, 5);
  metrics.SetQueue({});
  EXPECT_EQ(Samples(metrics.Text()).at("meshfill_queue_oldest_seconds"), 0);
}

}  // namespace
}  // namespace meshfill
