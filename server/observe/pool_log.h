// What is to be known of a pool that was loaded, as lines of the log.
#ifndef MESHFILL_SERVER_OBSERVE_POOL_LOG_H_
#define MESHFILL_SERVER_OBSERVE_POOL_LOG_H_

#include <string>

#include "server/observe/log.h"

namespace meshfill {

// A PoolNotes (engine/speed/pool_notes.h).
inline void LogPoolNote(const std::string& note, bool warning) {
  Log(note, {.level = warning ? LogLevel::kWarning : LogLevel::kInfo});
}

}  // namespace meshfill

#endif  // MESHFILL_SERVER_OBSERVE_POOL_LOG_H_
