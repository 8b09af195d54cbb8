// cuBLASLt's matmul on the host, from the descriptions alone: whoever confuses rows and columns gets another
// product.
#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels/cuda/cublaslt_library.h"
#include "kernels/dtype.h"
#include "tests/fake_cuda/fake_cuda.h"

namespace meshfill {
namespace {

struct Operation {
  cublasOperation_t transpose_a = CUBLAS_OP_N, transpose_b = CUBLAS_OP_N;
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  void* bias = nullptr;
  cudaDataType_t bias_type = CUDA_R_32F;
};

// Columns of `rows` elements, `stride` elements apart.
struct Layout {
  cudaDataType_t type;
  uint64_t rows, columns;
  int64_t stride;

  double Load(const void* matrix, uint64_t row, uint64_t column) const {
    const size_t at = column * stride + row;
    return type == CUDA_R_32F ? static_cast<const float*>(matrix)[at]
                              : static_cast<const BFloat16*>(matrix)[at].ToFloat();
  }
  void Store(void* matrix, uint64_t row, uint64_t column, double value) const {
    const size_t at = column * stride + row;
    if (type == CUDA_R_32F) {
      static_cast<float*>(matrix)[at] = static_cast<float>(value);
    } else {
      static_cast<BFloat16*>(matrix)[at] = BFloat16::FromFloat(static_cast<float>(value));
    }
  }
};

const Operation& Of(cublasLtMatmulDesc_t operation) { return *reinterpret_cast<const Operation*>(operation); }
const Layout& Of(cublasLtMatrixLayout_t layout) { return *reinterpret_cast<const Layout*>(layout); }

cublasStatus_t SetAttribute(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute,
                            const void* value, size_t size_bytes) {
  Operation& set = *reinterpret_cast<Operation*>(operation);
  const auto into = [&](auto& field) {
    if (size_bytes != sizeof(field)) return CUBLAS_STATUS_INVALID_VALUE;
    std::memcpy(&field, value, sizeof(field));
    return CUBLAS_STATUS_SUCCESS;
  };
  switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA:
      return into(set.transpose_a);
    case CUBLASLT_MATMUL_DESC_TRANSB:
      return into(set.transpose_b);
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
      return into(set.epilogue);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
      return into(set.bias);
    case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE:
      return into(set.bias_type);
    default:
      return CUBLAS_STATUS_NOT_SUPPORTED;
  }
}

constexpr uint64_t kAlgorithms = 4;
constexpr uint64_t kUnusable = 2;  // refuses when it is run

// op(A), [m, k].
struct Operand {
  const Layout& layout;
  bool transposed;
  uint64_t rows() const { return transposed ? layout.columns : layout.rows; }
  uint64_t columns() const { return transposed ? layout.rows : layout.columns; }
  // Its elements, column by column.
  std::vector<float> Read(const void* matrix) const {
    std::vector<float> elements;
    elements.reserve(rows() * columns());
    for (uint64_t column = 0; column < columns(); ++column) {
      for (uint64_t row = 0; row < rows(); ++row) {
        elements.push_back(static_cast<float>(transposed ? layout.Load(matrix, column, row)
                                                         : layout.Load(matrix, row, column)));
      }
    }
    return elements;
  }
};

cublasStatus_t FakeMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t desc, const void* alpha, const void* a,
                          cublasLtMatrixLayout_t a_desc, const void* b, cublasLtMatrixLayout_t b_desc,
                          const void* beta, const void* c, cublasLtMatrixLayout_t c_desc, void* d,
                          cublasLtMatrixLayout_t d_desc, const cublasLtMatmulAlgo_t* algo, void* workspace,
                          size_t workspace_bytes, cudaStream_t stream) {
  const Operation operation = Of(desc);
  const Layout a_layout = Of(a_desc), b_layout = Of(b_desc), d_layout = Of(d_desc);
  const uint64_t algorithm = algo->data[0];
  if (algorithm == kUnusable) return CUBLAS_STATUS_NOT_SUPPORTED;
  if (c != d || c_desc != d_desc || workspace == nullptr || workspace_bytes == 0)
    return CUBLAS_STATUS_INVALID_VALUE;
  const float scale = *static_cast<const float*>(alpha), carried = *static_cast<const float*>(beta);
  const auto run = [=] {
    FakeCuda::TakeTime();
    const Operand left{a_layout, operation.transpose_a == CUBLAS_OP_T};
    const Operand right{b_layout, operation.transpose_b == CUBLAS_OP_T};
    const std::vector<float> x = left.Read(FakeCuda::Memory(a)), y = right.Read(FakeCuda::Memory(b));
    const uint64_t rows = left.rows(), depth = left.columns();
    void* out = FakeCuda::Memory(d);
    const Layout bias{operation.bias_type, d_layout.rows, 1, static_cast<int64_t>(d_layout.rows)};
    std::vector<float> sums(rows);
    for (uint64_t column = 0; column < d_layout.columns; ++column) {
      std::fill(sums.begin(), sums.end(), 0.f);
      for (uint64_t step = 0; step < depth; ++step) {  // in the algorithm's own order
        const uint64_t k = algorithm == 0 ? step : depth - 1 - step;
        const float factor = y[column * depth + k];
        const float* of_k = &x[k * rows];
        for (uint64_t row = 0; row < rows; ++row) sums[row] += of_k[row] * factor;
      }
      for (uint64_t row = 0; row < rows; ++row) {
        double value = double{scale} * sums[row];
        if (carried != 0) value += carried * d_layout.Load(out, row, column);
        if (operation.epilogue == CUBLASLT_EPILOGUE_BIAS)
          value += bias.Load(FakeCuda::Memory(operation.bias), row, 0);
        d_layout.Store(out, row, column, value);
      }
    }
  };
  const Operand left{a_layout, operation.transpose_a == CUBLAS_OP_T};
  const Operand right{b_layout, operation.transpose_b == CUBLAS_OP_T};
  if (left.rows() != d_layout.rows || right.columns() != d_layout.columns || left.columns() != right.rows() ||
      d_layout.stride < static_cast<int64_t>(d_layout.rows)) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  return FakeCuda::Enqueue(stream, run) == cudaSuccess ? CUBLAS_STATUS_SUCCESS
                                                       : CUBLAS_STATUS_EXECUTION_FAILED;
}

cublasStatus_t Heuristic(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t,
                         cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                         cublasLtMatmulPreference_t, int wanted, cublasLtMatmulHeuristicResult_t results[],
                         int* found) {
  *found = 0;
  for (uint64_t i = 0; i < kAlgorithms && *found < wanted; ++i) {
    results[*found] = {};
    results[*found].algo.data[0] = i;
    results[(*found)++].state = CUBLAS_STATUS_SUCCESS;
  }
  return CUBLAS_STATUS_SUCCESS;
}

template <typename Handle, typename Made>
cublasStatus_t Make(Handle* handle, Made made) {
  *handle = reinterpret_cast<Handle>(new Made(made));
  return CUBLAS_STATUS_SUCCESS;
}

}  // namespace

absl::StatusOr<const CublasLt*> CublasLt::Load() {
  static constexpr CublasLt kFake = {
      .Create =
          [](cublasLtHandle_t* handle) {
            *handle = nullptr;
            return CUBLAS_STATUS_SUCCESS;
          },
      .Destroy = [](cublasLtHandle_t) { return CUBLAS_STATUS_SUCCESS; },
      .GetStatusString = [](cublasStatus_t) { return "a fake status"; },
      .MatmulDescCreate = [](cublasLtMatmulDesc_t* made, cublasComputeType_t,
                             cudaDataType_t) { return Make(made, Operation{}); },
      .MatmulDescDestroy =
          [](cublasLtMatmulDesc_t operation) {
            delete reinterpret_cast<Operation*>(operation);
            return CUBLAS_STATUS_SUCCESS;
          },
      .MatmulDescSetAttribute = SetAttribute,
      .MatrixLayoutCreate =
          [](cublasLtMatrixLayout_t* made, cudaDataType_t type, uint64_t rows, uint64_t columns,
             int64_t stride) {
            return Make(made, Layout{type, rows, columns, stride});
          },
      .MatrixLayoutDestroy =
          [](cublasLtMatrixLayout_t layout) {
            delete reinterpret_cast<Layout*>(layout);
            return CUBLAS_STATUS_SUCCESS;
          },
      .MatmulPreferenceCreate =
          [](cublasLtMatmulPreference_t* preference) {
            *preference = nullptr;
            return CUBLAS_STATUS_SUCCESS;
          },
      .MatmulPreferenceDestroy = [](cublasLtMatmulPreference_t) { return CUBLAS_STATUS_SUCCESS; },
      .MatmulPreferenceSetAttribute = [](cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t,
                                         const void*, size_t) { return CUBLAS_STATUS_SUCCESS; },
      .MatmulAlgoGetHeuristic = Heuristic,
      .Matmul = FakeMatmul,
  };
  return &kFake;
}

}  // namespace meshfill
