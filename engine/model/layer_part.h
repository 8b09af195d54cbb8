// What the tensors of a layer are for.
#ifndef MESHFILL_ENGINE_MODEL_LAYER_PART_H_
#define MESHFILL_ENGINE_MODEL_LAYER_PART_H_

#include <compare>
#include <cstdint>

namespace meshfill {

// What a tensor of the layer is for. The linear layers of one part are stacked into one product.
enum class LayerPart {
  kAttentionNorm,
  kQkv,
  kQNorm,
  kKNorm,
  kSinks,
  kO,
  kAttentionPostNorm,
  kMlpNorm,
  kGateUp,
  kDown,
  kMlpPostNorm,
  kRouter,
  kRouterCorrection,
  kSharedGateUp,
  kSharedDown,
  kExpertGateUp,
  kExpertDown,
};

// A set of parts.
class LayerParts {
 public:
  void Add(LayerPart part) { bits_ |= Bit(part); }
  bool Has(LayerPart part) const { return (bits_ & Bit(part)) != 0; }
  bool empty() const { return bits_ == 0; }
  uint32_t bits() const { return bits_; }  // a number for each set
  auto operator<=>(const LayerParts&) const = default;

 private:
  static constexpr uint32_t Bit(LayerPart part) { return uint32_t{1} << static_cast<int>(part); }

  uint32_t bits_ = 0;
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_MODEL_LAYER_PART_H_
