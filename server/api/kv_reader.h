// What one FetchKv call reads: the parts of a lease's K and V, one after the other.
//
// Implementations: the slabs of this process (slab_reader.h), and the workers of a pool
// (server/pool/pool_kv_reader.h). Of one call, and of one thread at a time; it blocks nobody.
#ifndef MESHFILL_SERVER_API_KV_READER_H_
#define MESHFILL_SERVER_API_KV_READER_H_

#include "absl/status/statusor.h"
#include "meshfill/v1/prefill.pb.h"

namespace meshfill {

class KvReader {
 public:
  enum class Next {
    kPart,    // it was filled
    kNotYet,  // its layer is not there yet; whoever opened the reader is told when it may be
    kEnd,     // there are no more
  };

  virtual ~KvReader() = default;

  // Fills `part` with the next one, its checksum included. Errors: FetchKv's own; the call ends with them.
  virtual absl::StatusOr<Next> Take(v1::KvPart& part) = 0;

  // Memory that it has, beside the part that it has filled, until its next call: at most.
  virtual int64_t held_bytes() const { return 0; }
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_API_KV_READER_H_
