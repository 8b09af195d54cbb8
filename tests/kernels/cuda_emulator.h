// One CTA of a CUDA kernel on the host, thread by thread: the Machine that the attention kernels are written
// against (kernels/cuda/ptx_sm80.cuh, ptx_sm90.cuh), with the layouts of the PTX ISA written down a second
// time.
//
// Each thread is a fiber; a scheduler picks the next by a random number, and whatever the chip does by itself
// (cp.async, TMA, wgmma) happens at a random moment between issue and wait. A missing wait, a stage freed too
// early or a barrier too few therefore shows as a wrong result or as a deadlock. What this cannot show: the
// compiler's part (registers of products in flight), memory ordering between proxies, and speed.
#ifndef MESHFILL_TESTS_KERNELS_CUDA_EMULATOR_H_
#define MESHFILL_TESTS_KERNELS_CUDA_EMULATOR_H_

#include <ucontext.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kernels/dtype.h"

namespace meshfill {

struct Half {
  uint16_t bits;

  static Half FromFloat(float value) {  // round to nearest even
    const uint32_t u = std::bit_cast<uint32_t>(value), sign = (u >> 16) & 0x8000, magnitude = u & 0x7fffffff;
    if (magnitude > 0x7f800000) return {static_cast<uint16_t>(sign | 0x7e00)};
    if (magnitude < 0x38800000) {  // subnormal
      const float units = std::nearbyint(std::bit_cast<float>(magnitude) * 0x1p24f);
      return {static_cast<uint16_t>(sign | static_cast<uint32_t>(units))};
    }
    const uint32_t rounded = (magnitude + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    return {static_cast<uint16_t>(sign | std::min<uint32_t>(rounded - (112 << 10), 0x7c00))};
  }
  float ToFloat() const { return HalfToFloat(bits); }
};

// A tensor map of [heads, tokens, head_dim] as kernels/cuda/tensor_map.h describes it.
struct EmulatedMap {
  const uint16_t* tensor;
  uint32_t heads;
  uint32_t tokens;
  uint32_t head_dim;
  uint32_t box_rows;
  uint32_t box_columns;  // 64 or 32: swizzled by 128 or 64 bytes
};

class EmulatedCta {
 public:
  static constexpr uint32_t kSharedBase = 1024;  // shared memory begins at this address

  EmulatedCta(uint32_t threads, uint32_t block, uint32_t blocks, uint32_t shared_bytes, uint64_t seed)
      : block_(block),
        blocks_(blocks),
        random_(seed),
        shared_(shared_bytes, 0xff),
        fibers_(threads),
        warps_(threads / 32) {}

  // Runs `body` in every thread. Empty, or what went wrong.
  std::string Run(const std::function<void()>& body) {
    body_ = &body;
    EmulatedCta* const outer = current_;
    current_ = this;
    for (Fiber& fiber : fibers_) {
      fiber.stack = std::make_unique_for_overwrite<char[]>(kStackBytes);
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.get();
      fiber.context.uc_stack.ss_size = kStackBytes;
      fiber.context.uc_link = &scheduler_;
      makecontext(&fiber.context, &EmulatedCta::FiberMain, 0);
    }
    while (error_.empty() && Step()) {
    }
    if (error_.empty() && !copies_.empty()) error_ = "the CTA ended before its copies";
    current_ = outer;
    return error_;
  }

 private:
  friend struct EmulatedMachine;
  static constexpr size_t kStackBytes = 128 << 10;

  struct Bytes {
    uint32_t shared;
    std::array<uint8_t, 16> value;
  };
  struct Product {
    float* d;
    int columns;
    bool accumulate;
    bool a_in_registers;
    uint64_t a_descriptor;
    float a[2][16];  // this thread's two rows
    bool b_by_rows;  // as K lies, which is K-major; or as V does
    uint64_t b_descriptor;
    float (*load)(uint16_t);
  };
  // A fiber waits until `counter` reaches `target`, or until its parity is another.
  struct Wait {
    const uint64_t* counter = nullptr;
    uint64_t target = 0;
    bool by_parity = false;

    bool Over() const {
      if (counter == nullptr) return true;
      return by_parity ? (*counter & 1) != target : *counter >= target;
    }
  };
  struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    Wait wait;
    bool finished = false;
    uint64_t exchanges = 0;
    std::vector<Bytes> copies;                  // cp.async under way, not committed
    std::deque<std::vector<Bytes>> groups;      // likewise, committed
    std::deque<std::vector<Product>> products;  // committed and under way
    std::vector<Product> batch;                 // not committed
  };
  struct Rendezvous {
    uint32_t arrived = 0;
    uint64_t completed = 0;

    void Arrive(uint32_t threads) {
      if (++arrived < threads) return;
      arrived = 0;
      ++completed;
    }
  };
  struct Warp : Rendezvous {
    std::array<std::array<uint32_t, 6>, 32> posted[2];
  };
  struct TransactionBarrier {
    uint32_t arrivals;
    uint32_t pending;
    int64_t bytes = 0;
    uint64_t completed = 0;

    void CompleteIfDone() {
      if (pending > 0 || bytes != 0) return;
      pending = arrivals;
      ++completed;
    }
  };
  struct BoxCopy {
    uint32_t shared;
    const EmulatedMap* map;
    uint32_t barrier, column, row, head;
  };

  static void FiberMain() {
    EmulatedCta& cta = *current_;
    (*cta.body_)();
    cta.fibers_[cta.thread_].finished = true;
  }

  bool Step() {
    if (!copies_.empty() && random_() % copy_delay_ == 0) CompleteCopy();
    uint32_t candidate = random_() % 64 == 0 ? random_() % fibers_.size() : thread_ + 1;
    bool unfinished = false;
    for (size_t i = 0; i < 2 * fibers_.size(); ++i, ++candidate) {
      candidate %= fibers_.size();
      const bool last_resort = i >= fibers_.size() || random_() % 1'024 == 0;
      Fiber& fiber = fibers_[candidate];
      if (fiber.finished) continue;
      unfinished = true;
      if (!fiber.wait.Over()) continue;
      if (candidate / 32 == slow_warp_ && !last_resort) continue;
      thread_ = candidate;
      swapcontext(&scheduler_, &fiber.context);
      return true;
    }
    if (!unfinished) return false;
    if (copies_.empty()) {
      error_ = "deadlock";
      return false;
    }
    CompleteCopy();
    return true;
  }

  Fiber& fiber() { return fibers_[thread_]; }
  void Block(Wait wait) {
    fiber().wait = wait;
    if (!wait.Over()) swapcontext(&fiber().context, &scheduler_);
  }
  // Another thread may run here.
  void Pause() {
    fiber().wait = {};
    if (random_() % 4 == 0) swapcontext(&fiber().context, &scheduler_);
  }
  void Meet(Rendezvous& rendezvous, uint32_t threads) {
    const uint64_t target = rendezvous.completed + 1;
    rendezvous.Arrive(threads);
    Block({&rendezvous.completed, target});
  }
  // What each thread of the warp posted.
  const std::array<std::array<uint32_t, 6>, 32>& Exchange(const std::array<uint32_t, 6>& post) {
    Warp& warp = warps_[thread_ / 32];
    auto& posted = warp.posted[fiber().exchanges++ % 2];
    posted[thread_ % 32] = post;
    Meet(warp, 32);
    return posted;
  }

  uint8_t* At(uint32_t address, uint32_t bytes) {
    if (address < kSharedBase || address + bytes > kSharedBase + shared_.size() || address % bytes != 0) {
      error_ = "shared memory at " + std::to_string(address) + ": outside, or misaligned";
      return shared_.data();
    }
    return &shared_[address - kSharedBase];
  }
  uint16_t Element(uint32_t address) {
    uint16_t element;
    std::memcpy(&element, At(address, 2), 2);
    return element;
  }
  // The swizzles of TMA and wgmma: of rows of 128 bytes, address bits 4–6 are xored with bits 7–9; of 64
  // bytes, bits 4–5 with bits 7–8.
  static uint32_t Swizzled(uint32_t address, uint32_t row_bytes) {
    return address ^ ((address >> 7 & (row_bytes == 128 ? 7 : 3)) << 4);
  }

  void CompleteCopy() {
    std::swap(copies_[random_() % copies_.size()], copies_.back());
    const BoxCopy copy = copies_.back();
    copies_.pop_back();
    if (copy.shared % 1024 != 0) error_ = "a box's address is no multiple of 1,024";
    const uint32_t row_bytes = copy.map->box_columns * 2;
    for (uint32_t row = 0; row < copy.map->box_rows; ++row) {
      for (uint32_t column = 0; column < copy.map->box_columns; ++column) {
        const uint64_t token = copy.row + row, element = copy.column + column;
        const bool inside = token < copy.map->tokens && element < copy.map->head_dim;
        const uint16_t value =
            inside ? copy.map->tensor[(copy.head * uint64_t{copy.map->tokens} + token) * copy.map->head_dim +
                                      element]
                   : 0;
        std::memcpy(At(Swizzled(copy.shared + row * row_bytes + column * 2, row_bytes), 2), &value, 2);
      }
    }
    TransactionBarrier& barrier = barriers_.at(copy.barrier);
    barrier.bytes -= copy.map->box_rows * row_bytes;
    barrier.CompleteIfDone();
  }

  void CompleteGroups(size_t in_flight) {
    auto& groups = fiber().groups;
    for (; groups.size() > in_flight; groups.pop_front()) Write(groups.front());
  }
  void Write(const std::vector<Bytes>& copies) {
    for (const Bytes& bytes : copies) std::memcpy(At(bytes.shared, 16), bytes.value.data(), 16);
  }

  // Fields of a matrix descriptor, in bytes; its swizzle is 1 or 2 for rows of 128 or 64 bytes.
  static uint32_t DescriptorField(uint64_t descriptor, int bit) { return (descriptor >> bit & 0x3fff) << 4; }
  static uint32_t RowBytes(uint64_t descriptor) { return descriptor >> 62 == 1 ? 128 : 64; }
  // Row r of A or B stored row by row, 16 columns a product ("K-major").
  float RowElement(const Product& product, uint64_t descriptor, uint32_t row, uint32_t column) {
    const uint32_t row_bytes = RowBytes(descriptor);
    const uint32_t offset = row % 8 * row_bytes + row / 8 * DescriptorField(descriptor, 32) + column * 2;
    return product.load(Element(Swizzled(DescriptorField(descriptor, 0) + offset, row_bytes)));
  }
  // B stored with its columns side by side ("MN-major"): groups of 64 or 32 columns, and of 8 rows.
  float ColumnElement(const Product& product, uint32_t row, uint32_t column) {
    const uint64_t b = product.b_descriptor;
    const uint32_t row_bytes = RowBytes(b), group = row_bytes / 2;
    const uint32_t offset = column % group * 2 + column / group * DescriptorField(b, 16) +
                            row % 8 * row_bytes + row / 8 * DescriptorField(b, 32);
    return product.load(Element(Swizzled(DescriptorField(b, 0) + offset, row_bytes)));
  }
  void Execute(Product& product) {
    for (const uint64_t descriptor :
         {product.a_in_registers ? product.b_descriptor : product.a_descriptor, product.b_descriptor}) {
      const uint64_t swizzle = descriptor >> 62;
      if ((swizzle != 1 && swizzle != 2) || (descriptor >> 49 & 7) != 0) {
        error_ = "a descriptor is not of the 128-byte or 64-byte swizzle";
      }
    }
    if (!product.b_by_rows && product.columns % (RowBytes(product.b_descriptor) / 2) != 0) {
      error_ = "a product takes part of a group of columns";  // of which the ISA says nothing
    }
    const uint32_t lane = thread_ % 32, first_row = thread_ % 128 / 32 * 16 + lane / 4;
    if (!product.a_in_registers) {
      for (int half = 0; half < 2; ++half) {
        for (int k = 0; k < 16; ++k) {
          product.a[half][k] = RowElement(product, product.a_descriptor, first_row + 8 * half, k);
        }
      }
    }
    for (int group = 0; group < product.columns / 8; ++group) {
      for (int side = 0; side < 2; ++side) {
        const uint32_t column = group * 8 + lane % 4 * 2 + side;
        double sum[2] = {0, 0};
        for (int k = 0; k < 16; ++k) {
          const double b = product.b_by_rows ? RowElement(product, product.b_descriptor, column, k)
                                             : ColumnElement(product, k, column);
          sum[0] += product.a[0][k] * b;
          sum[1] += product.a[1][k] * b;
        }
        for (int half = 0; half < 2; ++half) {
          float& d = product.d[group * 4 + half * 2 + side];
          d = static_cast<float>((product.accumulate ? d : 0.0) + sum[half]);
        }
      }
    }
  }
  void CompleteProducts(size_t in_flight) {
    while (fiber().products.size() > in_flight) {
      for (Product& product : fiber().products.front()) Execute(product);
      fiber().products.pop_front();
    }
  }

  static inline EmulatedCta* current_ = nullptr;

  const uint32_t block_, blocks_;
  std::mt19937_64 random_;
  std::vector<uint8_t> shared_;
  std::vector<Fiber> fibers_;
  std::vector<Warp> warps_;
  Rendezvous all_;
  std::map<uint32_t, TransactionBarrier> barriers_;
  std::vector<BoxCopy> copies_;
  const std::function<void()>* body_ = nullptr;
  ucontext_t scheduler_;
  // Steps that a copy takes on average; the longest ends only when no thread can go on without it.
  const uint64_t copy_delay_ = std::array<uint64_t, 4>{1, 30, 1'000, 1'000'000'000}[random_() % 4];
  const uint32_t slow_warp_ = random_() % warps_.size();  // runs when all others wait, and seldom else
  uint32_t thread_ = 0;
  std::string error_;
};

struct EmulatedMachine {
  using TensorMap = EmulatedMap;

  static EmulatedCta& Cta() { return *EmulatedCta::current_; }
  static uint32_t Thread() { return Cta().thread_; }
  static uint32_t Block() { return Cta().block_; }
  static uint32_t Blocks() { return Cta().blocks_; }
  static uint32_t Uniform(uint32_t value) { return value; }
  static void SyncThreads() { Cta().Meet(Cta().all_, static_cast<uint32_t>(Cta().fibers_.size())); }
  static float ShuffleXor(float value, int mask) {
    const auto& posted = Cta().Exchange({std::bit_cast<uint32_t>(value)});
    return std::bit_cast<float>(posted[Thread() % 32 ^ mask][0]);
  }
  template <class T>
  static T Shuffle(T value, uint32_t lane) {
    std::array<uint32_t, 6> words = {};
    static_assert(sizeof(value) <= sizeof(words));
    std::memcpy(words.data(), &value, sizeof(value));
    std::memcpy(&value, Cta().Exchange(words)[lane].data(), sizeof(value));
    return value;
  }
  static uint32_t Ballot(bool vote) {
    const auto& posted = Cta().Exchange({vote ? 1u : 0u});
    uint32_t votes = 0;
    for (uint32_t lane = 0; lane < 32; ++lane) votes |= posted[lane][0] << lane;
    return votes;
  }
  static bool Any(bool holds) { return Ballot(holds) != 0; }
  static uint32_t PopCount(uint32_t bits) { return static_cast<uint32_t>(std::popcount(bits)); }
  static uint32_t LoadShared(uint32_t shared) {
    uint32_t value;
    std::memcpy(&value, Cta().At(shared, 4), 4);
    return value;
  }
  static void StoreShared(uint32_t shared, uint32_t value) { std::memcpy(Cta().At(shared, 4), &value, 4); }
  static void Store16(uint32_t shared, const uint32_t (&words)[4]) {
    std::memcpy(Cta().At(shared, 16), words, 16);
  }
  static float Exp2(float x) { return std::exp2(x); }
  template <class T>
  static uint32_t Pack(float first, float second) {
    return T::FromFloat(first).bits | uint32_t{T::FromFloat(second).bits} << 16;
  }
  static void LoadPair(float* pair, const float* from) { pair[0] = from[0], pair[1] = from[1]; }
  static void Prefetch(const float* from) { static_cast<void>(*const_cast<const volatile float*>(from)); }
  static void StorePair(float* to, float first, float second) { to[0] = first, to[1] = second; }

  // ---- cp.async, ldmatrix, mma.sync
  static void Copy16(uint32_t shared, const void* global, bool inside) {
    EmulatedCta::Bytes bytes{shared, {}};
    if (inside) std::memcpy(bytes.value.data(), global, 16);
    Cta().fiber().copies.push_back(bytes);
    if (Cta().random_() % Cta().copy_delay_ == 0) {
      Cta().CompleteGroups(0);
      Cta().Write(std::exchange(Cta().fiber().copies, {}));
    }
  }
  static void CopyCommit() { Cta().fiber().groups.push_back(std::exchange(Cta().fiber().copies, {})); }
  static void CopyWait() { CopyWaitBut<0>(); }
  template <int kInFlight>
  static void CopyWaitBut() {
    Cta().CompleteGroups(kInFlight);
  }

  static void LoadMatrices(uint32_t (&m)[4], uint32_t shared) { LoadMatrices(m, shared, false); }
  static void LoadMatricesTransposed(uint32_t (&m)[4], uint32_t shared) { LoadMatrices(m, shared, true); }
  static void LoadMatrices(uint32_t (&m)[4], uint32_t shared, bool transposed) {
    const uint32_t lane = Thread() % 32;
    const auto& rows = Cta().Exchange({shared});
    for (int matrix = 0; matrix < 4; ++matrix) {
      uint32_t banks = 0;
      for (int row = 0; row < 8; ++row) banks |= 1u << rows[8 * matrix + row][0] / 16 % 8;
      if (banks != 0xff) Cta().error_ = "ldmatrix: bank conflict";
      const auto element = [&](uint32_t row, uint32_t column) {
        return uint32_t{Cta().Element(rows[8 * matrix + row][0] + 2 * column)};
      };
      const uint32_t major = lane / 4, minor = lane % 4 * 2;
      m[matrix] = transposed ? element(minor, major) | element(minor + 1, major) << 16
                             : element(major, minor) | element(major, minor + 1) << 16;
    }
  }

  template <class T>
  static void Multiply(float* d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    const auto& posted = Cta().Exchange({a[0], a[1], a[2], a[3], b0, b1});
    const uint32_t lane = Thread() % 32;
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t row = lane / 4 + (i < 2 ? 0 : 8), column = lane % 4 * 2 + i % 2;
      double sum = 0;
      for (uint32_t k = 0; k < 16; ++k) {
        const uint32_t of_a = posted[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
        const uint32_t of_b = posted[column * 4 + k % 8 / 2][4 + k / 8];
        sum += Value<T>(of_a >> k % 2 * 16) * Value<T>(of_b >> k % 2 * 16);
      }
      d[i] = static_cast<float>(d[i] + sum);
    }
  }

  // ---- Barriers and TMA
  template <int kRegisters>
  static void ReleaseRegisters() {}
  template <int kRegisters>
  static void ClaimRegisters() {}
  static void BarrierInit(uint32_t barrier, uint32_t arrivals) {
    Cta().At(barrier, 8);
    Cta().barriers_[barrier] = {arrivals, arrivals};
  }
  static void BarrierInitFence() {}
  static void BarrierArrive(uint32_t barrier) {
    auto& state = Cta().barriers_.at(barrier);
    if (state.pending == 0) Cta().error_ = "an mbarrier has more arrivals than it counts";
    --state.pending;
    state.CompleteIfDone();
    Cta().Pause();
  }
  static void BarrierExpectBytes(uint32_t barrier, uint32_t bytes) {
    Cta().barriers_.at(barrier).bytes += bytes;
    BarrierArrive(barrier);
  }
  static void BarrierWait(uint32_t barrier, uint32_t parity) {
    Cta().Pause();
    Cta().Block({&Cta().barriers_.at(barrier).completed, parity, true});
  }
  static void CopyBox(uint32_t shared, const EmulatedMap* map, uint32_t barrier, uint32_t column,
                      uint32_t row, uint32_t head) {
    Cta().copies_.push_back({shared, map, barrier, column, row, head});
  }

  // ---- wgmma
  static void FenceProducts() {}
  static void CommitProducts() {
    auto& fiber = Cta().fiber();
    fiber.products.push_back(std::move(fiber.batch));
    fiber.batch.clear();
    if (Cta().random_() % 2 == 0) Cta().CompleteProducts(0);
    Cta().Pause();
  }
  template <int kInFlight>
  static void WaitProducts() {
    // A warp's products end together: what its threads then announce must hold for all of them.
    Cta().CompleteProducts(kInFlight);
    Cta().Exchange({});
  }
  template <int kElements>
  static void Pin(float (&)[kElements]) {}
  template <class T, int kColumns>
  static void MultiplyShared(float* d, uint64_t a, uint64_t b, bool accumulate) {
    Cta().fiber().batch.push_back({.d = d,
                                   .columns = kColumns,
                                   .accumulate = accumulate,
                                   .a_in_registers = false,
                                   .a_descriptor = a,
                                   .a = {},
                                   .b_by_rows = true,
                                   .b_descriptor = b,
                                   .load = Load<T>});
  }
  template <class T, int kColumns>
  static void MultiplyRegistersTransposed(float* d, const uint32_t (&a)[4], uint64_t b, bool accumulate) {
    IssueFromRegisters<T>(d, kColumns, accumulate, a, b, /*b_by_rows=*/true);
  }
  template <class T, int kColumns>
  static void MultiplyRegisters(float* d, const uint32_t (&a)[4], uint64_t b) {
    IssueFromRegisters<T>(d, kColumns, /*accumulate=*/true, a, b, /*b_by_rows=*/false);
  }

 private:
  template <class T>
  static void IssueFromRegisters(float* d, int columns, bool accumulate, const uint32_t (&a)[4], uint64_t b,
                                 bool b_by_rows) {
    const auto& posted = Cta().Exchange({a[0], a[1], a[2], a[3]});
    EmulatedCta::Product product{.d = d,
                                 .columns = columns,
                                 .accumulate = accumulate,
                                 .a_in_registers = true,
                                 .a_descriptor = 0,
                                 .a = {},
                                 .b_by_rows = b_by_rows,
                                 .b_descriptor = b,
                                 .load = Load<T>};
    for (uint32_t half = 0; half < 2; ++half) {
      for (uint32_t k = 0; k < 16; ++k) {
        const uint32_t pair = posted[Thread() % 32 / 4 * 4 + k % 8 / 2][half + k / 8 * 2];
        product.a[half][k] = Value<T>(pair >> k % 2 * 16);
      }
    }
    Cta().fiber().batch.push_back(product);
  }
  template <class T>
  static float Value(uint32_t bits) {
    return T{static_cast<uint16_t>(bits)}.ToFloat();
  }
  template <class T>
  static float Load(uint16_t bits) {
    return T{bits}.ToFloat();
  }
};

}  // namespace meshfill

#endif  // MESHFILL_TESTS_KERNELS_CUDA_EMULATOR_H_
