// The rows of a layer's element-wise operations, vectorised for the machine at hand; one thread a call.
//
// Each function does what the Stream operation of its name means, for a range of rows or tokens, so that the
// caller can share the ranges out. Inputs of `dtype` (f32 or bf16, the compute dtype) are widened to f32,
// computed there, and rounded once on the way out.
#ifndef MESHFILL_KERNELS_CPU_LAYER_OPS_H_
#define MESHFILL_KERNELS_CPU_LAYER_OPS_H_

#include <cstdint>

#include "kernels/stream.h"

namespace meshfill {

// to[i] = from[i]; `from_dtype` is any without scales, `to_dtype` is f32 or bf16. bf16 to bf16 copies.
void ConvertValues(const void* from, DType from_dtype, int64_t count, DType to_dtype, void* to);

// [rows, columns] to rows `to_stride` elements apart, past the caches where `to` is aligned: nobody reads it
// soon.
void RoundRowsPastCaches(const float* from, int64_t rows, int64_t columns, int64_t to_stride, BFloat16* to);

// Normalises `rows` rows of `width`.
void RmsNormRows(const float* x, const float* weight, int64_t rows, int64_t width, float eps, DType dtype,
                 void* y);
void AddRmsNormRows(const float* y, const float* weight, int64_t rows, int64_t width, float eps, float* x);

// x[i] *= factor.
void ScaleValues(float* x, int64_t count, float factor);

// Tokens [begin, end) of the slice.
void SplitQkvTokens(const SplitQkvArgs& args, DType dtype, int64_t begin, int64_t end);

// Rows [begin, end).
void MergePartialRows(const MergePartialArgs& args, int64_t begin, int64_t end);

// Rows [begin, end), of all heads.
void ApplySinksRows(const ApplySinksArgs& args, int64_t begin, int64_t end);

// Slots [begin, end).
void CopyHeadsSlots(const CopyHeadsArgs& args, int64_t begin, int64_t end);

void ActivateTokens(const ActivateArgs& args, DType dtype);

// Tokens [begin, end).
void AddExpertsTokens(const AddExpertsArgs& args, DType dtype, int64_t begin, int64_t end);

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CPU_LAYER_OPS_H_
