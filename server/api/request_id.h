// The names of requests that come without one.
#ifndef MESHFILL_SERVER_API_REQUEST_ID_H_
#define MESHFILL_SERVER_API_REQUEST_ID_H_

#include <string>

namespace meshfill {

// Unique in this process by its count, and among processes and restarts by 64 random bits. Thread-safe.
std::string NewRequestId();

}  // namespace meshfill

#endif  // MESHFILL_SERVER_API_REQUEST_ID_H_
