// The device that the tests of the engine compute on: MESHFILL_TEST_DEVICE, cpu or cuda; the CPU where it is
// not set.
#ifndef MESHFILL_TESTS_ENGINE_TEST_DEVICE_H_
#define MESHFILL_TESTS_ENGINE_TEST_DEVICE_H_

#include <cstdio>
#include <cstdlib>
#include <string>

#include "engine/platforms.h"

namespace meshfill {

// Where there is no such device the program ends with status 77: not run.
inline const std::string& TestDevice() {
  static const std::string device = [] {
    const char* name = std::getenv("MESHFILL_TEST_DEVICE");
    std::string chosen = name != nullptr ? name : "cpu";
    if (const auto devices = FindDevices(chosen, {}); !devices.ok()) {
      std::printf("not run: %s\n", std::string(devices.status().message()).c_str());
      std::exit(77);
    }
    return chosen;
  }();
  return device;
}
inline bool TestsOnCuda() { return TestDevice() == "cuda"; }

}  // namespace meshfill

#endif  // MESHFILL_TESTS_ENGINE_TEST_DEVICE_H_
