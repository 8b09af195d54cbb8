// Corrects predicted seconds by what prefills took, each part by itself: products, attention, transfers and
// weights that workers share by a factor, and what does not depend on the prompt by seconds.
//
//     finished prefill ──► measured seconds ──► Observe ──► factors ──► Plan ──► corrected predictions
//
// A part moves by how much of a prefill it is: many short prompts say little of attention, one long prompt
// says much. A prefill that is far off moves a part little; from the third on that agrees each moves it, by
// at most kMostStep.
//
// Plans are ranked by factors that follow in steps of kRankingStep, so that a prompt keeps its plan while
// predictions change with every prefill. Safe on any thread.
#ifndef MESHFILL_ENGINE_PLAN_SPEED_CORRECTION_H_
#define MESHFILL_ENGINE_PLAN_SPEED_CORRECTION_H_

#include <functional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "engine/mesh/topology.h"
#include "engine/plan/plan.h"
#include "engine/plan/rank_speed.h"
#include "kernels/mutex.h"

namespace meshfill {

// Real seconds over those that the speeds say; `fixed_seconds` come to a prefill's fixed ones. They are below
// 0 where these are less than measured, at most by all of them.
struct PartFactors {
  double products = 1;
  double attention = 1;
  double transfers = 1;
  double weights = 1;
  double fixed_seconds = 0;
  bool operator==(const PartFactors&) const = default;
};

// What a prefill took: by the clock, and of that, on average of its ranks, in attention and comm wait, of
// which that for weights is a part: chunks that share a link with weights are waited for longer.
struct MeasuredSeconds {
  double all = 0;
  double attention = 0;
  double comm_wait = 0;
};

class SpeedCorrection {
 public:
  static constexpr double kMostFactor = 8;  // 1 / kMostFactor at least
  static constexpr double kMostFixedSeconds = 1;
  static constexpr double kMostStep = 1.6;     // most that one prefill changes a factor, up or down
  static constexpr double kRankingStep = 1.5;  // plans are ranked anew where a factor is off by that
  static constexpr int kRankingPrefills = 32;  // plans are ranked anew after so many prefills at the earliest
  static constexpr double kWrong = 2;
  static constexpr int kWrongPrefills = 256;

  using Planner = std::function<absl::StatusOr<PlanChoice>(const PoolSpeed& speed, const Topology& topology)>;

  // What `planner` plans with these speeds and links as they are ranked by, with corrected predictions. The
  // candidates keep their order.
  absl::StatusOr<PlanChoice> Plan(const PoolSpeed& speed, const Topology& topology,
                                  const Planner& planner) const;

  // A prefill under a plan of Plan's took so long. Seconds that are negative or not finite are ignored.
  void Observe(const Prediction& predicted, const MeasuredSeconds& measured);

  PartFactors factors() const;
  // Products or attention have been off by kWrong since kWrongPrefills: the speeds are to be measured anew.
  bool StaysWrong() const;
  // Where it does: by how much, for whoever runs the pool.
  std::string WhatIsWrong() const;

 private:
  // Seconds = factor · x + other · y, from samples of both sides: a Kalman filter that trusts no sample that
  // is far off, until the next one agrees with it.
  struct Line {
    double factor = 1;
    double other = 0;  // a factor, too; of products seconds, where y is 1
    double factor_variance = 1;
    double covariance = 0;
    double other_variance = 0;
    int beyond = 0;  // samples that were far off, since one lay on the other side: above 0 too long

    struct Bounds {
      double least = 0;
      double most = 0;
    };
    static Bounds Step(double factor);  // to where one sample may move it

    // `deviation`: of the seconds, as samples vary.
    void Observe(double x, double y, double seconds, double deviation, const Bounds& of_other);
  };

  PartFactors Current() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  mutable Mutex mu_;
  Line products_ ABSL_GUARDED_BY(mu_) = {.other_variance = 9e-6};  // 3 ms
  Line attention_ ABSL_GUARDED_BY(mu_);
  // y: shared weights. They rest on their link alone, chunks on peers that may be late, too.
  Line transfers_ ABSL_GUARDED_BY(mu_) = {.other = 1, .other_variance = 0.04};
  int prefills_ ABSL_GUARDED_BY(mu_) = 0;
  int wrong_prefills_ ABSL_GUARDED_BY(mu_) = 0;  // wrong predictions in a row
  PartFactors ranking_ ABSL_GUARDED_BY(mu_);     // each factor over that of products
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_PLAN_SPEED_CORRECTION_H_
