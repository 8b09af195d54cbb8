#include "engine/plan/speed_correction.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_format.h"
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
// By what machines change from one prefill to the next: a share of a factor, or of seconds, and 20 µs of
// these.
constexpr double kDrift = 0.03, kOtherDrift = 20e-6;
constexpr double kMostOtherVariance = 1;  // where drifts end that no sample corrects
// After so many samples in a row that are far off on one side, a factor is known to that share of it alone.
constexpr int kAgree = 3;
constexpr double kUnknown = 0.5;

bool Counts(double seconds) { return std::isfinite(seconds) && seconds >= 0; }

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
         factors.weights * parts.weights + std::max(0.0, parts.fixed + factors.fixed_seconds);
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
  predicted.weight_seconds *= weights == WeightMode::kSharded ? factors.weights : factors.products;
  predicted.compute_seconds = predicted.seconds - predicted.comm_wait_seconds - predicted.weight_seconds;
}

void Scale(double ratio, Prediction& predicted) {
  for (double* seconds : {&predicted.seconds, &predicted.compute_seconds, &predicted.comm_wait_seconds,
                          &predicted.weight_seconds}) {
    *seconds *= ratio;
  }
}

}  // namespace

void SpeedCorrection::Line::Observe(double x, double y, double seconds, double deviation,
                                    const Bounds& of_other) {
  const double expected = factor * x + other * y;
  const double trusted = std::max(kTrustedShare * std::abs(expected), kTrustedDeviations * deviation);
  double off = seconds - expected;
  const int side = off > trusted ? 1 : off < -trusted ? -1 : 0;
  if (off * beyond <= 0) beyond = 0;
  beyond += side;
  if (side != 0) {
    if (std::abs(beyond) >= kAgree) {
      const double unknown = kUnknown * factor, other_unknown = kUnknown * other;
      factor_variance = std::max(factor_variance, unknown * unknown);
      if (y != 0) other_variance = std::max(other_variance, other_unknown * other_unknown);
    }
    deviation *= std::abs(off) / trusted;
    off = side * trusted;
  }
  const double with_factor = x * factor_variance + y * covariance;
  const double with_other = x * covariance + y * other_variance;
  const double variance = x * with_factor + y * with_other + deviation * deviation;
  if (!(variance > 0)) return;
  const Bounds of_factor = Step(factor);
  factor = std::clamp(factor + with_factor / variance * off, of_factor.least, of_factor.most);
  other = std::clamp(other + with_other / variance * off, of_other.least, of_other.most);
  factor_variance -= with_factor * with_factor / variance;
  covariance -= with_factor * with_other / variance;
  other_variance -= with_other * with_other / variance;
  if (factor_variance < factor * factor) factor_variance += kDrift * kDrift * factor * factor;
  if (y == 0 || other_variance > kMostOtherVariance) return;
  const double drift = kDrift * std::abs(other) + kOtherDrift;
  other_variance += drift * drift;
}

SpeedCorrection::Line::Bounds SpeedCorrection::Line::Step(double factor) {
  return {.least = std::max(1 / kMostFactor, factor / kMostStep),
          .most = std::min(kMostFactor, factor * kMostStep)};
}

PartFactors SpeedCorrection::factors() const {
  const MutexLock lock(mu_);
  return Current();
}

PartFactors SpeedCorrection::Current() const {
  return {.products = products_.factor,
          .attention = attention_.factor,
          .transfers = transfers_.factor,
          .weights = transfers_.other,
          .fixed_seconds = products_.other};
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
  attention_.Observe(parts.attention, 0, measured.attention, deviation(measured.attention), {});
  double waited = measured.comm_wait;  // for transfers and weights, as far as these can explain it
  if (parts.transfers + parts.weights > 0) {
    const double hidden = attention_.factor * parts.hidden;
    transfers_.Observe(parts.transfers, parts.weights, hidden + waited, deviation(waited),
                       Line::Step(transfers_.other));
    waited = std::min(waited, std::max(0.0, kMostFactor * (parts.transfers + parts.weights) - hidden));
  }
  const double rest = std::max(0.0, measured.all - measured.attention - waited);
  products_.Observe(parts.products, 1, rest - parts.fixed, deviation(rest),
                    {.least = -parts.fixed, .most = kMostFixedSeconds});
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

std::string SpeedCorrection::WhatIsWrong() const {
  const PartFactors wrong = factors();
  return absl::StrFormat(
      "the pool's speed is wrong: products take %.2g and attention %.2g times as long as it says, for %d "
      "prefills",
      wrong.products, wrong.attention, kWrongPrefills);
}

}  // namespace meshfill
