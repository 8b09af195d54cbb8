// A piece of one device's memory.
//
// Owned through shared_ptr for one reason: a chunk is at the same time an input of its owner's blocks and on
// its way to a peer (the in-process communicator hands over the reference, not the bytes), and the last of
// them to finish frees it.
#ifndef MESHFILL_KERNELS_BUFFER_H_
#define MESHFILL_KERNELS_BUFFER_H_

#include <cstddef>
#include <functional>
#include <memory>
#include <utility>

namespace meshfill {

class Buffer {
 public:
  // `release` frees `data`; it runs once, on whichever thread drops the last reference.
  Buffer(void* data, size_t size_bytes, std::function<void(void*, size_t)> release)
      : data_(data), size_bytes_(size_bytes), release_(std::move(release)) {}
  // `allocation` frees `data` when it goes; its type is its device's own affair.
  Buffer(void* data, size_t size_bytes, std::shared_ptr<void> allocation)
      : data_(data), size_bytes_(size_bytes), allocation_(std::move(allocation)) {}
  ~Buffer() {
    if (release_ != nullptr) release_(data_, size_bytes_);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  template <typename T = void>
  T* data() {
    return static_cast<T*>(data_);
  }
  template <typename T = void>
  const T* data() const {
    return static_cast<const T*>(data_);
  }
  size_t size_bytes() const { return size_bytes_; }
  const std::shared_ptr<void>& allocation() const { return allocation_; }  // null: of the host's memory

 private:
  void* data_;
  size_t size_bytes_;
  std::function<void(void*, size_t)> release_;
  std::shared_ptr<void> allocation_;
};

using BufferRef = std::shared_ptr<Buffer>;

// Some bytes of a buffer as one of its own, without a copy; it keeps the whole alive.
inline BufferRef PartOf(const BufferRef& whole, size_t offset_bytes, size_t size_bytes) {
  if (whole->allocation() != nullptr) {
    return std::make_shared<Buffer>(whole->data<std::byte>() + offset_bytes, size_bytes, whole->allocation());
  }
  return std::make_shared<Buffer>(whole->data<std::byte>() + offset_bytes, size_bytes,
                                  [whole](void*, size_t) {});
}

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_BUFFER_H_
