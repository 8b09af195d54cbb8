// The plainest reader of gzip, for what the server's pages answer.
#ifndef MESHFILL_TESTS_SERVER_OBSERVE_GUNZIP_H_
#define MESHFILL_TESTS_SERVER_OBSERVE_GUNZIP_H_

#include <zlib.h>

#include <string>

#include "gtest/gtest.h"

namespace meshfill {

inline std::string Gunzip(const std::string& packed) {
  z_stream stream{};
  EXPECT_EQ(inflateInit2(&stream, 15 + 16), Z_OK);  // 16: gzip alone
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(packed.data()));
  stream.avail_in = static_cast<uInt>(packed.size());
  std::string text;
  int status = Z_OK;
  while (status == Z_OK) {
    char buffer[4096];
    stream.next_out = reinterpret_cast<Bytef*>(buffer);
    stream.avail_out = sizeof(buffer);
    status = inflate(&stream, Z_NO_FLUSH);
    text.append(buffer, sizeof(buffer) - stream.avail_out);
  }
  EXPECT_EQ(status, Z_STREAM_END);
  EXPECT_EQ(stream.avail_in, 0u);
  inflateEnd(&stream);
  return text;
}

}  // namespace meshfill

#endif  // MESHFILL_TESTS_SERVER_OBSERVE_GUNZIP_H_
