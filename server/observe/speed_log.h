// Where the pool's speed comes from, as lines of the log.
#ifndef MESHFILL_SERVER_OBSERVE_SPEED_LOG_H_
#define MESHFILL_SERVER_OBSERVE_SPEED_LOG_H_

#include <string>

#include "server/observe/log.h"

namespace meshfill {

// A SpeedNotes (engine/speed/speed_notes.h).
inline void LogSpeedNote(const std::string& note, bool warning) {
  Log(note, {.level = warning ? LogLevel::kWarning : LogLevel::kInfo});
}

}  // namespace meshfill

#endif  // MESHFILL_SERVER_OBSERVE_SPEED_LOG_H_
