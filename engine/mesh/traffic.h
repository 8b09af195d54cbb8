// What moves between ranks: every report of bytes, waits and links is told apart by it.
//
//     kQ          Q chunks, around the Q rings; in a backward pass, OdOQ chunks (O, dO, Q and LSE)
//     kKv         KV chunks, around the KV rings
//     kO          partial outputs, back along the Q rings
//     kDq, kDkv   gradients of a backward pass, along the Q rings and the KV rings
//     kAllToAll   tokens for heads in a head group, and back
//     kGather     all of a tensor's parts, to every member of a team: weights that workers share
#ifndef MESHFILL_ENGINE_MESH_TRAFFIC_H_
#define MESHFILL_ENGINE_MESH_TRAFFIC_H_

#include <array>
#include <initializer_list>
#include <utility>

namespace meshfill {

enum class Traffic { kQ, kKv, kO, kDq, kDkv, kAllToAll, kGather };

inline constexpr std::array kAllTraffics = {Traffic::kQ,   Traffic::kKv,       Traffic::kO,     Traffic::kDq,
                                            Traffic::kDkv, Traffic::kAllToAll, Traffic::kGather};
inline constexpr int kTraffics = static_cast<int>(kAllTraffics.size());

// Traffic of a prefill. The rest moves in simulations alone.
inline constexpr std::array kPrefillTraffics = {Traffic::kQ, Traffic::kKv, Traffic::kO, Traffic::kAllToAll,
                                                Traffic::kGather};

// "q", "kv", "o", "dq", "dkv", "all_to_all", "gather": the names of bytes and of schedules.
const char* TrafficName(Traffic traffic);

// "recv_q", "recv_kv", "send_o", "send_dq", "send_dkv", "all_to_all", "gather": the names of operations in
// metrics, timelines and errors.
const char* OperationName(Traffic traffic);

// One T for each traffic; T{} for those that nobody sets.
template <typename T>
class PerTraffic {
 public:
  constexpr PerTraffic() = default;
  constexpr PerTraffic(std::initializer_list<std::pair<Traffic, T>> values) {
    for (const auto& [traffic, value] : values) (*this)[traffic] = value;
  }
  static constexpr PerTraffic Alike(const T& value) {
    PerTraffic all;
    all.values_.fill(value);
    return all;
  }

  constexpr T& operator[](Traffic traffic) { return values_[static_cast<int>(traffic)]; }
  constexpr const T& operator[](Traffic traffic) const { return values_[static_cast<int>(traffic)]; }

  constexpr T total() const {
    T sum{};
    for (const T& value : values_) sum += value;
    return sum;
  }

  constexpr PerTraffic& operator+=(const PerTraffic& other) {
    for (int i = 0; i < kTraffics; ++i) values_[i] += other.values_[i];
    return *this;
  }
  bool operator==(const PerTraffic&) const = default;

 private:
  std::array<T, kTraffics> values_{};
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_MESH_TRAFFIC_H_
