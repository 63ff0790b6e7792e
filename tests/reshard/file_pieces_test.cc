// A file in pieces, of nodes that end, change and differ in between.
#include "reshard/job/file_pieces.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "store/base/json.h"
#include "tests/store/temp_dir.h"

namespace ptc {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class FilePiecesTest : public ::testing::Test {
 protected:
  FilePiecesTest() {
    for (int i = 0; i < 10'000; ++i) content_ += std::to_string(i) + ' ';
    options_.piece = 1000;
  }
  std::string path_of(const std::string& node) const { return dir_.file(node); }
  void put(const std::string& node, const std::string& content) const {
    std::ofstream(path_of(node), std::ios::binary | std::ios::trunc) << content;
  }
  Result<std::string> fetch(const std::vector<std::string>& nodes) {
    return fetch_in_pieces(
        [&](const std::string& node, const std::string& body) -> Result<std::string> {
          const json::object request = parse_json(body).value().as_object();
          PieceRequest piece{{json_text(request, "id"), json_text(request, "file")},
                             request.at("offset").to_number<uint64_t>(),
                             request.at("most").to_number<uint64_t>(),
                             request.at("sum").as_bool()};
          EXPECT_EQ(piece.name, name_);
          asked_.emplace_back(node, piece.offset);
          if (before_) before_(node, piece.offset);
          if (down_ == node) return make_error(Code::kUnavailable, "node {} is gone", node);
          Result<std::string> answer = read_piece(path_of(node), piece);
          if (answer.has_value()) longest_ = std::max(longest_, answer.value().size());
          return answer;
        },
        nodes, name_, options_);
  }

  const TempDir dir_;
  const NamedFile name_{"id", "manifest.json"};
  std::string content_;
  PieceOptions options_;
  std::vector<std::pair<std::string, uint64_t>> asked_;
  std::function<void(const std::string& node, uint64_t offset)> before_;
  std::string down_;
  size_t longest_ = 0;
};

TEST_F(FilePiecesTest, NoAnswerIsLongerThanAPiece) {
  put("a", content_);
  uint64_t last = 0, whole = 0;
  options_.progress = [&](uint64_t bytes, uint64_t of_bytes) {
    EXPECT_GT(bytes, last);
    last = bytes;
    whole = of_bytes;
  };
  EXPECT_TRUE(fetch({"a"}).value() == content_);
  EXPECT_EQ(asked_.size(), (content_.size() + 999) / 1000);
  EXPECT_LE(longest_, 1100u);
  EXPECT_EQ(last, content_.size());
  EXPECT_EQ(whole, content_.size());
  asked_.clear();
  options_.progress = nullptr;
  options_.facts = FileFacts::of(content_);
  EXPECT_EQ(FileFacts::of_file(path_of("a")).value(), *options_.facts);
  EXPECT_TRUE(fetch({"a"}).value() == content_);
}

TEST_F(FilePiecesTest, OneThatIsEmptyIsOnePiece) {
  put("a", "");
  EXPECT_EQ(fetch({"a"}).value(), "");
  EXPECT_EQ(asked_.size(), 1u);
}

TEST_F(FilePiecesTest, WhereANodeEndsAnotherGoesOn) {
  put("a", content_);
  put("b", content_);
  before_ = [&](const std::string& node, uint64_t offset) {
    if (node == "a" && offset == 7000) down_ = "a";
  };
  EXPECT_TRUE(fetch({"a", "b"}).value() == content_);
  const auto first_of_b =
      std::find_if(asked_.begin(), asked_.end(), [](const auto& one) { return one.first == "b"; });
  EXPECT_EQ(first_of_b->second, 7000u);
  EXPECT_EQ(asked_.size(), (content_.size() + 999) / 1000 + 1);
}

TEST_F(FilePiecesTest, NothingIsPutBehindWhatCameOfAnotherFile) {
  std::string other = content_;
  other[3] = 'x';  // as long, and in a piece that the first one gives
  put("a", content_);
  put("b", other);
  before_ = [&](const std::string& node, uint64_t offset) {
    if (node == "a" && offset == 7000) down_ = "a";
  };
  EXPECT_TRUE(fetch({"a", "b"}).value() == other);  // all of it
  down_.clear();
  options_.facts = FileFacts::of(content_);
  const Result<std::string> refused = fetch({"a", "b"});
  ASSERT_TRUE(refused.has_error());
  EXPECT_EQ(refused.error().code(), Code::kUnavailable);
  EXPECT_THAT(refused.error().message(), HasSubstr("node b: manifest.json of checkpoint id"));
}

TEST_F(FilePiecesTest, WhatChangesInBetweenIsNoticed) {
  std::string other = content_;
  other[3] = other[20'000] = 'x';  // before the change and after it
  for (const std::string& next : {other, content_ + "more", content_.substr(0, 5000)}) {
    put("a", content_);
    bool changed = false;
    before_ = [&](const std::string&, uint64_t offset) {
      if (offset >= 7000 && !std::exchange(changed, true)) put("a", next);
    };
    const Result<std::string> fetched = fetch({"a"});
    // Shorter than what has come of it already: then that node is passed over.
    if (next.size() < 7000) EXPECT_EQ(fetched.error().code(), Code::kUnavailable);
    else EXPECT_TRUE(fetched.value() == next);
  }
}

TEST_F(FilePiecesTest, NobodyHasItOrSomebodyMay) {
  EXPECT_EQ(fetch({"a", "b"}).error().code(), Code::kNotFound);
  EXPECT_EQ(fetch({}).error().code(), Code::kNotFound);
  down_ = "b";
  EXPECT_EQ(fetch({"a", "b"}).error().code(), Code::kUnavailable);
  put("a", content_);
  EXPECT_TRUE(fetch({"b", "a"}).value() == content_);
  options_.limit = content_.size();
  put("b", content_ + content_);
  down_.clear();
  EXPECT_TRUE(fetch({"b", "a"}).value() == content_) << "one that is too long ends nothing";
  EXPECT_EQ(fetch({"b"}).error().code(), Code::kUnavailable);
  std::stop_source stopped;
  stopped.request_stop();
  options_.stop = stopped.get_token();
  EXPECT_EQ(fetch({"a"}).error().code(), Code::kCancelled);
}

TEST_F(FilePiecesTest, AnAnswerThatIsNoPieceIsPassedOver) {
  for (const char* answer :
       {"", "no JSON\n", "[]\n", "{}\n", "{\"bytes\": 3}", "{\"bytes\": 3, \"sum\": \"\"}\nfour",
        "{\"bytes\": 3, \"sum\": \"\"}\n", "{\"bytes\": 3, \"sum\": \"\"}\ntw"}) {
    const Result<std::string> refused = fetch_in_pieces(
        [&](const std::string&, const std::string&) { return Result<std::string>(answer); }, {"a"},
        name_, options_);
    ASSERT_TRUE(refused.has_error()) << answer;
    EXPECT_EQ(refused.error().code(), Code::kUnavailable) << answer;
  }
}

/// More than one message may have.
TEST_F(FilePiecesTest, OneOfMoreThanAMessage) {
  constexpr uint64_t kBytes = (uint64_t{256} << 20) + 5;
  put("a", "{");
  ASSERT_EQ(::truncate(path_of("a").c_str(), kBytes), 0);
  options_.piece = PieceSizes().piece;
  const Result<std::string> fetched = fetch({"a"});
  ASSERT_TRUE(fetched.has_value()) << fetched.error().message();
  EXPECT_EQ(fetched.value().size(), kBytes);
  EXPECT_EQ(asked_.size(), 65u);
  EXPECT_LE(longest_, options_.piece + 100);
}

TEST(FilePieces, WhatIsAskedForIsBounded) {
  const TempDir dir;
  const std::string path = dir.file("file");
  std::ofstream(path) << "0123456789";
  EXPECT_EQ(read_piece(path, {{"id", "file"}, 8, UINT64_MAX, false}).value(), "{\"bytes\":10}\n89");
  EXPECT_EQ(read_piece(path, {{"id", "file"}, 10, 5, false}).value(), "{\"bytes\":10}\n");
  EXPECT_EQ(read_piece(path, {{"id", "file"}, 11, 5, false}).error().code(),
            Code::kInvalidArgument);
  EXPECT_EQ(read_piece(path + "x", {}).error().code(), Code::kNotFound);
}

}  // namespace
}  // namespace ptc
