#include "engine/model/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "engine/model/strict_json.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

using nlohmann::json;

constexpr uint64_t kLengthBytes = 8;
constexpr uint64_t kMaxHeaderBytes = 100'000'000;
constexpr char kMetadataKey[] = "__metadata__";

struct ElementTypeInfo {
  ElementType type;
  const char* name;
  int64_t bytes;
};
constexpr std::array kElementTypes = {
    ElementTypeInfo{ElementType::kBool, "BOOL", 1},      ElementTypeInfo{ElementType::kU8, "U8", 1},
    ElementTypeInfo{ElementType::kI8, "I8", 1},          ElementTypeInfo{ElementType::kF8E4M3, "F8_E4M3", 1},
    ElementTypeInfo{ElementType::kF8E5M2, "F8_E5M2", 1}, ElementTypeInfo{ElementType::kI16, "I16", 2},
    ElementTypeInfo{ElementType::kU16, "U16", 2},        ElementTypeInfo{ElementType::kF16, "F16", 2},
    ElementTypeInfo{ElementType::kBf16, "BF16", 2},      ElementTypeInfo{ElementType::kI32, "I32", 4},
    ElementTypeInfo{ElementType::kU32, "U32", 4},        ElementTypeInfo{ElementType::kF32, "F32", 4},
    ElementTypeInfo{ElementType::kI64, "I64", 8},        ElementTypeInfo{ElementType::kU64, "U64", 8},
    ElementTypeInfo{ElementType::kF64, "F64", 8},
};

const ElementTypeInfo& Info(ElementType type) {
  return *std::find_if(kElementTypes.begin(), kElementTypes.end(),
                       [type](const ElementTypeInfo& info) { return info.type == type; });
}

std::optional<ElementType> ParseElementType(std::string_view name) {
  for (const ElementTypeInfo& info : kElementTypes) {
    if (name == info.name) return info.type;
  }
  return std::nullopt;
}

// Bytes of a tensor, nothing where the product leaves int64.
std::optional<int64_t> CheckedBytes(ElementType type, std::span<const int64_t> shape) {
  int64_t bytes = ElementTypeBytes(type);
  for (const int64_t extent : shape) {
    if (__builtin_mul_overflow(bytes, extent, &bytes)) return std::nullopt;
  }
  return bytes;
}

std::optional<int64_t> NonNegativeInteger(const json& value) {
  if (!value.is_number_unsigned()) return std::nullopt;
  const uint64_t number = value.get<uint64_t>();
  if (number > static_cast<uint64_t>(INT64_MAX)) return std::nullopt;
  return static_cast<int64_t>(number);
}

absl::Status BrokenFile(const std::string& path, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(path, ": ", what, "; fetch or write the file again"));
}

absl::Status BrokenTensor(const std::string& path, const std::string& name, absl::string_view what) {
  return BrokenFile(path, absl::StrCat("tensor ", Excerpt(name), " ", what));
}

// A tensor as its header entry describes it, offsets relative to the first tensor's byte.
struct HeaderEntry {
  std::string name;
  ElementType type;
  std::vector<int64_t> shape;
  int64_t begin;
  int64_t end;
};

absl::StatusOr<HeaderEntry> ParseEntry(const std::string& path, const std::string& name, const json& value) {
  if (!value.is_object()) {
    return BrokenTensor(path, name, absl::StrCat("is described by ", Excerpt(value), ", no object"));
  }
  for (const auto& [key, member] : value.items()) {
    if (key != "dtype" && key != "shape" && key != "data_offsets") {
      return BrokenTensor(path, name, absl::StrCat("has the unknown field ", Excerpt(key)));
    }
  }
  for (const char* key : {"dtype", "shape", "data_offsets"}) {
    if (!value.contains(key)) return BrokenTensor(path, name, absl::StrCat("has no ", key));
  }

  HeaderEntry entry;
  entry.name = name;
  const json& dtype = value["dtype"];
  const std::optional<ElementType> type =
      dtype.is_string() ? ParseElementType(dtype.get_ref<const std::string&>()) : std::nullopt;
  if (!type) return BrokenTensor(path, name, absl::StrCat("has the unknown dtype ", Excerpt(dtype)));
  entry.type = *type;

  const json& shape = value["shape"];
  if (!shape.is_array()) {
    return BrokenTensor(path, name, absl::StrCat("has the shape ", Excerpt(shape), ", no array"));
  }
  for (const json& extent : shape) {
    const std::optional<int64_t> number = NonNegativeInteger(extent);
    if (!number) {
      return BrokenTensor(
          path, name,
          absl::StrCat("has the shape ", Excerpt(shape), ", not all of it non-negative integers"));
    }
    entry.shape.push_back(*number);
  }
  const std::optional<int64_t> bytes = CheckedBytes(entry.type, entry.shape);
  if (!bytes) {
    return BrokenTensor(path, name, absl::StrCat("has the shape ", Excerpt(shape), ", whose bytes overflow"));
  }

  const json& offsets = value["data_offsets"];
  const bool pair = offsets.is_array() && offsets.size() == 2;
  const std::optional<int64_t> begin = pair ? NonNegativeInteger(offsets[0]) : std::nullopt;
  const std::optional<int64_t> end = pair ? NonNegativeInteger(offsets[1]) : std::nullopt;
  if (!begin || !end || *begin > *end) {
    return BrokenTensor(path, name,
                        absl::StrCat("has the data_offsets ", Excerpt(offsets), ", not [begin, end]"));
  }
  entry.begin = *begin;
  entry.end = *end;
  if (entry.end - entry.begin != *bytes) {
    return BrokenTensor(
        path, name,
        absl::StrCat("has ", entry.end - entry.begin, " bytes of data, but ", ElementTypeName(entry.type),
                     " ", ShapeString(entry.shape), " takes ", *bytes));
  }
  return entry;
}

absl::Status CheckMetadata(const std::string& path, const json& metadata) {
  bool strings = metadata.is_object();
  if (strings) {
    for (const json& value : metadata) strings = strings && value.is_string();
  }
  if (!strings) {
    return BrokenFile(path, absl::StrCat(kMetadataKey, " is ", Excerpt(metadata), ", no object of strings"));
  }
  return absl::OkStatus();
}

// `entries` by rising offset: one begins where the last ended, and the last ends with the file.
absl::Status CheckCoverage(const std::string& path, std::span<const HeaderEntry> entries,
                           int64_t data_bytes) {
  int64_t covered = 0;
  for (const HeaderEntry& entry : entries) {
    if (entry.end > data_bytes) {
      return BrokenTensor(
          path, entry.name,
          absl::StrCat("ends at byte ", entry.end, " of the data, but the file has only ", data_bytes));
    }
    if (entry.begin != covered) {
      return BrokenTensor(path, entry.name,
                          absl::StrCat("begins at byte ", entry.begin, " of the data, ",
                                       entry.begin < covered ? "inside the tensor before it" : "after a hole",
                                       ", not at ", covered));
    }
    covered = entry.end;
  }
  if (covered != data_bytes) {
    return BrokenFile(
        path, absl::StrCat("the tensors end at byte ", covered, " of the data, the file has ", data_bytes));
  }
  return absl::OkStatus();
}

}  // namespace

const char* ElementTypeName(ElementType type) { return Info(type).name; }
int64_t ElementTypeBytes(ElementType type) { return Info(type).bytes; }

ElementType ElementTypeOf(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return ElementType::kF32;
    case DType::kBf16:
      return ElementType::kBf16;
    case DType::kF16:
      return ElementType::kF16;
    case DType::kF8E4M3:
      return ElementType::kF8E4M3;
    case DType::kF4E2M1:
      return ElementType::kU8;
  }
  return ElementType::kF32;
}

std::string ShapeString(std::span<const int64_t> shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

absl::StatusOr<std::shared_ptr<const SafetensorsFile>> SafetensorsFile::Open(const std::string& path) {
  // A FIFO would wait for a writer: without one it opens at once, and is refused below.
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat(path, ": cannot be opened; check the path"));
  }
  struct stat info;
  const int error = fstat(descriptor, &info) != 0 ? errno : 0;
  if (error != 0 || !S_ISREG(info.st_mode) || info.st_size < static_cast<off_t>(kLengthBytes)) {
    close(descriptor);
    if (error != 0) return absl::ErrnoToStatus(error, absl::StrCat(path, ": cannot be read"));
    if (!S_ISREG(info.st_mode)) return BrokenFile(path, "is no regular file");
    return BrokenFile(path, absl::StrCat("has ", info.st_size, " bytes, too few for a safetensors file"));
  }
  const size_t size = static_cast<size_t>(info.st_size);
  void* data = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, descriptor, 0);
  const int map_error = errno;
  if (data == MAP_FAILED) {
    close(descriptor);
    return absl::ErrnoToStatus(map_error, absl::StrCat(path, ": cannot be mapped"));
  }

  std::shared_ptr<SafetensorsFile> file(
      new SafetensorsFile(path, descriptor, static_cast<const std::byte*>(data), size));
  RETURN_IF_ERROR(file->ReadHeader());
  return file;
}

absl::Status SafetensorsFile::ReadHeader() {
  uint64_t header_bytes = 0;
  for (uint64_t i = 0; i < kLengthBytes; ++i) header_bytes |= std::to_integer<uint64_t>(data_[i]) << (8 * i);
  if (header_bytes > kMaxHeaderBytes) {
    return BrokenFile(path_, absl::StrCat("announces a header of ", header_bytes, " bytes, more than the ",
                                          kMaxHeaderBytes, " allowed"));
  }
  if (header_bytes > size_bytes_ - kLengthBytes) {
    return BrokenFile(path_, absl::StrCat("announces a header of ", header_bytes, " bytes, but only ",
                                          size_bytes_ - kLengthBytes, " follow"));
  }
  const std::string_view text(reinterpret_cast<const char*>(data_) + kLengthBytes, header_bytes);
  if (text.empty() || text.front() != '{') return BrokenFile(path_, "its header does not begin with '{'");
  ASSIGN_OR_RETURN(json header, ParseJsonObject(text, path_));

  std::vector<HeaderEntry> entries;
  for (const auto& [name, value] : header.items()) {
    if (name == kMetadataKey) {
      RETURN_IF_ERROR(CheckMetadata(path_, value));
      continue;
    }
    ASSIGN_OR_RETURN(HeaderEntry entry, ParseEntry(path_, name, value));
    entries.push_back(std::move(entry));
  }
  std::sort(entries.begin(), entries.end(), [](const HeaderEntry& x, const HeaderEntry& y) {
    return std::pair(x.begin, x.end) < std::pair(y.begin, y.end);
  });
  const std::span<const std::byte> data(data_ + kLengthBytes + header_bytes,
                                        size_bytes_ - kLengthBytes - header_bytes);
  RETURN_IF_ERROR(CheckCoverage(path_, entries, static_cast<int64_t>(data.size())));
  for (HeaderEntry& entry : entries) {
    tensors_[std::move(entry.name)] = {entry.type, std::move(entry.shape),
                                       data.subspan(entry.begin, entry.end - entry.begin)};
  }
  return absl::OkStatus();
}

SafetensorsFile::~SafetensorsFile() { munmap(const_cast<std::byte*>(data_), size_bytes_); }

const TensorView* SafetensorsFile::Find(std::string_view name) const {
  const auto it = tensors_.find(name);
  return it == tensors_.end() ? nullptr : &it->second;
}

}  // namespace meshfill
