// How a pool holds its weights and where its speed comes from, told to whoever runs the pool: one line each.
#ifndef MESHFILL_ENGINE_SPEED_POOL_NOTES_H_
#define MESHFILL_ENGINE_SPEED_POOL_NOTES_H_

#include <cstdio>
#include <functional>
#include <string>

namespace meshfill {

// `warning`: something is wrong, and the note says what to do. Called from any thread; must return quickly.
using PoolNotes = std::function<void(const std::string& note, bool warning)>;

// Notes for commands: standard error has nothing but what is wrong.
inline void WarnOnStandardError(const std::string& note, bool warning) {
  if (warning) std::fprintf(stderr, "meshfill: %s\n", note.c_str());
}

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_SPEED_POOL_NOTES_H_
