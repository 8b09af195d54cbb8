#include "server/api/kv_fetch.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "engine/kv/crc32c.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

constexpr int64_t kPartBytes = 1 << 20;      // enough for a stream to be as fast as its connection
constexpr int64_t kOverheadBytes = 1 << 10;  // what a message has around its bytes

// A count from `first` on, of `total`; 0 stands for all that is left.
absl::StatusOr<int64_t> CountOf(const char* what, uint64_t first, uint64_t count, int64_t total) {
  const auto all = static_cast<uint64_t>(total);
  if (first >= all) {
    return absl::InvalidArgumentError(absl::StrCat("first_", what, " is ", first, ", but the ", what,
                                                   "s that are kept go from 0 to ", total - 1));
  }
  if (count > all - first) {
    return absl::InvalidArgumentError(absl::StrCat(what, "s ", first, " to ", first, " + ", count,
                                                   " - 1 were asked for, but the last one is ", total - 1));
  }
  return static_cast<int64_t>(count == 0 ? all - first : count);
}

absl::StatusOr<KvFormat> FormatOf(v1::KvLayout layout) {
  switch (layout) {
    case v1::KV_LAYOUT_TOKENS:
      return KvFormat::kTokens;
    case v1::KV_LAYOUT_PAGES_HND:
      return KvFormat::kPagesHnd;
    case v1::KV_LAYOUT_PAGES_NHD:
      return KvFormat::kPagesNhd;
    default:
      return absl::InvalidArgumentError(
          absl::StrCat("layout is ", static_cast<int>(layout), ", which is none; see KvLayout"));
  }
}

absl::Status CheckPages(const v1::FetchKvRequest& request, const KvFetch& fetch, int64_t tokens) {
  const uint64_t page_tokens = request.page_tokens();
  if (fetch.format == KvFormat::kTokens) {
    if (page_tokens == 0) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("page_tokens is ", page_tokens, ", but KV_LAYOUT_TOKENS has no pages; leave it out"));
  }
  if (page_tokens == 0) {
    return absl::InvalidArgumentError("page_tokens is 0; say how many tokens a page has");
  }
  if (request.first_token() % page_tokens != 0) {
    return absl::InvalidArgumentError(absl::StrCat("first_token is ", request.first_token(),
                                                   ", no multiple of page_tokens, ", page_tokens));
  }
  const int64_t end = fetch.range.first_token + fetch.range.tokens;
  if (end != tokens && fetch.range.tokens % static_cast<int64_t>(page_tokens) != 0) {
    return absl::InvalidArgumentError(absl::StrCat("tokens is ", request.tokens(),
                                                   ", no multiple of page_tokens, ", page_tokens,
                                                   ", and does not reach the prompt's end, ", tokens));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<KvFetch> CheckFetch(const v1::FetchKvRequest& request, const KvShape& shape, int64_t tokens,
                                   int64_t max_message_bytes) {
  KvFetch fetch;
  ASSIGN_OR_RETURN(fetch.range.tokens, CountOf("token", request.first_token(), request.tokens(), tokens));
  ASSIGN_OR_RETURN(const int64_t layers,
                   CountOf("layer", request.first_layer(), request.layers(), shape.layers));
  ASSIGN_OR_RETURN(const int64_t heads,
                   CountOf("head", request.first_head(), request.heads(), shape.kv_heads));
  fetch.range.first_token = static_cast<int64_t>(request.first_token());
  fetch.range.first_head = static_cast<int>(request.first_head());
  fetch.range.heads = static_cast<int>(heads);
  fetch.first_layer = static_cast<int>(request.first_layer());
  fetch.layers = static_cast<int>(layers);
  ASSIGN_OR_RETURN(fetch.format, FormatOf(request.layout()));
  RETURN_IF_ERROR(CheckPages(request, fetch, tokens));
  fetch.page_tokens = request.page_tokens();

  const bool pages = fetch.format != KvFormat::kTokens;
  const int64_t unit_tokens = pages ? fetch.page_tokens : 1;
  const int64_t unit_bytes = unit_tokens * 2 * heads * shape.head_bytes();
  if (unit_bytes > max_message_bytes - kOverheadBytes) {
    return absl::InvalidArgumentError(absl::StrCat(pages ? "a page" : "a token", " has ", unit_bytes,
                                                   " bytes, which no message of limits.max_message_bytes, ",
                                                   max_message_bytes, ", holds; ask for ",
                                                   pages ? "fewer page_tokens or heads" : "fewer heads"));
  }
  const int64_t part_bytes = std::min(kPartBytes, max_message_bytes - kOverheadBytes);
  fetch.part_tokens = std::max<int64_t>(1, part_bytes / unit_bytes) * unit_tokens;
  return fetch;
}

absl::Status FillPart(const KvFetch& fetch, const KvSlabs& slabs, int layer, int64_t first_token,
                      int64_t tokens, v1::KvPart& part) {
  KvRange range = fetch.range;
  range.first_token = first_token;
  range.tokens = tokens;
  part.set_layer(static_cast<uint32_t>(layer));
  part.set_first_token(static_cast<uint64_t>(first_token));
  part.set_tokens(static_cast<uint64_t>(range.tokens));
  const auto bytes = static_cast<size_t>(KvRangeBytes(slabs.shape, range, fetch.format, fetch.page_tokens));
  const auto data = [](std::string* field) { return reinterpret_cast<std::byte*>(field->data()); };
  if (fetch.format == KvFormat::kTokens) {
    part.mutable_k()->resize(bytes / 2);
    part.mutable_v()->resize(bytes / 2);
    RETURN_IF_ERROR(CopyKvTokens(slabs, layer, range, data(part.mutable_k()), data(part.mutable_v())));
  } else {
    part.mutable_pages()->resize(bytes);
    RETURN_IF_ERROR(CopyKv(slabs, layer, range, fetch.format, fetch.page_tokens, data(part.mutable_pages())));
  }
  part.set_crc32c(PartChecksum(part));
  return absl::OkStatus();
}

uint32_t PartChecksum(const v1::KvPart& part) {
  return Crc32c(part.pages(), Crc32c(part.v(), Crc32c(part.k())));
}

}  // namespace meshfill
