#include "engine/sim/nelder_mead.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace meshfill::sim {
namespace {

using Point = std::vector<double>;

// from + factor · (to − from)
Point Along(const Point& from, const Point& to, double factor) {
  Point point(from.size());
  for (size_t i = 0; i < from.size(); ++i) point[i] = from[i] + factor * (to[i] - from[i]);
  return point;
}

class Simplex {
 public:
  Simplex(const std::function<double(const Point&)>& function, const Point& start, double step)
      : function_(function) {
    vertices_.push_back(Evaluate(start));
    for (size_t i = 0; i < start.size(); ++i) {
      Point vertex = start;
      vertex[i] += step;
      vertices_.push_back(Evaluate(std::move(vertex)));
    }
    Sort();
  }

  const Minimum& best() const { return vertices_.front(); }
  int evaluations() const { return evaluations_; }

  double Spread() const {
    double spread = 0;
    for (const Minimum& vertex : vertices_) {
      for (size_t i = 0; i < vertex.at.size(); ++i) {
        spread = std::max(spread, std::abs(vertex.at[i] - best().at[i]));
      }
    }
    return spread;
  }

  // Replaces the worst vertex by a better one on the line through the others' centre, or shrinks towards the
  // best.
  void Improve() {
    const Minimum& worst = vertices_.back();
    const Point centre = CentreOfOthers();
    const Minimum reflected = Evaluate(Along(centre, worst.at, -1));
    if (reflected.value < best().value) {
      Minimum expanded = Evaluate(Along(centre, worst.at, -2));
      Replace(expanded.value < reflected.value ? std::move(expanded) : reflected);
      return;
    }
    if (reflected.value < vertices_[vertices_.size() - 2].value) {
      Replace(reflected);
      return;
    }
    const bool outside = reflected.value < worst.value;
    Minimum contracted = Evaluate(Along(centre, worst.at, outside ? -0.5 : 0.5));
    if (contracted.value < std::min(reflected.value, worst.value)) {
      Replace(std::move(contracted));
      return;
    }
    for (size_t v = 1; v < vertices_.size(); ++v)
      vertices_[v] = Evaluate(Along(best().at, vertices_[v].at, 0.5));
    Sort();
  }

 private:
  Minimum Evaluate(Point at) {
    ++evaluations_;
    const double value = function_(at);
    return {.at = std::move(at), .value = value};
  }

  Point CentreOfOthers() const {
    Point centre(best().at.size(), 0.0);
    for (size_t v = 0; v + 1 < vertices_.size(); ++v) {
      for (size_t i = 0; i < centre.size(); ++i) {
        centre[i] += vertices_[v].at[i] / static_cast<double>(vertices_.size() - 1);
      }
    }
    return centre;
  }

  void Replace(Minimum vertex) {
    vertices_.back() = std::move(vertex);
    Sort();
  }

  void Sort() {
    std::stable_sort(vertices_.begin(), vertices_.end(),
                     [](const Minimum& x, const Minimum& y) { return x.value < y.value; });
  }

  const std::function<double(const Point&)>& function_;
  std::vector<Minimum> vertices_;  // by rising value
  int evaluations_ = 0;
};

}  // namespace

Minimum NelderMead(const std::function<double(const std::vector<double>&)>& function,
                   std::vector<double> start, double step, double tolerance, int max_evaluations) {
  Simplex simplex(function, start, step);
  while (simplex.Spread() > tolerance && simplex.evaluations() < max_evaluations) simplex.Improve();
  return simplex.best();
}

}  // namespace meshfill::sim
