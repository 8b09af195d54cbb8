// Launches of the product's kernels, carried out by the plain reference in their turn on the stream.
#include <functional>
#include <utility>
#include <vector>

#include "kernels/cuda/attention.h"
#include "kernels/cuda/expert_ops.h"
#include "kernels/cuda/launch_status.h"
#include "kernels/cuda/layer_ops.h"
#include "tests/fake_cuda/fake_cuda.h"
#include "tests/kernels/lone_stream.h"

namespace meshfill {
namespace {

constexpr auto At = [](auto* pointer) { return FakeCuda::At(pointer); };

ExpertRows RowsAt(const ExpertRows& rows) {
  return {.begin = At(rows.begin), .token = At(rows.token), .row = At(rows.row), .weight = At(rows.weight)};
}

// `run` gets a stream of its own: the reference keeps nothing between operations.
absl::Status Enqueue(const char* name, CUstream_st* stream, std::function<absl::Status(Stream&)> run) {
  return LaunchStatus(name, FakeCuda::Enqueue(stream, [run = std::move(run)] {
                        FakeCuda::TakeTime();
                        const LoneStream reference = ReferenceStream(DType::kBf16);
                        run(*reference).IgnoreError();  // it has no way to fail
                      }));
}

}  // namespace

absl::Status LaunchEmbed(const uint32_t* ids, int64_t tokens, const void* table, DType table_dtype,
                         int64_t width, float* x, CUstream_st* stream) {
  if (tokens == 0) return absl::OkStatus();
  return Enqueue("embed", stream, [=](Stream& reference) {
    return reference.Embed({At(ids), static_cast<size_t>(tokens)}, At(table), table_dtype, width, At(x));
  });
}

absl::Status LaunchRmsNorm(const float* x, const float* weight, int64_t tokens, int64_t width, float eps,
                           BFloat16* y, CUstream_st* stream) {
  if (tokens == 0) return absl::OkStatus();
  return Enqueue("rms norm", stream, [=](Stream& reference) {
    return reference.RmsNorm(At(x), At(weight), tokens, width, eps, At(y));
  });
}

absl::Status LaunchAddRmsNorm(const float* y, const float* weight, int64_t tokens, int64_t width, float eps,
                              float* x, CUstream_st* stream) {
  if (tokens == 0) return absl::OkStatus();
  return Enqueue("add rms norm", stream, [=](Stream& reference) {
    return reference.AddRmsNorm(At(y), At(weight), tokens, width, eps, At(x));
  });
}

absl::Status LaunchScale(float* x, int64_t count, float factor, CUstream_st* stream) {
  if (count == 0) return absl::OkStatus();
  return Enqueue("scale", stream, [=](Stream& reference) { return reference.Scale(At(x), count, factor); });
}

absl::Status LaunchSplitQkv(const SplitQkvArgs& args, CUstream_st* stream) {
  if (args.tokens == 0) return absl::OkStatus();
  return Enqueue("split qkv", stream, [args = args](Stream& reference) mutable {
    args.qkv = At(args.qkv), args.q = At(args.q), args.k = At(args.k), args.v = At(args.v);
    args.q_norm = At(args.q_norm), args.k_norm = At(args.k_norm);
    args.rope_cos = At(args.rope_cos), args.rope_sin = At(args.rope_sin);
    return reference.SplitQkv(args);
  });
}

absl::Status LaunchMergePartial(const MergePartialArgs& args, CUstream_st* stream) {
  if (args.rows == 0) return absl::OkStatus();
  return Enqueue("merge partial", stream, [args = args](Stream& reference) mutable {
    args.o = At(args.o), args.lse = At(args.lse);
    args.other_o = At(args.other_o), args.other_lse = At(args.other_lse);
    return reference.MergePartial(args);
  });
}

absl::Status LaunchApplySinks(const ApplySinksArgs& args, CUstream_st* stream) {
  if (args.tokens == 0) return absl::OkStatus();
  return Enqueue("apply sinks", stream, [args = args](Stream& reference) mutable {
    args.o = At(args.o), args.lse = At(args.lse), args.sinks = At(args.sinks);
    return reference.ApplySinks(args);
  });
}

absl::Status LaunchCopyHeads(const CopyHeadsArgs& args, CUstream_st* stream) {
  if (args.tokens == 0) return absl::OkStatus();
  return Enqueue("copy heads", stream, [args = args](Stream& reference) mutable {
    args.from = At(args.from), args.to = At(args.to);
    return reference.CopyHeads(args);
  });
}

absl::Status LaunchActivate(const ActivateArgs& args, CUstream_st* stream) {
  if (args.tokens == 0) return absl::OkStatus();
  return Enqueue("activation", stream, [args = args](Stream& reference) mutable {
    args.x = At(args.x), args.y = At(args.y);
    return reference.Activate(args);
  });
}

absl::Status LaunchRoute(const RouteArgs& args, CUstream_st* stream) {
  return Enqueue("route", stream, [args = args](Stream& reference) mutable {
    args.logits = At(args.logits), args.correction = At(args.correction);
    args.rows = RowsAt(args.rows);
    args.tokens_per_expert = At(args.tokens_per_expert);
    return reference.Route(args);
  });
}

// The reference's products are of weights of its own: these are of the device's.
absl::Status LaunchExpertGemm(const ExpertProducts& products, int64_t rows, CUstream_st* stream) {
  if (rows == 0) return absl::OkStatus();
  return Enqueue("expert gemm", stream, [=](Stream&) {
    const int64_t in = products.in_features, out = products.out_features;
    const int32_t *const begin = At(products.begin), *const token = At(products.token);
    const ExpertMatrix* const experts = At(products.experts);
    const BFloat16* const x = At(products.x);
    BFloat16* const y = At(products.y);
    for (int e = 0; e < products.count; ++e) {
      const BFloat16* const matrix = At(experts[e].matrix);
      const float* const bias = At(experts[e].bias);
      for (int32_t row = begin[e]; row < begin[e + 1]; ++row) {
        const BFloat16* const from = x + (token == nullptr ? row : token[row]) * in;
        for (int64_t column = 0; column < out; ++column) {
          float sum = bias == nullptr ? 0 : bias[column];
          for (int64_t i = 0; i < in; ++i) sum += from[i].ToFloat() * matrix[column * in + i].ToFloat();
          y[row * out + column] = BFloat16::FromFloat(sum);
        }
      }
    }
    return absl::OkStatus();
  });
}

absl::Status LaunchAddExperts(const AddExpertsArgs& args, CUstream_st* stream) {
  if (args.tokens == 0) return absl::OkStatus();
  return Enqueue("add experts", stream, [args = args](Stream& reference) mutable {
    args.y = At(args.y), args.x = At(args.x);
    args.rows = RowsAt(args.rows);
    return reference.AddExperts(args);
  });
}

absl::Status LaunchConvert(const void* from, DType from_dtype, int64_t count, DType to_dtype, void* to,
                           CUstream_st* stream) {
  if (count == 0) return absl::OkStatus();
  // One head of one element a slot: CopyHeads rounds as Convert does. f16 by way of the embedding.
  return Enqueue("convert", stream, [=](Stream& reference) {
    if (from_dtype == DType::kF16) {
      const uint32_t first[] = {0};
      std::vector<float> values(count);
      if (absl::Status status = reference.Embed(first, At(from), DType::kF16, count, values.data());
          !status.ok()) {
        return status;
      }
      return reference.Convert(values.data(), count, to_dtype, At(to));
    }
    return reference.CopyHeads({.from = At(from),
                                .from_rows = {.dtype = from_dtype, .head_stride = count, .slot_stride = 1},
                                .to = At(to),
                                .to_rows = {.dtype = to_dtype, .head_stride = count, .slot_stride = 1},
                                .heads = 1,
                                .tokens = count,
                                .head_dim = 1});
  });
}

absl::Status LaunchWiden(const WidenArgs& args, CUstream_st* stream) {
  const auto count = std::ssize(args.matrices);
  if (count == 0) return absl::OkStatus();
  return Enqueue(
      "widen", stream,
      [count, on_device = args.on_device, rows = args.rows, width = args.width, to = args.to](Stream&) {
        BFloat16* const y = At(to);
        for (int64_t m = 0; m < count; ++m) {
          const NarrowMatrix matrix = At(on_device)[m];
          for (int64_t row = 0; row < rows; ++row) {
            const uint8_t* const elements = At(matrix.rows) + row * matrix.row_bytes;
            const uint8_t* const scales = elements + matrix.scales_at;
            for (int64_t i = 0; i < width; ++i) {
              const int64_t scale = i / matrix.scale_columns.value();
              const float value =
                  matrix.fp4 ? Fp4ToFloat(static_cast<uint8_t>(elements[i / 2] >> i % 2 * 4)) *
                                   E8M0ToFloat(scales[scale])
                             : Fp8ToFloat(elements[i]) * reinterpret_cast<const float*>(scales)[scale];
              y[(m * rows + row) * width + i] = BFloat16::FromFloat(value);
            }
          }
        }
        return absl::OkStatus();
      });
}

absl::Status CudaAttentionBlock(const AttentionBlockArgs& args, DType dtype, const CudaDeviceTraits&,
                                CUstream_st* stream, CudaAttentionKernel) {
  const bool aligned = (reinterpret_cast<uintptr_t>(args.q) | reinterpret_cast<uintptr_t>(args.k) |
                        reinterpret_cast<uintptr_t>(args.v) | 2 * reinterpret_cast<uintptr_t>(args.o)) %
                           16 ==
                       0;
  if (dtype != DType::kBf16 || args.head_dim % 8 != 0 || !aligned) {
    return absl::InvalidArgumentError("fake cuda attention: an argument that the kernels refuse");
  }
  if (args.q_tokens == 0) return absl::OkStatus();
  return Enqueue("attention", stream, [args = args](Stream& reference) mutable {
    if (args.k_tokens > 0) args.k = At(args.k), args.v = At(args.v);
    args.q = At(args.q), args.o = At(args.o), args.lse = At(args.lse);
    return reference.AttentionBlock(args);
  });
}

}  // namespace meshfill
