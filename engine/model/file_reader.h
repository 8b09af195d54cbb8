// Reads of a file that is mapped, too, and which may lose its bytes meanwhile.
#ifndef MESHFILL_ENGINE_MODEL_FILE_READER_H_
#define MESHFILL_ENGINE_MODEL_FILE_READER_H_

#include <sys/types.h>

#include <cstddef>
#include <span>
#include <string>

#include "absl/status/status.h"

namespace meshfill {

// What becomes of bytes that the page cache does not have.
enum class PageCache {
  kFill,  // it has them from then on
  kPass   // it stays as it is, which takes less of the cores; where the file system has no such reads: kFill
};

// Immutable; any thread may read.
class FileReader {
 public:
  // Owns `descriptor`. `mapped` are the whole file's bytes, and outlive the object.
  FileReader(std::string path, int descriptor, std::span<const std::byte> mapped);
  ~FileReader();
  FileReader(const FileReader&) = delete;
  FileReader& operator=(const FileReader&) = delete;

  // Copies mapped `bytes`, but reads them from the file: where it has lost them since it was opened,
  // DATA_LOSS instead of the signal that ends a process.
  absl::Status Read(std::span<const std::byte> bytes, PageCache cache, void* to) const;

 private:
  bool Cached(off_t at, size_t size_bytes) const;
  ssize_t ReadPastCache(std::byte* to, size_t size_bytes, off_t at) const;

  const std::string path_;
  const int descriptor_;
  const int direct_;  // the same file, read past the page cache; -1: it cannot be
  const std::span<const std::byte> mapped_;
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_MODEL_FILE_READER_H_
