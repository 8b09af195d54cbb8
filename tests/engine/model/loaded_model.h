// A model loaded from a small folder, and what it holds against what the folder's files say.
#ifndef MESHFILL_TESTS_ENGINE_MODEL_LOADED_MODEL_H_
#define MESHFILL_TESTS_ENGINE_MODEL_LOADED_MODEL_H_

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/model/model.h"
#include "tests/engine/model/hf_folder.h"

namespace meshfill {

inline constexpr char kLayer1[] = "model.layers.1.";
inline constexpr WeightMode kModes[] = {WeightMode::kResident, WeightMode::kStreamed};

// A small good model as a folder in memory: two layers, a vocabulary of 11.
HfFolder Good(ModelFamily family = ModelFamily::kLlama, DType dtype = DType::kF32, bool tied = false);

// Changes the shape in the file, and cuts or extends the bytes with it.
void Reshape(HfFolder& folder, const std::string& name, std::vector<int64_t> shape);

// On the reference's device. `dtype`: what it computes in; none: what the files say.
absl::StatusOr<std::unique_ptr<Model>> Load(const std::string& folder,
                                            std::optional<DType> dtype = std::nullopt);

// A model whose weights are all there, or are read when they are asked for.
struct Held {
  std::unique_ptr<Device> device;
  absl::StatusOr<std::unique_ptr<Model>> model = absl::UnknownError("");
};
Held LoadAs(WeightMode mode, const std::string& folder);

// Waits a minute at most.
const WeightPart& Part(WeightFeed& feed, int part);

// Rows and bias of a packed f32 weight, read back by multiplying: row r of the answer is output feature r,
// [out_features, in_features + 1], the bias last.
std::vector<std::vector<float>> Unpack(const PackedWeight& weight);

// `packed` holds the named linear layers of `folder`, stacked in this order.
void ExpectStacked(const PackedWeight& packed, const HfFolder& folder, const std::vector<std::string>& names);

// All but the experts.
void ExpectHolds(const Model& model, const HfFolder& folder);

// The experts of one layer, by what the family calls their three matrices.
void ExpectHoldsExperts(const Model& model, int layer, const HfFolder& folder, const std::string& mlp,
                        const std::array<std::string, 3>& gate_up_down);

struct BadModel {
  std::string what;
  std::function<void(HfFolder&)> damage;
  std::vector<std::string> named;
};

// Each is refused in one line that says where, and names what is wrong.
void ExpectRefusedByName(const HfFolder& good, std::span<const BadModel> cases);

}  // namespace meshfill

#endif  // MESHFILL_TESTS_ENGINE_MODEL_LOADED_MODEL_H_
