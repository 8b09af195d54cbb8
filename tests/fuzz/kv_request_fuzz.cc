// A FetchKv request: its ranges, and the parts that answer it.
#include <memory>

#include "engine/kv/kv_prompt.h"
#include "server/api/kv_fetch.h"
#include "server/api/slab_reader.h"
#include "tests/engine/kv/kv_values.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/quiet_protobuf.h"

namespace meshfill {
namespace {

const KvShape kShape = {.layers = 3, .kv_heads = 4, .head_dim = 8, .dtype = DType::kBf16};
constexpr int64_t kTokens = 100;

std::shared_ptr<const KvPrompt> Prompt() {
  static const auto& prompt = *new std::shared_ptr<const KvPrompt>([] {
    auto kept = std::make_shared<KvPrompt>(kShape, kTokens);
    KeepAllValues(*kept, TokenLayout::Make(LayoutKind::kStriped, 4, kTokens, 7).value());
    return kept;
  }());
  return prompt;
}

void Check(const KvFetch& fetch, int64_t max_message_bytes) {
  FUZZ_CHECK(fetch.range.first_token >= 0 && fetch.range.tokens > 0);
  FUZZ_CHECK(fetch.range.first_token + fetch.range.tokens <= kTokens);
  FUZZ_CHECK(fetch.range.first_head >= 0 && fetch.range.heads > 0);
  FUZZ_CHECK(fetch.range.first_head + fetch.range.heads <= kShape.kv_heads);
  FUZZ_CHECK(fetch.first_layer >= 0 && fetch.layers > 0 && fetch.first_layer + fetch.layers <= kShape.layers);
  FUZZ_CHECK(fetch.part_tokens > 0);
  SlabReader reader(fetch, {}, [] { return Prompt(); });
  int64_t tokens = 0;
  v1::KvPart part;
  for (auto next = reader.Take(part); next.ok() && *next == KvReader::Next::kPart; next = reader.Take(part)) {
    tokens += static_cast<int64_t>(part.tokens());
    FUZZ_CHECK(static_cast<int64_t>(part.ByteSizeLong()) <= max_message_bytes);
    FUZZ_CHECK(part.crc32c() == PartChecksum(part));
  }
  FUZZ_CHECK(tokens == fetch.range.tokens * fetch.layers);
}

}  // namespace

const int kFuzzRounds = 100'000;

std::vector<std::string> FuzzSeeds() {
  v1::FetchKvRequest all, range, pages;
  all.set_lease("l");
  range.set_first_token(10);
  range.set_tokens(20);
  range.set_first_layer(1);
  range.set_layers(2);
  range.set_first_head(1);
  range.set_heads(2);
  pages.set_layout(v1::KV_LAYOUT_PAGES_HND);
  pages.set_page_tokens(16);
  pages.set_first_token(32);
  std::vector<std::string> seeds;
  for (const char limit : {'\0', '\x20', '\xff'}) {
    for (const v1::FetchKvRequest& request : {all, range, pages}) {
      seeds.push_back(limit + request.SerializeAsString());
    }
  }
  return seeds;
}

}  // namespace meshfill

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  [[maybe_unused]] const meshfill::QuietProtobuf quiet{};
  using namespace meshfill;
  FuzzInput input(data, size);
  const int64_t max_message_bytes = (64 << 10) + (input.Byte() << 14);  // the least that a config may have
  v1::FetchKvRequest request;
  if (!request.ParseFromString(input.Rest())) return 0;
  const auto fetch = CheckFetch(request, kShape, kTokens, max_message_bytes);
  if (fetch.ok()) Check(*fetch, max_message_bytes);
  return 0;
}
