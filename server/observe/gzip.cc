#include "server/observe/gzip.h"

#include <zlib.h>

#include "server/observe/accept_header.h"

namespace meshfill {
namespace {

constexpr int kGzipWindowBits = 15 + 16;  // the largest window; 16: with gzip's header instead of zlib's
constexpr int kMemoryLevel = 8;           // zlib's default

}  // namespace

bool AcceptsGzip(absl::string_view accept_encoding) {
  bool any = false;
  for (const AcceptedElement& coding : ParseAccept(accept_encoding)) {
    if (coding.Is("gzip")) return coding.weight > 0;
    if (coding.name == "*") any = coding.weight > 0;
  }
  return any;
}

std::string Gzip(absl::string_view text) {
  z_stream stream{};
  if (deflateInit2(&stream, Z_DEFAULT_COMPRESSION, Z_DEFLATED, kGzipWindowBits, kMemoryLevel,
                   Z_DEFAULT_STRATEGY) != Z_OK) {
    return "";
  }
  std::string packed(deflateBound(&stream, text.size()), '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
  stream.avail_in = static_cast<uInt>(text.size());
  stream.next_out = reinterpret_cast<Bytef*>(packed.data());
  stream.avail_out = static_cast<uInt>(packed.size());
  const bool whole = deflate(&stream, Z_FINISH) == Z_STREAM_END;
  packed.resize(whole ? stream.total_out : 0);
  deflateEnd(&stream);
  return packed;
}

}  // namespace meshfill
