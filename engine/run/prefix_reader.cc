#include "engine/run/prefix_reader.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "kernels/return_if_error.h"

namespace meshfill {

HeadRows HeadsOutermost(const ModelShape& shape, int64_t slots, int64_t first_slot) {
  return {.dtype = shape.dtype,
          .head_stride = slots * shape.head_dim,
          .slot_stride = shape.head_dim,
          .slots = {.base = first_slot}};
}

std::byte* HalfOf(const BufferRef& kv, int half) {
  return kv->data<std::byte>() + half * (kv->size_bytes() / 2);
}

// The slabs that one layer of a rank reads, each asked for once.
class PrefixReader::Slabs {
 public:
  explicit Slabs(Stream& stream) : stream_(stream) {}

  // The slab as the stream's operations read it; null: it is on the host.
  absl::StatusOr<BufferRef> OnDevice(KvSlab& slab) {
    if (const auto known = known_.find(&slab); known != known_.end()) return known->second;
    BufferRef kept;
    if (std::optional<DeviceMessage> on_device = slab.On(stream_.device()); on_device.has_value()) {
      ASSIGN_OR_RETURN(kept, stream_.TakeOver(*std::move(on_device)));
    } else {
      RETURN_IF_ERROR(slab.BringToHost());
    }
    return known_[&slab] = kept;
  }

 private:
  Stream& stream_;
  std::map<const KvSlab*, BufferRef> known_;
};

PrefixReader::PrefixReader(const KvSlabs& prefix, const ModelShape& shape, const TokenLayout& layout,
                           int rank, int64_t slots, Stream& stream, BufferRef staging, int64_t staging_tokens)
    : prefix_(prefix),
      shape_(shape),
      layout_(layout),
      rank_(rank),
      slots_(slots),
      stream_(stream),
      staging_(std::move(staging)),
      staging_tokens_(staging_tokens) {}

absl::Status PrefixReader::Read(int layer, const BufferRef& kv, int64_t all_slots) {
  const auto copy = [&](int half, const std::byte* from, const HeadRows& from_rows, int64_t slot,
                        int64_t tokens) {
    return stream_.CopyHeads({.from = from,
                              .from_rows = from_rows,
                              .to = HalfOf(kv, half),
                              .to_rows = HeadsOutermost(shape_, all_slots, slot),
                              .heads = shape_.kv_heads,
                              .tokens = tokens,
                              .head_dim = shape_.head_dim});
  };
  Slabs slabs(stream_);
  for (int64_t slot = 0; slot < slots_;) {
    KvRows rows = KvRowsOf(prefix_, layer, layout_, rank_, slot, /*most=*/1);
    ASSIGN_OR_RETURN(const BufferRef kept, slabs.OnDevice(*rows.slab));
    if (kept == nullptr) {
      ASSIGN_OR_RETURN(rows.slots, Upload(layer, slot, slabs));
    } else {
      rows = KvRowsOf(prefix_, layer, layout_, rank_, slot, slots_ - slot);
    }
    const HeadRows staged = {.dtype = shape_.dtype,
                             .head_stride = shape_.head_dim,
                             .slot_stride = int64_t{shape_.kv_heads} * shape_.head_dim,
                             .slots = {.width = std::max<int64_t>(1, rows.slots)}};
    for (int half = 0; half < 2; ++half) {
      RETURN_IF_ERROR(kept == nullptr
                          ? copy(half, StagedHalf(half), staged, slot, rows.slots)
                          : copy(half, HalfOf(kept, half),
                                 HeadsOutermost(shape_, rows.slab->shape().tokens, rows.first_slot), slot,
                                 rows.slots));
    }
    slot += rows.slots;
  }
  return absl::OkStatus();
}

absl::StatusOr<int64_t> PrefixReader::Upload(int layer, int64_t begin, Slabs& slabs) {
  const int64_t most = std::min(staging_tokens_, slots_ - begin);
  int64_t done = 0;
  while (done < most) {
    const KvRows rows = KvRowsOf(prefix_, layer, layout_, rank_, begin + done, most - done);
    ASSIGN_OR_RETURN(const BufferRef kept, slabs.OnDevice(*rows.slab));
    if (kept != nullptr) break;
    const auto slot_bytes = static_cast<size_t>(rows.slab->shape().slot_bytes());
    for (int half = 0; half < 2; ++half) {
      RETURN_IF_ERROR(stream_.Upload(rows.slab->Row(half, rows.first_slot), rows.slots * slot_bytes,
                                     StagedHalf(half) + done * slot_bytes));
    }
    done += rows.slots;
  }
  return done;
}

std::byte* PrefixReader::StagedHalf(int half) const {
  return staging_->data<std::byte>() +
         half * staging_tokens_ * shape_.kv_heads * shape_.head_dim * DTypeBytes(shape_.dtype);
}

}  // namespace meshfill
