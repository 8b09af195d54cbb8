// How an expected failure is forwarded, in one line:
//
//     RETURN_IF_ERROR(stream.RmsNorm(x, weight, tokens, width, eps, y));
//     ASSIGN_OR_RETURN(BufferRef q, stream.Allocate(bytes));   // or an lvalue that is there already
//
// The enclosing function returns absl::Status or an absl::StatusOr. Both are statements of a block, never the
// lone body of an `if`. A type with a comma is written as auto.
#ifndef MESHFILL_KERNELS_RETURN_IF_ERROR_H_
#define MESHFILL_KERNELS_RETURN_IF_ERROR_H_

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define RETURN_IF_ERROR(...)                                                               \
  do {                                                                                     \
    if (absl::Status return_if_error_status = (__VA_ARGS__); !return_if_error_status.ok()) \
      return return_if_error_status;                                                       \
  } while (false)

#define ASSIGN_OR_RETURN(left, ...) \
  MESHFILL_ASSIGN_OR_RETURN(MESHFILL_JOIN(assign_or_return_, __LINE__), left, __VA_ARGS__)
#define MESHFILL_ASSIGN_OR_RETURN(value, left, ...)  \
  auto value = (__VA_ARGS__);                        \
  if (!value.ok()) return std::move(value).status(); \
  left = *std::move(value)
#define MESHFILL_JOIN(a, b) MESHFILL_JOIN_EXPANDED(a, b)
#define MESHFILL_JOIN_EXPANDED(a, b) a##b

#endif  // MESHFILL_KERNELS_RETURN_IF_ERROR_H_
