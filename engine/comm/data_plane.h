// How the ranks of a worker reach the ranks of other processes: what a worker keeps of it between runs, and
// an endpoint for each rank of each run.
//
// Several runs may live at once. Where messages_mix says no, one of them alone has messages under way
// (message_gate.h).
#ifndef MESHFILL_ENGINE_COMM_DATA_PLANE_H_
#define MESHFILL_ENGINE_COMM_DATA_PLANE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/comm/endpoint.h"
#include "kernels/stop_token.h"

namespace meshfill {

// What an operator says of a worker's data plane. Each kind reads what it needs.
struct DataPlaneOptions {
  std::string listen = "127.0.0.1";  // a host name, an address, or a network interface ("eth0")
  bool encrypt = false;              // who cannot refuses it
  int nccl_ctas = 8;                 // most CTAs that NCCL takes on a GPU; 0: NCCL decides
};

class DataPlane {
 public:
  // One rank of one run.
  struct Seat {
    int local_rank = 0;  // index among this worker's ranks
    int rank = 0;        // index among the run's ranks
    int ranks = 1;
    uint64_t epoch = 0;
    uint64_t run = 0;  // tells this run's messages from those of any other; the same on all ranks
    const StopToken* stop = nullptr;  // the run's; its pauses are no part of a wait; null: the run has none
  };

  virtual ~DataPlane() = default;

  // "gloo", "nccl": ranks reach those of the same kind alone.
  virtual std::string kind() const = 0;

  // Errors: those of the endpoint's kind (gloo.h, nccl.h).
  virtual absl::StatusOr<std::unique_ptr<Endpoint>> Listen(const Seat& seat) = 0;
  // The run is over here: its communicators have gone. A later one may use its connections, unless its
  // endpoints were aborted.
  virtual void End(uint64_t run) = 0;

  // A rank that takes longer to connect than this will not.
  virtual absl::Duration connect_timeout() const = 0;
  // True: connecting takes seconds though nothing is wrong, and a rank that connects does not hang.
  virtual bool connects_slowly() const = 0;
  // Whether messages of several runs may be under way at once.
  virtual bool messages_mix() const = 0;
  // Whether many messages of a rank travel at once, beside its compute, so that head groups may exchange in
  // slices (engine/run/head_exchange.h), and chunks go along all rings at once (multi_ring_schedule.h).
  virtual bool many_messages() const = 0;
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_COMM_DATA_PLANE_H_
