#include "kernels/cpu/amx.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace meshfill {
namespace {

#if defined(__x86_64__) && defined(__linux__)
// Intel 64 and IA-32 Architectures Software Developer's Manual, vol. 1, 18.1 to 18.3.
bool ProcessorHasBf16Tiles() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  constexpr unsigned kBf16 = 1u << 22, kTiles = 1u << 24;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (edx & kBf16) != 0 && (edx & kTiles) != 0;
}

// Their 8 KiB are no part of a thread's state until they are asked for.
bool AskForTiles() {
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr int kTileData = 18;               // the state component
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#else
bool ProcessorHasBf16Tiles() { return false; }
bool AskForTiles() { return false; }
#endif

}  // namespace

bool MayUseTiles() {
  static const bool may = ProcessorHasBf16Tiles() && AskForTiles();
  return may;
}

}  // namespace meshfill
