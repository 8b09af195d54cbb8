// HTTP's content coding gzip.
#ifndef MESHFILL_SERVER_OBSERVE_GZIP_H_
#define MESHFILL_SERVER_OBSERVE_GZIP_H_

#include <string>

#include "absl/strings/string_view.h"

namespace meshfill {

// Whether a client whose request has this Accept-Encoding (RFC 9110, 12.5.3) takes gzip: it is named, or `*`
// is, with a weight above 0. Empty, or no such header: no.
bool AcceptsGzip(absl::string_view accept_encoding);

// `text` as one gzip member; empty where memory is short.
std::string Gzip(absl::string_view text);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_OBSERVE_GZIP_H_
