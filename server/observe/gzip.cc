#include "server/observe/gzip.h"

#include <zlib.h>

#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace meshfill {
namespace {

constexpr int kGzipWindowBits = 15 + 16;  // the largest window; 16: with gzip's header instead of zlib's
constexpr int kMemoryLevel = 8;           // zlib's default

// The weight of "gzip;q=0.5" is 0.5; 1 where it states none, 0 where it is no number.
double Weight(const std::vector<absl::string_view>& parts) {
  for (size_t i = 1; i < parts.size(); ++i) {
    absl::string_view parameter = absl::StripAsciiWhitespace(parts[i]);
    if (!absl::ConsumePrefix(&parameter, "q=") && !absl::ConsumePrefix(&parameter, "Q=")) continue;
    double weight = 0;
    return absl::SimpleAtod(parameter, &weight) ? weight : 0;
  }
  return 1;
}

}  // namespace

bool AcceptsGzip(absl::string_view accept_encoding) {
  bool any = false;
  for (const absl::string_view coding : absl::StrSplit(accept_encoding, ',')) {
    const std::vector<absl::string_view> parts = absl::StrSplit(coding, ';');
    const absl::string_view name = absl::StripAsciiWhitespace(parts.front());
    if (absl::EqualsIgnoreCase(name, "gzip")) return Weight(parts) > 0;
    if (name == "*") any = Weight(parts) > 0;
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
