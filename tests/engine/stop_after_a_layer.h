// An observer that stops its prefill at the end of the first layer.
#ifndef MESHFILL_TESTS_ENGINE_STOP_AFTER_A_LAYER_H_
#define MESHFILL_TESTS_ENGINE_STOP_AFTER_A_LAYER_H_

#include <chrono>
#include <future>
#include <memory>
#include <vector>

#include "engine/prefill_engine.h"

namespace meshfill {

class StopAfterALayer final : public PrefillObserver {
 public:
  // Starts the prompt, stops it after its first layer, and returns what Wait does.
  absl::StatusOr<PrefillResult> Run(PrefillEngine& engine, const PrefillRequest& request) {
    absl::StatusOr<std::unique_ptr<Prefill>> prefill = engine.Start(request, this);
    if (!prefill.ok()) return prefill.status();
    if (reached_.get_future().wait_for(std::chrono::minutes(10)) == std::future_status::ready) {
      (*prefill)->Stop();
    }
    stopped_.set_value();
    return (*prefill)->Wait();
  }
  const std::vector<int>& layers_done() const { return layers_done_; }

  void OnLayerDone(int layers_done, int) override {
    layers_done_.push_back(layers_done);
    if (layers_done_.size() > 1) return;
    reached_.set_value();
    stopped_.get_future().wait();  // the rank that reports computes no more until then
  }

 private:
  std::vector<int> layers_done_;
  std::promise<void> reached_, stopped_;
};

}  // namespace meshfill

#endif  // MESHFILL_TESTS_ENGINE_STOP_AFTER_A_LAYER_H_
