// A system that fails: preloaded into the real binary (LD_PRELOAD), it sets the wall clock and flips bits
// that leave for other ranks. The file $MESHFILL_FAULTS is its control panel, mapped into memory: a struct
// Faults. The machine has the memory that the file $MESHFILL_MEMINFO says, instead of /proc/meminfo.
//
// The clock of the process alone is set. So absolute waits for a time of day are translated back: libstdc++'s
// by pthread_cond_timedwait, absl's by futex.
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>

namespace {

struct Faults {
  std::atomic<int64_t> clock_offset_seconds;
  std::atomic<int64_t> flips_left;  // of one bit each, in writes of large chunks
};

constexpr size_t kLargeChunkBytes = 4096;

Faults& Panel() {
  static Faults* const faults = [] {
    static Faults none = {};
    const char* path = std::getenv("MESHFILL_FAULTS");
    const int fd = path != nullptr ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0) return &none;
    void* mapped = mmap(nullptr, sizeof(Faults), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    return mapped == MAP_FAILED ? &none : static_cast<Faults*>(mapped);
  }();
  return *faults;
}

// The function that is called without this library, looked up once. Not as a static's initializer: whoever waits
// for another thread's calls syscall, which is one of them.
using Known = std::atomic<void*>;
template <typename Function>
Function* Next(Known& known, const char* name) {
  void* function = known.load(std::memory_order_relaxed);
  if (function == nullptr) {
    function = dlsym(RTLD_NEXT, name);
    known.store(function, std::memory_order_relaxed);
  }
  return reinterpret_cast<Function*>(function);
}

timespec Shifted(const timespec& time, int64_t seconds) {
  return {.tv_sec = static_cast<time_t>(time.tv_sec + seconds), .tv_nsec = time.tv_nsec};
}

}  // namespace

extern "C" {

int clock_gettime(clockid_t clock, timespec* time) noexcept {
  static constinit Known known;
  auto* const next = Next<int(clockid_t, timespec*)>(known, "clock_gettime");
  const int result = next(clock, time);
  if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
    time->tv_sec += static_cast<time_t>(Panel().clock_offset_seconds.load());
  }
  return result;
}

// std::ifstream opens files with it.
FILE* fopen64(const char* path, const char* mode) {
  static constinit Known known;
  auto* const next = Next<FILE*(const char*, const char*)>(known, "fopen64");
  const char* meminfo = std::strcmp(path, "/proc/meminfo") == 0 ? std::getenv("MESHFILL_MEMINFO") : nullptr;
  return next(meminfo != nullptr ? meminfo : path, mode);
}

int gettimeofday(timeval* time, void* zone) noexcept {
  static constinit Known known;
  auto* const next = Next<int(timeval*, void*)>(known, "gettimeofday");
  const int result = next(time, zone);
  if (result == 0) time->tv_sec += static_cast<time_t>(Panel().clock_offset_seconds.load());
  return result;
}

int pthread_cond_timedwait(pthread_cond_t* condition, pthread_mutex_t* mutex, const timespec* deadline) {
  static constinit Known known;
  auto* const next = Next<int(pthread_cond_t*, pthread_mutex_t*, const timespec*)>(known, "pthread_cond_timedwait");
  const timespec shifted = Shifted(*deadline, -Panel().clock_offset_seconds.load());
  return next(condition, mutex, &shifted);
}

long syscall(long number, ...) noexcept {
  static constinit Known known;
  auto* const next = Next<long(long, ...)>(known, "syscall");
  va_list list;
  va_start(list, number);
  long arguments[6];
  for (long& argument : arguments) argument = va_arg(list, long);
  va_end(list);
  timespec shifted;
  if (number == SYS_futex && (arguments[1] & FUTEX_CLOCK_REALTIME) != 0 && arguments[3] != 0) {
    shifted = Shifted(*reinterpret_cast<const timespec*>(arguments[3]), -Panel().clock_offset_seconds.load());
    arguments[3] = reinterpret_cast<long>(&shifted);
  }
  return next(number, arguments[0], arguments[1], arguments[2], arguments[3], arguments[4], arguments[5]);
}

// gloo writes a message's preamble and payload with it; the last piece is the payload.
ssize_t writev(int fd, const iovec* pieces, int count) {
  static constinit Known known;
  auto* const next = Next<ssize_t(int, const iovec*, int)>(known, "writev");
  const iovec& payload = pieces[count - 1];
  if (count > 2 || payload.iov_len < kLargeChunkBytes || Panel().flips_left.load() <= 0) {
    return next(fd, pieces, count);
  }
  char flipped = static_cast<char>(static_cast<const char*>(payload.iov_base)[0] ^ 1);
  iovec changed[4];
  int pieces_changed = 0;
  if (count == 2) changed[pieces_changed++] = pieces[0];
  changed[pieces_changed++] = {.iov_base = &flipped, .iov_len = 1};
  changed[pieces_changed++] = {.iov_base = static_cast<char*>(payload.iov_base) + 1,
                               .iov_len = payload.iov_len - 1};
  const ssize_t written = next(fd, changed, pieces_changed);
  if (written > static_cast<ssize_t>(count == 2 ? pieces[0].iov_len : 0)) Panel().flips_left.fetch_sub(1);
  return written;
}

// OpenSSL writes a record of TLS with it.
ssize_t write(int fd, const void* data, size_t size) {
  static constinit Known known;
  auto* const next = Next<ssize_t(int, const void*, size_t)>(known, "write");
  constexpr unsigned char kApplicationData[] = {23, 3, 3};
  constexpr size_t kHeaderBytes = 5, kMaxRecordBytes = kHeaderBytes + (1 << 14) + 256;
  if (size < kLargeChunkBytes || size > kMaxRecordBytes || Panel().flips_left.load() <= 0 ||
      std::memcmp(data, kApplicationData, sizeof(kApplicationData)) != 0) {
    return next(fd, data, size);
  }
  char changed[kMaxRecordBytes];
  std::memcpy(changed, data, size);
  changed[kHeaderBytes] ^= 1;
  const ssize_t written = next(fd, changed, size);
  if (written > static_cast<ssize_t>(kHeaderBytes)) Panel().flips_left.fetch_sub(1);
  return written;
}

}  // extern "C"
