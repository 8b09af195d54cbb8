// Preloaded into a program, hides instruction sets that the processor has: CPUID traps (arch_prctl, Linux 4.12,
// where the processor can), and the answer comes without the bits. HIDE_INSTRUCTIONS is amx_bf16,
// avx512_bf16, avx512 (with it all that builds on it) or avx2 (and FMA). Without that variable it does nothing. Exits with 86 where
// CPUID cannot be made to trap.
#define _GNU_SOURCE
#include <asm/prctl.h>
#include <cpuid.h>
#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/ucontext.h>
#include <unistd.h>

enum { kNothing, kAmxBf16, kAvx512Bf16, kAvx512, kAvx2 };  // each hides what is before it, too

static int hidden;
static struct sigaction before;

static long AllowCpuid(int allowed) { return syscall(SYS_arch_prctl, ARCH_SET_CPUID, allowed); }

static void Hide(uint32_t leaf, uint32_t subleaf, uint32_t* eax, uint32_t* ebx, uint32_t* ecx, uint32_t* edx) {
  if (leaf == 7 && subleaf == 1 && hidden >= kAvx512Bf16) *eax &= ~(1u << 5);  // AVX512_BF16
  if (leaf == 7 && subleaf == 0) {
    *edx &= ~(1u << 22 | 1u << 24 | 1u << 25);  // AMX
    if (hidden < kAvx512) return;
    *ebx &= ~(1u << 16 | 1u << 17 | 1u << 21 | 1u << 26 | 1u << 27 | 1u << 28 | 1u << 30 | 1u << 31);
    *ecx &= ~(1u << 1 | 1u << 6 | 1u << 11 | 1u << 12 | 1u << 14);
    *edx &= ~(1u << 2 | 1u << 3 | 1u << 8 | 1u << 23);
    if (hidden >= kAvx2) *ebx &= ~(1u << 5);
  }
  if (leaf == 1 && hidden >= kAvx2) *ecx &= ~(1u << 12);  // FMA
}

static void OnFault(int signal, siginfo_t* info, void* context) {
  greg_t* registers = ((ucontext_t*)context)->uc_mcontext.gregs;
  static const unsigned char kCpuid[] = {0x0f, 0xa2};
  if (memcmp((const void*)registers[REG_RIP], kCpuid, sizeof(kCpuid)) != 0) {  // a fault of the program's own
    sigaction(signal, &before, NULL);
    return;
  }
  const uint32_t leaf = (uint32_t)registers[REG_RAX], subleaf = (uint32_t)registers[REG_RCX];
  uint32_t eax, ebx, ecx, edx;
  AllowCpuid(1);
  __cpuid_count(leaf, subleaf, eax, ebx, ecx, edx);
  AllowCpuid(0);
  Hide(leaf, subleaf, &eax, &ebx, &ecx, &edx);
  registers[REG_RAX] = eax;
  registers[REG_RBX] = ebx;
  registers[REG_RCX] = ecx;
  registers[REG_RDX] = edx;
  registers[REG_RIP] += sizeof(kCpuid);
  (void)info;
}

__attribute__((constructor)) static void Begin(void) {
  const char* what = getenv("HIDE_INSTRUCTIONS");
  if (what == NULL) return;
  if (strcmp(what, "amx_bf16") == 0) hidden = kAmxBf16;
  if (strcmp(what, "avx512_bf16") == 0) hidden = kAvx512Bf16;
  if (strcmp(what, "avx512") == 0) hidden = kAvx512;
  if (strcmp(what, "avx2") == 0) hidden = kAvx2;
  struct sigaction action = {.sa_sigaction = OnFault, .sa_flags = SA_SIGINFO | SA_NODEFER};
  if (hidden == kNothing || sigaction(SIGSEGV, &action, &before) != 0 || AllowCpuid(0) != 0) _exit(86);
}
