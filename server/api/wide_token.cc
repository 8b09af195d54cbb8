#include "server/api/wide_token.h"

#include <limits>
#include <string>
#include <vector>

#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/wire_format_lite.h"
#include "grpcpp/support/slice.h"

namespace meshfill {
namespace {

using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedInputStream;

// Walks the ids of a message that protobuf has decoded, in their order.
class IdWalk {
 public:
  explicit IdWalk(const std::string& bytes)
      : in_(reinterpret_cast<const uint8_t*>(bytes.data()), static_cast<int>(bytes.size())) {}

  std::optional<WideToken> Find() {
    while (const uint32_t tag = in_.ReadTag()) {
      if (tag != Tag(v1::PrefillRequest::kTokensFieldNumber, WireFormatLite::WIRETYPE_LENGTH_DELIMITED)) {
        if (!WireFormatLite::SkipField(&in_, tag)) return std::nullopt;
        continue;
      }
      const auto limit = in_.ReadLengthAndPushLimit();
      if (!WalkChunk()) return wide_;
      in_.PopLimit(limit);
    }
    return std::nullopt;
  }

 private:
  static uint32_t Tag(int field, WireFormatLite::WireType type) {
    return WireFormatLite::MakeTag(field, type);
  }

  // False: the walk is over.
  bool WalkChunk() {
    while (const uint32_t tag = in_.ReadTag()) {
      if (tag == Tag(v1::TokenChunk::kIdsFieldNumber, WireFormatLite::WIRETYPE_VARINT)) {
        if (!TakeId()) return false;
      } else if (tag == Tag(v1::TokenChunk::kIdsFieldNumber, WireFormatLite::WIRETYPE_LENGTH_DELIMITED)) {
        const auto limit = in_.ReadLengthAndPushLimit();
        while (in_.BytesUntilLimit() > 0) {
          if (!TakeId()) return false;
        }
        in_.PopLimit(limit);
      } else if (!WireFormatLite::SkipField(&in_, tag)) {
        return false;
      }
    }
    return true;
  }

  bool TakeId() {
    uint64_t id = 0;
    if (!in_.ReadVarint64(&id)) return false;
    if (id > std::numeric_limits<uint32_t>::max()) {
      wide_ = WideToken{index_, id};
      return false;
    }
    ++index_;
    return true;
  }

  CodedInputStream in_;
  int64_t index_ = 0;
  std::optional<WideToken> wide_;
};

}  // namespace

std::optional<WideToken> FindWideToken(const grpc::ByteBuffer& bytes, const v1::PrefillRequest& message) {
  if (bytes.Length() == message.ByteSizeLong()) return std::nullopt;
  std::vector<grpc::Slice> slices;
  if (!bytes.Dump(&slices).ok()) return std::nullopt;
  std::string whole;
  whole.reserve(bytes.Length());
  for (const grpc::Slice& slice : slices) {
    whole.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return IdWalk(whole).Find();
}

}  // namespace meshfill
