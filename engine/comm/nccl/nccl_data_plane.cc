#include "engine/comm/nccl/nccl_data_plane.h"

#include <utility>

#include "engine/comm/nccl/nccl.h"
#include "engine/comm/nccl/nccl_links.h"

namespace meshfill {
namespace {

class NcclDataPlane final : public DataPlane {
 public:
  NcclDataPlane(const DataPlaneOptions& options, std::vector<int> device_of_rank)
      : options_(options), device_of_rank_(std::move(device_of_rank)) {
    for (size_t rank = 0; rank < device_of_rank_.size(); ++rank) {
      links_of_rank_.push_back(std::make_shared<NcclLinks>());
    }
  }

  std::string kind() const override { return "nccl"; }
  absl::StatusOr<std::unique_ptr<Endpoint>> Listen(const Seat& seat) override {
    return ListenNccl({.rank = seat.rank,
                       .ranks = seat.ranks,
                       .device = device_of_rank_[seat.local_rank],
                       .most_ctas = options_.nccl_ctas,
                       .epoch = seat.epoch,
                       .run = seat.run,
                       .links = links_of_rank_[seat.local_rank]});
  }
  void End(uint64_t run) override {
    for (const auto& links : links_of_rank_) links->End(run);
  }
  absl::Duration connect_timeout() const override { return absl::Seconds(60); }  // NCCL tries out the links
  bool connects_slowly() const override { return true; }
  // Kernels that wait for their peers share a device: two runs' could wait for each other.
  bool messages_mix() const override { return false; }
  // Its messages are one queue of the device, in the order of their calls; what slices gain there has yet to
  // be measured on GPUs.
  bool many_messages() const override { return false; }

 private:
  const DataPlaneOptions options_;
  const std::vector<int> device_of_rank_;
  std::vector<std::shared_ptr<NcclLinks>> links_of_rank_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<DataPlane>> MakeNcclDataPlane(const DataPlaneOptions& options,
                                                             std::vector<int> device_of_rank) {
  return std::make_unique<NcclDataPlane>(options, std::move(device_of_rank));
}

}  // namespace meshfill
