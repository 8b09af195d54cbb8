// What a process does once, before anything else.
#ifndef MESHFILL_SERVER_PROCESS_SETUP_H_
#define MESHFILL_SERVER_PROCESS_SETUP_H_

#include <malloc.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstdlib>
#include <thread>

#include "absl/synchronization/mutex.h"
#include "google/protobuf/stubs/common.h"
#include "meshfill/v1/config.pb.h"
#include "server/observe/log.h"
#if GOOGLE_PROTOBUF_VERSION < 4022000
#include "google/protobuf/stubs/logging.h"
#endif

namespace meshfill {

// For every command. Debian builds absl with its check of lock orders: it ends the process where two locks,
// of gRPC as well, were ever taken in both orders, whether or not that can meet, and takes one lock of the
// whole process to find out.
inline void TrustLockOrders() { absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore); }

// An arena of the allocator keeps what was freed in it, up to a prompt's logits. So many do for threads that
// allocate little while they compute; glibc would take eight for each core.
inline void BoundArenas() {
  mallopt(M_ARENA_MAX, static_cast<int>(std::max(4u, std::thread::hardware_concurrency())));
}

// For the two long-lived ones. Raises the limit of descriptors to the most that the system allows: the usual
// soft limit, 1024, is for programs that call select. Silences gRPC and protobuf, which log a line for many
// kinds of bad input, so that clients could fill the log; statuses tell all of it. Chooses the log's format.
inline void SetUpProcess(const v1::LogSection& log) {
  BoundArenas();
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
  }
  SetLogFormat(log.format() == v1::LogSection::FORMAT_JSON ? LogFormat::kJson : LogFormat::kText);
  setenv("GRPC_VERBOSITY", "NONE", /*overwrite=*/0);
#if GOOGLE_PROTOBUF_VERSION < 4022000  // later ones have no handler
  google::protobuf::SetLogHandler(nullptr);
#endif
}

}  // namespace meshfill

#endif  // MESHFILL_SERVER_PROCESS_SETUP_H_
