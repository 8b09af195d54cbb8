#include "engine/mesh/traffic.h"

namespace meshfill {

const char* TrafficName(Traffic traffic) {
  switch (traffic) {
    case Traffic::kQ:
      return "q";
    case Traffic::kKv:
      return "kv";
    case Traffic::kO:
      return "o";
    case Traffic::kDq:
      return "dq";
    case Traffic::kDkv:
      return "dkv";
    case Traffic::kAllToAll:
      return "all_to_all";
    case Traffic::kGather:
      return "gather";
  }
  return "?";
}

const char* OperationName(Traffic traffic) {
  switch (traffic) {
    case Traffic::kQ:
      return "recv_q";
    case Traffic::kKv:
      return "recv_kv";
    case Traffic::kO:
      return "send_o";
    case Traffic::kDq:
      return "send_dq";
    case Traffic::kDkv:
      return "send_dkv";
    case Traffic::kAllToAll:
      return "all_to_all";
    case Traffic::kGather:
      return "gather";
  }
  return "?";
}

}  // namespace meshfill
