// A folder that is gone with its test.
#ifndef MESHFILL_TESTS_ENGINE_TEMP_FOLDER_H_
#define MESHFILL_TESTS_ENGINE_TEMP_FOLDER_H_

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

namespace meshfill {

class TempFolder {
 public:
  TempFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "meshfill_test_XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) std::abort();
    path_ = name;
  }
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  std::string path() const { return path_.string(); }
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }

  // Writes a file into the folder and answers its path.
  std::string Write(const std::string& name, std::string_view content) const {
    std::filesystem::remove(path_ /
                            name);  // some file systems flush a file that is truncated and written again
    std::ofstream(path_ / name, std::ios::binary)
        .write(content.data(), static_cast<std::streamsize>(content.size()));
    return *this / name;
  }

 private:
  std::filesystem::path path_;
};

inline std::string ReadWholeFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

}  // namespace meshfill

#endif  // MESHFILL_TESTS_ENGINE_TEMP_FOLDER_H_
