// The weights of a Hugging Face folder, whether in one file or in shards with an index.
#ifndef MESHFILL_ENGINE_MODEL_SAFETENSORS_FOLDER_H_
#define MESHFILL_ENGINE_MODEL_SAFETENSORS_FOLDER_H_

#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "engine/model/safetensors.h"

namespace meshfill {

// The tensors of a Hugging Face folder: model.safetensors, or the shards that model.safetensors.index.json
// names.
class SafetensorsFolder {
 public:
  struct Entry {
    TensorView tensor;
    std::shared_ptr<const SafetensorsFile> file;  // shared: whoever keeps a tensor keeps its file mapped
  };

  // NOT_FOUND: no such folder, no weights in it, a shard is missing. INVALID_ARGUMENT: as
  // SafetensorsFile::Open, or index and shards disagree, or the index names a file outside the folder.
  static absl::StatusOr<SafetensorsFolder> Open(const std::string& folder);

  const std::string& path() const { return path_; }
  const std::map<std::string, Entry, std::less<>>& entries() const { return entries_; }
  const Entry* Find(std::string_view name) const;  // null: no such tensor

 private:
  std::string path_;
  std::map<std::string, Entry, std::less<>> entries_;
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_MODEL_SAFETENSORS_FOLDER_H_
