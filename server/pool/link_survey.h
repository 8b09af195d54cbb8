// What the leader knows of its pool's links: as the configuration gives them, as the ranks measured them, or
// assumed until they have.
//
// Three classes, as a Topology has them. A class that the configuration leaves out is measured in a run whose
// ranks have it, and again once the pool's membership has changed; until then what was measured last counts,
// and before that what is assumed. A run of the membership of before measures nothing for the new one.
//
//     between hosts   one flow         the first rank of a host with that of another
//     on a host       all at once      ranks of a host in pairs
//     out of a host   its flows, which share its port: as many ranks as both hosts have
//
//     measured by     hosts  A: 0 1 2  B: 3 4  C: 5 6  D: 7
//     out of a host          0–3 1–4     5–7
//     between hosts          0–3         5–7
//     on a host              0–1   3–4   5–6
//
// A figure that no link can have (not a number, below 0, beyond kMostBytesPerSecond or kMostLatencySeconds)
// counts for nothing. Of the others the median counts; of all flows of a host together, the sum.
// Pure and not thread-safe, like the leader.
#ifndef MESHFILL_SERVER_POOL_LINK_SURVEY_H_
#define MESHFILL_SERVER_POOL_LINK_SURVEY_H_

#include <array>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/comm/link_probe.h"
#include "engine/mesh/topology.h"
#include "engine/prefill_engine.h"

namespace meshfill {

enum class LinkClass { kBetweenHosts, kOnHost, kOutOfHost };
inline constexpr int kLinkClasses = 3;

// What the configuration says. Without seats.
struct ConfiguredLinks {
  Topology links;                            // given, or assumed until measured
  std::array<bool, kLinkClasses> measure{};  // by class: the configuration leaves it out
};

class LinkSurvey {
 public:
  // What the ranks of one run measure; runs send it and keep it until they end.
  struct Probes {
    std::vector<LinkProbe> pairs;
    std::vector<LinkClass> classes;  // by probe
    std::vector<int> host_of_rank;
    int membership = 0;  // as LinkSurvey counts them
  };
  using RankLinks = std::vector<std::optional<Link>>;  // one rank's links, by probe; none: the rank sat out

  explicit LinkSurvey(const ConfiguredLinks& configured);

  const Topology& links() const { return links_; }  // without seats

  // What is not known yet of the links that a run's ranks have. Ranks of a host have its number.
  Probes Ask(std::vector<int> host_of_rank) const;

  // Takes what a run that is done has measured, unless the membership is another since Ask. A line for the
  // log; empty: nothing was asked.
  std::string Take(const Probes& probes, std::span<const RankLinks> by_rank);

  // The pool's membership changed.
  void AskAgain();
  int membership() const { return membership_; }  // counts them

  // Looks at a pool with these seats: which classes of links it has. `changed`: AskAgain comes with its next
  // run.
  std::vector<PoolLink> Describe(const Topology& pool, bool changed) const;

  static constexpr double kMostBytesPerSecond = 1e15;
  static constexpr double kMostLatencySeconds = 60;

 private:
  enum class Source { kGiven, kAssumed, kMeasured, kMeasuredBefore };

  bool TakeClass(LinkClass of, int probe, const Probes& probes, std::span<const RankLinks> by_rank);
  bool TakeOutOfHost(int probe, const Probes& probes, std::span<const RankLinks> by_rank);
  Source& source(LinkClass of) { return source_[static_cast<int>(of)]; }
  Source source(LinkClass of) const { return source_[static_cast<int>(of)]; }
  std::string Text(LinkClass of) const;

  Topology links_;
  std::array<Source, kLinkClasses> source_;
  int membership_ = 0;
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_POOL_LINK_SURVEY_H_
