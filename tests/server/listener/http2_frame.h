// Frames of HTTP/2 (RFC 9113 §4.1), as bytes.
#ifndef MESHFILL_TESTS_SERVER_LISTENER_HTTP2_FRAME_H_
#define MESHFILL_TESTS_SERVER_LISTENER_HTTP2_FRAME_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace meshfill {

using Bytes = std::vector<uint8_t>;

inline Bytes Frame(uint8_t type, uint8_t flags, uint32_t stream, const Bytes& payload) {
  const size_t size = payload.size();
  Bytes frame;
  for (const uint64_t byte :
       {size >> 16, size >> 8, size, uint64_t{type}, uint64_t{flags}, uint64_t{stream} >> 24,
        uint64_t{stream} >> 16, uint64_t{stream} >> 8, uint64_t{stream}}) {
    frame.push_back(static_cast<uint8_t>(byte));
  }
  frame.insert(frame.end(), payload.begin(), payload.end());
  return frame;
}

}  // namespace meshfill

#endif  // MESHFILL_TESTS_SERVER_LISTENER_HTTP2_FRAME_H_
