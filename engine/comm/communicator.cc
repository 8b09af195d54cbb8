#include "engine/comm/communicator.h"

namespace meshfill {

const char* CommOpName(CommOp op) {
  switch (op) {
    case CommOp::kRecvQ:
      return "recv_q";
    case CommOp::kRecvKv:
      return "recv_kv";
    case CommOp::kSendO:
      return "send_o";
    case CommOp::kAllToAll:
      return "all_to_all";
  }
  return "?";
}

}  // namespace meshfill
