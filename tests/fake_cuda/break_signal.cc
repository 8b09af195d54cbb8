// Lets a test of the whole binary break the devices of a process: by SIGRTMIN, which the binary leaves alone.
#include <csignal>

#include "tests/fake_cuda/fake_cuda.h"

namespace meshfill {
namespace {

[[maybe_unused]] const auto previous = std::signal(SIGRTMIN, [](int) { FakeCuda::BreakDevice(); });

}  // namespace
}  // namespace meshfill
