#include "engine/mesh/layout.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace meshfill {
namespace {

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

const char* LayoutName(LayoutKind kind) {
  switch (kind) {
    case LayoutKind::kStriped:
      return "striped";
    case LayoutKind::kZigzag:
      return "zigzag";
    case LayoutKind::kContiguous:
      return "contiguous";
  }
  return "?";
}

absl::StatusOr<LayoutKind> ParseLayout(std::string_view name) {
  for (LayoutKind kind : {LayoutKind::kStriped, LayoutKind::kZigzag, LayoutKind::kContiguous}) {
    if (name == LayoutName(kind)) return kind;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("unknown layout \"", std::string(name), "\": use striped, zigzag or contiguous"));
}

absl::StatusOr<TokenLayout> TokenLayout::Make(LayoutKind kind, int ranks, int64_t tokens, int64_t stripe) {
  if (ranks < 1)
    return absl::InvalidArgumentError(absl::StrCat("layout over ", ranks, " ranks: at least 1 is needed"));
  if (tokens < 1 || tokens >= int64_t{1} << 31) {
    return absl::InvalidArgumentError(
        absl::StrCat("layout of ", tokens, " tokens: 1 to 2^31 - 1 are possible"));
  }
  switch (kind) {
    case LayoutKind::kStriped:
      if (stripe < 1) {
        return absl::InvalidArgumentError(
            absl::StrCat("stripe of ", stripe, " tokens: at least 1 is needed"));
      }
      // A stripe longer than the prompt deals the same, and would overflow the positions of the ranks it
      // leaves empty.
      return TokenLayout(kind, ranks, tokens, std::min(stripe, tokens));
    case LayoutKind::kZigzag:
      return TokenLayout(kind, ranks, tokens, CeilDiv(tokens, 2 * int64_t{ranks}));
    case LayoutKind::kContiguous:
      return TokenLayout(kind, ranks, tokens, CeilDiv(tokens, ranks));
  }
  return absl::InvalidArgumentError(absl::StrCat("unknown layout kind ", static_cast<int>(kind)));
}

int TokenLayout::RankOf(int64_t token) const {
  const int64_t s = token / stripe_;
  switch (kind_) {
    case LayoutKind::kStriped:
      return static_cast<int>(s % ranks_);
    case LayoutKind::kZigzag:
      return static_cast<int>(s < ranks_ ? s : 2 * int64_t{ranks_} - 1 - s);
    case LayoutKind::kContiguous:
      return static_cast<int>(s);
  }
  return 0;
}

int64_t TokenLayout::SlotOf(int64_t token) const {
  const int64_t s = token / stripe_;
  const int64_t local_stripe = kind_ == LayoutKind::kContiguous ? 0 : s / ranks_;  // zigzag: 0 there, 1 back
  return local_stripe * stripe_ + token % stripe_;
}

int64_t TokenLayout::ChunkTokens(int rank) const {
  const auto stripe_tokens = [this](int64_t s) {
    return std::clamp<int64_t>(tokens_ - s * stripe_, 0, stripe_);
  };
  switch (kind_) {
    case LayoutKind::kStriped:
      return whole_rounds_ * stripe_ + stripe_tokens(whole_rounds_ * ranks_ + rank);
    case LayoutKind::kZigzag:
      return stripe_tokens(rank) + stripe_tokens(2 * int64_t{ranks_} - 1 - rank);
    case LayoutKind::kContiguous:
      return stripe_tokens(rank);
  }
  return 0;
}

// A run ends where the prompt does: behind its whole stripes, or behind the one that is not.
int TokenLayout::AlikeUntil(int rank) const {
  const int64_t whole = tokens_ / stripe_ - (kind_ == LayoutKind::kStriped ? whole_rounds_ * ranks_ : 0);
  int64_t until = ranks_;
  const auto end_at = [&](int64_t end) { until = end > rank ? std::min(until, end) : until; };
  for (const int64_t stripe : {whole, whole + 1}) {
    end_at(stripe);
    if (kind_ == LayoutKind::kZigzag) end_at(2 * int64_t{ranks_} - stripe);
  }
  return static_cast<int>(until);
}

// Stripes are short from some stripe on: that is late for rank 0's first, and for the last rank's second of a
// zigzag.
int64_t TokenLayout::LargestChunkTokens() const {
  return std::max(ChunkTokens(0), kind_ == LayoutKind::kZigzag ? ChunkTokens(ranks_ - 1) : 0);
}

SlotPositions TokenLayout::Positions(int rank) const {
  switch (kind_) {
    case LayoutKind::kStriped:
      return {.base = rank, .stride = ranks_, .width = stripe_};
    case LayoutKind::kZigzag:
      return {.base = rank, .stride = 2 * int64_t{ranks_} - 1 - 2 * rank, .width = stripe_};
    case LayoutKind::kContiguous:
      return {.base = rank, .stride = 1, .width = stripe_};
  }
  return {};
}

TokenLayout TokenLayout::Groups(int h) const { return TokenLayout(kind_, ranks_ / h, tokens_, h * stripe_); }

TokenLayout TokenLayout::Members(int group, int h) const {
  return TokenLayout(kind_, h, Groups(h).ChunkTokens(group), stripe_);
}

std::string TokenLayout::DebugString() const {
  return absl::StrCat(LayoutName(kind_), "(n=", ranks_, ", tokens=", tokens_, ", stripe=", stripe_, ")");
}

}  // namespace meshfill
