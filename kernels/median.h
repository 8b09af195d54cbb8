// The median of measured values.
#ifndef MESHFILL_KERNELS_MEDIAN_H_
#define MESHFILL_KERNELS_MEDIAN_H_

#include <algorithm>
#include <vector>

namespace meshfill {

// The median of `values`, which has at least one; the mean of the middle two where the count is even.
inline double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return (values[(values.size() - 1) / 2] + values[values.size() / 2]) / 2;
}

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_MEDIAN_H_
