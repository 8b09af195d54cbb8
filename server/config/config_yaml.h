// YAML into a protobuf message, key by key against the message's descriptor: what the schema does not know is
// refused.
//
// Keys are field names; nested messages are maps. Of the types that a configuration needs: string, uint32,
// uint64, double, bool, google.protobuf.Duration ("30s"), enums; an integer field whose name ends in _bytes
// takes a byte size ("8GiB"). LAYOUT_STRIPED of `enum Layout` is written "striped".
#ifndef MESHFILL_SERVER_CONFIG_CONFIG_YAML_H_
#define MESHFILL_SERVER_CONFIG_CONFIG_YAML_H_

#include <map>
#include <string>

#include "absl/status/status.h"
#include "google/protobuf/message.h"

namespace meshfill {

// Where each key was set: by path ("pool.embedded.ranks"), "configs/local.yaml:7" or "--set".
using KeyOrigins = std::map<std::string, std::string>;

// Reads one YAML document. INVALID_ARGUMENT, "FILE:LINE: PATH: what is wrong; what to do", for text that is
// not YAML and for unknown, duplicate or badly typed keys.
absl::Status ReadYaml(const std::string& file_name, const std::string& text,
                      google::protobuf::Message* message, KeyOrigins* origins);

// Sets one key from "path.to.key=value". INVALID_ARGUMENT as above, with "--set" in place of the file and
// line.
absl::Status ReadOverride(const std::string& assignment, google::protobuf::Message* message,
                          KeyOrigins* origins);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_CONFIG_CONFIG_YAML_H_
