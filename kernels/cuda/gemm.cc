#include "kernels/cuda/gemm.h"

#include <algorithm>
#include <compare>
#include <cstddef>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "kernels/cuda/cublaslt_library.h"
#include "kernels/cuda/cuda_weight.h"
#include "kernels/cuda/expert_ops.h"
#include "kernels/cuda/launch_status.h"
#include "kernels/cuda/layer_ops.h"
#include "kernels/mutex.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

// Multiples of it are timed: whole slices, and chunks of round length. Of other lengths there are too many.
constexpr int64_t kTimedTokens = 1024;
constexpr int kCandidates = 4;
constexpr int kTimedRuns = 3;

// What a shape's algorithm is chosen by.
struct Shape {
  int64_t tokens, in_features, out_features;
  DType y_dtype;
  bool accumulate;
  bool bias;
  uint32_t alignment;  // largest that all pointers have, in bytes
  auto operator<=>(const Shape&) const = default;
};

// The algorithms of one device.
class ChosenAlgorithms {
 public:
  // Chosen by the first who asks; others wait for it.
  template <typename Choose>
  absl::StatusOr<cublasLtMatmulAlgo_t> Of(const Shape& shape, const Choose& choose) {
    const MutexLock lock(mu_);
    const auto found = algorithms_.find(shape);
    if (found != algorithms_.end()) return found->second;
    absl::StatusOr<cublasLtMatmulAlgo_t> algorithm = choose();
    if (algorithm.ok()) algorithms_.emplace(shape, *algorithm);
    return algorithm;
  }

 private:
  Mutex mu_;
  std::map<Shape, cublasLtMatmulAlgo_t> algorithms_ ABSL_GUARDED_BY(mu_);
};

// The largest power of two that divides all addresses, 256 at most.
uint32_t AlignmentOf(std::initializer_list<const void*> pointers) {
  uintptr_t bits = 256;
  for (const void* pointer : pointers) bits |= reinterpret_cast<uintptr_t>(pointer);
  return static_cast<uint32_t>(bits & -bits);
}

constexpr cudaDataType_t DataType(DType dtype) { return dtype == DType::kF32 ? CUDA_R_32F : CUDA_R_16BF; }

// The descriptions of one product. Made for each call: the bias' address is in them.
class Product {
 public:
  Product(const CublasLt& lt, const Shape& shape, const void* bias) : lt_(lt) {
    const cublasOperation_t transposed = CUBLAS_OP_T;
    const cudaDataType_t y_type = DataType(shape.y_dtype);
    Try(lt_.MatmulDescCreate(&operation_, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    Set(CUBLASLT_MATMUL_DESC_TRANSA, transposed);
    if (shape.bias) {
      const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
      Set(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue);
      Set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, y_type);
      Set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
    }
    const auto in = static_cast<uint64_t>(shape.in_features), out = static_cast<uint64_t>(shape.out_features);
    const auto tokens = static_cast<uint64_t>(shape.tokens);
    Try(lt_.MatrixLayoutCreate(&weight_, CUDA_R_16BF, in, out, shape.in_features));
    Try(lt_.MatrixLayoutCreate(&x_, CUDA_R_16BF, in, tokens, shape.in_features));
    Try(lt_.MatrixLayoutCreate(&y_, y_type, out, tokens, shape.out_features));
  }
  ~Product() {
    if (operation_ != nullptr) lt_.MatmulDescDestroy(operation_);
    for (cublasLtMatrixLayout_t layout : {weight_, x_, y_}) {
      if (layout != nullptr) lt_.MatrixLayoutDestroy(layout);
    }
  }
  Product(const Product&) = delete;
  Product& operator=(const Product&) = delete;

  absl::Status status() const { return lt_.ToStatus("describing a product", status_); }

  // The heuristic's, best first.
  absl::StatusOr<std::vector<cublasLtMatmulAlgo_t>> Candidates(cublasLtHandle_t handle, uint32_t alignment) {
    cublasLtMatmulPreference_t preference = nullptr;
    Try(lt_.MatmulPreferenceCreate(&preference));
    Prefer(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, CudaGemm::kWorkspaceBytes);
    for (cublasLtMatmulPreferenceAttributes_t attribute :
         {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
          CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
      Prefer(preference, attribute, alignment);
    }
    cublasLtMatmulHeuristicResult_t results[kCandidates];
    int found = 0;
    Try(lt_.MatmulAlgoGetHeuristic(handle, operation_, weight_, x_, y_, y_, preference, kCandidates, results,
                                   &found));
    if (preference != nullptr) lt_.MatmulPreferenceDestroy(preference);
    if (status_ != CUBLAS_STATUS_SUCCESS) return status();
    std::vector<cublasLtMatmulAlgo_t> algorithms;
    for (int i = 0; i < found; ++i) {
      if (results[i].state == CUBLAS_STATUS_SUCCESS) algorithms.push_back(results[i].algo);
    }
    if (algorithms.empty()) return absl::InternalError("cublasLt: no algorithm for a product");
    return algorithms;
  }

  absl::Status Run(cublasLtHandle_t handle, const cublasLtMatmulAlgo_t& algorithm, const void* weight,
                   const void* x, bool accumulate, void* y, void* workspace, cudaStream_t stream) {
    const float one = 1, beta = accumulate ? 1.0f : 0.0f;
    return lt_.ToStatus("multiplying",
                        lt_.Matmul(handle, operation_, &one, weight, weight_, x, x_, &beta, y, y_, y, y_,
                                   &algorithm, workspace, CudaGemm::kWorkspaceBytes, stream));
  }

 private:
  void Try(cublasStatus_t status) {
    if (status_ == CUBLAS_STATUS_SUCCESS) status_ = status;
  }
  template <typename T>
  void Set(cublasLtMatmulDescAttributes_t attribute, const T& value) {
    if (status_ == CUBLAS_STATUS_SUCCESS)
      Try(lt_.MatmulDescSetAttribute(operation_, attribute, &value, sizeof(value)));
  }
  template <typename T>
  void Prefer(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute,
              const T& value) {
    if (status_ == CUBLAS_STATUS_SUCCESS) {
      Try(lt_.MatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value)));
    }
  }

  const CublasLt& lt_;
  cublasStatus_t status_ = CUBLAS_STATUS_SUCCESS;
  cublasLtMatmulDesc_t operation_ = nullptr;
  cublasLtMatrixLayout_t weight_ = nullptr, x_ = nullptr, y_ = nullptr;
};

class CublasGemm final : public CudaGemm {
 public:
  CublasGemm(const CublasLt& lt, cublasLtHandle_t handle) : lt_(lt), handle_(handle) {}
  ~CublasGemm() override { lt_.Destroy(handle_); }

  absl::Status Run(const GemmArgs& args, const CudaLane& lane) override {
    if (args.tokens == 0) return absl::OkStatus();
    const auto& weight = static_cast<const CudaWeight&>(*args.weight);
    const BufferRef& bias = args.y_dtype == DType::kF32 ? weight.bias_f32 : weight.bias_bf16;
    const void* const bias_data = bias == nullptr ? nullptr : bias->data();
    const CudaWeight* const weights[] = {&weight};
    ASSIGN_OR_RETURN(const WidenedMatrices widened, WidenMatrices(weights, lane));
    const BFloat16* const matrix = widened.matrix.front();
    const Shape shape{.tokens = args.tokens,
                      .in_features = weight.in_features(),
                      .out_features = weight.out_features(),
                      .y_dtype = args.y_dtype,
                      .accumulate = args.accumulate,
                      .bias = bias != nullptr,
                      .alignment = AlignmentOf({matrix, args.x, args.y, bias_data})};
    Product product(lt_, shape, bias_data);
    RETURN_IF_ERROR(product.status());
    ASSIGN_OR_RETURN(cublasLtMatmulAlgo_t algorithm,
                     chosen_.Of(shape, [&] { return Choose(shape, product, matrix, args.x, lane); }));
    return product.Run(handle_, algorithm, matrix, args.x, args.accumulate, args.y, lane.workspace->data(),
                       lane.queue->get());
  }

  absl::Status RunExperts(const ExpertGemmArgs& args, const CudaLane& lane) override {
    std::vector<const CudaWeight*> weights;
    weights.reserve(args.weights.size());
    for (const std::unique_ptr<PackedWeight>& packed : args.weights) {
      weights.push_back(static_cast<const CudaWeight*>(packed.get()));
    }
    ASSIGN_OR_RETURN(const WidenedMatrices widened, WidenMatrices(weights, lane));
    std::vector<ExpertMatrix> experts;
    experts.reserve(weights.size());
    for (size_t i = 0; i < weights.size(); ++i) {
      const BufferRef& bias = weights[i]->bias_f32;
      experts.push_back(
          {.matrix = widened.matrix[i], .bias = bias == nullptr ? nullptr : bias->data<float>()});
    }
    const size_t size_bytes = experts.size() * sizeof(ExpertMatrix);
    ASSIGN_OR_RETURN(const BufferRef on_device, lane.Allocate(size_bytes));
    RETURN_IF_ERROR(lane.queue->Upload(experts.data(), size_bytes, on_device->data()));
    return LaunchExpertGemm({.experts = on_device->data<ExpertMatrix>(),
                             .count = static_cast<int>(experts.size()),
                             .in_features = args.weights.front()->in_features(),
                             .out_features = args.weights.front()->out_features(),
                             .begin = args.rows.begin,
                             .token = args.by_token ? args.rows.token : nullptr,
                             .x = static_cast<const BFloat16*>(args.x),
                             .y = static_cast<BFloat16*>(args.y)},
                            args.row_count, lane.queue->get());
  }

 private:
  absl::StatusOr<cublasLtMatmulAlgo_t> Choose(const Shape& shape, Product& product, const BFloat16* matrix,
                                              const void* x, const CudaLane& lane) {
    ASSIGN_OR_RETURN(std::vector<cublasLtMatmulAlgo_t> candidates,
                     product.Candidates(handle_, shape.alignment));
    if (shape.tokens % kTimedTokens != 0 || candidates.size() == 1) return candidates.front();
    // Into memory of its own: y may be accumulated into.
    absl::StatusOr<BufferRef> y =
        lane.Allocate(shape.tokens * shape.out_features * DTypeBytes(shape.y_dtype));
    if (!y.ok()) return candidates.front();  // short of memory: no reason to fail
    double least_seconds = std::numeric_limits<double>::infinity();
    cublasLtMatmulAlgo_t fastest = candidates.front();
    for (const cublasLtMatmulAlgo_t& candidate : candidates) {
      absl::StatusOr<double> seconds = Time(*lane.queue, [&] {
        return product.Run(handle_, candidate, matrix, x, shape.accumulate, (*y)->data(),
                           lane.workspace->data(), lane.queue->get());
      });
      if (!seconds.ok() || *seconds >= least_seconds) continue;  // one that fails is not the one
      least_seconds = *seconds;
      fastest = candidate;
    }
    return fastest;
  }

  // Times one run, after one that warms up.
  template <typename Enqueue>
  static absl::StatusOr<double> Time(CudaQueue& queue, const Enqueue& enqueue) {
    RETURN_IF_ERROR(enqueue());
    ASSIGN_OR_RETURN(const std::shared_ptr<const CudaPoint> begin, queue.Mark());
    for (int run = 0; run < kTimedRuns; ++run) {
      RETURN_IF_ERROR(enqueue());
    }
    ASSIGN_OR_RETURN(const std::shared_ptr<const CudaPoint> end, queue.Mark());
    RETURN_IF_ERROR(LaunchStatus("timing a product", cudaStreamSynchronize(queue.get())));
    return end->SecondsSince(*begin) / kTimedRuns;
  }

  const CublasLt& lt_;
  const cublasLtHandle_t handle_;
  ChosenAlgorithms chosen_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<CudaGemm>> CudaGemm::Make() {
  ASSIGN_OR_RETURN(const CublasLt* lt, CublasLt::Load());
  cublasLtHandle_t handle = nullptr;
  RETURN_IF_ERROR(lt->ToStatus("starting", lt->Create(&handle)));
  return std::make_unique<CublasGemm>(*lt, handle);
}

}  // namespace meshfill
