// Protobuf logs no line for bad input, as in the server (server/process_setup.h).
#ifndef MESHFILL_TESTS_FUZZ_QUIET_PROTOBUF_H_
#define MESHFILL_TESTS_FUZZ_QUIET_PROTOBUF_H_

#include "google/protobuf/stubs/common.h"
#if GOOGLE_PROTOBUF_VERSION < 4022000
#include "google/protobuf/stubs/logging.h"
#endif

namespace meshfill {

#if GOOGLE_PROTOBUF_VERSION < 4022000
using QuietProtobuf = google::protobuf::LogSilencer;  // as long as it lives
#else                                                 // which logs nothing of the kind
struct QuietProtobuf {};
#endif

}  // namespace meshfill

#endif  // MESHFILL_TESTS_FUZZ_QUIET_PROTOBUF_H_
