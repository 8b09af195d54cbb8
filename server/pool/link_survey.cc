#include "server/pool/link_survey.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace meshfill {
namespace {

// Flows of a host that together move less than so much of what as many would that share nothing, share its
// port.
constexpr double kShared = 0.8;

const char* Name(LinkClass of) {
  switch (of) {
    case LinkClass::kBetweenHosts:
      return "between hosts";
    case LinkClass::kOnHost:
      return "on a host";
    case LinkClass::kOutOfHost:
      return "out of a host";
  }
  return "?";
}

using RanksOfHosts = std::vector<std::vector<int>>;  // ascending

RanksOfHosts ByHost(const std::vector<int>& host_of_rank) {
  std::map<int, std::vector<int>> ranks;
  for (size_t rank = 0; rank < host_of_rank.size(); ++rank) {
    ranks[host_of_rank[rank]].push_back(static_cast<int>(rank));
  }
  RanksOfHosts hosts;
  for (auto& [host, of_host] : ranks) hosts.push_back(std::move(of_host));
  return hosts;
}

// Empty: no ranks have a link of this class.
LinkProbe PairsOf(LinkClass of, const RanksOfHosts& hosts, int ranks) {
  LinkProbe probe;
  probe.peer_of_rank.resize(ranks);
  for (int rank = 0; rank < ranks; ++rank) probe.peer_of_rank[rank] = rank;
  size_t most = 0;  // pairs of one host
  const auto join = [&](int one, int other) {
    probe.peer_of_rank[one] = other;
    probe.peer_of_rank[other] = one;
  };
  if (of == LinkClass::kOnHost) {
    for (const std::vector<int>& host : hosts) {
      for (size_t i = 0; i + 1 < host.size(); i += 2) join(host[i], host[i + 1]);
      most = std::max(most, host.size() / 2);
    }
    return most == 0 ? LinkProbe{} : probe;
  }
  for (size_t h = 0; h + 1 < hosts.size(); h += 2) {
    const size_t both = std::min(hosts[h].size(), hosts[h + 1].size());
    const size_t pairs = of == LinkClass::kOutOfHost ? both : 1;
    for (size_t i = 0; i < pairs; ++i) join(hosts[h][i], hosts[h + 1][i]);
    most = std::max(most, pairs);
  }
  // One flow is what the class before measures.
  return most < (of == LinkClass::kOutOfHost ? 2 : 1) ? LinkProbe{} : probe;
}

bool IsPlausible(const Link& link) {
  return link.bytes_per_second > 0 && link.bytes_per_second <= LinkSurvey::kMostBytesPerSecond &&
         link.latency_seconds >= 0 && link.latency_seconds <= LinkSurvey::kMostLatencySeconds;
}

// The link that this rank measured; nullopt: it measured none, or one that cannot be.
std::optional<Link> LinkOf(const LinkSurvey::RankLinks& links, int probe) {
  if (probe >= std::ssize(links) || !links[probe].has_value() || !IsPlausible(*links[probe]))
    return std::nullopt;
  return links[probe];
}

// `values` is not empty; of two, the smaller is taken.
double Median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<ptrdiff_t>((values.size() - 1) / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

std::string BytesPerSecond(double rate) {
  if (rate >= 1e9) return absl::StrFormat("%.3g GB/s", rate / 1e9);
  return rate >= 1e6 ? absl::StrFormat("%.3g MB/s", rate / 1e6) : absl::StrFormat("%.3g kB/s", rate / 1e3);
}

}  // namespace

LinkSurvey::LinkSurvey(const ConfiguredLinks& configured) : links_(configured.links) {
  for (int i = 0; i < kLinkClasses; ++i) {
    source_[i] = configured.measure[i] ? Source::kAssumed : Source::kGiven;
  }
}

LinkSurvey::Probes LinkSurvey::Ask(std::vector<int> host_of_rank) const {
  Probes probes;
  const RanksOfHosts hosts = ByHost(host_of_rank);
  // First what all ranks of a host do at once: all begin together.
  for (LinkClass of : {LinkClass::kOutOfHost, LinkClass::kBetweenHosts, LinkClass::kOnHost}) {
    if (source(of) == Source::kGiven || source(of) == Source::kMeasured) continue;
    LinkProbe pairs = PairsOf(of, hosts, static_cast<int>(host_of_rank.size()));
    if (pairs.peer_of_rank.empty()) continue;
    probes.pairs.push_back(std::move(pairs));
    probes.classes.push_back(of);
  }
  probes.host_of_rank = std::move(host_of_rank);
  probes.membership = membership_;
  return probes;
}

std::string LinkSurvey::Take(const Probes& probes, std::span<const RankLinks> by_rank) {
  if (probes.membership != membership_) return "links measured for a pool that has changed: not taken";
  std::string measured, missing;
  for (LinkClass of : {LinkClass::kBetweenHosts, LinkClass::kOnHost, LinkClass::kOutOfHost}) {
    const auto asked = std::find(probes.classes.begin(), probes.classes.end(), of);
    if (asked == probes.classes.end()) continue;
    const int probe = static_cast<int>(asked - probes.classes.begin());
    const bool taken = of == LinkClass::kOutOfHost ? TakeOutOfHost(probe, probes, by_rank)
                                                   : TakeClass(of, probe, probes, by_rank);
    std::string& list = taken ? measured : missing;
    absl::StrAppend(&list, list.empty() ? "" : "; ", Name(of), taken ? " " : "", taken ? Text(of) : "");
  }
  if (!missing.empty()) missing = absl::StrCat("no figure that a link can have: ", missing);
  if (measured.empty()) return missing;
  return absl::StrCat("links measured: ", measured, missing.empty() ? "" : "; ", missing);
}

bool LinkSurvey::TakeClass(LinkClass of, int probe, const Probes& probes,
                           std::span<const RankLinks> by_rank) {
  std::vector<double> rates, latencies;
  for (size_t rank = 0; rank < probes.host_of_rank.size() && rank < by_rank.size(); ++rank) {
    const std::optional<Link> link = LinkOf(by_rank[rank], probe);
    if (!link.has_value()) continue;
    rates.push_back(link->bytes_per_second);
    latencies.push_back(link->latency_seconds);
  }
  if (rates.empty()) return false;
  Link& link = of == LinkClass::kOnHost ? links_.same_node : links_.between_nodes;
  link.latency_seconds = Median(std::move(latencies));
  link.bytes_per_second = Median(std::move(rates));
  source(of) = Source::kMeasured;
  return true;
}

// After the class between hosts, which says what flows move that share nothing.
bool LinkSurvey::TakeOutOfHost(int probe, const Probes& probes, std::span<const RankLinks> by_rank) {
  // Bytes/s of a host's flows together; that over what as many lone flows move.
  std::vector<double> of_hosts, shares;
  for (const std::vector<int>& host : ByHost(probes.host_of_rank)) {
    double sum = 0;
    int flows = 0;
    for (int rank : host) {
      if (probes.pairs[probe].peer_of_rank[rank] == rank) continue;
      const std::optional<Link> link =
          rank < std::ssize(by_rank) ? LinkOf(by_rank[rank], probe) : std::nullopt;
      if (!link.has_value()) return false;
      sum += link->bytes_per_second;
      ++flows;
    }
    if (flows < 2) continue;
    of_hosts.push_back(sum);
    shares.push_back(sum / (flows * links_.between_nodes.bytes_per_second));
  }
  if (of_hosts.empty()) return false;
  links_.node_bytes_per_second = Median(std::move(shares)) < kShared
                                     ? Median(std::move(of_hosts))
                                     : std::numeric_limits<double>::infinity();
  source(LinkClass::kOutOfHost) = Source::kMeasured;
  return true;
}

void LinkSurvey::AskAgain() {
  ++membership_;
  for (Source& source : source_) {
    if (source == Source::kMeasured) source = Source::kMeasuredBefore;
  }
}

std::string LinkSurvey::Text(LinkClass of) const {
  if (of == LinkClass::kOutOfHost) {
    return std::isinf(links_.node_bytes_per_second)
               ? "nothing is shared"
               : absl::StrCat(BytesPerSecond(links_.node_bytes_per_second), " shared");
  }
  const Link& link = of == LinkClass::kOnHost ? links_.same_node : links_.between_nodes;
  return absl::StrCat(BytesPerSecond(link.bytes_per_second), ", ",
                      link.latency_seconds >= 1e-3 ? absl::StrFormat("%.3g ms", link.latency_seconds * 1e3)
                                                   : absl::StrFormat("%.3g us", link.latency_seconds * 1e6));
}

std::vector<PoolLink> LinkSurvey::Describe(const Topology& pool, bool changed) const {
  std::vector<PoolLink> all;
  const RanksOfHosts hosts = ByHost(pool.node_of_seat);
  for (LinkClass of : {LinkClass::kBetweenHosts, LinkClass::kOnHost, LinkClass::kOutOfHost}) {
    if (PairsOf(of, hosts, static_cast<int>(pool.node_of_seat.size())).peer_of_rank.empty()) continue;
    const double shared = std::isinf(links_.node_bytes_per_second) ? 0 : links_.node_bytes_per_second;
    const Source from = source(of);
    all.push_back({.where = Name(of),
                   .link = of == LinkClass::kBetweenHosts ? links_.between_nodes
                           : of == LinkClass::kOnHost     ? links_.same_node
                                                          : Link{.bytes_per_second = shared},
                   .source = from == Source::kGiven                  ? "given"
                             : from == Source::kAssumed              ? "assumed"
                             : from == Source::kMeasured && !changed ? "measured"
                                                                     : "measured before"});
  }
  return all;
}

}  // namespace meshfill
