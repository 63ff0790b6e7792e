// The table of trees: each row knows its own and no other's, and a step at which it has nothing to
// do leaves all as it is.
#include "reshard/intake/tree_format.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <set>

#include "reshard/exec/executor.h"
#include "reshard/exec/thread_team.h"
#include "store/base/file.h"

namespace ptc {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;
using ::testing::UnorderedElementsAre;

/// A directory with files that have nothing of their kind in them.
class TreeOfNames {
 public:
  explicit TreeOfNames(const std::vector<std::string>& files)
      : path_(::testing::TempDir() + "tree-XXXXXX") {
    PTC_CHECK(::mkdtemp(path_.data()) != nullptr);
    for (const std::string& file : files) {
      fs::create_directories(fs::path(path_ + "/" + file).parent_path());
      std::ofstream(path_ + "/" + file) << "nothing";
    }
    directory_ = open_file(AT_FDCWD, path_, O_RDONLY | O_DIRECTORY).value();
    top_ = names_in(fd(), ".").value();
  }
  ~TreeOfNames() { fs::remove_all(path_); }
  TreeOfNames(const TreeOfNames&) = delete;
  TreeOfNames& operator=(const TreeOfNames&) = delete;

  int fd() const { return directory_.get(); }
  NamesThere names() const { return {fd(), top_}; }

 private:
  std::string path_;
  UniqueFd directory_;
  std::vector<std::string> top_;
};

/// What a row says of one tree, in the place of rank/.
struct NamedTree {
  const TreeFormat* tree;    // that has it
  const TreeFormat* reader;  // of its files
  std::vector<std::string> files;
  bool says_ranks = false;
};
const std::vector<NamedTree>& examples() {
  const TreeFormat *megatron = &megatron_trees(), *deepspeed = &deepspeed_trees(),
                   *sets = &safetensors_sets(), *dcp = &dcp_trees(), *plain = &plain_files();
  static const std::vector<NamedTree> all = {
      {megatron, plain, {"iter_0000100/mp_rank_00_001/model_optim_rng.pt"}, true},
      {megatron, plain, {"mp_rank_00/model_optim_rng.pt", "mp_rank_01/model_optim_rng.pt"}, true},
      {megatron,
       plain,
       {"release/mp_rank_00/model_optim_rng.pt", "latest_checkpointed_iteration.txt"},
       true},
      {deepspeed,
       deepspeed,
       {"global_step1/mp_rank_00_model_states.pt",
        "global_step1/zero_pp_rank_0_mp_rank_00_optim_states.pt", "latest"},
       true},
      {deepspeed, deepspeed, {"mp_rank_00_model_states.pt"}, true},
      {plain, sets, {"model.safetensors", "config.json"}},
      {plain, sets, {"model-00001-of-00001.safetensors", "model.safetensors.index.json"}},
      {dcp, dcp, {".metadata", "__0_0.distcp"}},
      {dcp, dcp, {"iter_0000100/.metadata", "iter_0000100/__0_0.distcp", "iter_0000100/common.pt"}},
      {plain, plain, {"pytorch_model.bin", "config.json"}},
  };
  return all;
}

std::vector<Found> found_in(const TreeOfNames& tree) {
  auto found = find_files(tree.fd());
  EXPECT_TRUE(found.has_value()) << found.error().message();
  return found.has_value() ? std::move(found).value() : std::vector<Found>();
}

Found file_in_place(const std::string& at) {
  Found file;
  file.path = file.at = at;
  return file;
}

std::string why(const Result<>& result) {
  return result.has_error() ? result.error().message() : "";
}

TEST(TreeFormats, HaveNamesOfTheirOwn) {
  std::set<std::string_view> names;
  for (const TreeFormat* tree : tree_formats()) EXPECT_TRUE(names.insert(tree->name()).second);
  EXPECT_EQ(tree_formats().size(), 5u);
  // What no other takes is the last's.
  EXPECT_EQ(tree_formats().back(), &plain_files());
}

TEST(TreeFormats, KnowTheirOwnTreesAlone) {
  for (const NamedTree& example : examples()) {
    SCOPED_TRACE(example.files.front());
    const TreeOfNames tree(example.files);
    const NamesThere names = tree.names();
    for (const TreeFormat* row : tree_formats()) {
      SCOPED_TRACE(row->name());
      // The last is for what is right there, whoever else has it.
      if (row == &plain_files() && row != example.tree) continue;
      EXPECT_EQ(row->is_there(names, false), row == example.tree);
    }
    EXPECT_EQ(find_tree([&](const TreeFormat& row) { return row.is_there(names, false); }),
              example.tree);
  }
  for (const char* other : {"weights/mp_rank/model.pt", "a/b/mp_rank_00_model_states.pt",
                            "a/b/.metadata", "iter_1/model.pt"}) {
    const TreeOfNames tree({other});
    const NamesThere names = tree.names();
    EXPECT_EQ(find_tree([&](const TreeFormat& row) { return row.is_there(names, false); }), nullptr)
        << other;
  }
}

TEST(TreeFormats, ReadTheirOwnFilesAlone) {
  for (const NamedTree& example : examples()) {
    SCOPED_TRACE(example.files.front());
    const TreeOfNames tree(example.files);
    const std::vector<Found> found = found_in(tree);
    for (const TreeFormat* row : tree_formats()) {
      SCOPED_TRACE(row->name());
      EXPECT_EQ(row->reads(found), row == example.reader || row == &plain_files());
      EXPECT_EQ(row->says_ranks(found), example.says_ranks && row == example.tree);
    }
    EXPECT_EQ(find_tree([&](const TreeFormat& row) { return row.reads(found); }), example.reader);
    EXPECT_NE(find_tree([&](const TreeFormat& row) {
                return std::any_of(found.begin(), found.end(),
                                   [&](const Found& file) { return row.shows(file); });
              }),
              nullptr);
  }
  EXPECT_EQ(find_tree([](const TreeFormat& row) { return row.shows(file_in_place("a/w.txt")); }),
            nullptr);
}

TEST(TreeFormats, SayTheirLayoutWhereItIsKnownByNames) {
  for (const NamedTree& example : examples()) {
    SCOPED_TRACE(example.files.front());
    const TreeOfNames tree(example.files);
    const std::vector<Found> found = found_in(tree);
    for (const TreeFormat* row : tree_formats()) {
      SCOPED_TRACE(row->name());
      const bool known = row == example.tree && (row == &deepspeed_trees() || row == &dcp_trees());
      for (const bool said : {false, true}) {
        const auto layout = row->layout(said, found);
        ASSERT_EQ(layout.has_value(), known);
        EXPECT_EQ(layout.value_or(LayoutSpec()).name(), "tp1-pp1-dp1");
      }
    }
  }
}

TEST(TreeFormats, GiveFilesNamesAndRanks) {
  const auto names_and_ranks = [](const TreeOfNames& tree) {
    std::vector<std::pair<uint64_t, std::string>> all;
    for (const Found& file : found_in(tree)) all.emplace_back(file.rank, file.path);
    return all;
  };
  for (const NamedTree& example : examples()) {
    SCOPED_TRACE(example.files.front());
    const TreeOfNames tree(example.files);
    if (example.tree == &megatron_trees()) continue;
    std::vector<std::pair<uint64_t, std::string>> same;
    for (const std::string& file : example.files) same.emplace_back(0, file);
    EXPECT_THAT(names_and_ranks(tree), ::testing::UnorderedElementsAreArray(same));
  }
  const std::vector<std::string> of_ranks = {"mp_rank_00/model_optim_rng.pt",
                                             "mp_rank_01/model_optim_rng.pt"};
  EXPECT_THAT(names_and_ranks(TreeOfNames(of_ranks)),
              UnorderedElementsAre(Pair(0, "model_optim_rng.pt"), Pair(1, "model_optim_rng.pt")));
  EXPECT_THAT(
      names_and_ranks(TreeOfNames({"rank/3/iter_0000100/mp_rank_01/model_optim_rng.pt",
                                   "rank/3/config.json", "rank/4/a/mp_rank_01/weights.pt"})),
      UnorderedElementsAre(Pair(3, "model_optim_rng.pt"), Pair(3, "config.json"),
                           Pair(4, "a/mp_rank_01/weights.pt")));
}

TEST(TreeFormats, APartWithoutTheRestIsRefused) {
  EXPECT_EQ(tree_of_part("__0_0.distcp"), &dcp_trees());
  for (const char* other : {".metadata", "model.safetensors", "model.pt", "rank", ""})
    EXPECT_EQ(tree_of_part(other), nullptr) << other;
  for (const char* name : {"__0_0.distcp", "iter_0000100/__0_0.distcp"}) {
    const TreeOfNames tree({name, "config.json"});
    // The rest may be on another node.
    const auto beside_others = find_files(tree.fd(), true);
    ASSERT_TRUE(beside_others.has_value()) << beside_others.error().message();
    EXPECT_EQ(beside_others.value().size(), 2u);
    EXPECT_EQ(find_tree([&](const TreeFormat& row) { return row.is_there(tree.names(), true); }),
              &dcp_trees());
    EXPECT_EQ(find_tree([&](const TreeFormat& row) { return row.reads(beside_others.value()); }),
              &dcp_trees());
  }
  const TreeOfNames tree({"__0_0.distcp", "config.json"});
  const auto found = find_files(tree.fd());
  ASSERT_TRUE(found.has_error());
  EXPECT_EQ(found.error().message(),
            "__0_0.distcp is of PyTorch's distributed checkpointing, and there is no .metadata "
            "beside it, on any node: the checkpoint is not complete");
}

TEST(TreeFormats, AFileWhereADirectoryBelongsIsRefused) {
  for (const char* file : {"rank", "rank/0"}) {
    const TreeOfNames tree({file});
    const auto found = find_files(tree.fd());
    ASSERT_TRUE(found.has_error()) << file;
    EXPECT_EQ(found.error().code(), Code::kInvalidArgument) << file;
    EXPECT_THAT(found.error().message(),
                ::testing::StartsWith(std::string(file) + " is no directory"));
  }
}

TEST(TreeFormats, AStepOfNoneLeavesAllAsItIs) {
  std::vector<Found> found = {file_in_place("weights/a.txt")};
  const Found& file = found.front();
  for (const TreeFormat* row : tree_formats()) {
    SCOPED_TRACE(row->name());
    LayoutSpec spec;
    EXPECT_EQ(why(row->name_files(false, found)), "");
    EXPECT_EQ(why(row->find_sets(-1, found)), "");
    EXPECT_EQ(why(row->join_sets(found)), "");
    EXPECT_EQ(why(row->check_names(found)), "");
    EXPECT_EQ(why(row->read_rest(-1, found)), "");
    EXPECT_EQ(why(row->settle(false, spec, found)), "");
    EXPECT_EQ(why(row->check_whole(found)), "");
    EXPECT_EQ(row->config(found, "{}"), "{}");
    EXPECT_EQ(row->config(found, ""), "");
    EXPECT_EQ(spec.name(), LayoutSpec().name());
    EXPECT_EQ(std::pair(file.path, file.at), std::pair(std::string("weights/a.txt"), file.path));
    EXPECT_EQ(file.rank, 0u);
    EXPECT_FALSE(file.has_tensors || file.index || file.by_stage);
  }
}

TEST(TreeFormats, OneRowAloneReadsAFileLater) {
  EXPECT_TRUE(is_read_later("distrib_optim.pt"));
  EXPECT_FALSE(is_read_later("model_optim_rng.pt"));
  for (const TreeFormat* row : tree_formats())
    EXPECT_EQ(row->is_read_later("distrib_optim.pt"), row == &megatron_trees());
}

/// Why a directory is no checkpoint, as a commit says it.
std::string why_refused(const TreeOfNames& tree) {
  CommitRequest request;
  request.dir_fd = tree.fd();
  HashCache hashes;
  Executor executor(1, nullptr);
  const auto draft = draft_commit(request, {}, executor, hashes, {});
  return draft.has_error() ? draft.error().message() : "";
}

TEST(TreeFormats, TwoAtOnceAreRefused) {
  const std::string megatron = "iter_0000100/mp_rank_00/model_optim_rng.pt",
                    deepspeed = "global_step1/mp_rank_00_model_states.pt";
  EXPECT_THAT(why_refused(TreeOfNames({megatron, "iter_0000200/mp_rank_00/model_optim_rng.pt"})),
              HasSubstr("are of two iterations, and a checkpoint is one: move one away"));
  EXPECT_THAT(why_refused(TreeOfNames({deepspeed, "global_step2/mp_rank_00_model_states.pt"})),
              HasSubstr("are of two checkpoints of DeepSpeed's: move one away"));
  for (const NamedTree& example : examples())
    EXPECT_THAT(why_refused(TreeOfNames({example.files.front(), "rank/0/model.safetensors"})),
                HasSubstr("is not under rank/<r>/: a process' files belong into rank/0/"));

  // DeepSpeed's row reads these, and what is in the other tree then has nothing that it must have.
  const TreeOfNames both({megatron, deepspeed});
  std::vector<Found> found = found_in(both);
  EXPECT_EQ(find_tree([&](const TreeFormat& row) { return row.reads(found); }), &deepspeed_trees());
  LayoutSpec spec;
  std::set<std::string> refusals;
  for (const TreeFormat* row : tree_formats())
    refusals.insert(why(row->settle(false, spec, found)));
  EXPECT_THAT(refusals,
              ElementsAre("", megatron + " is in a tree of Megatron's, and no file there has "
                                         "args, checkpoint_version and a model"));
}

}  // namespace
}  // namespace ptc
