// Stands in for a header of gloo that Debian's package (0.0~git20220518) leaves out though its other headers
// include it. Used only where the system has none (engine/CMakeLists.txt). What is fixed by the library is
// each class's one member and its meaning: an object that is not owned by a shared_ptr lends itself to other
// threads through one, and its destructor waits until all of them are done with it.
#ifndef MESHFILL_ENGINE_COMM_GLOO_GLOO_DEBIAN_GLOO_COMMON_MEMORY_H_
#define MESHFILL_ENGINE_COMM_GLOO_GLOO_DEBIAN_GLOO_COMMON_MEMORY_H_

#include <memory>
#include <thread>

namespace gloo {

template <typename T>
class WeakNonOwningPtr;

// A member of the object that lends itself.
template <typename T>
class ShareableNonOwningPtr final {
 public:
  explicit ShareableNonOwningPtr(T* object) : ptr_(object, [](T*) {}) {}
  ShareableNonOwningPtr(const ShareableNonOwningPtr&) = delete;
  ShareableNonOwningPtr& operator=(const ShareableNonOwningPtr&) = delete;
  ~ShareableNonOwningPtr() {
    const std::weak_ptr<T> lent = ptr_;
    ptr_.reset();
    while (!lent.expired()) std::this_thread::yield();
  }

 private:
  friend class WeakNonOwningPtr<T>;
  std::shared_ptr<T> ptr_;
};

// The object while it is in use; null where it has gone.
template <typename T>
class NonOwningPtr final {
 public:
  NonOwningPtr() = default;
  explicit NonOwningPtr(const WeakNonOwningPtr<T>& weak) : ptr_(weak.ptr_.lock()) {}
  T* operator->() const noexcept { return ptr_.get(); }
  explicit operator bool() const noexcept { return ptr_ != nullptr; }

 private:
  std::shared_ptr<T> ptr_;
};

template <typename T>
class WeakNonOwningPtr final {
 public:
  WeakNonOwningPtr() = default;
  explicit WeakNonOwningPtr(const ShareableNonOwningPtr<T>& object) : ptr_(object.ptr_) {}
  // Whether it ever was of an object, though that may have gone.
  explicit operator bool() const noexcept {
    const std::weak_ptr<T> none;
    return ptr_.owner_before(none) || none.owner_before(ptr_);
  }

 private:
  friend class NonOwningPtr<T>;
  std::weak_ptr<T> ptr_;
};

}  // namespace gloo

#endif  // MESHFILL_ENGINE_COMM_GLOO_GLOO_DEBIAN_GLOO_COMMON_MEMORY_H_
