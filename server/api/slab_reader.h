// Reads what this process has of a kept prompt: all tokens, or those of some ranks.
//
// A part has consecutive tokens. Where the process has not all of them, a reader gives those of the range
// that are here, in order:
//
//     striped, n = 4, ranks 1 and 2 are here    tokens 64…191, 320…447, …
#ifndef MESHFILL_SERVER_API_SLAB_READER_H_
#define MESHFILL_SERVER_API_SLAB_READER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/kv/kv_prompt.h"
#include "server/api/kv_fetch.h"
#include "server/api/kv_reader.h"

namespace meshfill {

class SlabReader final : public KvReader {
 public:
  // Looks the prompt up before each part, so that nothing is read after its lease. No slab is held between.
  using Find = std::function<absl::StatusOr<std::shared_ptr<const KvPrompt>>()>;

  // `here`, by rank of the prompt's one run: whose tokens this process has; empty: it has all.
  SlabReader(const KvFetch& fetch, std::vector<bool> here, Find find);

  // INVALID_ARGUMENT: a page lies only in part here.
  absl::StatusOr<Next> Take(v1::KvPart& part) override;

 private:
  struct Run {
    int64_t begin = 0;
    int64_t end = 0;  // begin: there are no more tokens in the range
  };
  // The next part's tokens, from token_ on.
  Run NextRun(const KvSlabs& slabs) const;
  absl::Status CheckWholePages(const Run& run, const KvSlabs& slabs) const;
  int64_t end_token() const { return fetch_.range.first_token + fetch_.range.tokens; }

  const KvFetch fetch_;
  const std::vector<bool> here_;
  const Find find_;
  int layer_;  // layer of the next part
  int64_t token_;
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_API_SLAB_READER_H_
