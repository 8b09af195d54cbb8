#include "server/cli/scenario.h"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <tuple>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"
#include "engine/sim/paper_fit.h"
#include "kernels/return_if_error.h"
#include "meshfill/v1/scenario.pb.h"
#include "server/config/config_units.h"
#include "server/config/config_yaml.h"

namespace meshfill {
namespace {

// Bytes of one number on the wire.
int BytesOf(v1::Scenario::AttentionSection::Dtype dtype) {
  return dtype == v1::Scenario::AttentionSection::DTYPE_BF16 ? 2 : 4;
}

// "16, 32" as its words.
std::vector<std::string> Words(const std::string& list) {
  std::vector<std::string> words;
  for (absl::string_view word : absl::StrSplit(list, ',')) {
    word = absl::StripAsciiWhitespace(word);
    if (!word.empty()) words.emplace_back(word);
  }
  return words;
}

class ScenarioReader {
 public:
  explicit ScenarioReader(const std::string& path) : path_(path) {}

  absl::StatusOr<Scenario> Read() {
    RETURN_IF_ERROR(ReadSource());
    RETURN_IF_ERROR(ReadStrategies());
    if (source_.report() == v1::Scenario::REPORT_SWEEP) {
      scenario_.report = Scenario::Report::kSweep;
      RETURN_IF_ERROR(ReadSweep());
      return std::move(scenario_);
    }
    RETURN_IF_ERROR(ReadCluster("cluster", source_.cluster(), scenario_.cluster));
    if (source_.report() == v1::Scenario::REPORT_MESH_ATTENTION_PAPER) {
      scenario_.report = Scenario::Report::kMeshAttentionPaper;
      RETURN_IF_ERROR(ReadPaper());
    } else {
      const auto& attention = source_.attention();
      ASSIGN_OR_RETURN(scenario_.job, ReadJob(attention.tokens(), attention.q_heads(), attention.kv_heads()));
      ASSIGN_OR_RETURN(scenario_.gpus, ReadGpus());
      scenario_.passes = Passes();
    }
    return std::move(scenario_);
  }

  absl::StatusOr<GpuCluster> ReadGpuCluster(const std::string& key) {
    RETURN_IF_ERROR(ReadSource());
    const ClusterSection& section = source_.cluster();
    GpuCluster gpus = {.gemm_flops_per_second = section.gemm_flops_per_second(),
                       .memory_bytes_per_second = section.memory_bytes_per_second(),
                       .host_bytes_per_second = section.host_bytes_per_second(),
                       .memory_bytes = static_cast<int64_t>(section.memory_bytes()),
                       .host_memory_bytes = static_cast<int64_t>(section.host_memory_bytes())};
    if (section.has_experts_gemm_share()) gpus.experts_gemm_share = section.experts_gemm_share();
    RETURN_IF_ERROR(ReadCluster(key, section, gpus.cluster));
    for (const auto& [name, value] : {std::pair{"gemm_flops_per_second", gpus.gemm_flops_per_second},
                                      std::pair{"memory_bytes_per_second", gpus.memory_bytes_per_second},
                                      std::pair{"memory_bytes", static_cast<double>(gpus.memory_bytes)}}) {
      if (value > 0 && std::isfinite(value)) continue;
      return Refuse(absl::StrCat(key, ".", name), "is missing, or not above 0: a plan needs it of a GPU");
    }
    if (!(gpus.host_bytes_per_second >= 0) || !std::isfinite(gpus.host_bytes_per_second)) {
      return Refuse(absl::StrCat(key, ".host_bytes_per_second"), "must be finite, and 0 or more");
    }
    if (!(gpus.experts_gemm_share > 0) || gpus.experts_gemm_share > 1) {
      return Refuse(absl::StrCat(key, ".experts_gemm_share"), "must be above 0, and 1 at most");
    }
    return gpus;
  }

 private:
  absl::Status ReadSource() {
    std::ifstream file(path_, std::ios::binary);
    if (!file)
      return absl::NotFoundError(absl::StrCat(path_, ": cannot be read; give a scenario's YAML file"));
    const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    return ReadYaml(path_, text, &source_, &origins_);
  }

  absl::Status Refuse(const std::string& key, const std::string& problem) const {
    const auto origin = origins_.find(key);
    return absl::InvalidArgumentError(
        absl::StrCat(origin == origins_.end() ? path_ : origin->second, ": ", key, ": ", problem));
  }

  using ClusterSection = v1::Scenario::ClusterSection;

  absl::Status ReadCluster(const std::string& key, const ClusterSection& section, sim::Cluster& cluster) {
    cluster.gpus_per_node = section.has_gpus_per_node() ? static_cast<int>(section.gpus_per_node()) : 8;
    if (!section.fitted_to().empty()) {
      RETURN_IF_ERROR(FitCluster(key, section, cluster));
    } else {
      cluster.same_node = LinkOf(section.same_node());
      cluster.between_nodes = LinkOf(section.between_nodes());
      if (section.node_bytes_per_second() != 0)
        cluster.node_bytes_per_second = section.node_bytes_per_second();
      cluster.attention_flops_per_second = section.attention_flops_per_second();
    }
    cluster.block_overhead_seconds = absl::ToDoubleSeconds(ToDuration(section.block_overhead()));
    const auto& variation = section.variation();
    cluster.variation = {
        .straggler_share = variation.straggler_share(),
        .straggler_slowdown = variation.has_straggler_slowdown() ? variation.straggler_slowdown() : 1,
        .jitter = variation.jitter(),
        .seed = variation.has_seed() ? variation.seed() : 1};
    if (absl::Status status = sim::CheckCluster(cluster); !status.ok()) {
      return Refuse(key, std::string(absl::StripPrefix(status.message(), "cluster: ")));
    }
    return absl::OkStatus();
  }

  absl::Status FitCluster(const std::string& key, const ClusterSection& section, sim::Cluster& cluster) {
    const std::string fitted_to = absl::StrCat(key, ".fitted_to");
    if (section.has_between_nodes() || section.node_bytes_per_second() != 0 ||
        section.attention_flops_per_second() != 0) {
      return Refuse(fitted_to,
                    "leave out between_nodes, node_bytes_per_second and attention_flops_per_second: they are "
                    "fitted");
    }
    ASSIGN_OR_RETURN(auto table, ReadTable(fitted_to, section.fitted_to()));
    sim::FitAssumptions assumptions{
        .gpus_per_node = cluster.gpus_per_node,
        .same_node_bytes_per_second = section.same_node().flow_bytes_per_second()};
    if (section.same_node().has_latency()) {
      assumptions.same_node_latency_seconds =
          absl::ToDoubleSeconds(ToDuration(section.same_node().latency()));
    }
    auto fitted = sim::FitPaperCluster(table, assumptions);
    if (!fitted.ok()) return Refuse(key, std::string(fitted.status().message()));
    cluster = *std::move(fitted);
    return absl::OkStatus();
  }

  static Link LinkOf(const v1::Scenario::ClusterSection::Link& link) {
    return {.latency_seconds = absl::ToDoubleSeconds(ToDuration(link.latency())),
            .bytes_per_second = link.flow_bytes_per_second()};
  }

  absl::Status ReadStrategies() {
    for (const std::string& word : Words(source_.strategies())) {
      auto kind = sim::ParseStrategy(word);
      if (!kind.ok()) return Refuse("strategies", std::string(kind.status().message()));
      scenario_.strategies.push_back(*kind);
    }
    if (!scenario_.strategies.empty()) return absl::OkStatus();
    const auto all = sim::AllStrategies();
    scenario_.strategies.assign(all.begin(), all.end());
    return absl::OkStatus();
  }

  absl::StatusOr<sim::AttentionJob> ReadJob(uint64_t tokens, uint32_t q_heads, uint32_t kv_heads) const {
    const auto& attention = source_.attention();
    constexpr uint64_t kMaxTokens = uint64_t{1} << 31;
    constexpr uint32_t kMaxHeads = 1u << 16;
    if (tokens >= kMaxTokens || q_heads > kMaxHeads || kv_heads > kMaxHeads ||
        attention.head_dim() > kMaxHeads) {
      return Refuse("attention", "too large: below 2^31 tokens, at most 65536 heads of at most 65536");
    }
    sim::AttentionJob job = {.tokens = static_cast<int64_t>(tokens),
                             .q_heads = static_cast<int>(q_heads),
                             .kv_heads = static_cast<int>(kv_heads),
                             .head_dim = static_cast<int>(attention.head_dim()),
                             .causal = attention.mask() == v1::Scenario::AttentionSection::MASK_CAUSAL};
    job.wire.element = attention.has_dtype() ? BytesOf(attention.dtype()) : 2;
    job.wire.partial = BytesOf(attention.partial_dtype());
    job.wire.gradient = BytesOf(attention.gradient_dtype());
    if (absl::Status status = sim::CheckJob(job); !status.ok()) {
      return Refuse("attention", std::string(status.message()));
    }
    return job;
  }

  absl::StatusOr<std::vector<int>> ReadGpus() const {
    std::vector<int> all;
    for (const std::string& word : Words(source_.gpus())) {
      int gpus = 0;
      if (!absl::SimpleAtoi(word, &gpus) || gpus < 1 || gpus > sim::kMaxGpus) {
        return Refuse("gpus", absl::StrCat("\"", word, "\" is no number from 1 to ", sim::kMaxGpus));
      }
      all.push_back(gpus);
    }
    if (all.empty()) return Refuse("gpus", "is missing; write e.g. gpus: 16, 32, 64");
    return all;
  }

  std::vector<sim::Pass> Passes() const {
    if (source_.passes() == v1::Scenario::PASSES_BACKWARD) return {sim::Pass::kBackward};
    if (source_.passes() == v1::Scenario::PASSES_FORWARD) return {sim::Pass::kForward};
    return {sim::Pass::kForward, sim::Pass::kBackward};
  }

  absl::Status ReadSweep() {
    const auto& section = source_.sweep();
    const auto& attention = source_.attention();
    if (source_.has_cluster()) return Refuse("cluster", "a sweep has its clusters in sweep.clusters");
    if (attention.tokens() != 0 || attention.q_heads() != 0 || attention.kv_heads() != 0) {
      return Refuse("attention", "leave out tokens, q_heads and kv_heads: sweep has them");
    }
    const std::map<std::string, ClusterSection> clusters(section.clusters().begin(),
                                                         section.clusters().end());
    if (clusters.empty()) return Refuse("sweep.clusters", "is missing; give at least one cluster a name");
    for (const auto& [name, cluster] : clusters) {
      sim::SweepCluster& read = scenario_.sweep.clusters.emplace_back();
      read.name = name;
      RETURN_IF_ERROR(ReadCluster(absl::StrCat("sweep.clusters.", name), cluster, read.cluster));
    }
    RETURN_IF_ERROR(ReadSweepJobs(section));
    ASSIGN_OR_RETURN(scenario_.sweep.gpus, ReadGpus());
    scenario_.sweep.passes = Passes();
    return absl::OkStatus();
  }

  absl::Status ReadSweepJobs(const v1::Scenario::SweepSection& section) {
    for (const std::string& heads : Words(section.heads())) {
      const std::vector<std::string> parts = absl::StrSplit(heads, '/');
      uint32_t q_heads = 0, kv_heads = 0;
      if (parts.size() != 2 || !absl::SimpleAtoi(parts[0], &q_heads) ||
          !absl::SimpleAtoi(parts[1], &kv_heads)) {
        return Refuse("sweep.heads", absl::StrCat("\"", heads, "\" is no pair of numbers; write e.g. 32/8"));
      }
      for (const std::string& word : Words(section.tokens())) {
        uint64_t tokens = 0;
        if (!absl::SimpleAtoi(word, &tokens)) {
          return Refuse("sweep.tokens", absl::StrCat("\"", word, "\" is no number of tokens"));
        }
        ASSIGN_OR_RETURN(sim::AttentionJob job, ReadJob(tokens, q_heads, kv_heads));
        scenario_.sweep.jobs.push_back(job);
      }
    }
    if (!scenario_.sweep.jobs.empty()) return absl::OkStatus();
    return Refuse("sweep", "heads and tokens are missing; write e.g. heads: 32/8, 64/8 and tokens: 131072");
  }

  absl::Status ReadPaper() {
    const auto& paper = source_.paper();
    for (const auto& [key, file, cells] :
         {std::tuple{"paper.throughput", paper.throughput(), &scenario_.throughput},
          std::tuple{"paper.mfu", paper.mfu(), &scenario_.mfu},
          std::tuple{"paper.memory", paper.memory(), &scenario_.memory}}) {
      if (file.empty()) return Refuse(key, "is missing; name the table's CSV file");
      ASSIGN_OR_RETURN(auto table, ReadTable(key, file));
      *cells = std::move(table);
    }
    return absl::OkStatus();
  }

  // A table beside the scenario.
  absl::StatusOr<std::vector<sim::PaperCell>> ReadTable(const std::string& key,
                                                        const std::string& file) const {
    auto table = sim::ReadPaperTable((std::filesystem::path(path_).parent_path() / file).string());
    if (!table.ok())
      return absl::Status(table.status().code(),
                          Refuse(key, std::string(table.status().message())).message());
    return table;
  }

  const std::string path_;
  v1::Scenario source_;
  KeyOrigins origins_;
  Scenario scenario_;
};

}  // namespace

absl::StatusOr<Scenario> LoadScenario(const std::string& path) { return ScenarioReader(path).Read(); }

absl::StatusOr<GpuCluster> LoadGpuCluster(const std::string& path) {
  return ScenarioReader(path).ReadGpuCluster("cluster");
}

}  // namespace meshfill
