#include "server/pool/ended_epochs.h"

#include <algorithm>

namespace meshfill {
namespace {

bool AnyMayBe(const std::vector<PromptPlace>& places, const PromptPlace& place) {
  return std::any_of(places.begin(), places.end(),
                     [&](const PromptPlace& other) { return other.MayBe(place); });
}

}  // namespace

bool PromptPlace::MayBe(const PromptPlace& other) const {
  return first_token <= other.last_token && other.first_token <= last_token &&
         first_layer <= other.last_layer && other.first_layer <= last_layer;
}

bool EndedEpochs::Blame(const PromptPlace& place) {
  const bool again = AnyMayBe(blamed_, place) || AnyMayBe(suspected_, place);
  blamed_.push_back(place);
  return again;
}

void EndedEpochs::Suspect(const PromptPlace& place) { suspected_.push_back(place); }

}  // namespace meshfill
