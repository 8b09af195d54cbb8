#include "server/config/config_yaml.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <set>
#include <sstream>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "google/protobuf/duration.pb.h"
#include "kernels/return_if_error.h"
#include "server/config/closest_name.h"
#include "server/config/config_units.h"
#include "yaml-cpp/anchor.h"
#include "yaml-cpp/eventhandler.h"
#include "yaml-cpp/yaml.h"

namespace meshfill {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::EnumDescriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

// The message is one line, though keys and values that it repeats may have several.
absl::Status KeyError(const std::string& origin, const std::string& path, absl::string_view problem) {
  return absl::InvalidArgumentError(absl::StrReplaceAll(
      absl::StrCat(origin, ": ", path.empty() ? "" : path + ": ", problem), {{"\n", " "}, {"\r", " "}}));
}

bool IsDuration(const FieldDescriptor& field) {
  return field.cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE &&
         field.message_type() == google::protobuf::Duration::descriptor();
}

// Keys that somebody chooses, a section of each.
bool IsNamedSections(const FieldDescriptor& field) { return field.is_map(); }

bool IsSection(const FieldDescriptor& field) {
  return field.cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE && !IsDuration(field);
}

// The section of that name, new or not.
Message* NamedSection(Message* message, const FieldDescriptor& field, const std::string& name) {
  const auto* reflection = message->GetReflection();
  const FieldDescriptor* key = field.message_type()->map_key();
  const FieldDescriptor* value = field.message_type()->map_value();
  const int size = reflection->FieldSize(*message, &field);
  for (int i = 0; i < size; ++i) {
    Message* entry = reflection->MutableRepeatedMessage(message, &field, i);
    if (entry->GetReflection()->GetString(*entry, key) == name)
      return entry->GetReflection()->MutableMessage(entry, value);
  }
  Message* entry = reflection->AddMessage(message, &field);
  entry->GetReflection()->SetString(entry, key, name);
  return entry->GetReflection()->MutableMessage(entry, value);
}

std::string Child(const std::string& path, const std::string& key) {
  return path.empty() ? key : path + "." + key;
}

std::string UnknownKey(const Descriptor& section, const std::string& key) {
  std::vector<std::string> known;
  for (int i = 0; i < section.field_count(); ++i) known.emplace_back(section.field(i)->name());
  std::sort(known.begin(), known.end());
  return absl::StrCat("unknown key; ", DidYouMean(key, known),
                      "known keys here: ", absl::StrJoin(known, ", "));
}

// The names of an enum's values as YAML has them, by index: "striped" for LAYOUT_STRIPED of Layout.
std::vector<std::string> YamlNames(const EnumDescriptor& type) {
  std::string prefix;
  for (const char letter : type.name()) {
    if (absl::ascii_isupper(static_cast<unsigned char>(letter)) && !prefix.empty()) prefix += '_';
    prefix += absl::ascii_toupper(static_cast<unsigned char>(letter));
  }
  prefix += '_';
  std::vector<std::string> names;
  for (int i = 0; i < type.value_count(); ++i) {
    names.push_back(absl::AsciiStrToLower(absl::StripPrefix(type.value(i)->name(), prefix)));
  }
  return names;
}

// `path` is of a field that holds a single value. `quoted`: written as a YAML string.
absl::Status SetValue(const std::string& text, bool quoted, const FieldDescriptor& field,
                      const std::string& origin, const std::string& path, Message* message) {
  const auto* reflection = message->GetReflection();
  if (IsDuration(field)) {
    const auto duration = ParseDuration(text);
    if (!duration.ok()) return KeyError(origin, path, duration.status().message());
    auto* value = static_cast<google::protobuf::Duration*>(reflection->MutableMessage(message, &field));
    *value = ToProto(*duration);
    return absl::OkStatus();
  }
  if (field.cpp_type() == FieldDescriptor::CPPTYPE_ENUM) {
    const std::vector<std::string> names = YamlNames(*field.enum_type());
    const auto found = std::find(names.begin(), names.end(), text);
    if (found == names.end()) {
      return KeyError(
          origin, path,
          absl::StrCat("\"", text, "\" is not known; choose one of ", absl::StrJoin(names, ", ")));
    }
    reflection->SetEnum(message, &field, field.enum_type()->value(found - names.begin()));
    return absl::OkStatus();
  }
  if (field.cpp_type() == FieldDescriptor::CPPTYPE_STRING) {
    reflection->SetString(message, &field, text);
    return absl::OkStatus();
  }
  if (absl::EndsWith(field.name(), "_bytes")) {
    const auto bytes = ParseByteSize(text);
    if (!bytes.ok()) return KeyError(origin, path, bytes.status().message());
    reflection->SetUInt64(message, &field, *bytes);
    return absl::OkStatus();
  }
  if (field.cpp_type() == FieldDescriptor::CPPTYPE_DOUBLE) {
    double number = 0;
    if (quoted || !absl::SimpleAtod(text, &number) || !std::isfinite(number)) {
      return KeyError(origin, path, absl::StrCat("\"", text, "\" is no number; write e.g. 2.5e12"));
    }
    reflection->SetDouble(message, &field, number);
    return absl::OkStatus();
  }
  if (field.cpp_type() == FieldDescriptor::CPPTYPE_BOOL) {
    if (quoted || (text != "true" && text != "false")) {
      return KeyError(origin, path, absl::StrCat("\"", text, "\" is neither true nor false"));
    }
    reflection->SetBool(message, &field, text == "true");
    return absl::OkStatus();
  }
  if (field.cpp_type() == FieldDescriptor::CPPTYPE_INT32) {
    int32_t number = 0;
    if (quoted || !absl::SimpleAtoi(text, &number)) {
      return KeyError(origin, path, absl::StrCat("\"", text, "\" is no whole number; write e.g. -1"));
    }
    reflection->SetInt32(message, &field, number);
    return absl::OkStatus();
  }
  const bool narrow = field.cpp_type() == FieldDescriptor::CPPTYPE_UINT32;
  const uint64_t largest =
      narrow ? std::numeric_limits<uint32_t>::max() : std::numeric_limits<uint64_t>::max();
  uint64_t number = 0;
  if (quoted || !absl::SimpleAtoi(text, &number) || number > largest) {
    return KeyError(origin, path, absl::StrCat("\"", text, "\" is no whole number from 0 to ", largest));
  }
  narrow ? reflection->SetUInt32(message, &field, static_cast<uint32_t>(number))
         : reflection->SetUInt64(message, &field, number);
  return absl::OkStatus();
}

class YamlReader {
 public:
  YamlReader(const std::string& file_name, KeyOrigins* origins) : file_name_(file_name), origins_(origins) {}

  absl::Status ReadSection(const YAML::Node& node, const std::string& path, Message* message) {
    if (node.IsNull()) return absl::OkStatus();  // a section whose keys are all commented out
    if (!node.IsMap())
      return KeyError(Origin(node), path, "must be a map of keys, \"key: value\" on lines of its own");
    std::set<std::string> seen;
    for (const auto& entry : node) {
      if (!entry.first.IsScalar()) return KeyError(Origin(entry.first), path, "a key must be a single word");
      const std::string& key = entry.first.Scalar();
      const std::string origin = Origin(entry.first);
      const FieldDescriptor* field = message->GetDescriptor()->FindFieldByName(key);
      if (field == nullptr)
        return KeyError(origin, Child(path, key), UnknownKey(*message->GetDescriptor(), key));
      if (!seen.insert(key).second)
        return KeyError(origin, Child(path, key), "duplicate key; keep one of them");
      RETURN_IF_ERROR(ReadField(entry.second, *field, origin, Child(path, key), message));
    }
    return absl::OkStatus();
  }

 private:
  absl::Status ReadField(const YAML::Node& node, const FieldDescriptor& field, const std::string& origin,
                         const std::string& path, Message* message) {
    (*origins_)[path] = origin;
    if (IsNamedSections(field)) return ReadNamedSections(node, field, path, message);
    if (IsSection(field))
      return ReadSection(node, path, message->GetReflection()->MutableMessage(message, &field));
    if (!node.IsScalar()) return KeyError(origin, path, "must be a single value, \"key: value\"");
    return SetValue(node.Scalar(), /*quoted=*/node.Tag() == "!", field, origin, path, message);
  }

  absl::Status ReadNamedSections(const YAML::Node& node, const FieldDescriptor& field,
                                 const std::string& path, Message* message) {
    if (node.IsNull()) return absl::OkStatus();
    if (!node.IsMap()) return KeyError(Origin(node), path, "must be a map of names, \"name: {key: value}\"");
    std::set<std::string> seen;
    for (const auto& entry : node) {
      if (!entry.first.IsScalar()) return KeyError(Origin(entry.first), path, "a name must be a single word");
      const std::string& name = entry.first.Scalar();
      const std::string child = Child(path, name);
      if (!seen.insert(name).second)
        return KeyError(Origin(entry.first), child, "duplicate name; keep one of them");
      (*origins_)[child] = Origin(entry.first);
      RETURN_IF_ERROR(ReadSection(entry.second, child, NamedSection(message, field, name)));
    }
    return absl::OkStatus();
  }

  std::string Origin(const YAML::Node& node) const {
    return absl::StrCat(file_name_, ":", node.Mark().line + 1);
  }

  const std::string& file_name_;
  KeyOrigins* origins_;
};

// Hears where documents begin, of the first two. yaml-cpp's own LoadAll takes a stray comma for documents
// without end, until there is no memory.
class DocumentStarts final : public YAML::EventHandler {
 public:
  explicit DocumentStarts(const std::string& text) {
    std::istringstream stream(text);
    YAML::Parser parser(stream);
    while (lines_.size() < 2 && parser.HandleNextDocument(*this)) {
    }
  }
  const std::vector<int>& lines() const { return lines_; }  // from 0

  void OnDocumentStart(const YAML::Mark& mark) override { lines_.push_back(mark.line); }
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark&, YAML::anchor_t) override {}
  void OnAlias(const YAML::Mark&, YAML::anchor_t) override {}
  void OnScalar(const YAML::Mark&, const std::string&, YAML::anchor_t, const std::string&) override {}
  void OnSequenceStart(const YAML::Mark&, const std::string&, YAML::anchor_t,
                       YAML::EmitterStyle::value) override {}
  void OnSequenceEnd() override {}
  void OnMapStart(const YAML::Mark&, const std::string&, YAML::anchor_t, YAML::EmitterStyle::value) override {
  }
  void OnMapEnd() override {}

 private:
  std::vector<int> lines_;
};

}  // namespace

absl::Status ReadYaml(const std::string& file_name, const std::string& text, Message* message,
                      KeyOrigins* origins) {
  try {
    const DocumentStarts starts(text);
    if (starts.lines().size() > 1) {
      return KeyError(absl::StrCat(file_name, ":", starts.lines()[1] + 1), "",
                      "a second YAML document, or a character that begins none; keep one");
    }
    if (starts.lines().empty()) return absl::OkStatus();
    return YamlReader(file_name, origins).ReadSection(YAML::Load(text), "", message);
  } catch (const YAML::Exception& error) {
    return KeyError(absl::StrCat(file_name, ":", error.mark.line + 1), "",
                    absl::StrCat("not YAML: ", error.msg));
  }
}

absl::Status ReadOverride(const std::string& assignment, Message* message, KeyOrigins* origins) {
  const std::string origin = "--set";
  const size_t equals = assignment.find('=');
  if (equals == std::string::npos) {
    return KeyError(origin, assignment, "no value; write path=value, e.g. pool.embedded.ranks=4");
  }
  const std::vector<std::string> keys = absl::StrSplit(assignment.substr(0, equals), '.');
  std::string path;
  for (auto key = keys.begin(); key != keys.end(); ++key) {
    path = Child(path, *key);
    const FieldDescriptor* field = message->GetDescriptor()->FindFieldByName(*key);
    if (field == nullptr) return KeyError(origin, path, UnknownKey(*message->GetDescriptor(), *key));
    const bool last = key + 1 == keys.end();
    if (IsSection(*field) && last) return KeyError(origin, path, "is a section; set one of its keys");
    if (!IsSection(*field) && !last)
      return KeyError(origin, path, "is a single value and has no keys of its own");
    (*origins)[path] = origin;
    if (IsNamedSections(*field)) {
      if (++key + 1 == keys.end())
        return KeyError(origin, path, "is a section; set a key of one of its names, e.g. NAME.KEY");
      path = Child(path, *key);
      (*origins)[path] = origin;
      message = NamedSection(message, *field, *key);
      continue;
    }
    if (last) return SetValue(assignment.substr(equals + 1), /*quoted=*/false, *field, origin, path, message);
    message = message->GetReflection()->MutableMessage(message, field);
  }
  return absl::OkStatus();
}

}  // namespace meshfill
