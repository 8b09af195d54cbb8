// What one FetchKv call asks for: checked against the kept prompt, and cut into parts.
#ifndef MESHFILL_SERVER_API_KV_FETCH_H_
#define MESHFILL_SERVER_API_KV_FETCH_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "engine/kv/kv_slabs.h"
#include "meshfill/v1/prefill.pb.h"

namespace meshfill {

struct KvFetch {
  KvRange range;  // what is read of each layer
  int first_layer = 0;
  int layers = 0;
  KvFormat format = KvFormat::kTokens;
  int64_t page_tokens = 0;  // tokens of a page, for the paged format
  int64_t part_tokens = 0;  // tokens of a part; the last part of a layer may have fewer
};

// INVALID_ARGUMENT: a range that is empty or outside of the prompt, the model's layers or its heads (the
// message has the numbers); an unknown layout; pages without page_tokens, or that do not begin and end where
// a page does; a page, or a token, that no message below `max_message_bytes` holds.
absl::StatusOr<KvFetch> CheckFetch(const v1::FetchKvRequest& request, const KvShape& shape, int64_t tokens,
                                   int64_t max_message_bytes);

// Fills `part` with tokens of a layer, in the fetch's heads and format. With pages, the first token begins
// one. The error of bringing them from a device (CopyKv).
absl::Status FillPart(const KvFetch& fetch, const KvSlabs& slabs, int layer, int64_t first_token,
                      int64_t tokens, v1::KvPart& part);

// The checksum that a part of these bytes has.
uint32_t PartChecksum(const v1::KvPart& part);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_API_KV_FETCH_H_
