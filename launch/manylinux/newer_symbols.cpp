// Defines the functions that glibc 2.28 and the libstdc++ of g++ 8 lack, by functions that these have. relink.py links
// them, hidden, into every file of the wheel.
#include <dlfcn.h>
#include <malloc.h>
#include <pthread.h>
#include <sys/stat.h>
#include <time.h>

#include <exception>
#include <new>
#include <stdexcept>

extern "C" {

char __libc_single_threaded = 0;  // 2.32: libstdc++ counts references without atomic instructions if it is set

// 2.33. Older headers had inline functions that call these, with the version of the struct.
int __xstat64(int version, const char* path, struct stat64* status);
int __lxstat64(int version, const char* path, struct stat64* status);
int __fxstat64(int version, int file, struct stat64* status);
int __xstat(int version, const char* path, struct stat* status);
int __lxstat(int version, const char* path, struct stat* status);

constexpr int kStatVersion = 1;

int stat64(const char* path, struct stat64* status) noexcept { return __xstat64(kStatVersion, path, status); }
int lstat64(const char* path, struct stat64* status) noexcept { return __lxstat64(kStatVersion, path, status); }
int fstat64(int file, struct stat64* status) noexcept { return __fxstat64(kStatVersion, file, status); }
int stat(const char* path, struct stat* status) noexcept { return __xstat(kStatVersion, path, status); }
int lstat(const char* path, struct stat* status) noexcept { return __lxstat(kStatVersion, path, status); }

// 2.30. A std::condition_variable waits by the system's clock: until that clock's time of `until`, as libstdc++ does on
// such a system. If the clock is set meanwhile, libstdc++ sees that `until` has not come, and its callers wait again.
int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock, const timespec* until) {
  timespec now, system;
  clock_gettime(clock, &now);
  clock_gettime(CLOCK_REALTIME, &system);
  system.tv_sec += until->tv_sec - now.tv_sec;
  system.tv_nsec += until->tv_nsec - now.tv_nsec;
  constexpr long kSecond = 1'000'000'000;
  if (system.tv_nsec < 0) system.tv_sec -= 1, system.tv_nsec += kSecond;
  if (system.tv_nsec >= kSecond) system.tv_sec += 1, system.tv_nsec -= kSecond;
  return pthread_cond_timedwait(condition, mutex, &system);
}

// 2.33. mallinfo counts in 32 bits.
struct mallinfo2 mallinfo2() noexcept {
  using Function = struct mallinfo2 (*)();
  if (const auto of_libc = reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, "mallinfo2"))) return of_libc();
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
  const struct mallinfo heaps = mallinfo();
  return {.hblkhd = static_cast<unsigned>(heaps.hblkhd), .uordblks = static_cast<unsigned>(heaps.uordblks)};
}

}  // extern "C"

namespace {

/// A function that was in libstdc++ before the header of g++ 11 had it: by its version, because the files of the wheel
/// may have their own copy of the header's.
template <class Function>
Function* of_libstdcxx(const char* name) {
  return reinterpret_cast<Function*>(dlvsym(RTLD_DEFAULT, name, "CXXABI_1.3.3"));
}

}  // namespace

namespace std {

void __exception_ptr::exception_ptr::_M_addref() noexcept {
  static auto* const construct =
      of_libstdcxx<void(void*, const void*)>("_ZNSt15__exception_ptr13exception_ptrC1ERKS0_");
  void* copy;  // which nothing destroys
  construct(&copy, this);
}

void __exception_ptr::exception_ptr::_M_release() noexcept {
  static auto* const destroy = of_libstdcxx<void(void*)>("_ZNSt15__exception_ptr13exception_ptrD1Ev");
  destroy(this);
  _M_exception_object = nullptr;
}

runtime_error::runtime_error(runtime_error&& other) noexcept
    : runtime_error(static_cast<const runtime_error&>(other)) {}

void __throw_bad_array_new_length() { throw bad_array_new_length(); }

}  // namespace std
