// A message as JSON, for programs that read status.
#ifndef MESHFILL_SERVER_CONFIG_MESSAGE_JSON_H_
#define MESHFILL_SERVER_CONFIG_MESSAGE_JSON_H_

#include "google/protobuf/message.h"
#include "nlohmann/json.hpp"

namespace meshfill {

// Every field, zeros and empty lists, too, and 64-bit numbers as numbers: protobuf's own JSON leaves out the
// former and quotes the latter. None of them is above 2^53.
nlohmann::ordered_json MessageJson(const google::protobuf::Message& message);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_CONFIG_MESSAGE_JSON_H_
