#include "server/config/message_json.h"

#include <string>

#include "google/protobuf/descriptor.h"

namespace meshfill {
namespace {

using Json = nlohmann::ordered_json;
using google::protobuf::FieldDescriptor;

// `index`: of a repeated field's value; -1: of a single one.
Json FieldJson(const google::protobuf::Message& message, const FieldDescriptor& field, int index) {
  const google::protobuf::Reflection& all = *message.GetReflection();
  const bool one = index < 0;
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_STRING:
      return one ? all.GetString(message, &field) : all.GetRepeatedString(message, &field, index);
    case FieldDescriptor::CPPTYPE_UINT32:
      return one ? all.GetUInt32(message, &field) : all.GetRepeatedUInt32(message, &field, index);
    case FieldDescriptor::CPPTYPE_INT32:
      return one ? all.GetInt32(message, &field) : all.GetRepeatedInt32(message, &field, index);
    case FieldDescriptor::CPPTYPE_UINT64:
      return one ? all.GetUInt64(message, &field) : all.GetRepeatedUInt64(message, &field, index);
    case FieldDescriptor::CPPTYPE_INT64:
      return one ? all.GetInt64(message, &field) : all.GetRepeatedInt64(message, &field, index);
    case FieldDescriptor::CPPTYPE_FLOAT:
      return one ? all.GetFloat(message, &field) : all.GetRepeatedFloat(message, &field, index);
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return one ? all.GetDouble(message, &field) : all.GetRepeatedDouble(message, &field, index);
    case FieldDescriptor::CPPTYPE_BOOL:
      return one ? all.GetBool(message, &field) : all.GetRepeatedBool(message, &field, index);
    case FieldDescriptor::CPPTYPE_ENUM:
      return std::string(
          (one ? all.GetEnum(message, &field) : all.GetRepeatedEnum(message, &field, index))->name());
    case FieldDescriptor::CPPTYPE_MESSAGE:
      return MessageJson(one ? all.GetMessage(message, &field)
                             : all.GetRepeatedMessage(message, &field, index));
  }
  return Json();
}

}  // namespace

Json MessageJson(const google::protobuf::Message& message) {
  Json json = Json::object();
  for (int i = 0; i < message.GetDescriptor()->field_count(); ++i) {
    const FieldDescriptor& field = *message.GetDescriptor()->field(i);
    const std::string name(field.name());
    if (!field.is_repeated()) {
      json[name] = FieldJson(message, field, -1);
      continue;
    }
    json[name] = Json::array();
    for (int at = 0; at < message.GetReflection()->FieldSize(message, &field); ++at) {
      json[name].push_back(FieldJson(message, field, at));
    }
  }
  return json;
}

}  // namespace meshfill
