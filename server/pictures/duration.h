// Durations as pictures print them.
#ifndef MESHFILL_SERVER_PICTURES_DURATION_H_
#define MESHFILL_SERVER_PICTURES_DURATION_H_

#include <string>

namespace meshfill {

std::string DurationText(double seconds);  // "12.3 µs", "4 ms", "1.25 s": three figures

}  // namespace meshfill

#endif  // MESHFILL_SERVER_PICTURES_DURATION_H_
