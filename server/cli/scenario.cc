#include "server/cli/scenario.h"

#include <filesystem>
#include <fstream>
#include <iterator>
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

constexpr int kMaxGpus = 4096;

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
    std::ifstream file(path_, std::ios::binary);
    if (!file)
      return absl::NotFoundError(absl::StrCat(path_, ": cannot be read; give a scenario's YAML file"));
    const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    RETURN_IF_ERROR(ReadYaml(path_, text, &source_, &origins_));
    if (source_.report() == v1::Scenario::REPORT_MESH_ATTENTION_PAPER) {
      scenario_.report = Scenario::Report::kMeshAttentionPaper;
    }
    RETURN_IF_ERROR(ReadCluster());
    RETURN_IF_ERROR(ReadStrategies());
    RETURN_IF_ERROR(scenario_.report == Scenario::Report::kStrategies ? ReadJob() : ReadPaper());
    return std::move(scenario_);
  }

 private:
  absl::Status Refuse(const std::string& key, const std::string& problem) const {
    const auto origin = origins_.find(key);
    return absl::InvalidArgumentError(
        absl::StrCat(origin == origins_.end() ? path_ : origin->second, ": ", key, ": ", problem));
  }

  absl::Status ReadCluster() {
    const auto& section = source_.cluster();
    sim::Cluster& cluster = scenario_.cluster;
    cluster.gpus_per_node = section.has_gpus_per_node() ? static_cast<int>(section.gpus_per_node()) : 8;
    if (!section.fitted_to().empty()) {
      RETURN_IF_ERROR(FitCluster());
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
      return Refuse("cluster", std::string(absl::StripPrefix(status.message(), "cluster: ")));
    }
    return absl::OkStatus();
  }

  absl::Status FitCluster() {
    const auto& section = source_.cluster();
    if (section.has_between_nodes() || section.node_bytes_per_second() != 0 ||
        section.attention_flops_per_second() != 0) {
      return Refuse("cluster.fitted_to",
                    "leave out between_nodes, node_bytes_per_second and attention_flops_per_second: they are "
                    "fitted");
    }
    ASSIGN_OR_RETURN(auto table, ReadTable("cluster.fitted_to", section.fitted_to()));
    sim::FitAssumptions assumptions{
        .gpus_per_node = scenario_.cluster.gpus_per_node,
        .same_node_bytes_per_second = section.same_node().flow_bytes_per_second()};
    if (section.same_node().has_latency()) {
      assumptions.same_node_latency_seconds =
          absl::ToDoubleSeconds(ToDuration(section.same_node().latency()));
    }
    auto cluster = sim::FitPaperCluster(table, assumptions);
    if (!cluster.ok()) return Refuse("cluster", std::string(cluster.status().message()));
    scenario_.cluster = *std::move(cluster);
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

  absl::Status ReadJob() {
    const auto& attention = source_.attention();
    sim::AttentionJob& job = scenario_.job;
    constexpr uint64_t kMaxTokens = uint64_t{1} << 31;
    if (attention.tokens() >= kMaxTokens || attention.q_heads() > 1u << 16 ||
        attention.head_dim() > 1u << 16) {
      return Refuse("attention", "too large: below 2^31 tokens, at most 65536 heads of at most 65536");
    }
    job.tokens = static_cast<int64_t>(attention.tokens());
    job.q_heads = static_cast<int>(attention.q_heads());
    job.kv_heads = static_cast<int>(attention.kv_heads());
    job.head_dim = static_cast<int>(attention.head_dim());
    job.causal = attention.mask() == v1::Scenario::AttentionSection::MASK_CAUSAL;
    job.wire.element = attention.has_dtype() ? BytesOf(attention.dtype()) : 2;
    job.wire.partial = BytesOf(attention.partial_dtype());
    job.wire.gradient = BytesOf(attention.gradient_dtype());
    if (absl::Status status = sim::CheckJob(job); !status.ok()) {
      return Refuse("attention", std::string(status.message()));
    }
    return ReadGpusAndPasses();
  }

  absl::Status ReadGpusAndPasses() {
    for (const std::string& word : Words(source_.gpus())) {
      int gpus = 0;
      if (!absl::SimpleAtoi(word, &gpus) || gpus < 1 || gpus > kMaxGpus) {
        return Refuse("gpus", absl::StrCat("\"", word, "\" is no number from 1 to ", kMaxGpus));
      }
      scenario_.gpus.push_back(gpus);
    }
    if (scenario_.gpus.empty()) return Refuse("gpus", "is missing; write e.g. gpus: 16, 32, 64");
    scenario_.passes = {sim::Pass::kForward};
    if (source_.passes() == v1::Scenario::PASSES_FORWARD_BACKWARD) {
      scenario_.passes.push_back(sim::Pass::kBackward);
    }
    return absl::OkStatus();
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

}  // namespace meshfill
