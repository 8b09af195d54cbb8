#include "server/cli/token_file.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <random>

#include "absl/strings/match.h"

namespace meshfill {
namespace {

absl::StatusOr<std::vector<uint32_t>> DecodeAll(TokenFormat format, absl::string_view bytes) {
  TokenDecoder decoder(format, "prompt");
  if (absl::Status status = decoder.Decode(bytes); !status.ok()) return status;
  return decoder.Finish();
}

void ExpectError(TokenFormat format, absl::string_view bytes, absl::StatusCode code, absl::string_view part) {
  const absl::StatusOr<std::vector<uint32_t>> ids = DecodeAll(format, bytes);
  EXPECT_EQ(ids.status().code(), code) << bytes;
  EXPECT_TRUE(absl::StrContains(ids.status().message(), part)) << ids.status();
}

std::string RandomPiece(const std::string& bytes, size_t begin, std::mt19937& random) {
  return bytes.substr(begin, random() % 7);
}

// Whatever the pieces in which the bytes arrive, the ids are those that were written.
TEST(TokenDecoder, ReadsBackRandomIdsInRandomPieces) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 200; ++round) {
    std::vector<uint32_t> ids(1 + random() % 50);
    std::string text, raw, bytes;
    for (uint32_t& id : ids) {
      id = static_cast<uint32_t>(random()) >> (random() % 32);
      text += std::to_string(id);
      for (size_t spaces = 1 + random() % 3; spaces > 0; --spaces) text += " \t\n\r\v\f"[random() % 6];
      for (int shift = 0; shift < 32; shift += 8) raw += static_cast<char>(id >> shift);
      bytes += static_cast<char>(id);
    }
    if (random() % 2 == 0) text.resize(text.find_last_of("0123456789") + 1);  // the last id ends the file

    for (const auto& [format, written] :
         {std::pair(TokenFormat::kIds, text), std::pair(TokenFormat::kU32le, raw),
          std::pair(TokenFormat::kBytes, bytes)}) {
      TokenDecoder decoder(format, "prompt");
      for (size_t begin = 0; begin < written.size();) {
        const std::string piece = RandomPiece(written, begin, random);
        ASSERT_TRUE(decoder.Decode(piece).ok());
        begin += piece.size();
      }
      std::vector<uint32_t> expected = ids;
      if (format == TokenFormat::kBytes) {
        for (uint32_t& id : expected) id &= 0xff;
      }
      const absl::StatusOr<std::vector<uint32_t>> decoded = decoder.Finish();
      ASSERT_TRUE(decoded.ok()) << decoded.status();
      EXPECT_EQ(*decoded, expected);
    }
  }
}

// A file without an end stops at the bound, and not when the memory does.
TEST(TokenDecoder, BoundsTheTokens) {
  for (const TokenFormat format : {TokenFormat::kIds, TokenFormat::kU32le, TokenFormat::kBytes}) {
    const std::string token = format == TokenFormat::kIds     ? "7 "
                              : format == TokenFormat::kU32le ? "abcd"
                                                              : "a";
    TokenDecoder decoder(format, "file", /*most_tokens=*/3);
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(decoder.Decode(token).ok());
    const absl::Status more = decoder.Decode(token);
    EXPECT_EQ(more, absl::OutOfRangeError("file: more than 3 tokens; give a shorter prompt"));
  }
}

TEST(TokenDecoder, TakesTheLargestIdAndLeadingZeros) {
  const absl::StatusOr<std::vector<uint32_t>> ids =
      DecodeAll(TokenFormat::kIds, "4294967295 00000000000000000007 0");
  ASSERT_TRUE(ids.ok()) << ids.status();
  EXPECT_EQ(*ids, (std::vector<uint32_t>{4294967295u, 7, 0}));
}

TEST(TokenDecoder, NamesTheLineAndColumnOfWhatIsWrong) {
  ExpectError(TokenFormat::kIds, "1 2\n3 x4\n", absl::StatusCode::kInvalidArgument,
              "prompt:2:3: unexpected 'x'");
  ExpectError(TokenFormat::kIds, "1 -2", absl::StatusCode::kInvalidArgument, "prompt:1:3: unexpected '-'");
  ExpectError(TokenFormat::kIds, "\n\n\xff", absl::StatusCode::kInvalidArgument,
              "prompt:3:1: unexpected '\\xff'");
  ExpectError(TokenFormat::kIds, "7\n4294967296", absl::StatusCode::kInvalidArgument, "above 4294967295");
  ExpectError(TokenFormat::kIds, "99999999999999999999999999", absl::StatusCode::kInvalidArgument,
              "above 4294967295");
}

// A file comes in pieces; lines and columns are the file's.
TEST(TokenDecoder, CountsColumnsFromTheLinesBegin) {
  TokenDecoder decoder(TokenFormat::kIds, "prompt");
  ASSERT_TRUE(decoder.Decode("1 2\n33").ok());
  ASSERT_TRUE(decoder.Decode("3 4\n5 ").ok());
  const absl::Status status = decoder.Decode("6 x");
  EXPECT_TRUE(absl::StrContains(status.message(), "prompt:3:5: unexpected 'x'")) << status;
}

// As tokenizers in Python print them, and as one file of comma-separated values has them.
TEST(TokenDecoder, ReadsJsonListsAndCommasInRandomPieces) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  const auto space = [&] { return std::string(random() % 3, " \t\n\r"[random() % 4]); };
  for (int round = 0; round < 200; ++round) {
    std::vector<uint32_t> ids(1 + random() % 50);
    const bool brackets = random() % 2 == 0;
    std::string text = space() + (brackets ? "[" : "");
    for (size_t i = 0; i < ids.size(); ++i) {
      ids[i] = static_cast<uint32_t>(random());
      text += (i == 0 ? "" : ",") + space() + std::to_string(ids[i]) + space();
    }
    text += brackets ? "]" + space() : "";
    TokenDecoder decoder(TokenFormat::kIds, "prompt");
    for (size_t begin = 0; begin < text.size();) {
      const std::string piece = RandomPiece(text, begin, random);
      ASSERT_TRUE(decoder.Decode(piece).ok()) << text;
      begin += piece.size();
    }
    const absl::StatusOr<std::vector<uint32_t>> decoded = decoder.Finish();
    ASSERT_TRUE(decoded.ok()) << decoded.status() << text;
    EXPECT_EQ(*decoded, ids);
  }
}

TEST(TokenDecoder, RefusesBrokenLists) {
  for (const auto& [text, problem] :
       {std::pair("1,,2", "prompt:1:3: unexpected ',': an id is missing after the comma"),
        std::pair(",1", "prompt:1:1: unexpected ',': an id is missing before the comma"),
        std::pair("[1,]", "prompt:1:4: unexpected ']': an id is missing after the comma"),
        std::pair("1]", "prompt:1:2: unexpected ']': no list has begun"),
        std::pair("1 [2]", "prompt:1:3: unexpected '[': a list begins the file"),
        std::pair("[[1]]", "prompt:1:2: unexpected '[': a list begins the file"),
        std::pair("[1] 2", "prompt:1:5: the list has ended"),
        std::pair("[1]\n,", "prompt:2:1: unexpected ','"), std::pair("[1, 2", "ends before the list's ']'"),
        std::pair("1, ", "ends after a comma"), std::pair("[]", "holds no tokens"),
        std::pair("{\"ids\": [1]}", "prompt:1:1: unexpected '{'")}) {
    ExpectError(TokenFormat::kIds, text, absl::StatusCode::kInvalidArgument, problem);
  }
}

TEST(TokenDecoder, CountsLinesAcrossPieces) {
  TokenDecoder decoder(TokenFormat::kIds, "prompt");
  ASSERT_TRUE(decoder.Decode("1 2\n3").ok());
  const absl::Status status = decoder.Decode("4 5 ?");
  EXPECT_TRUE(absl::StrContains(status.message(), "prompt:2:6: unexpected '?'")) << status;
}

TEST(TokenDecoder, RefusesWhatHoldsNoTokens) {
  for (const TokenFormat format : {TokenFormat::kIds, TokenFormat::kU32le, TokenFormat::kBytes}) {
    ExpectError(format, "", absl::StatusCode::kInvalidArgument, "holds no tokens");
  }
  ExpectError(TokenFormat::kIds, " \n\t ", absl::StatusCode::kInvalidArgument, "holds no tokens");
}

TEST(TokenDecoder, RefusesARaggedU32leFile) {
  ExpectError(TokenFormat::kU32le, "abcde", absl::StatusCode::kInvalidArgument,
              "5 bytes, is no multiple of 4");
}

TEST(TokenFormat, HasThreeNames) {
  EXPECT_EQ(ParseTokenFormat("ids").value(), TokenFormat::kIds);
  EXPECT_EQ(ParseTokenFormat("u32le").value(), TokenFormat::kU32le);
  EXPECT_EQ(ParseTokenFormat("bytes").value(), TokenFormat::kBytes);
  EXPECT_EQ(ParseTokenFormat("text").status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(ReadTokens, ReadsAFileOfManyBlocks) {
  const std::string path = testing::TempDir() + "tokens." + std::to_string(getpid());
  std::vector<uint32_t> expected(1 << 20);
  std::ofstream file(path);
  for (size_t i = 0; i < expected.size(); ++i) {
    expected[i] = static_cast<uint32_t>(i * 2654435761u);
    file << expected[i] << (i % 16 == 15 ? '\n' : ' ');
  }
  file.close();
  const absl::StatusOr<std::vector<uint32_t>> ids = ReadTokens(path, TokenFormat::kIds);
  std::remove(path.c_str());
  ASSERT_TRUE(ids.ok()) << ids.status();
  EXPECT_TRUE(*ids == expected);
}

TEST(ReadTokens, SaysWhichFileItCannotRead) {
  const absl::Status missing = ReadTokens("/no/such/file", TokenFormat::kIds).status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(absl::StrContains(missing.message(), "/no/such/file: no such file")) << missing;
  const absl::Status folder = ReadTokens("/", TokenFormat::kBytes).status();
  EXPECT_EQ(folder.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(absl::StrContains(folder.message(), "/: cannot be read")) << folder;
}

}  // namespace
}  // namespace meshfill
