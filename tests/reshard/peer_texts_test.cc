// What other nodes send may be nonsense: then it is refused, and nothing else happens.
#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>

#include "reshard/intake/found_files.h"
#include "reshard/intake/hash_questions.h"
#include "reshard/job/plan_part.h"

namespace ptc {
namespace {

const std::string kManyAxes = "[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]";
const std::string kShapes[] = {
    kManyAxes, "[-1]", "[1.5]", "[\"1\"]", "7", "null", "[18446744073709551616]"};

TEST(PeerTexts, PartsOfPlans) {
  auto part = [](const std::string& offset, const std::string& extent) {
    return R"({"plan": "a", "images": [], "copies": [], "sums": [[0, )" + offset + ", " + extent +
           R"(, "00000000000000000000000000000000"]]})";
  };
  Result<PlanPart> right = PlanPart::from_text(part("[0, 2]", "[1, 3]"));
  ASSERT_TRUE(right.has_value()) << right.error().message();
  EXPECT_EQ(right.value().sums[0].box.extent, Dims({1, 3}));
  for (const std::string& shape : kShapes) {
    Result<PlanPart> read = PlanPart::from_text(part(shape, shape));
    ASSERT_TRUE(read.has_error()) << shape;
    EXPECT_EQ(read.error().code(), Code::kInvalidArgument) << shape;
  }
  EXPECT_TRUE(PlanPart::from_text(part("[0]", "[1, 3]")).has_error());
}

TEST(PeerTexts, ListsOfFiles) {
  auto list = [](const std::string& shape) {
    return FilesElsewhere{
        "w1", R"({"files": [{"rank": 0, "path": "model.safetensors", "bytes": 8, "index": false, )"
              R"("set": "", "set_index": "", "promised": [], "header": 0, )"
              R"("tensors": [["a", "F32", )" +
                  shape + ", 0, 8]]}]}\n"};
  };
  const FilesElsewhere right = list("[2]");
  Result<std::vector<Found>> found = read_listing(right);
  ASSERT_TRUE(found.has_value()) << found.error().message();
  EXPECT_EQ(found.value()[0].tensors[0].shape, Shape({2}));
  for (const std::string& shape : kShapes) {
    const FilesElsewhere wrong = list(shape);
    Result<std::vector<Found>> read = read_listing(wrong);
    ASSERT_TRUE(read.has_error()) << shape;
    EXPECT_EQ(read.error().code(), Code::kCorrupt) << shape;
  }
}

/// What is said of files on another node by it, and what is asked of it and answered.
class PeerFiles : public ::testing::Test {
 protected:
  static constexpr std::string_view kHeader =
      R"({"model.norm.weight":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
  static std::string listing(
      std::string_view tensor = R"(["model.norm.weight", "F32", [2], 78, 8])") {
    const uint64_t length = kHeader.size();
    std::string header(reinterpret_cast<const char*>(&length), 8);
    header += kHeader;
    const auto file = [](std::string_view path, size_t bytes, size_t header_bytes,
                         std::string_view tensors) {
      return fmt::format(
          R"({{"rank": 0, "path": "{}", "bytes": {}, "index": false, "set": "", "set_index": "", )"
          R"("promised": [], "header": {}, "tensors": [{}]}})",
          path, bytes, header_bytes, tensors);
    };
    return fmt::format(R"({{"files": [{}, {}]}})", file("a.txt", 1, 0, ""),
                       file("model.safetensors", header.size() + 8, header.size(), tensor)) +
           "\n" + header;
  }
  static std::string why(const std::string& text, const std::string& answer) {
    Executor executor(1, nullptr);
    HashCache hashes;
    CommitRequest request{.name = "incoming/a", .node = "w0"};
    request.hash_elsewhere = [&](const auto&, const auto& next) {
      std::vector<Result<std::string>> answers;
      answers.emplace_back(answer);
      EXPECT_EQ(next(0, answers[0]), std::nullopt);
      return answers;
    };
    auto draft = draft_commit(request, {{"w1", text}}, executor, hashes, {});
    return draft.has_error() ? draft.error().message() : "";
  }
  static inline const std::string kSum = std::string(32, '0');
  static inline const std::string kText = R"({"number": 0, "whole": ")" + kSum + "\"}";
  static std::string tensors(std::string_view padding = "") {
    return fmt::format(R"({{"number": 1, "tensors": [{{"sums": ["{}"], "padding": [{}]}}]}})", kSum,
                       padding);
  }
  static std::string answer(const std::string& files) { return R"({"files": [)" + files + "]}"; }
};

TEST_F(PeerFiles, ChecksumsAreOfAllThatWasAsked) {
  EXPECT_EQ(why(listing(), answer(kText + ", " + tensors())), "");
  const std::string twice = kText + ", " + kText + ", " + tensors();
  const std::string as_text = kText + R"(, {"number": 1, "whole": ")" + kSum + "\"}";
  const std::string outside = kText + ", " + tensors(R"([[1], [2], ")" + kSum + "\"]");
  const std::string no_sum = R"({"number": 0, "tensors": []}, )" + tensors();
  for (const std::string& wrong :
       {std::string(), kText, tensors(), twice, as_text, outside, no_sum})
    EXPECT_THAT(why(listing(), answer(wrong)), ::testing::StartsWith("node w1: its checksums are"))
        << wrong;
}

TEST_F(PeerFiles, TensorsAreThoseOfTheHeader) {
  for (const char* wrong :
       {R"(["model.norm.bias", "F32", [2], 78, 8])", R"(["model.norm.weight", "I32", [2], 78, 8])",
        R"(["model.norm.weight", "F32", [4294967296, 4294967296], 78, 8])",
        R"(["model.norm.weight", "F32", [2], 9078, 8])",
        R"(["model.norm.weight", "F32", [2], 78, 16])"})
    EXPECT_THAT(why(listing(wrong), answer(kText + ", " + tensors())),
                ::testing::HasSubstr("the header is not that of its tensors"))
        << wrong;
}

TEST_F(PeerFiles, RequestsAreForPartsOfWhatIsThere) {
  std::string top = ::testing::TempDir() + "peer-XXXXXX";
  ASSERT_NE(::mkdtemp(top.data()), nullptr);
  std::filesystem::create_directories(top + "/rank/0");
  const std::string text = listing();
  std::ofstream(top + "/rank/0/model.safetensors", std::ios::binary)
      << text.substr(text.find('\n') + 1) << std::string(8, '\1');
  const UniqueFd directory = open_file(AT_FDCWD, top, O_RDONLY | O_DIRECTORY).value();
  Executor executor(1, nullptr);
  const auto ask = [&](std::string_view part) {
    HashCache hashes;
    FilesToHash files;
    auto hashed = hash_files(
        directory.get(), files,
        fmt::format(R"({{"files": [{{"number": 0, "first": 0, "of": 1, "tensors": [{}]}}]}})",
                    part),
        executor, hashes, {});
    return hashed.has_error() ? hashed.error().message() : "";
  };
  EXPECT_EQ(ask(R"({"shape": [2], "pieces": [[[0], [2], [0]]], "global": [2]})"), "");
  for (const char* wrong :
       {R"({"shape": [2], "pieces": [[[1], [2], [0]]], "global": [2]})",
        R"({"shape": [2], "pieces": [[[0], [2], [1]]], "global": [2]})",
        R"({"shape": [2], "pieces": [[[0, 0], [2, 1], [0]]], "global": [2, 1]})",
        R"({"shape": [2], "pieces": [[[0], [2], []]], "global": [2]})",
        R"({"shape": [2], "pieces": [], "global": [4294967296, 4294967296]})",
        R"({"shape": [2], "pieces": [], "global": [2], "flat": [[2], 3]})",
        R"({"shape": [2], "pieces": [[[0], [2], [0]]], "global": [2], "flat": [[2, 2], 0]})"})
    EXPECT_THAT(ask(wrong),
                ::testing::HasSubstr("says of 'model.norm.weight' what no part of it is"))
        << wrong;
  std::filesystem::remove_all(top);
}

}  // namespace
}  // namespace ptc
