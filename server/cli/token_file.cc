#include "server/cli/token_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

constexpr uint64_t kMaxId = std::numeric_limits<uint32_t>::max();
constexpr size_t kReadBytes = size_t{1} << 20;

bool IsSpace(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

absl::Status ReadError(const std::string& name, int error) {
  if (error == ENOENT) {
    return absl::NotFoundError(
        absl::StrCat(name,
                     ": no such file; give the prompt's file, or - for standard input; text belongs "
                     "in a file, with --format bytes"));
  }
  return absl::InvalidArgumentError(
      absl::StrCat(name, ": cannot be read: ", std::strerror(error), "; give a file of token ids"));
}

}  // namespace

absl::StatusOr<TokenFormat> ParseTokenFormat(absl::string_view name) {
  if (name == "ids") return TokenFormat::kIds;
  if (name == "u32le") return TokenFormat::kU32le;
  if (name == "bytes") return TokenFormat::kBytes;
  return absl::InvalidArgumentError(absl::StrCat("'", name, "' is no token format; use ids, u32le or bytes"));
}

absl::Status TokenDecoder::Decode(absl::string_view bytes) {
  switch (format_) {
    case TokenFormat::kIds:
      RETURN_IF_ERROR(DecodeIds(bytes));
      break;
    case TokenFormat::kU32le:
      DecodeU32le(bytes);
      break;
    case TokenFormat::kBytes:
      for (const char c : bytes) ids_.push_back(static_cast<unsigned char>(c));
      break;
  }
  offset_ += static_cast<int64_t>(bytes.size());
  if (ids_.size() > most_tokens_) {
    return absl::OutOfRangeError(
        absl::StrCat(name_, ": more than ", most_tokens_, " tokens; give a shorter prompt"));
  }
  return absl::OkStatus();
}

void TokenDecoder::EndId() {
  if (partial_length_ == 0) return;
  ids_.push_back(static_cast<uint32_t>(partial_));
  partial_ = 0;
  partial_length_ = 0;
}

absl::string_view TokenDecoder::Misplaced(char c) const {
  const bool begun = !ids_.empty() || partial_length_ != 0;
  if (c == '[') return begun || after_comma_ || list_ != List::kNone ? "a list begins the file" : "";
  if (list_ == List::kClosed) return "the list has ended";
  if (after_comma_) return "an id is missing after the comma";
  if (c == ',') return begun ? "" : "an id is missing before the comma";
  return list_ == List::kOpen ? "" : "no list has begun";  // ']'
}

absl::Status TokenDecoder::DecodeIds(absl::string_view bytes) {
  for (size_t i = 0; i < bytes.size(); ++i) {
    const char c = bytes[i];
    if (c >= '0' && c <= '9') {
      if (list_ == List::kClosed) return IdsError(i, "the list has ended");
      partial_ = partial_ * 10 + static_cast<uint64_t>(c - '0');
      ++partial_length_;
      after_comma_ = false;
      if (partial_ > kMaxId) return IdsError(i, absl::StrCat("this id is above ", kMaxId));
    } else if (IsSpace(c)) {
      EndId();
      if (c == '\n') {
        ++line_;
        line_offset_ = offset_ + static_cast<int64_t>(i) + 1;
      }
    } else if (c == '[' || c == ',' || c == ']') {
      if (const absl::string_view why = Misplaced(c); !why.empty()) {
        return IdsError(i, absl::StrCat("unexpected '", bytes.substr(i, 1), "': ", why));
      }
      EndId();
      if (c == ',') after_comma_ = true;
      if (c != ',') list_ = c == '[' ? List::kOpen : List::kClosed;
    } else {
      return IdsError(i, absl::StrCat("unexpected '", absl::CHexEscape(bytes.substr(i, 1)), "'"));
    }
  }
  return absl::OkStatus();
}

// `offset` counts from the start of the piece.
absl::Status TokenDecoder::IdsError(int64_t offset, absl::string_view what) const {
  return absl::InvalidArgumentError(absl::StrCat(
      name_, ":", line_, ":", offset_ + offset - line_offset_ + 1, ": ", what,
      "; --format ids takes decimal ids from 0 to ", kMaxId,
      " with white space or commas between them, or a JSON list of them (raw ids: --format u32le, "
      "plain text: --format bytes)"));
}

void TokenDecoder::DecodeU32le(absl::string_view bytes) {
  for (const char c : bytes) {
    partial_ |= uint64_t{static_cast<unsigned char>(c)} << (8 * partial_length_);
    if (++partial_length_ < 4) continue;
    ids_.push_back(static_cast<uint32_t>(partial_));
    partial_ = 0;
    partial_length_ = 0;
  }
}

absl::StatusOr<std::vector<uint32_t>> TokenDecoder::Finish() {
  if (format_ == TokenFormat::kIds) {
    EndId();
    if (after_comma_) return IdsError(0, "ends after a comma");
    if (list_ == List::kOpen) return IdsError(0, "ends before the list's ']'");
  }
  if (partial_length_ != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(name_, ": its size, ", offset_, " bytes, is no multiple of 4, as --format u32le needs"));
  }
  if (ids_.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(name_, ": holds no tokens; a prompt needs at least one"));
  }
  return std::move(ids_);
}

absl::StatusOr<std::vector<uint32_t>> ReadTokens(const std::string& path, TokenFormat format) {
  const bool standard_input = path == "-";
  const std::string name = standard_input ? "standard input" : path;
  const int file = standard_input ? STDIN_FILENO : open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return ReadError(name, errno);
  const absl::Cleanup close_file = [&] {
    if (!standard_input) close(file);
  };

  TokenDecoder decoder(format, name);
  std::string buffer(kReadBytes, '\0');
  while (true) {
    const ssize_t size = read(file, buffer.data(), buffer.size());
    if (size < 0 && errno == EINTR) continue;
    if (size < 0) return ReadError(name, errno);
    if (size == 0) return decoder.Finish();
    const absl::string_view piece(buffer.data(), static_cast<size_t>(size));
    RETURN_IF_ERROR(decoder.Decode(piece));
  }
}

}  // namespace meshfill
