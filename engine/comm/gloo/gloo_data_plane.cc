#include "engine/comm/gloo/gloo_data_plane.h"

#include "engine/comm/gloo/gloo.h"

namespace meshfill {
namespace {

class GlooDataPlane final : public DataPlane {
 public:
  explicit GlooDataPlane(const DataPlaneOptions& options) : options_(options) {}

  std::string kind() const override { return kGlooDataPlane; }
  absl::StatusOr<std::unique_ptr<Endpoint>> Listen(const Seat& seat) override {
    return GlooEndpoint::Listen({.listen = options_.listen,
                                 .rank = seat.rank,
                                 .ranks = seat.ranks,
                                 .run = seat.run,
                                 .encrypt = options_.encrypt,
                                 .stop = seat.stop});
  }
  void End(uint64_t) override {}
  absl::Duration connect_timeout() const override { return absl::Seconds(5); }
  bool connects_slowly() const override { return false; }
  bool messages_mix() const override { return true; }
  bool many_messages() const override { return true; }

 private:
  const DataPlaneOptions options_;
};

}  // namespace

std::unique_ptr<DataPlane> MakeGlooDataPlane(const DataPlaneOptions& options) {
  return std::make_unique<GlooDataPlane>(options);
}

}  // namespace meshfill
