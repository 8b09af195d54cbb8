#include "engine/model/safetensors_folder.h"

#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "engine/model/strict_json.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

using nlohmann::json;

absl::Status BrokenIndex(const std::string& path, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(path, ": ", what, "; fetch or write the file again"));
}

absl::Status BrokenTensor(const std::string& path, const std::string& name, absl::string_view what) {
  return BrokenIndex(path, absl::StrCat("tensor ", Excerpt(name), " ", what));
}

// "model-00001-of-00002.safetensors", never a path that leaves the folder.
bool IsPlainBasename(std::string_view name) {
  return !name.empty() && name != "." && name != ".." &&
         name.find_first_of(std::string_view("/\\\0", 3)) == name.npos;
}

// Tensor name → shard, as model.safetensors.index.json says.
absl::StatusOr<std::map<std::string, std::string>> ReadIndex(const std::string& path) {
  ASSIGN_OR_RETURN(std::string text, ReadJsonText(path));
  ASSIGN_OR_RETURN(json index, ParseJsonObject(text, path));
  const auto weight_map = index.find("weight_map");
  if (weight_map == index.end() || !weight_map->is_object()) {
    return BrokenIndex(path, "has no object \"weight_map\"");
  }
  std::map<std::string, std::string> shard_of;
  for (const auto& [name, shard] : weight_map->items()) {
    if (!shard.is_string() || !IsPlainBasename(shard.get_ref<const std::string&>())) {
      return BrokenTensor(path, name,
                          absl::StrCat("is said to be in ", Excerpt(shard), ", not a plain file name"));
    }
    shard_of[name] = shard.get<std::string>();
  }
  return shard_of;
}

}  // namespace

absl::StatusOr<SafetensorsFolder> SafetensorsFolder::Open(const std::string& folder) {
  namespace fs = std::filesystem;
  std::error_code error;
  if (!fs::is_directory(folder, error)) {
    return absl::NotFoundError(absl::StrCat(folder, ": no such folder; name a Hugging Face model folder"));
  }
  const fs::path single = fs::path(folder) / "model.safetensors";
  const fs::path index = fs::path(folder) / "model.safetensors.index.json";
  SafetensorsFolder result;
  result.path_ = folder;

  if (fs::exists(single, error)) {
    ASSIGN_OR_RETURN(std::shared_ptr<const SafetensorsFile> file, SafetensorsFile::Open(single.string()));
    for (const auto& [name, tensor] : file->tensors()) result.entries_[name] = {tensor, file};
    return result;
  }
  if (!fs::exists(index, error)) {
    return absl::NotFoundError(
        absl::StrCat(folder, ": neither model.safetensors nor model.safetensors.index.json is in it; ",
                     "convert the weights to safetensors"));
  }

  ASSIGN_OR_RETURN(auto shard_of, ReadIndex(index.string()));
  std::map<std::string, std::shared_ptr<const SafetensorsFile>> files;
  for (const auto& [name, shard] : shard_of) {
    std::shared_ptr<const SafetensorsFile>& file = files[shard];
    if (file == nullptr) {
      ASSIGN_OR_RETURN(std::shared_ptr<const SafetensorsFile> opened,
                       SafetensorsFile::Open((fs::path(folder) / shard).string()));
      file = std::move(opened);
    }
    const TensorView* tensor = file->Find(name);
    if (tensor == nullptr) {
      return BrokenTensor(index.string(), name,
                          absl::StrCat("is said to be in ", Excerpt(shard), ", which lacks it"));
    }
    result.entries_[name] = {*tensor, file};
  }
  for (const auto& [shard, file] : files) {
    for (const auto& [name, tensor] : file->tensors()) {
      const Entry* entry = result.Find(name);
      if (entry == nullptr || entry->file != file) {
        return BrokenTensor(file->path(), name,
                            "is not what model.safetensors.index.json says is in this file");
      }
    }
  }
  return result;
}

const SafetensorsFolder::Entry* SafetensorsFolder::Find(std::string_view name) const {
  const auto it = entries_.find(name);
  return it == entries_.end() ? nullptr : &it->second;
}

}  // namespace meshfill
