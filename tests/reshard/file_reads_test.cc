// What a commit reads of files on this node and on others.
#include "reshard/intake/file_reads.h"

#include <fcntl.h>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/store/temp_dir.h"
#include "tests/support/job_fixture.h"

namespace ptc::testing {
namespace {

using ::testing::HasSubstr;

/// rank/0/a and rank/0/b on a node that is asked through read_parts().
class FileReadsTest : public ::testing::Test {
 protected:
  FileReadsTest() {
    content_.resize(300'000);
    for (size_t i = 0; i < content_.size(); ++i) content_[i] = static_cast<char>(i * i / 7);
    write_file(dir_.path() / "rank/0/a", content_);
    write_file(dir_.path() / "rank/0/b", "b");
    fd_ = UniqueFd(::open(dir_.path().c_str(), O_RDONLY | O_DIRECTORY));
    found_ = find_files(fd_.get(), true).value();
    for (uint32_t i = 0; i < found_.size(); ++i) {
      found_[i].node = &node_;
      found_[i].number = i;
    }
  }

  TempDir dir_;
  UniqueFd fd_;
  ListedFiles listed_;
  std::string content_;
  FilesElsewhere node_{"w1", ""};
  std::vector<Found> found_;
  Executor executor_{2, nullptr};
  std::vector<size_t> asked_;  // bytes of each question
  const AskToRead ask_ = [this](const std::vector<std::string>& nodes,
                                const std::vector<std::string>& requests) {
    std::vector<Result<std::string>> answers;
    for (size_t i = 0; i < nodes.size(); ++i) {
      EXPECT_EQ(nodes[i], "w1");
      asked_.push_back(requests[i].size());
      answers.push_back(read_parts(fd_.get(), listed_, requests[i], executor_, {}));
    }
    return answers;
  };
  const FileReader reader_{-1, ask_, executor_, {}};
};

TEST_F(FileReadsTest, ManyAreSeveralQuestions) {
  FileReads reads{&found_[0], {}, {}}, others{&found_[1], {}, {{0, 1}}};
  for (size_t i = 0; i < 2 * FileReader::kMostAsked + 5; ++i) reads.ranges.push_back({i, i % 3});
  const auto parts = reader_.read({reads, others});
  ASSERT_TRUE(parts.has_value()) << parts.error().message();
  EXPECT_EQ(asked_.size(), 3u);
  for (size_t i = 0; i < reads.ranges.size(); ++i)
    ASSERT_EQ(parts.value()[0].ranges[i], content_.substr(i, i % 3)) << i;
  EXPECT_EQ(parts.value()[1].ranges[0], "b");
}

TEST_F(FileReadsTest, SmallReadsAreOneQuestion) {
  EXPECT_EQ(reader_.text_of(found_[0]).value(), content_);
  asked_.clear();
  const ReadAt read = reader_.open(found_[0]).value();
  const auto expect_read = [&](uint64_t offset, size_t length) {
    std::string bytes(length, '\0');
    ASSERT_TRUE(read(offset, std::as_writable_bytes(std::span(bytes))).has_value());
    EXPECT_EQ(bytes, content_.substr(offset, length)) << offset;
  };
  for (uint64_t offset = 0; offset < 60'000; offset += 1'000) expect_read(offset, 30);
  EXPECT_EQ(asked_.size(), 1u);
  expect_read(65'530, 20);  // over the end of a block
  EXPECT_EQ(asked_.size(), 2u);
  expect_read(70'000, 200'000);
  expect_read(299'990, 10);
  expect_read(0, content_.size());
  std::string bytes(20, '\0');
  EXPECT_TRUE(read(299'990, std::as_writable_bytes(std::span(bytes))).has_error());
}

TEST_F(FileReadsTest, WhatIsNotThereIsRefused) {
  const auto why = [&](const std::string& request) {
    const auto answer = read_parts(fd_.get(), listed_, request, executor_, {});
    return answer.has_error() ? answer.error().message() : "answered";
  };
  EXPECT_EQ(why(R"({"files": [[0, 300000]], "arrays": [], "ranges": [[0, 299999, 1]]})"),
            "answered");
  for (const auto& [request, reason] : std::initializer_list<std::pair<const char*, const char*>>{
           {R"({"files": [[0, 300000]], "arrays": [], "ranges": [[0, 299999, 2]]})", "is not in"},
           {R"({"files": [[0, 300000]], "arrays": [], "ranges": [[0, 18446744073709551615, 2]]})",
            "is not in"},
           {R"({"files": [[0, 300000]], "arrays": [], "ranges": [[0, 0, 67108865]]})",
            "more than 67108864 bytes"},
           {R"({"files": [[0, 300000]], "arrays": [], "ranges": [[1, 0, 1]]})", "is damaged"},
           {R"({"files": [[2, 300000]], "arrays": [], "ranges": []})", "is damaged"},
           {R"({"files": [[0, 1]], "arrays": [], "ranges": []})", "was written while"},
           {R"({"files": [[0, 300000]], "arrays": [[0, 1, 300000, "F32", [1]]], "ranges": []})",
            "an item is not in"},
           {R"({"files": [[0, 300000]], "ranges": [],
                "arrays": [[0, 0, 9, "F32", [9223372036854775808, 4]]]})",
            ""},
           {R"({"files": [[0, 300000]], "arrays": [[0, 0, 9, "what", [1]]], "ranges": []})", ""},
           {R"([])", "no JSON object"},
           {"", ""}}) {
    EXPECT_THAT(why(request), HasSubstr(reason)) << request;
    EXPECT_NE(why(request), "answered") << request;
  }
}

/// A node says where an array is; what cannot be is not believed.
TEST_F(FileReadsTest, AnswersAreChecked) {
  std::string answer;
  const AskToRead said = [&](const std::vector<std::string>&, const std::vector<std::string>&) {
    return std::vector<Result<std::string>>{answer};
  };
  const FileReader reader(-1, said, executor_, {});
  const FileReads reads{&found_[0], {{{0, 0, 100}, DType::kF32, Shape{5}}}, {{0, 3}}};
  const auto read_with = [&](const std::string& text) {
    answer = text;
    return reader.read({reads});
  };
  const auto good = read_with("{\"arrays\": [[64, 20]]}\nabc");
  ASSERT_TRUE(good.has_value()) << good.error().message();
  EXPECT_EQ(good.value()[0].arrays[0].offset, 64u);
  EXPECT_EQ(good.value()[0].ranges[0], "abc");
  EXPECT_EQ(read_with("{\"arrays\": [\"it is none\"]}\nabc").value()[0].arrays[0].problem,
            "it is none");
  EXPECT_FALSE(read_with("{\"arrays\": [null]}\nabc").value()[0].arrays[0].contiguous);
  for (const char* bad :
       {"{\"arrays\": [[64, 20]]}\nab", "{\"arrays\": []}\nabc", "{\"arrays\": [[64, 24]]}\nabc",
        "{\"arrays\": [[299981, 20]]}\nabc", "{\"arrays\": [[64]]}\nabc", "{}\nabc", "", "[]"}) {
    const auto read = read_with(bad);
    ASSERT_TRUE(read.has_error()) << bad;
    EXPECT_EQ(read.error().code(), Code::kCorrupt) << bad;
    EXPECT_THAT(read.error().message(), HasSubstr("node w1")) << bad;
  }
}

}  // namespace
}  // namespace ptc::testing
