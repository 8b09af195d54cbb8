// Where in its prompt a request ended epochs of the pool: twice at the same place makes it poisonous.
//
// What a prompt does to those who compute it, it does again at the same place. Workers that are lost for
// other reasons are lost anywhere: a long prompt that meets two such losses is not to blame.
//
// Part of the leader's state machine (leader.h). Not thread-safe.
#ifndef MESHFILL_SERVER_POOL_ENDED_EPOCHS_H_
#define MESHFILL_SERVER_POOL_ENDED_EPOCHS_H_

#include <cstdint>
#include <string>
#include <vector>

namespace meshfill {

// Work on a prompt within which an epoch ended, as far as anybody knows. Both ends are included.
struct PromptPlace {
  int64_t first_token = 0, last_token = 0;
  int first_layer = 0, last_layer = 0;

  bool MayBe(const PromptPlace& other) const;  // whether both may be the same place
};

// The end of an epoch that a run may have caused.
struct EpochEnd {
  PromptPlace place;
  bool alone = false;  // no other run may have caused it
  std::string why;     // what ended it
};

class EndedEpochs {
 public:
  // The request's run alone may have ended it. Whether it is poisonous: it, or its run and others, may have
  // ended one at that place before.
  bool Blame(const PromptPlace& place);
  // Its run and others may have. Counts until those were found to be to blame.
  void Suspect(const PromptPlace& place);
  void ForgetSuspicions() { suspected_.clear(); }

 private:
  std::vector<PromptPlace> blamed_;
  std::vector<PromptPlace> suspected_;
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_POOL_ENDED_EPOCHS_H_
