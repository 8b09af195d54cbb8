// A process that has hardly any descriptor left.
#ifndef MESHFILL_TESTS_ENGINE_FEW_DESCRIPTORS_H_
#define MESHFILL_TESTS_ENGINE_FEW_DESCRIPTORS_H_

#include <sys/resource.h>
#include <unistd.h>

#include <vector>

#include "gtest/gtest.h"

namespace meshfill {

// As long as it lives, so many descriptors are free. No other thread opens or closes any meanwhile.
class FewDescriptors {
 public:
  explicit FewDescriptors(int free) {
    EXPECT_EQ(getrlimit(RLIMIT_NOFILE, &before_), 0);
    const int highest = dup(STDERR_FILENO);
    close(highest);
    rlimit low = before_;
    low.rlim_cur = static_cast<rlim_t>(highest) + 64;
    EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
    for (int fd; (fd = dup(STDERR_FILENO)) >= 0;) taken_.push_back(fd);
    for (int i = 0; i < free; ++i) {
      close(taken_.back());
      taken_.pop_back();
    }
  }
  ~FewDescriptors() {
    EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &before_), 0);
    for (const int fd : taken_) close(fd);
  }
  FewDescriptors(const FewDescriptors&) = delete;
  FewDescriptors& operator=(const FewDescriptors&) = delete;

  // How many are free now.
  static int CountFree() {
    std::vector<int> taken;
    for (int fd; (fd = dup(STDERR_FILENO)) >= 0;) taken.push_back(fd);
    for (const int fd : taken) close(fd);
    return static_cast<int>(taken.size());
  }

 private:
  rlimit before_ = {};
  std::vector<int> taken_;
};

}  // namespace meshfill

#endif  // MESHFILL_TESTS_ENGINE_FEW_DESCRIPTORS_H_
