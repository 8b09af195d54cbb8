#include "server/api/slab_reader.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/return_if_error.h"

namespace meshfill {

SlabReader::SlabReader(const KvFetch& fetch, std::vector<bool> here, Find find)
    : fetch_(fetch),
      here_(std::move(here)),
      find_(std::move(find)),
      layer_(fetch.first_layer),
      token_(fetch.range.first_token) {}

SlabReader::Run SlabReader::NextRun(const KvSlabs& slabs) const {
  if (here_.empty()) return {token_, std::min(end_token(), token_ + fetch_.part_tokens)};
  const TokenLayout& layout = slabs.pieces.front().run->layout;
  const int64_t stripe = layout.stripe();
  const auto end_of_stripe = [&](int64_t token) {
    return std::min(end_token(), (token / stripe + 1) * stripe);
  };
  int64_t begin = token_;
  while (begin < end_token() && !here_[layout.RankOf(begin)]) begin = end_of_stripe(begin);
  const int64_t most = std::min(end_token(), begin + fetch_.part_tokens);
  int64_t end = begin;
  while (end < most && here_[layout.RankOf(end)]) end = std::min(most, end_of_stripe(end));
  return {begin, end};
}

absl::Status SlabReader::CheckWholePages(const Run& run, const KvSlabs& slabs) const {
  if (fetch_.format == KvFormat::kTokens) return absl::OkStatus();
  const int64_t page_tokens = fetch_.page_tokens;
  const bool begins = run.begin % page_tokens == 0;
  if (begins && (run.end % page_tokens == 0 || run.end == slabs.tokens())) return absl::OkStatus();
  const int64_t page = (begins ? run.end : run.begin) / page_tokens;
  return absl::InvalidArgumentError(absl::StrCat(
      "the page of tokens ", page * page_tokens, " to ", (page + 1) * page_tokens - 1,
      " lies only in part here; ask for page_tokens that divide ", slabs.pieces.front().run->layout.stripe(),
      ", for KV_LAYOUT_TOKENS, or ask the front-end"));
}

absl::StatusOr<KvReader::Next> SlabReader::Take(v1::KvPart& part) {
  const int end_layer = fetch_.first_layer + fetch_.layers;
  if (layer_ == end_layer) return Next::kEnd;  // whatever becomes of the lease
  ASSIGN_OR_RETURN(const std::shared_ptr<const KvPrompt> prompt, find_());
  for (; layer_ < end_layer; ++layer_) {
    const std::shared_ptr<const KvSlabs> slabs = prompt->Layer(layer_);
    if (slabs == nullptr) return Next::kNotYet;
    const Run run = NextRun(*slabs);
    if (run.begin == run.end) continue;  // nothing of the range is here
    RETURN_IF_ERROR(CheckWholePages(run, *slabs));
    RETURN_IF_ERROR(FillPart(fetch_, *slabs, layer_, run.begin, run.end - run.begin, part));
    token_ = run.end;
    if (const Run rest = NextRun(*slabs); rest.begin == rest.end) {
      token_ = fetch_.range.first_token;
      ++layer_;
    }
    return Next::kPart;
  }
  return Next::kEnd;
}

}  // namespace meshfill
