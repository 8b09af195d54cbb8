#include "engine/model/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/model/safetensors_folder.h"
#include "engine/model/safetensors_writer.h"
#include "tests/engine/few_descriptors.h"
#include "tests/engine/random_seed.h"
#include "tests/engine/temp_folder.h"

namespace meshfill {
namespace {

using testing::HasSubstr;

// A file with this header, its length field as it should be, and `data_bytes` zeros behind.
std::string FileOf(const std::string& header, size_t data_bytes) {
  std::string file(8, '\0');
  for (int i = 0; i < 8; ++i) file[i] = static_cast<char>(static_cast<uint64_t>(header.size()) >> (8 * i));
  return file + header + std::string(data_bytes, '\0');
}

std::string WithLength(std::string file, uint64_t length) {
  for (int i = 0; i < 8; ++i) file[i] = static_cast<char>(length >> (8 * i));
  return file;
}

std::string Entry(const std::string& name, const std::string& dtype, const std::string& shape,
                  const std::string& offsets) {
  return "\"" + name + R"(":{"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets +
         "}";
}

struct BadFile {
  std::string what;
  std::string content;
  std::vector<std::string> named;  // what the error must name
};

std::vector<BadFile> BadFiles() {
  const std::string good = "{" + Entry("w", "F32", "[2,2]", "[0,16]") + "}";
  const std::string deep = "{\"w\":" + std::string(100, '[') + std::string(100, ']') + "}";
  return {
      {"empty", "", {"0 bytes"}},
      {"shorter than the length field", "1234567", {"7 bytes"}},
      {"header length beyond the file", WithLength(FileOf(good, 16), 1000), {"1000 bytes", "follow"}},
      {"header that ends a byte behind the file",
       WithLength(FileOf(good, 0), good.size() + 1),
       {std::to_string(good.size() + 1) + " bytes", "follow"}},
      {"header that ends the length field's bytes behind the file",
       WithLength(FileOf(good, 0), good.size() + 8),
       {std::to_string(good.size() + 8) + " bytes", "follow"}},
      {"header length that wraps",
       WithLength(FileOf(good, 16), ~uint64_t{0}),
       {"18446744073709551615 bytes"}},
      {"header above 100 MB", WithLength(FileOf(good, 16), 100'000'001), {"100000001 bytes", "100000000"}},
      {"no header", FileOf("", 0), {"'{'"}},
      {"header that is no object", FileOf("[1]", 0), {"'{'"}},
      {"white space before the header", FileOf(" " + good, 16), {"'{'"}},
      {"broken JSON", FileOf("{\"w\":{\"dtype\"", 0), {"no valid JSON"}},
      {"text behind the JSON", FileOf(good + "x", 16), {"no valid JSON"}},
      {"bad UTF-8", FileOf("{\"\xff\xfe\":1}", 0), {"no valid JSON"}},
      {"deeply nested JSON", FileOf(deep, 0), {"nested deeper"}},
      {"a tensor twice",
       FileOf("{" + Entry("w", "U8", "[1]", "[0,1]") + "," + Entry("w", "U8", "[1]", "[1,2]") + "}", 2),
       {"\"w\"", "twice"}},
      {"a field twice",
       FileOf(R"({"w":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}})", 1),
       {"\"dtype\"", "twice"}},
      {"an entry that is no object", FileOf(R"({"w":7})", 0), {"\"w\"", "no object"}},
      {"an unknown field",
       FileOf(R"({"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"strides":[1]}})", 1),
       {"\"w\"", "\"strides\""}},
      {"no dtype", FileOf(R"({"w":{"shape":[1],"data_offsets":[0,1]}})", 1), {"\"w\"", "no dtype"}},
      {"no shape", FileOf(R"({"w":{"dtype":"U8","data_offsets":[0,1]}})", 1), {"\"w\"", "no shape"}},
      {"no offsets", FileOf(R"({"w":{"dtype":"U8","shape":[1]}})", 1), {"\"w\"", "no data_offsets"}},
      {"unknown dtype", FileOf("{" + Entry("w", "F7", "[1]", "[0,1]") + "}", 1), {"\"w\"", "\"F7\""}},
      {"dtype that is no string",
       FileOf(R"({"w":{"dtype":3,"shape":[1],"data_offsets":[0,1]}})", 1),
       {"\"w\"", "dtype 3"}},
      {"negative shape", FileOf("{" + Entry("w", "U8", "[-1]", "[0,1]") + "}", 1), {"\"w\"", "[-1]"}},
      {"fractional shape", FileOf("{" + Entry("w", "U8", "[1.5]", "[0,1]") + "}", 1), {"\"w\"", "[1.5]"}},
      {"shape that is no array", FileOf("{" + Entry("w", "U8", "1", "[0,1]") + "}", 1), {"\"w\"", "shape 1"}},
      {"shape whose product wraps to 4",
       FileOf("{" + Entry("w", "U8", "[4194305,4194305,211106198978564]", "[0,4]") + "}", 4),
       {"\"w\"", "overflow"}},
      {"shape beyond 64 bits",
       FileOf("{" + Entry("w", "U8", "[18446744073709551616]", "[0,1]") + "}", 1),
       {"\"w\""}},
      {"shape of 2^63, which is nothing times another",
       FileOf("{" + Entry("w", "U8", "[9223372036854775808,0]", "[0,0]") + "}", 0),
       {"\"w\"", "non-negative integers"}},
      {"offsets of one number",
       FileOf("{" + Entry("w", "U8", "[1]", "[0]") + "}", 1),
       {"\"w\"", "data_offsets [0]"}},
      {"negative offset", FileOf("{" + Entry("w", "U8", "[1]", "[-1,0]") + "}", 1), {"\"w\"", "[-1,0]"}},
      {"offsets backwards", FileOf("{" + Entry("w", "U8", "[1]", "[1,0]") + "}", 1), {"\"w\"", "[1,0]"}},
      {"offsets that do not match the shape",
       FileOf("{" + Entry("w", "F32", "[2,2]", "[0,15]") + "}", 15),
       {"\"w\"", "15 bytes", "F32 [2, 2] takes 16"}},
      {"offsets of more than the shape",
       FileOf("{" + Entry("w", "F32", "[2,2]", "[0,17]") + "}", 17),
       {"\"w\"", "17 bytes", "F32 [2, 2] takes 16"}},
      {"data cut off", FileOf(good, 15), {"\"w\"", "only 15"}},
      {"data too long", FileOf(good, 17), {"end at byte 16", "has 17"}},
      {"overlap",
       FileOf("{" + Entry("v", "U8", "[4]", "[0,4]") + "," + Entry("w", "U8", "[4]", "[3,7]") + "}", 7),
       {"\"w\"", "inside the tensor before it"}},
      {"hole",
       FileOf("{" + Entry("v", "U8", "[4]", "[0,4]") + "," + Entry("w", "U8", "[4]", "[5,9]") + "}", 9),
       {"\"w\"", "after a hole"}},
      {"hole in front", FileOf("{" + Entry("w", "U8", "[4]", "[1,5]") + "}", 5), {"\"w\"", "after a hole"}},
      {"metadata that is no object", FileOf(R"({"__metadata__":"pt"})", 0), {"__metadata__"}},
      {"metadata with a number", FileOf(R"({"__metadata__":{"format":1}})", 0), {"__metadata__"}},
  };
}

TEST(SafetensorsFileTest, RefusesBrokenFilesByName) {
  const TempFolder folder;
  for (const BadFile& bad : BadFiles()) {
    SCOPED_TRACE(bad.what);
    const std::string path = folder.Write("bad.safetensors", bad.content);
    const auto file = SafetensorsFile::Open(path);
    ASSERT_EQ(file.status().code(), absl::StatusCode::kInvalidArgument) << file.status();
    EXPECT_THAT(std::string(file.status().message()), HasSubstr(path));
    EXPECT_EQ(file.status().message().find('\n'), std::string::npos);
    for (const std::string& named : bad.named) {
      EXPECT_THAT(std::string(file.status().message()), HasSubstr(named));
    }
  }
}

TEST(SafetensorsFileTest, MissingFileIsNotFound) {
  const TempFolder folder;
  const auto file = SafetensorsFile::Open(folder / "none.safetensors");
  EXPECT_EQ(file.status().code(), absl::StatusCode::kNotFound) << file.status();
}

TEST(SafetensorsFileTest, FolderIsNoFile) {
  const TempFolder folder;
  EXPECT_EQ(SafetensorsFile::Open(folder.path()).status().code(), absl::StatusCode::kInvalidArgument);
}

// It is not waited for.
TEST(SafetensorsFileTest, APipeIsNoFile) {
  const TempFolder folder;
  const std::string path = folder / "pipe";
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  EXPECT_EQ(SafetensorsFile::Open(path).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(SafetensorsFileTest, ReadsScalarsEmptyTensorsAndOddHeaders) {
  const TempFolder folder;
  const std::string header = "{" + Entry("empty", "F32", "[0,3]", "[0,0]") + "," +
                             Entry("scalar", "I64", "[]", "[0,8]") + "," +
                             Entry("A", "F32", "[0]", "[8,8]") + R"(,"__metadata__":{"a":"b"}}  )";
  const auto file = SafetensorsFile::Open(folder.Write("f.safetensors", FileOf(header, 8)));
  ASSERT_TRUE(file.ok()) << file.status();
  ASSERT_EQ((*file)->tensors().size(), 3u);
  EXPECT_NE((*file)->Find("A"), nullptr) << "it sorts before the metadata";
  EXPECT_EQ((*file)->Find("empty")->bytes.size(), 0u);
  EXPECT_EQ((*file)->Find("scalar")->bytes.size(), 8u);
  EXPECT_EQ((*file)->Find("other"), nullptr);
}

TEST(SafetensorsFileTest, EveryTypeHasItsNameAndSize) {
  const struct {
    ElementType type;
    const char* name;
    int64_t bytes;
  } kTypes[] = {{ElementType::kBool, "BOOL", 1},      {ElementType::kU8, "U8", 1},
                {ElementType::kI8, "I8", 1},          {ElementType::kF8E4M3, "F8_E4M3", 1},
                {ElementType::kF8E5M2, "F8_E5M2", 1}, {ElementType::kI16, "I16", 2},
                {ElementType::kU16, "U16", 2},        {ElementType::kF16, "F16", 2},
                {ElementType::kBf16, "BF16", 2},      {ElementType::kI32, "I32", 4},
                {ElementType::kU32, "U32", 4},        {ElementType::kF32, "F32", 4},
                {ElementType::kI64, "I64", 8},        {ElementType::kU64, "U64", 8},
                {ElementType::kF64, "F64", 8}};
  const TempFolder folder;
  for (const auto& [type, name, bytes] : kTypes) {
    SCOPED_TRACE(name);
    const std::string header =
        absl::StrCat("{", Entry("w", name, "[3]", absl::StrCat("[0,", 3 * bytes, "]")), "}");
    const auto file =
        SafetensorsFile::Open(folder.Write("f.safetensors", FileOf(header, static_cast<size_t>(3 * bytes))));
    ASSERT_TRUE(file.ok()) << file.status();
    EXPECT_EQ((*file)->Find("w")->type, type);
    EXPECT_STREQ(ElementTypeName(type), name);
  }
  for (const auto& [dtype, type] : {std::pair(DType::kF32, ElementType::kF32),
                                    {DType::kBf16, ElementType::kBf16},
                                    {DType::kF16, ElementType::kF16},
                                    {DType::kF8E4M3, ElementType::kF8E4M3},
                                    {DType::kF4E2M1, ElementType::kU8}}) {  // two in a byte
    EXPECT_EQ(ElementTypeOf(dtype), type) << DTypeName(dtype);
  }
}

// Whatever is wrong with them.
TEST(SafetensorsFileTest, FilesThatGoLeaveNoDescriptor) {
  const TempFolder folder;
  const std::string good = folder.Write("good", FileOf("{" + Entry("w", "U8", "[1]", "[0,1]") + "}", 1));
  const std::string broken = folder.Write("broken", FileOf("{", 0)), small = folder.Write("small", "1234567");
  const FewDescriptors few(20);
  const int before = FewDescriptors::CountFree();
  for (const std::string& path : {good, broken, small, folder.path()}) {
    for (int i = 0; i < 3; ++i) EXPECT_EQ(SafetensorsFile::Open(path).ok(), path == good) << path;
    EXPECT_EQ(FewDescriptors::CountFree(), before) << path;
  }
}

struct NamedTensor {
  TensorSpec spec;
  std::string data;
};

std::vector<NamedTensor> RandomTensors(std::mt19937_64& random) {
  constexpr ElementType kTypes[] = {ElementType::kBool, ElementType::kU8,   ElementType::kF8E4M3,
                                    ElementType::kU16,  ElementType::kBf16, ElementType::kF16,
                                    ElementType::kF32,  ElementType::kI64};
  std::vector<NamedTensor> tensors(Draw(random, 1, 6));
  for (size_t i = 0; i < tensors.size(); ++i) {
    TensorSpec& spec = tensors[i].spec;
    spec.name = "tensor \"" + std::to_string(i) + "\" ä";
    spec.type = kTypes[Draw<size_t>(random, 0, std::size(kTypes) - 1)];
    for (int extents = Draw(random, 0, 3); extents > 0; --extents) {
      spec.shape.push_back(Draw<int64_t>(random, 0, 5));
    }
    tensors[i].data.resize(static_cast<size_t>(spec.size_bytes()));
    for (char& byte : tensors[i].data) byte = static_cast<char>(Draw(random, 0, 255));
  }
  return tensors;
}

absl::Status WriteTensors(const std::string& path, const std::vector<NamedTensor>& tensors) {
  std::vector<TensorSpec> specs;
  for (const NamedTensor& tensor : tensors) specs.push_back(tensor.spec);
  auto writer = SafetensorsWriter::Create(path, specs);
  if (!writer.ok()) return writer.status();
  for (const NamedTensor& tensor : tensors) {
    const auto bytes = std::as_bytes(std::span(tensor.data));
    const size_t half = bytes.size() / 2;  // in pieces, as a stream comes
    if (absl::Status status = writer->Append(bytes.first(half)); !status.ok()) return status;
    if (absl::Status status = writer->Append(bytes.subspan(half)); !status.ok()) return status;
  }
  return writer->Finish();
}

TEST(SafetensorsWriterTest, ReaderFindsWhatWasWritten) {
  const TempFolder folder;
  std::mt19937_64 random(TestSeed());
  for (int round = 0; round < 50; ++round) {
    const std::vector<NamedTensor> tensors = RandomTensors(random);
    const std::string path = folder / "t.safetensors";
    ASSERT_TRUE(WriteTensors(path, tensors).ok());
    const auto file = SafetensorsFile::Open(path);
    ASSERT_TRUE(file.ok()) << file.status();
    ASSERT_EQ((*file)->tensors().size(), tensors.size());
    for (const NamedTensor& tensor : tensors) {
      const TensorView* view = (*file)->Find(tensor.spec.name);
      ASSERT_NE(view, nullptr);
      EXPECT_EQ(view->type, tensor.spec.type);
      EXPECT_EQ(view->shape, tensor.spec.shape);
      const std::string data(reinterpret_cast<const char*>(view->bytes.data()), view->bytes.size());
      EXPECT_EQ(data, tensor.data);
    }
  }
}

TEST(SafetensorsWriterTest, RefusesToFinishWithoutAllData) {
  const TempFolder folder;
  auto writer = SafetensorsWriter::Create(folder / "t.safetensors",
                                          std::vector<TensorSpec>{{"w", ElementType::kF32, {2}}});
  ASSERT_TRUE(writer.ok()) << writer.status();
  ASSERT_TRUE(writer->Append(std::vector<std::byte>(7)).ok());
  EXPECT_EQ(writer->Finish().code(), absl::StatusCode::kInternal);
}

// As readers that map files want it; and transformers wants to know of which framework they are.
TEST(SafetensorsWriterTest, AlignsTheFirstTensorAndNamesTheFormat) {
  const TempFolder folder;
  for (const std::string name : {"a", "ab", "abc", "abcdefgh"}) {
    const std::string path = folder / "t.safetensors";
    ASSERT_TRUE(WriteTensors(path, {{{name, ElementType::kU8, {5}}, "12345"}}).ok());
    const std::string content = ReadWholeFile(path);
    EXPECT_EQ(content.find("12345") % 8, 0u) << name;
    EXPECT_THAT(content, HasSubstr(R"("__metadata__":{"format":"pt"})"));
  }
}

TEST(SafetensorsWriterTest, AFullDiskIsAnError) {
  const std::vector<TensorSpec> specs = {{"w", ElementType::kU8, {1 << 20}}};
  for (const size_t piece : {size_t{1} << 20, size_t{1} << 10}) {
    auto writer = SafetensorsWriter::Create("/dev/full", specs);
    ASSERT_TRUE(writer.ok()) << writer.status();
    absl::Status status;
    for (size_t done = 0; done < size_t{1} << 20 && status.ok(); done += piece) {
      status = writer->Append(std::vector<std::byte>(piece));
    }
    EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  }
  auto empty = SafetensorsWriter::Create("/dev/full", {});
  ASSERT_TRUE(empty.ok()) << empty.status();  // nothing has left the buffer yet
  EXPECT_TRUE(absl::IsResourceExhausted(empty->Finish()));
}

TEST(SafetensorsWriterTest, NamesTheFolderThatIsMissing) {
  const TempFolder folder;
  const auto writer = SafetensorsWriter::Create(folder / "none/t.safetensors", {});
  EXPECT_EQ(writer.status().code(), absl::StatusCode::kNotFound) << writer.status();
}

// Bytes that are read are those that are mapped; a file that has lost them is an error, no signal.
TEST(SafetensorsFileTest, ReadsItsBytesAndMissesThoseThatAreGone) {
  const TempFolder folder;
  std::string content = FileOf("{" + Entry("w", "U8", "[5000]", "[0,5000]") + "}", 5000);
  for (size_t i = 1; i <= 5000; ++i) content[content.size() - i] = static_cast<char>(i * i);
  const std::string path = folder.Write("model.safetensors", content);
  const auto file = SafetensorsFile::Open(path);
  ASSERT_TRUE(file.ok()) << file.status();
  const std::span<const std::byte> bytes = (*file)->Find("w")->bytes;
  std::mt19937_64 random(TestSeed());
  for (int draw = 0; draw < 50; ++draw) {
    const size_t begin = Draw<size_t>(random, 0, bytes.size()),
                 count = Draw(random, size_t{0}, bytes.size() - begin);
    std::vector<std::byte> read(count);
    ASSERT_TRUE((*file)->Read(bytes.subspan(begin, count), PageCache::kFill, read.data()).ok());
    EXPECT_TRUE(std::equal(read.begin(), read.end(), bytes.begin() + static_cast<std::ptrdiff_t>(begin)));
  }
  std::filesystem::resize_file(path, content.size() - 1000);
  std::vector<std::byte> read(bytes.size());
  EXPECT_TRUE((*file)->Read(bytes.first(4000), PageCache::kFill, read.data()).ok());
  const absl::Status gone = (*file)->Read(bytes.subspan(3000, 1001), PageCache::kFill, read.data());
  EXPECT_TRUE(absl::IsDataLoss(gone)) << gone;
  EXPECT_THAT(std::string(gone.message()),
              testing::AllOf(HasSubstr(path), HasSubstr(std::to_string(content.size()))));
}

TEST(SafetensorsFileTest, EveryTruncationIsRefused) {
  const TempFolder folder;
  std::mt19937_64 random(TestSeed());
  std::vector<NamedTensor> tensors = RandomTensors(random);
  tensors.push_back({{"last", ElementType::kF32, {3}}, std::string(12, 'x')});
  ASSERT_TRUE(WriteTensors(folder / "whole", tensors).ok());
  const std::string whole = ReadWholeFile(folder / "whole");
  for (size_t size = 0; size < whole.size(); ++size) {
    const auto file = SafetensorsFile::Open(folder.Write("cut", whole.substr(0, size)));
    ASSERT_EQ(file.status().code(), absl::StatusCode::kInvalidArgument)
        << size << " of " << whole.size() << " bytes";
  }
}

// Whatever the header is, a file that opens has all its tensors inside it.
TEST(SafetensorsFileTest, SurvivesRandomHeaders) {
  const TempFolder folder;
  std::mt19937_64 random(TestSeed());
  ASSERT_TRUE(WriteTensors(folder / "whole", RandomTensors(random)).ok());
  const std::string whole = ReadWholeFile(folder / "whole");
  constexpr std::string_view kLikely = "{}[]:,\"0123456789-.eE ";
  unsigned checksum = 0;
  for (int round = 0; round < 2000; ++round) {
    std::string changed = whole;
    for (int changes = Draw(random, 1, 3); changes > 0; --changes) {
      char& byte = changed[Draw<size_t>(random, 0, changed.size() - 1)];
      byte = Draw(random, 0, 1) ? kLikely[Draw<size_t>(random, 0, kLikely.size() - 1)]
                                : static_cast<char>(random());
    }
    const auto file = SafetensorsFile::Open(folder.Write("changed", changed));
    if (!file.ok()) {
      ASSERT_EQ(file.status().code(), absl::StatusCode::kInvalidArgument);
      continue;
    }
    for (const auto& [name, tensor] : (*file)->tensors()) {
      for (const std::byte byte : tensor.bytes) checksum += std::to_integer<unsigned>(byte);
    }
  }
  RecordProperty("checksum", std::to_string(checksum));  // so that the reads happen
}

// ---- Folders.

class SafetensorsFolderTest : public testing::Test {
 protected:
  void WriteShard(const std::string& shard, const std::vector<std::string>& names) {
    std::vector<NamedTensor> tensors;
    for (const std::string& name : names) {
      tensors.push_back({{name, ElementType::kU8, {1}}, name.substr(0, 1)});
    }
    ASSERT_TRUE(WriteTensors(folder_ / shard, tensors).ok());
  }
  void WriteIndex(const std::string& weight_map) {
    folder_.Write("model.safetensors.index.json",
                  R"({"metadata":{"total_size":2},"weight_map":)" + weight_map + "}");
  }
  void ExpectRefused(const std::vector<std::string>& named) {
    const auto opened = SafetensorsFolder::Open(folder_.path());
    ASSERT_EQ(opened.status().code(), absl::StatusCode::kInvalidArgument) << opened.status();
    for (const std::string& name : named) {
      EXPECT_THAT(std::string(opened.status().message()), HasSubstr(name));
    }
  }

  const TempFolder folder_;
};

TEST_F(SafetensorsFolderTest, ReadsOneFile) {
  WriteShard("model.safetensors", {"a", "b"});
  const auto opened = SafetensorsFolder::Open(folder_.path());
  ASSERT_TRUE(opened.ok()) << opened.status();
  EXPECT_EQ(opened->entries().size(), 2u);
  EXPECT_EQ(opened->Find("c"), nullptr);
}

TEST_F(SafetensorsFolderTest, OneFileNeedsNoIndex) {
  WriteShard("model.safetensors", {"a"});
  WriteIndex(R"({"b":"gone.safetensors"})");
  EXPECT_TRUE(SafetensorsFolder::Open(folder_.path()).ok());
}

TEST_F(SafetensorsFolderTest, ReadsShardsByIndex) {
  WriteShard("one.safetensors", {"a"});
  WriteShard("two.safetensors", {"b", "c"});
  WriteIndex(R"({"a":"one.safetensors","b":"two.safetensors","c":"two.safetensors"})");
  const auto opened = SafetensorsFolder::Open(folder_.path());
  ASSERT_TRUE(opened.ok()) << opened.status();
  for (const std::string name : {"a", "b", "c"}) {
    const SafetensorsFolder::Entry* entry = opened->Find(name);
    ASSERT_NE(entry, nullptr);
    EXPECT_EQ(static_cast<char>(entry->tensor.bytes[0]), name[0]);
  }
}

TEST_F(SafetensorsFolderTest, MissingFolderAndMissingWeightsAreNotFound) {
  EXPECT_EQ(SafetensorsFolder::Open(folder_ / "none").status().code(), absl::StatusCode::kNotFound);
  const auto empty = SafetensorsFolder::Open(folder_.path());
  EXPECT_EQ(empty.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(empty.status().message()), HasSubstr("model.safetensors"));
}

TEST_F(SafetensorsFolderTest, MissingShardIsNotFoundByName) {
  WriteIndex(R"({"a":"one.safetensors"})");
  const auto opened = SafetensorsFolder::Open(folder_.path());
  EXPECT_EQ(opened.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(opened.status().message()), HasSubstr("one.safetensors"));
}

TEST_F(SafetensorsFolderTest, RefusesPathsInTheIndex) {
  WriteShard("one.safetensors", {"a"});
  for (const std::string shard : {"../one.safetensors", "/etc/passwd", "sub/one.safetensors", "..", ".", "",
                                  "a\\\\b", "one.safetensors\\u0000"}) {
    SCOPED_TRACE(shard);
    WriteIndex(R"({"a":")" + shard + "\"}");
    ExpectRefused({"\"a\"", "plain file name", "index.json"});
  }
}

TEST_F(SafetensorsFolderTest, RefusesBrokenIndexes) {
  WriteShard("one.safetensors", {"a"});
  folder_.Write("model.safetensors.index.json", "{");
  ExpectRefused({"index.json", "no valid JSON"});
  folder_.Write("model.safetensors.index.json", "{}");
  ExpectRefused({"index.json", "weight_map"});
  WriteIndex("[]");
  ExpectRefused({"index.json", "weight_map"});
  WriteIndex(R"({"a":1})");
  ExpectRefused({"index.json", "\"a\""});
  WriteIndex(R"({"a":"one.safetensors","a":"one.safetensors"})");
  ExpectRefused({"index.json", "\"a\"", "twice"});
}

TEST_F(SafetensorsFolderTest, RefusesShardsThatDisagreeWithTheIndex) {
  WriteShard("one.safetensors", {"a"});
  WriteShard("two.safetensors", {"a", "b"});
  WriteIndex(R"({"a":"one.safetensors","c":"one.safetensors"})");
  ExpectRefused({"\"c\"", "one.safetensors", "lacks it"});
  WriteIndex(R"({"a":"one.safetensors","b":"two.safetensors"})");  // two has an `a` of its own
  ExpectRefused({"\"a\"", "two.safetensors"});
}

}  // namespace
}  // namespace meshfill
