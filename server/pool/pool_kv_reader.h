// Reads K and V that the workers of a pool hold: a FetchKv call to each holder, whose parts are put together
// in the order of tokens.
//
//     striped, 2 workers     holder 0: tokens   0…63    128…191     …
//                            holder 1: tokens       64…127     192…255  …
//                            reader:            0 … the range's end, then the next layer
//
// Memory: a part of its own, and one for each holder. What comes is checked: its place, its size, its
// checksum.
#ifndef MESHFILL_SERVER_POOL_POOL_KV_READER_H_
#define MESHFILL_SERVER_POOL_POOL_KV_READER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/kv/kv_slabs.h"
#include "server/api/kv_fetch.h"
#include "server/api/kv_reader.h"
#include "server/pool/holder_call.h"
#include "server/pool/kv_directory.h"

namespace meshfill {

class PoolKvReader final : public KvReader {
 public:
  // The lease as the directory has it now. A place comes with the first view of each run.
  struct Found {
    KvDirectory::View view;
    std::shared_ptr<const KvDirectory::Place> place;  // null where there is no run to read
  };
  using Find = std::function<absl::StatusOr<Found>(uint64_t known_run)>;

  // `shape` of the model; `channels` outlives the reader. `changed` as for KvSource::Open.
  PoolKvReader(const KvShape& shape, const KvFetch& fetch, std::string lease, std::string tenant, Find find,
               HolderChannels& channels, std::function<void()> changed);

  // UNAVAILABLE: a holder cannot be reached, or says nothing; or the prefill has begun again after some of
  // its K and V were read. DATA_LOSS: what a holder sent is not what its checksum says.
  absl::StatusOr<Next> Take(v1::KvPart& part) override;
  int64_t held_bytes() const override;  // what it gathers, and a part of each holder

 private:
  struct Source {
    std::string name;  // for errors: the worker and its ranks
    std::unique_ptr<HolderCall> call;
    int64_t taken_tokens = 0;  // tokens taken from the call's present part
  };

  void Open(const KvDirectory::Place& place);
  // Puts what has come of the part into slabs_. Whether the part is whole.
  absl::StatusOr<bool> Gather();
  absl::Status CheckPart(const v1::KvPart& part, const Source& source, int64_t token) const;
  absl::Status WhyItEnded(const Source& source, const absl::Status& end) const;
  // An error once a holder has said nothing for too long of a layer that it has.
  absl::Status CheckWait(const Source& source, int layers_done);
  absl::Status Deliver(v1::KvPart& part);

  int64_t row_bytes() const { return fetch_.range.heads * shape_.head_bytes(); }
  int64_t end_token() const { return fetch_.range.first_token + fetch_.range.tokens; }
  int64_t part_tokens() const;  // tokens of the next part

  const KvShape shape_;
  const KvFetch fetch_;
  const std::string lease_;
  const std::string tenant_;
  const Find find_;
  HolderChannels& channels_;
  const std::function<void()> changed_;

  uint64_t run_ = 0;    // the run that is read; 0: none yet
  bool begun_ = false;  // a part of it was given
  std::shared_ptr<const KvDirectory::Place> place_;
  std::vector<Source> sources_;      // by holder
  std::vector<int> source_of_rank_;  // −1: none
  int layer_;                        // layer of the next part
  int64_t token_;
  std::unique_ptr<std::byte[]> gathered_;  // the next part: K, then V, each [part_tokens, heads, head_dim]
  int64_t gathered_tokens_ = 0;
  absl::Time waiting_since_ = absl::InfiniteFuture();
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_POOL_POOL_KV_READER_H_
