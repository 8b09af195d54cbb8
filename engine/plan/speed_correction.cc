#include "engine/plan/speed_correction.h"

#include <algorithm>
#include <cmath>

#include "kernels/mutex.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

// Samples of a part vary by that share of it, by that share of the whole prefill, and by what a system's
// scheduler adds.
constexpr double kPartNoise = 0.1, kPrefillNoise = 0.05, kJitterSeconds = 1e-3;
// A sample counts in full where it is off by no more than that share of what was expected, or so many
// deviations.
constexpr double kTrustedShare = 0.5, kTrustedDeviations = 3;
// By what machines change from one prefill to the next: a share of the factor, of the addend, and seconds.
constexpr double kDrift = 0.03, kAddendDriftSeconds = 20e-6;
// After so many samples in a row that are far off on one side, a factor is known to that share of it alone.
constexpr int kAgree = 3;
constexpr double kUnknown = 0.5;

bool Counts(double seconds) { return std::isfinite(seconds) && seconds >= 0; }

double BoundedFactor(double factor) {
  return std::clamp(factor, 1 / SpeedCorrection::kMostFactor, SpeedCorrection::kMostFactor);
}

Link Slower(const Link& link, double factor) {
  return {.latency_seconds = link.latency_seconds * factor,
          .bytes_per_second = link.bytes_per_second / factor};
}

// The speed that plans are ranked with: attention and transfers by their factors over that of products.
PoolSpeed Ranked(PoolSpeed speed, const PartFactors& ranking) {
  speed.attention_flops_per_second /= ranking.attention;
  speed.merge_bytes_per_second /= ranking.attention;
  speed.block_row_seconds *= ranking.attention;
  speed.link_bytes_per_second /= ranking.transfers;
  speed.link_latency_seconds *= ranking.transfers;
  return speed;
}

Topology Ranked(Topology topology, const PartFactors& ranking) {
  topology.same_node = Slower(topology.same_node, ranking.transfers);
  topology.between_nodes = Slower(topology.between_nodes, ranking.transfers);
  topology.node_bytes_per_second /= ranking.transfers;
  return topology;
}

// Transfers take longer by their own factor, and what hides them is attention.
double CommWait(const PartSeconds& parts, const PartFactors& factors) {
  return std::max(0.0, factors.transfers * parts.transfers - factors.attention * parts.hidden);
}

double All(const PartSeconds& parts, const PartFactors& factors) {
  return factors.products * parts.products + factors.attention * parts.attention + CommWait(parts, factors) +
         std::max(0.0, parts.fixed + factors.fixed_seconds);
}

// Corrects a prediction that was made with ranked speeds.
void Correct(const PartFactors& ranking, const PartFactors& factors, WeightMode weights,
             Prediction& predicted) {
  PartSeconds& parts = predicted.parts;
  parts.attention /= ranking.attention;
  parts.hidden /= ranking.attention;
  parts.transfers /= ranking.transfers;
  predicted.seconds = All(parts, factors);
  predicted.comm_wait_seconds = CommWait(parts, factors);
  if (weights == WeightMode::kSharded) {
    predicted.weight_seconds = std::min(predicted.comm_wait_seconds,
                                        factors.transfers / ranking.transfers * predicted.weight_seconds);
    predicted.comm_wait_seconds -= predicted.weight_seconds;
  } else {
    predicted.weight_seconds *= factors.products;
  }
  predicted.compute_seconds = predicted.seconds - predicted.comm_wait_seconds - predicted.weight_seconds;
}

void Scale(double ratio, Prediction& predicted) {
  for (double* seconds : {&predicted.seconds, &predicted.compute_seconds, &predicted.comm_wait_seconds,
                          &predicted.weight_seconds}) {
    *seconds *= ratio;
  }
}

}  // namespace

void SpeedCorrection::Line::Observe(double x, double seconds, double deviation, double least_addend) {
  const double units = addend_variance > 0 ? 1 : 0;  // 1: the line's addend is fitted, too
  const double expected = At(x);
  const double trusted = std::max(kTrustedShare * std::abs(expected), kTrustedDeviations * deviation);
  double off = seconds - expected;
  const int side = off > trusted ? 1 : off < -trusted ? -1 : 0;
  if (off * beyond <= 0) beyond = 0;
  beyond += side;
  if (side != 0) {
    const double unknown = kUnknown * factor;
    if (std::abs(beyond) >= kAgree) factor_variance = std::max(factor_variance, unknown * unknown);
    deviation *= std::abs(off) / trusted;
    off = side * trusted;
  }
  const double with_factor = x * factor_variance + units * covariance;
  const double with_addend = x * covariance + units * addend_variance;
  const double variance = x * with_factor + units * with_addend + deviation * deviation;
  if (!(variance > 0)) return;
  factor = BoundedFactor(
      std::clamp(factor + with_factor / variance * off, factor / kMostStep, factor * kMostStep));
  addend = std::clamp(addend + with_addend / variance * off, least_addend, kMostFixedSeconds);
  factor_variance -= with_factor * with_factor / variance;
  if (factor_variance < factor * factor) factor_variance += kDrift * kDrift * factor * factor;
  covariance -= with_factor * with_addend / variance;
  if (units == 0) return;
  const double drift = kDrift * std::abs(addend) + kAddendDriftSeconds;
  addend_variance += drift * drift - with_addend * with_addend / variance;
}

PartFactors SpeedCorrection::factors() const {
  const MutexLock lock(mu_);
  return Current();
}

PartFactors SpeedCorrection::Current() const {
  return {.products = products_.factor,
          .attention = attention_.factor,
          .transfers = transfers_.factor,
          .fixed_seconds = products_.addend};
}

absl::StatusOr<PlanChoice> SpeedCorrection::Plan(const PoolSpeed& speed, const Topology& topology,
                                                 const Planner& planner) const {
  PartFactors ranking, factors;
  {
    const MutexLock lock(mu_);
    ranking = ranking_;
    factors = Current();
  }
  if (factors == PartFactors()) return planner(speed, topology);
  ASSIGN_OR_RETURN(PlanChoice choice, planner(Ranked(speed, ranking), Ranked(topology, ranking)));
  const double ranked_seconds = choice.plan.predicted.seconds;
  Correct(ranking, factors, choice.weights.mode, choice.plan.predicted);
  for (meshfill::Plan& piece : choice.pieces) Correct(ranking, factors, choice.weights.mode, piece.predicted);
  const double ratio = choice.plan.predicted.seconds / ranked_seconds;
  for (PlanCandidate& candidate : choice.candidates) Scale(ratio, candidate.predicted);
  return choice;
}

void SpeedCorrection::Observe(const Prediction& predicted, const MeasuredSeconds& measured) {
  if (!Counts(measured.all) || !Counts(measured.attention) || !Counts(measured.comm_wait)) return;
  const PartSeconds& parts = predicted.parts;
  const auto deviation = [&](double seconds) {
    return kPartNoise * seconds + kPrefillNoise * measured.all + kJitterSeconds;
  };
  const MutexLock lock(mu_);
  attention_.Observe(parts.attention, measured.attention, deviation(measured.attention));
  double waited = measured.comm_wait;  // for transfers, as far as these can explain it
  if (parts.transfers > 0) {
    const double hidden = attention_.factor * parts.hidden;
    transfers_.Observe(parts.transfers, hidden + waited, deviation(waited));
    waited = std::min(waited, std::max(0.0, kMostFactor * parts.transfers - hidden));
  }
  const double rest = std::max(0.0, measured.all - measured.attention - waited);
  products_.Observe(parts.products, rest - parts.fixed, deviation(rest), -parts.fixed);
  const auto is_off = [](double factor, double other, double by) {
    return factor > by * other || other > by * factor;
  };
  const bool wrong = is_off(products_.factor, 1, kWrong) || is_off(attention_.factor, 1, kWrong);
  wrong_prefills_ = wrong ? std::min(wrong_prefills_ + 1, kWrongPrefills) : 0;
  prefills_ = std::min(prefills_ + 1, kRankingPrefills);
  if (prefills_ < kRankingPrefills) return;
  const PartFactors now = {.attention = attention_.factor / products_.factor,
                           .transfers = transfers_.factor / products_.factor};
  if (is_off(now.attention, ranking_.attention, kRankingStep) ||
      is_off(now.transfers, ranking_.transfers, kRankingStep)) {
    ranking_ = now;
  }
}

bool SpeedCorrection::StaysWrong() const {
  const MutexLock lock(mu_);
  return wrong_prefills_ >= kWrongPrefills;
}

}  // namespace meshfill
