// A small model, what its workers offer, and plans for them: what mutations of plans begin with.
#ifndef MESHFILL_TESTS_FUZZ_GOOD_PLANS_H_
#define MESHFILL_TESTS_FUZZ_GOOD_PLANS_H_

#include <vector>

#include "engine/engine_options.h"
#include "engine/model/model_shape.h"
#include "server/pool/membership.h"
#include "server/pool/offered_speed.h"
#include "server/pool/pool_planner.h"
#include "tests/fuzz/fuzz_target.h"

namespace meshfill {

inline ModelShape SmallModel() {
  return {.layers = 2,
          .hidden = 64,
          .intermediate = 128,
          .q_heads = 8,
          .kv_heads = 8,
          .head_dim = 8,
          .vocab = 5,
          .context_tokens = 1 << 16};
}

inline v1::Join GoodOffer(const std::string& name, uint32_t ranks) {
  v1::Join offer;
  offer.set_protocol(kControlProtocol);
  offer.set_build("b");
  offer.set_name(name);
  offer.set_host("host");
  offer.set_ranks(ranks);
  offer.set_memory_bytes(1 << 30);
  offer.set_messages_mix(true);
  offer.set_peak_flops(1e12);
  offer.mutable_model()->set_name("m");
  offer.mutable_model()->set_config_hash(1);
  offer.mutable_model()->set_weights_hash(2);
  offer.mutable_model()->set_dtype("f32");
  *offer.mutable_speed() = ToProto(PoolSpeed{});
  return offer;
}

inline std::vector<Plan> GoodPlans() {
  std::vector<Plan> plans;
  for (const int ranks : {1, 2, 4, 6}) {
    for (const LayoutKind layout : {LayoutKind::kStriped, LayoutKind::kZigzag, LayoutKind::kContiguous}) {
      PoolCapacity capacity;
      capacity.ranks = ranks;
      PrefillOptions options;
      options.layout = layout;
      const auto choice = PlanForPool(SmallModel(), EngineOptions(), capacity, 200 * ranks, options);
      FUZZ_CHECK(choice.ok());
      plans.push_back(choice->plan);
    }
  }
  return plans;
}

}  // namespace meshfill

#endif  // MESHFILL_TESTS_FUZZ_GOOD_PLANS_H_
