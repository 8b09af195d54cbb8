// A run's way through the weights of a model on one device: each layer in turn, then the LM head.
//
// The ranks of the run that compute on the device read the same feed, each at its own pace:
//
//     resident    every part is there
//     streamed    a thread packs parts from the model's files, one ahead of the rank that is furthest behind:
//
//                     layer      0   1   2   3   4
//                     rank 0         ●                       computes layer 1
//                     rank 1             ●                   computes layer 2
//                     in memory      x   x                   layer 3 waits until rank 0 gives layer 1 back
//
//                 so that two parts are in memory at most, however far apart the ranks are. A rank waits for
//                 ranks behind it alone, which wait for nothing of it.
//     sharded     the same, of parts that the thread gathers from all processes of the run, or from all
//                 devices of this process
#ifndef MESHFILL_ENGINE_MODEL_WEIGHT_FEED_H_
#define MESHFILL_ENGINE_MODEL_WEIGHT_FEED_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/model/file_reader.h"
#include "engine/model/layer.h"
#include "engine/model/layer_shape.h"
#include "kernels/buffer.h"
#include "kernels/device.h"
#include "kernels/stop_token.h"

namespace meshfill {

// What is read at a time: a layer, or rows of the LM head. Parts are numbered, layers first.
struct WeightPart {
  LayerWeights layer;
  std::unique_ptr<PackedWeight> head;  // [rows, hidden]; null: a layer
};

// One process's share of the weights, or one device's: every part is divided among `of` of them.
struct WeightShare {
  int index = 0;
  int of = 0;  // 0: they are not shared
  bool operator==(const WeightShare&) const = default;
};

// Called while parts are made, before each thing that may take long: how to read a file. Its error ends the
// making.
using BeforeRead = std::function<absl::StatusOr<PageCache>()>;

// One step of an exchange: what goes to one process, and what comes from another.
struct ShareSwap {
  int to;          // index of the process's share
  BufferRef mine;  // null: nothing goes
  int from;
  BufferRef theirs;  // where it comes to lie, all of it; null: nothing comes
};

// Moves shares of parts between the processes of a run. But for End, one thread uses it.
class ShareExchange {
 public:
  virtual ~ShareExchange() = default;
  // All steps, in this order. A step may send what the one before it has received. All processes call it with
  // steps that fit together, and with the same `most_bytes`, above which no share of theirs is.
  virtual absl::Status Exchange(std::span<const ShareSwap> swaps, int64_t most_bytes,
                                const BeforeRead& before_piece) = 0;
  // Any thread: nobody needs the shares any more. Every Exchange fails soon, and the peers' do.
  virtual void End() = 0;
};

// How a run gathers shared weights.
struct Gathering {
  WeightShare share;
  std::optional<int> head;  // index of the process that reads the LM head; none: nobody does
  bool at_once = false;     // false: from when a reader asks for the first part
  std::unique_ptr<ShareExchange> exchange;
};

// Thread-safe.
class WeightFeed {
 public:
  virtual ~WeightFeed() = default;  // no reader uses it any more

  // Part `part`, once it is there; readers ask for later and later ones. Until the reader asks again, or
  // leaves, the part stays: by then the operations of its stream that read it have to have run. CANCELLED:
  // the run was stopped. DEADLINE_EXCEEDED: for `timeout` nothing was read. Else what reading or packing
  // failed with.
  virtual absl::StatusOr<const WeightPart*> Take(int reader, int part, absl::Duration timeout) = 0;
  // The reader asks for nothing more.
  virtual void Leave(int reader) = 0;
  // How often the files, or the network, were read, so that others see that a rank waits for something that
  // goes on.
  virtual uint64_t reads() const = 0;
  virtual WeightMode mode() const = 0;  // how the run has them
  // Bytes that other processes gather from it in the run.
  virtual int64_t sent_bytes() const { return 0; }
};

// Makes the parts of one feed, one after the other. The feed's thread alone calls Load.
class PartMaker {
 public:
  virtual ~PartMaker() = default;
  // Null: no reader of this feed has use for the part.
  virtual absl::StatusOr<std::shared_ptr<const WeightPart>> Load(int part, const BeforeRead& before_read) = 0;
  // Any thread: Load fails soon, where it waits for anything but its reads.
  virtual void Quit() = 0;
  // Whether others need its work on parts that no reader will ask for any more.
  virtual bool serves_others() const = 0;
  virtual WeightMode mode() const = 0;
  virtual int64_t sent_bytes() const = 0;  // bytes that other processes gather from it in the run
  // What a reader is told whose part does not come: "/models/m: layer 3", and where to look.
  virtual std::string PartName(int part) const = 0;
  virtual const char* advice() const = 0;
};

// Makes parts [0, parts) ahead of `readers` readers: from now on, or (`at_once` false) from when a reader
// asks for the first. `stop` may be null.
std::unique_ptr<WeightFeed> MakeAhead(std::unique_ptr<PartMaker> maker, int readers, int parts, bool at_once,
                                      const StopToken* stop);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_MODEL_WEIGHT_FEED_H_
