#include "server/config/message_json.h"

#include <memory>
#include <string>

#include "google/protobuf/descriptor.h"
#include "google/protobuf/descriptor.pb.h"
#include "google/protobuf/dynamic_message.h"
#include "google/protobuf/text_format.h"
#include "gtest/gtest.h"

namespace meshfill {
namespace {

using google::protobuf::FieldDescriptorProto;

// A message of each type twice, single and repeated: "int64_one", "int64_many".
class MessageJsonTest : public testing::Test {
 protected:
  MessageJsonTest() {
    google::protobuf::FileDescriptorProto file;
    file.set_name("all.proto");
    file.set_syntax("proto3");
    auto& type = *file.add_enum_type();
    type.set_name("Colour");
    for (const char* name : {"RED", "BLUE"}) {
      auto& value = *type.add_value();
      value.set_name(name);
      value.set_number(type.value_size() - 1);
    }
    auto& part = *file.add_message_type();
    part.set_name("Part");
    auto& id = *part.add_field();
    id.set_name("id");
    id.set_number(1);
    id.set_type(FieldDescriptorProto::TYPE_INT32);
    id.set_label(FieldDescriptorProto::LABEL_OPTIONAL);
    auto& message = *file.add_message_type();
    message.set_name("All");
    const auto add = [&](const std::string& name, FieldDescriptorProto::Type of, const char* type_name) {
      for (const bool many : {false, true}) {
        auto& field = *message.add_field();
        field.set_name(name + (many ? "_many" : "_one"));
        field.set_number(message.field_size());
        field.set_type(of);
        if (*type_name != 0) field.set_type_name(type_name);
        field.set_label(many ? FieldDescriptorProto::LABEL_REPEATED : FieldDescriptorProto::LABEL_OPTIONAL);
      }
    };
    add("text", FieldDescriptorProto::TYPE_STRING, "");
    add("uint32", FieldDescriptorProto::TYPE_UINT32, "");
    add("int32", FieldDescriptorProto::TYPE_INT32, "");
    add("uint64", FieldDescriptorProto::TYPE_UINT64, "");
    add("int64", FieldDescriptorProto::TYPE_INT64, "");
    add("float", FieldDescriptorProto::TYPE_FLOAT, "");
    add("double", FieldDescriptorProto::TYPE_DOUBLE, "");
    add("bool", FieldDescriptorProto::TYPE_BOOL, "");
    add("colour", FieldDescriptorProto::TYPE_ENUM, ".Colour");
    add("part", FieldDescriptorProto::TYPE_MESSAGE, ".Part");
    type_ = pool_.BuildFile(file)->FindMessageTypeByName("All");
  }

  nlohmann::ordered_json Read(const std::string& text) {
    const std::unique_ptr<google::protobuf::Message> message(factory_.GetPrototype(type_)->New());
    EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(text, message.get()));
    return MessageJson(*message);
  }

  google::protobuf::DescriptorPool pool_;
  google::protobuf::DynamicMessageFactory factory_{&pool_};
  const google::protobuf::Descriptor* type_ = nullptr;
};

TEST_F(MessageJsonTest, HasEveryTypeOnceAndRepeated) {
  EXPECT_EQ(Read(R"(
      text_one: "a" text_many: "b" text_many: "c"
      uint32_one: 4294967295 uint32_many: 1 uint32_many: 2
      int32_one: -1 int32_many: -2 int32_many: -3
      uint64_one: 18446744073709551615 uint64_many: 3 uint64_many: 4
      int64_one: -9223372036854775808 int64_many: -4 int64_many: -5
      float_one: 0.5 float_many: 1.5 float_many: 2.5
      double_one: 0.1 double_many: 0.2 double_many: 0.3
      bool_one: true bool_many: false bool_many: true
      colour_one: BLUE colour_many: RED colour_many: BLUE
      part_one { id: 6 } part_many { id: 7 } part_many { })"),
            nlohmann::ordered_json::parse(R"({
      "text_one": "a", "text_many": ["b", "c"],
      "uint32_one": 4294967295, "uint32_many": [1, 2],
      "int32_one": -1, "int32_many": [-2, -3],
      "uint64_one": 18446744073709551615, "uint64_many": [3, 4],
      "int64_one": -9223372036854775808, "int64_many": [-4, -5],
      "float_one": 0.5, "float_many": [1.5, 2.5],
      "double_one": 0.1, "double_many": [0.2, 0.3],
      "bool_one": true, "bool_many": [false, true],
      "colour_one": "BLUE", "colour_many": ["RED", "BLUE"],
      "part_one": {"id": 6}, "part_many": [{"id": 7}, {"id": 0}]})"));
}

// Who reads it needs no defaults.
TEST_F(MessageJsonTest, HasWhatIsNotSet) {
  EXPECT_EQ(Read(""), nlohmann::ordered_json::parse(R"({
      "text_one": "", "text_many": [], "uint32_one": 0, "uint32_many": [], "int32_one": 0, "int32_many": [],
      "uint64_one": 0, "uint64_many": [], "int64_one": 0, "int64_many": [], "float_one": 0.0, "float_many": [],
      "double_one": 0.0, "double_many": [], "bool_one": false, "bool_many": [],
      "colour_one": "RED", "colour_many": [], "part_one": {"id": 0}, "part_many": []})"));
}

}  // namespace
}  // namespace meshfill
