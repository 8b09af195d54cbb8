// Reading a prompt's token ids from a file or from standard input (--tokens, --format).
#ifndef MESHFILL_SERVER_CLI_TOKEN_FILE_H_
#define MESHFILL_SERVER_CLI_TOKEN_FILE_H_

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace meshfill {

enum class TokenFormat {
  kIds,  // decimal ids from 0 to 2^32 − 1, with white space or a comma between them; [1, 2, 3] of JSON, too
  kU32le,  // four bytes an id, little end first
  kBytes,  // each byte is an id
};
absl::StatusOr<TokenFormat> ParseTokenFormat(absl::string_view name);  // "ids", "u32le", "bytes"

// Turns a prompt's bytes into ids as they arrive, in pieces of any length.
class TokenDecoder {
 public:
  static constexpr size_t kMostTokens = std::numeric_limits<int32_t>::max();  // that a layout can place

  // `name` stands for the source in errors.
  TokenDecoder(TokenFormat format, std::string name, size_t most_tokens = kMostTokens)
      : format_(format), name_(std::move(name)), most_tokens_(most_tokens) {}

  // INVALID_ARGUMENT: not the format; names the line and column (ids). OUT_OF_RANGE: more than most_tokens.
  // After an error the decoder is of no more use.
  absl::Status Decode(absl::string_view bytes);

  // The ids, once. INVALID_ARGUMENT: no tokens, or a size that is no multiple of four (u32le).
  absl::StatusOr<std::vector<uint32_t>> Finish();

 private:
  absl::Status DecodeIds(absl::string_view bytes);
  void EndId();
  absl::string_view Misplaced(char c) const;  // why `c` cannot stand here; empty where it can
  void DecodeU32le(absl::string_view bytes);
  absl::Status IdsError(int64_t offset, absl::string_view what) const;

  const TokenFormat format_;
  const std::string name_;
  const size_t most_tokens_;
  std::vector<uint32_t> ids_;
  uint64_t partial_ = 0;      // the id whose digits or bytes are arriving
  int partial_length_ = 0;    // its digits or bytes so far
  int64_t offset_ = 0;        // bytes before this piece
  int64_t line_ = 1;          // ids: of the piece's next byte
  int64_t line_offset_ = 0;   // ids: where that line begins
  bool after_comma_ = false;  // ids: the last thing but white space was a comma
  enum class List { kNone, kOpen, kClosed } list_ = List::kNone;  // ids: between brackets
};

// Reads the file at `path`, or standard input for "-". NOT_FOUND: no such file. INVALID_ARGUMENT: it cannot
// be read, and the decoder's errors.
absl::StatusOr<std::vector<uint32_t>> ReadTokens(const std::string& path, TokenFormat format);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_CLI_TOKEN_FILE_H_
