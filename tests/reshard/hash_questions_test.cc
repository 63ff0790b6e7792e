// A commit of what two nodes have, by the functions with which they ask each other, without jobs:
// what one is asked to hash, some of it at a time.
#include "reshard/intake/hash_questions.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <chrono>
#include <filesystem>

#include "reshard/intake/file_reads.h"
#include "tests/reshard/saved_trees.h"
#include "tests/support/job_fixture.h"

namespace ptc::testing {
namespace {

using ::testing::HasSubstr;

/// w0, which leads, and w1, each with a directory that is committed.
class HashQuestionsTest : public ::testing::Test {
 protected:
  std::string here() const { return (dir_.path() / "w0").string(); }
  std::string there() const { return (dir_.path() / "w1").string(); }
  static UniqueFd opened(const std::string& path) {
    std::filesystem::create_directories(path);
    return open_file(AT_FDCWD, path, O_RDONLY | O_DIRECTORY).value();
  }

  Result<CommitDraft> draft(size_t at_once, const LayoutSpec& spec = {}) {
    const UniqueFd own = opened(here()), other = opened(there());
    asked_ = 0;
    longest_ = 0;
    ListedFiles listed;
    FilesToHash to_hash;
    CommitRequest request{.dir_fd = own.get(), .name = "incoming/base", .node = "w0"};
    request.in_force = spec;
    request.hashed_at_once = at_once;
    request.read_elsewhere = [&](const std::vector<std::string>& nodes,
                                 const std::vector<std::string>& requests) {
      std::vector<Result<std::string>> answers;
      for (size_t i = 0; i < nodes.size(); ++i)
        answers.push_back(read_parts(other.get(), listed, requests[i], executor_, {}));
      return answers;
    };
    request.hash_elsewhere = [&](const std::vector<std::string>& first,
                                 const CommitRequest::NextToHash& next) {
      std::vector<Result<std::string>> answers;
      for (std::optional<std::string> question = first.at(0); question;) {
        ++asked_;
        answers.assign(1, answer_(*question, [&](const std::string& text) {
                         return hash_files(other.get(), to_hash, text, executor_, there_hashes_,
                                           {});
                       }));
        longest_ = std::max(
            {longest_, question->size(), answers[0].has_value() ? answers[0].value().size() : 0});
        question = next(0, answers[0]);
      }
      return answers;
    };
    PTC_TRY(std::string list, list_files(other.get()));
    return draft_commit(request, {{"w1", std::move(list)}}, executor_, hashes_, {});
  }

  static void expect_same(const CommitDraft& a, const CommitDraft& b) {
    EXPECT_EQ(a.headers, b.headers);
    EXPECT_EQ(a.sources, b.sources);
    const auto hex = [](const std::vector<Checksum>& sums) {
      std::vector<std::string> texts;
      for (const Checksum& sum : sums) texts.push_back(sum.to_hex());
      return texts;
    };
    EXPECT_EQ(hex(a.manifest.checksums), hex(b.manifest.checksums));
    ASSERT_EQ(a.manifest.files.size(), b.manifest.files.size());
    for (size_t i = 0; i < a.manifest.files.size(); ++i)
      EXPECT_EQ(a.manifest.files[i].checksum.to_hex(), b.manifest.files[i].checksum.to_hex());
    ASSERT_EQ(a.manifest.padding.size(), b.manifest.padding.size());
    for (size_t i = 0; i < a.manifest.padding.size(); ++i) {
      EXPECT_EQ(a.manifest.padding[i].local, b.manifest.padding[i].local);
      EXPECT_EQ(a.manifest.padding[i].checksum.to_hex(), b.manifest.padding[i].checksum.to_hex());
    }
  }

  /// Rank 0 of two is here, rank 1 there, and some files without tensors.
  LayoutSpec write_two_ranks() {
    const LayoutSpec spec = Layout::parse(R"({"tp": 2, "pp": 1, "dp": 1})").value().spec;
    write_ranks(sample_, spec, here());
    std::filesystem::create_directories(there() + "/rank");
    std::filesystem::rename(here() + "/rank/1", there() + "/rank/1");
    for (int i = 0; i < 5; ++i)
      write_file(fmt::format("{}/rank/1/note-{}.txt", there(), i), fmt::format("note {}", i));
    return spec;
  }

  using Hash = std::function<Result<std::string>(const std::string& question)>;
  std::function<Result<std::string>(const std::string& question, const Hash& hash)> answer_ =
      [](const std::string& question, const Hash& hash) { return hash(question); };
  size_t asked_ = 0, longest_ = 0;  // questions; bytes of the longest, or of the longest answer
  TempDir dir_;
  Sample sample_ = llama_sample(false, 4);
  Executor executor_{2, nullptr};
  HashCache hashes_, there_hashes_;
};

TEST_F(HashQuestionsTest, SomeAtATimeAreWhatAllAre) {
  const LayoutSpec spec = write_two_ranks();
  const auto at_once = draft(1 << 15, spec);
  ASSERT_TRUE(at_once.has_value()) << at_once.error().message();
  EXPECT_EQ(asked_, 1u);
  for (const size_t most : {1, 2, 3, 7, 10}) {
    SCOPED_TRACE(most);
    const auto drafted = draft(most, spec);
    ASSERT_TRUE(drafted.has_value()) << drafted.error().message();
    EXPECT_GT(asked_, 1 + sample_.tensors.size() / most / 4);
    EXPECT_LT(longest_, 400 * (most + 1));
    expect_same(drafted.value(), at_once.value());
  }
}

/// What lies where in its files the other is told.
TEST_F(HashQuestionsTest, OfFilesOfWhichOthersSayWhatIsInThem) {
  const auto saved = dcp_files(sample_.tensors, sample_.bytes, 3);
  for (const auto& [name, content] : saved)
    write_file((name.ends_with("0.distcp") ? there() : here()) + "/" + name, content);
  for (const auto& [name, content] : saved)
    if (name != ".metadata") {
      std::filesystem::remove(here() + "/" + name);
      write_file(there() + "/" + name, content);
    }
  write_file(here() + "/config.json", sample_.config);
  const auto at_once = draft(1 << 15);
  ASSERT_TRUE(at_once.has_value()) << at_once.error().message();
  EXPECT_EQ(asked_, 1u);
  for (const size_t most : {1, 5, 9}) {
    SCOPED_TRACE(most);
    const auto drafted = draft(most);
    ASSERT_TRUE(drafted.has_value()) << drafted.error().message();
    EXPECT_GT(asked_, sample_.tensors.size() / most);
    expect_same(drafted.value(), at_once.value());
  }
}

TEST_F(HashQuestionsTest, ANodeThatEndsBetweenTwoQuestionsIsAskedNothingMore) {
  const LayoutSpec spec = write_two_ranks();
  answer_ = [&](const std::string& question, const Hash& hash) -> Result<std::string> {
    if (asked_ == 3) return make_error(Code::kUnavailable, "node w1: it is gone");
    return hash(question);
  };
  const auto lost = draft(3, spec);
  ASSERT_TRUE(lost.has_error());
  EXPECT_EQ(lost.error().code(), Code::kUnavailable);
  EXPECT_EQ(lost.error().message(), "node w1: it is gone");
  EXPECT_EQ(asked_, 3u);
  answer_ = [](const std::string& question, const Hash& hash) { return hash(question); };
  EXPECT_TRUE(draft(3, spec).has_value());
}

/// Each answer is one to its own question.
TEST_F(HashQuestionsTest, AnswersOfOtherQuestionsAreRefused) {
  const LayoutSpec spec = write_two_ranks();
  std::string before;
  answer_ = [&](const std::string& question, const Hash& hash) -> Result<std::string> {
    if (asked_ == 3) return before;
    auto answer = hash(question);
    before = answer.value();
    return answer;
  };
  for (const size_t most : {2, 3}) {
    const auto drafted = draft(most, spec);
    // One as long, of arrays that have as many parts, is known by its sums alone.
    if (drafted.has_value()) continue;
    EXPECT_EQ(drafted.error().code(), Code::kCorrupt) << drafted.error().message();
    EXPECT_THAT(drafted.error().message(), HasSubstr("node w1: its checksums are"));
  }
  answer_ = [&](const std::string&, const Hash&) -> Result<std::string> {
    return std::string(R"({"files": []})");
  };
  const auto nothing = draft(3, spec);
  ASSERT_TRUE(nothing.has_error());
  EXPECT_THAT(nothing.error().message(), HasSubstr("node w1: its checksums are not of rank/1/"));
}

/// A directory is gone through once for all questions, and anew once something was wrong.
TEST_F(HashQuestionsTest, FilesAreLookedForOnce) {
  const LayoutSpec spec = write_two_ranks();
  answer_ = [&](const std::string& question, const Hash& hash) {
    // It comes before all others, and would move their numbers.
    if (asked_ == 2) write_file(there() + "/rank/1/a", "a");
    return hash(question);
  };
  const auto drafted = draft(3, spec);
  EXPECT_TRUE(drafted.has_value()) << drafted.error().message();
  EXPECT_GT(asked_, 3u);
}

/// What nodes say to each other stays as long as it is for a few, and so does what they need.
TEST_F(HashQuestionsTest, AHundredThousandArrays) {
  constexpr uint64_t kArrays = 100'000;
  using Time = std::chrono::steady_clock;
  {
    std::vector<DcpNewTensor> tensors(kArrays);
    std::vector<std::vector<std::string>> contents(kArrays);
    for (uint64_t i = 0; i < kArrays; ++i) {
      tensors[i].name = fmt::format("table.{}", i);
      tensors[i].shape = Shape{2};
      tensors[i].chunks = {Box::whole(Shape{2})};
      contents[i] = {fmt::format("{:08}", i)};
    }
    for (const auto& [name, content] : dcp_files(tensors, {}, contents, 100 << 20))
      write_file((name == ".metadata" ? here() : there()) + "/" + name, content);
  }
  const Time::time_point begin = Time::now();
  const auto drafted = draft(1 << 15);
  const std::chrono::duration<double> took = Time::now() - begin;
  ASSERT_TRUE(drafted.has_value()) << drafted.error().message();
  struct rusage usage {};
  ::getrusage(RUSAGE_SELF, &usage);
  fmt::print("{} arrays: {} questions, at most {} KiB each; {:.1f} s, {} MiB at most\n", kArrays,
             asked_, longest_ >> 10, took.count(), usage.ru_maxrss >> 10);
  EXPECT_EQ(drafted.value().manifest.checksums.size(), kArrays);
  EXPECT_GE(asked_, 2 * kArrays >> 15);
  EXPECT_LT(longest_, 8u << 20);
}

}  // namespace
}  // namespace ptc::testing
