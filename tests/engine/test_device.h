// The device that the tests of the engine compute on: MESHFILL_TEST_DEVICE, cpu or cuda; the CPU where it is
// not set.
#ifndef MESHFILL_TESTS_ENGINE_TEST_DEVICE_H_
#define MESHFILL_TESTS_ENGINE_TEST_DEVICE_H_

#include <cstdio>
#include <cstdlib>
#include <string>

#include "engine/devices/device.h"

namespace meshfill {

// Where there is no such device the program ends with status 77: not run.
inline DeviceChoice TestDevice() {
  static const DeviceChoice choice = [] {
    const char* name = std::getenv("MESHFILL_TEST_DEVICE");
    if (name == nullptr || std::string(name) != "cuda") return DeviceChoice::kCpu;
    if (const auto devices = ChooseDevices(DeviceChoice::kCuda); !devices.ok()) {
      std::printf("not run: %s\n", std::string(devices.status().message()).c_str());
      std::exit(77);
    }
    return DeviceChoice::kCuda;
  }();
  return choice;
}
inline bool TestsOnCuda() { return TestDevice() == DeviceChoice::kCuda; }

}  // namespace meshfill

#endif  // MESHFILL_TESTS_ENGINE_TEST_DEVICE_H_
