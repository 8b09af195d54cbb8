#include "engine/model/safetensors_writer.h"

#include <array>
#include <cerrno>

#include "absl/strings/str_cat.h"
#include "engine/model/strict_json.h"

namespace meshfill {
namespace {

using nlohmann::json;

constexpr size_t kLengthBytes = 8;  // the header's length, in front of the header

}  // namespace

int64_t TensorSpec::size_bytes() const {
  int64_t bytes = ElementTypeBytes(type);
  for (const int64_t extent : shape) bytes *= extent;
  return bytes;
}

absl::StatusOr<SafetensorsWriter> SafetensorsWriter::Create(const std::string& path,
                                                            std::span<const TensorSpec> tensors) {
  json header = json::object();
  header["__metadata__"] = {{"format", "pt"}};  // transformers asks for it
  int64_t offset = 0;
  for (const TensorSpec& tensor : tensors) {
    const int64_t end = offset + tensor.size_bytes();
    header[tensor.name] = {
        {"dtype", ElementTypeName(tensor.type)}, {"shape", tensor.shape}, {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // so that the first tensor is aligned
  std::array<char, kLengthBytes> length;
  for (size_t i = 0; i < kLengthBytes; ++i) length[i] = static_cast<char>(text.size() >> (8 * i));

  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  if (!file) return absl::ErrnoToStatus(errno, absl::StrCat(path, ": cannot be created; check its folder"));
  file.write(length.data(), length.size()).write(text.data(), static_cast<std::streamsize>(text.size()));
  SafetensorsWriter writer(path, std::move(file), offset);
  if (!writer.file_) return writer.WriteError();
  return writer;
}

absl::Status SafetensorsWriter::Append(std::span<const std::byte> bytes) {
  missing_bytes_ -= static_cast<int64_t>(bytes.size());
  file_.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  return file_ ? absl::OkStatus() : WriteError();
}

absl::Status SafetensorsWriter::Finish() {
  if (missing_bytes_ != 0) {
    return absl::InternalError(
        absl::StrCat(path_, ": ", missing_bytes_, " bytes of the announced data were not written"));
  }
  file_.close();
  return file_ ? absl::OkStatus() : WriteError();
}

absl::Status SafetensorsWriter::WriteError() const {
  return absl::ResourceExhaustedError(absl::StrCat(path_, ": cannot be written; make room on its disk"));
}

}  // namespace meshfill
