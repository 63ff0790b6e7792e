// What several nodes wrote without rank/<r>/: it is one process', or refused. Each node knows only
// its own files.
#include <sys/stat.h>

#include <filesystem>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tests/reshard/cluster_fixture.h"
#include "tests/support/becomes.h"

namespace ptc::testing {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

class FlatTest : public ClusterTest {
 protected:
  FlatTest() {
    sample_ = llama_sample(false, 4);
    EXPECT_TRUE(cluster_.store(0).create_job("job").has_value());
  }

  void put(unsigned node, const std::string& name, const std::string& content) {
    write_file(incoming(node) + "/" + name, content);
  }
  void clear() {
    for (unsigned node = 0; node < 3; ++node) std::filesystem::remove_all(incoming(node));
  }
  /// As the rank has it; `torch`: as torch.save does.
  std::string slices(uint64_t rank, uint64_t ranks, bool torch = false) const {
    const LayoutSpec spec = spec_of(fmt::format(R"({{"tp": {}, "pp": 1, "dp": 1}})", ranks));
    std::vector<TensorEntry> entries;
    std::vector<std::string> bytes;
    for (const auto& [file, parts] : slow_rank(sample_, spec, rank))
      for (const auto& [name, part] : parts) {
        TensorEntry& entry = entries.emplace_back();
        entry.name = name;
        entry.dtype = part.dtype;
        for (const uint64_t extent : part.shape) entry.shape.push_back(extent);
        bytes.push_back(part.bytes);
      }
    return torch ? torch_file(entries, bytes) : safetensors_file(entries, bytes);
  }
  /// Every second tensor, whole.
  std::string half(size_t which) const {
    std::vector<TensorEntry> entries;
    std::vector<std::string> bytes;
    for (size_t i = which; i < sample_.tensors.size(); i += 2) {
      entries.push_back(
          {sample_.tensors[i].name, sample_.tensors[i].dtype, sample_.tensors[i].shape});
      bytes.push_back(sample_.bytes[i]);
    }
    return safetensors_file(entries, bytes);
  }
  static std::string shard_name(size_t which) {
    return fmt::format("model-0000{}-of-00002.safetensors", which + 1);
  }
  std::string index() const {
    std::string map;
    for (size_t i = 0; i < sample_.tensors.size(); ++i)
      map += fmt::format(R"({}"{}": "{}")", i == 0 ? "" : ",", sample_.tensors[i].name,
                         shard_name(i % 2));
    return "{\"weight_map\": {" + map + "}}";
  }
  /// Half of each tensor's rows, and where they belong, as PyTorch's writer says it.
  std::string rows(uint64_t which) const {
    std::vector<TensorEntry> entries;
    std::vector<std::string> bytes;
    std::string info;
    for (size_t i = 0; i < sample_.tensors.size(); ++i) {
      const TensorInfo& tensor = sample_.tensors[i];
      const uint64_t all = tensor.shape[0], first = which == 0 ? 0 : (all + 1) / 2;
      const uint64_t end = which == 0 ? (all + 1) / 2 : all;
      TensorEntry entry{tensor.name, tensor.dtype, tensor.shape};
      entry.shape[0] = end - first;
      const uint64_t row_bytes = sample_.bytes[i].size() / all;
      bytes.push_back(sample_.bytes[i].substr(first * row_bytes, (end - first) * row_bytes));
      std::string offsets = std::to_string(first);
      for (size_t axis = 1; axis < tensor.shape.size(); ++axis) offsets += ", 0";
      info += fmt::format(R"({}"{}": {{"saved_offsets": [{}]}})", info.empty() ? "" : ", ",
                          tensor.name, offsets);
      entries.push_back(std::move(entry));
    }
    return safetensors_file(entries, bytes, {{"DCP_SHARDING_INFO", "{" + info + "}"}});
  }

  std::string refusal(unsigned leader) {
    Result<> refused = cluster_.job(leader, "job")->commit("base", "base");
    EXPECT_TRUE(refused.has_error());
    return refused.has_error() ? refused.error().message() : "";
  }
  /// By whatever node leads, and it stays where it was.
  void expect_refused(const ::testing::Matcher<const std::string&>& why) {
    for (unsigned leader = 0; leader < 3; ++leader) {
      SCOPED_TRACE(fmt::format("led by w{}", leader));
      EXPECT_THAT(refusal(leader), why);
      EXPECT_EQ(cluster_.job(leader, "job")->find_checkpoint("base"), nullptr);
    }
  }
  /// Written anew for each: it is a single process' model.
  void expect_taken(const std::vector<unsigned>& leaders, const std::function<void()>& write_all) {
    for (const unsigned leader : leaders) {
      SCOPED_TRACE(fmt::format("led by w{}", leader));
      clear();
      write_all();
      commit(leader);
      cluster_.wait_settled();
      const CheckpointRef checkpoint = cluster_.job(2, "job")->find_checkpoint("base");
      ASSERT_NE(checkpoint, nullptr);
      EXPECT_EQ(checkpoint->manifest().written_spec.name(), "tp1-pp1-dp1");
      expect_model(*checkpoint, sample_);
      expect_layout(*checkpoint, sample_, spec_of(R"({"tp": 2, "pp": 1, "dp": 1})"));
      ASSERT_TRUE(cluster_.job(leader, "job")->remove_checkpoint("base").has_value());
      cluster_.wait_settled();
    }
  }
};

/// Each rank has saved its slices on its own node, into a file of its own name.
TEST_F(FlatTest, SlicesOfRanksOnTwoNodesAreRefused) {
  edit(0, R"({"tp": 2, "pp": 1, "dp": 1, "keep": 1})");
  cluster_.wait_settled();
  for (const auto& [first, second] :
       {std::pair("model_rank0.safetensors", "model_rank1.safetensors"),
        std::pair("left.safetensors", "right.safetensors"), std::pair("rank0.pt", "rank1.pt"),
        std::pair("left.pth", "right.pth"), std::pair("rank0.pt", "rank1.safetensors"),
        std::pair("part-1-of-1.safetensors", "part-2-of-2.safetensors")}) {
    SCOPED_TRACE(first);
    clear();
    put(0, first, slices(0, 2, !std::string_view(first).ends_with("s")));
    put(1, second, slices(1, 2, !std::string_view(second).ends_with("s")));
    put(0, "config.json", sample_.config);
    expect_refused(AllOf(HasSubstr("may be of several ranks"),
                         HasSubstr(fmt::format("{} on node w0", first)),
                         HasSubstr(fmt::format("{} on node w1", second)), HasSubstr("rank/1/")));
  }
}

/// Numbers make a set of them; what they hold does not.
TEST_F(FlatTest, SlicesWithNumbersOfShardsAreRefused) {
  edit(0, R"({"tp": 2, "pp": 1, "dp": 1})");
  cluster_.wait_settled();
  for (const std::string ending : {".safetensors", ".bin"}) {
    SCOPED_TRACE(ending);
    for (const unsigned second : {1u, 0u}) {
      clear();
      for (const uint64_t rank : {0, 1})
        put(rank == 0 ? 0 : second, fmt::format("model-0000{}-of-00002{}", rank + 1, ending),
            slices(rank, 2, ending == ".bin"));
      if (second == 1) {
        expect_refused(AllOf(HasSubstr("model-00001-of-00002" + ending + " on node w0"),
                             HasSubstr("they may be of several ranks")));
      } else {
        EXPECT_THAT(refusal(0), AllOf(HasSubstr("model-00001-of-00002" + ending + ":"),
                                      HasSubstr("they may be of several ranks")));
      }
    }
  }
  // Of those that are cut into as many rows and columns only values tell.
  const auto of_one = [](const std::string& bytes) {
    return safetensors_file({{"w", DType::kF32, {2}}}, {bytes});
  };
  clear();
  put(0, shard_name(0), of_one("aaaabbbb"));
  put(1, shard_name(1), of_one("ccccdddd"));
  expect_refused(AllOf(HasSubstr("w has other values in " + shard_name(1) + " on node w1 than in " +
                                 shard_name(0) + " on node w0"),
                       HasSubstr("rank/1/")));
  for (const std::string ending : {".safetensors", ".bin"}) {
    clear();
    put(0, "model-00001-of-00002" + ending, slices(0, 1, ending == ".bin"));
    expect_refused(HasSubstr("is missing"));
  }
}

TEST_F(FlatTest, TwoIndexesAreOfTwoRanks) {
  for (const unsigned second : {1u, 0u}) {
    clear();
    for (const unsigned rank : {0u, 1u}) {
      const std::string name = fmt::format("model_rank{}.safetensors", rank);
      const unsigned node = rank == 0 ? 0 : second;
      put(node, name, safetensors_file({{"w", DType::kF32, {1}}}, {std::string(4, '0')}));
      put(node, name + ".index.json", R"({"weight_map": {"w": ")" + name + R"("}})");
    }
    EXPECT_THAT(refusal(0), HasSubstr(second == 1 ? "model_rank0.safetensors on node w0 and "
                                                    "model_rank1.safetensors on node w1 may be"
                                                  : "model_rank0.safetensors and "
                                                    "model_rank1.safetensors may be"));
  }
}

TEST_F(FlatTest, ASetMayBeWrittenOnAnyNode) {
  edit(0, R"({"tp": 2, "pp": 1, "dp": 1})");
  cluster_.wait_settled();
  const auto shards = [&] {
    put(0, shard_name(0), half(0));
    put(1, shard_name(1), half(1));
    put(0, "config.json", sample_.config);
  };
  const auto with_index_on = [&](std::vector<unsigned> nodes) {
    return [&, nodes = std::move(nodes)] {
      shards();
      for (const unsigned node : nodes) put(node, "model.safetensors.index.json", index());
    };
  };
  expect_taken({0, 1}, with_index_on({0}));
  expect_taken({0}, with_index_on({1}));
  expect_taken({1}, with_index_on({2}));
  expect_taken({2}, with_index_on({0, 1}));
  clear();
  shards();
  put(0, "model.safetensors.index.json", index());
  std::filesystem::remove(incoming(1) + "/" + shard_name(1));
  std::filesystem::remove(incoming(1));
  expect_refused(HasSubstr("names the shard " + shard_name(1) + ", which is missing"));
  // Without an index each is a file of its own, of all of them by their numbers.
  for (size_t i = 0; i < sample_.tensors.size(); ++i) sample_.tensors[i].file = shard_name(i % 2);
  expect_taken({0, 2}, shards);
}

TEST_F(FlatTest, ShardsThatSayTheirPartsMayBeWrittenOnAnyNode) {
  edit(0, R"({"tp": 2, "pp": 1, "dp": 1})");
  cluster_.wait_settled();
  expect_taken({0, 1, 2}, [&] {
    put(0, "shard-00001-model-00001-of-00001.safetensors", rows(0));
    put(1, "shard-00002-model-00001-of-00001.safetensors", rows(1));
    put(1, "config.json", sample_.config);
  });
}

/// As Hugging Face's Trainer leaves it: the first node has the model, each its ranks' states.
TEST_F(FlatTest, WhatIsNoWeightsMayLieOnAnyNode) {
  edit(0, R"({"tp": 2, "pp": 1, "dp": 1})");
  cluster_.wait_settled();
  const auto beside = [&] {
    for (unsigned rank = 0; rank < 6; ++rank)
      put(rank / 2, fmt::format("rng_state_{}.pth", rank), fmt::format("state of {}", rank));
    put(2, "logs/of-rank-4.txt", "x");
  };
  expect_taken({0, 1, 2}, [&] {
    put(0, "model.safetensors", slices(0, 1));
    put(0, "config.json", sample_.config);
    put(0, "trainer_state.json", "{}");
    beside();
  });
  clear();
  beside();
  expect_refused(AllOf(HasSubstr("is not under rank/<r>/"), HasSubstr("on node w")));
  use_torch_files(sample_);
  expect_taken({0, 1, 2}, [&] {
    put(1, "model.pt", slices(0, 1, true));
    put(0, "config.json", sample_.config);
    beside();
  });
}

/// Trainers make the directory on every node, and not all write into it.
TEST_F(FlatTest, NodesWithoutFilesHoldNothingUp) {
  edit(0, R"({"tp": 2, "pp": 1, "dp": 1})");
  cluster_.wait_settled();
  const auto one_process = [&](unsigned node, const std::string& below) {
    put(node, below + "model.safetensors", slices(0, 1));
    put(node, below + "config.json", sample_.config);
  };
  const auto make = [&](unsigned node, const std::string& below) {
    std::filesystem::create_directories(incoming(node) + "/" + below);
  };
  expect_taken({0, 1, 2}, [&] {
    one_process(0, "");
    make(1, "");
    make(2, "logs/deeper");
  });
  const std::string one = R"({"tp": 1, "pp": 1, "dp": 1})";
  expect_taken({0, 1, 2}, [&] {
    one_process(0, "rank/0/");
    make(1, "rank/1");
    put(1, "layout.json", one);
    make(2, "");
  });
  expect_taken({0, 2}, [&] {
    one_process(0, "");
    put(1, "layout.json", one);
    put(2, "logs/events", "x");
  });
  clear();
  make(0, "rank");
  make(1, "");
  for (unsigned leader = 0; leader < 2; ++leader)
    EXPECT_THAT(refusal(leader),
                AnyOf(HasSubstr("no node has a file of it"), HasSubstr("rank/ holds no files"),
                      HasSubstr("there is no rank/ directory")));
  clear();
  make(0, "");
  put(1, "rank/0/other/notes.txt", "x");
  EXPECT_THAT(refusal(0), HasSubstr("there is no tensor in it"));
}

TEST_F(FlatTest, WhatIsNoFileIsNotLeftOutInSilence) {
  const auto link = [&](unsigned node, const std::string& name) {
    std::filesystem::create_directories(incoming(node));
    std::filesystem::create_symlink("/etc/hostname", incoming(node) + "/" + name);
  };
  for (const unsigned other : {1u, 0u}) {
    clear();
    put(1 - other, "model.safetensors", slices(0, 1));
    link(other, "optimizer.pt");
    EXPECT_THAT(refusal(0), HasSubstr("optimizer.pt is a symbolic link"));
    EXPECT_TRUE(std::filesystem::is_symlink(incoming(other) + "/optimizer.pt"));
    clear();
    put(1 - other, "rank/0/model.safetensors", slices(0, 1));
    ASSERT_EQ(
        ::mkfifo((std::filesystem::create_directories(incoming(other)), incoming(other) + "/pipe")
                     .c_str(),
                 0600),
        0);
    EXPECT_THAT(refusal(0), HasSubstr("pipe is no ordinary file"));
  }
}

TEST_F(FlatTest, SomeUnderRankAndSomeNotAreRefused) {
  edit(0, R"({"tp": 1, "pp": 1, "dp": 2})");
  cluster_.wait_settled();
  put(0, "model.safetensors", slices(0, 1));
  put(1, "rank/0/other.safetensors", slices(0, 1));
  expect_refused(AllOf(HasSubstr("'model.safetensors' on node w0 is not under rank/<r>/"),
                       HasSubstr("rank/0/other.safetensors on node w1")));
  clear();
  put(0, "iter_0000100/mp_rank_00/model_optim_rng.pt", slices(0, 1, true));
  put(1, "model.pt", slices(0, 1, true));
  EXPECT_THAT(refusal(0),
              AllOf(HasSubstr("model.pt on node w1"), HasSubstr("may be of several ranks")));
}

/// A rank that the layout has not, whichever node has its file.
TEST_F(FlatTest, RanksBeyondTheLayoutAreRefused) {
  edit(0, R"({"tp": 2, "pp": 1, "dp": 1})");
  cluster_.wait_settled();
  for (const unsigned other : {1u, 0u}) {
    SCOPED_TRACE(other);
    clear();
    put(0, "rank/0/model.safetensors", slices(0, 2));
    put(1, "rank/1/model.safetensors", slices(1, 2));
    put(other, "rank/2/model.safetensors", slices(1, 2));
    expect_refused(HasSubstr("rank/2 does not exist in layout tp2-pp1-dp1, which has 2 ranks"));
    std::filesystem::remove_all(incoming(other) + "/rank/2");
    put(other, "rank/184467440737095516/model.safetensors", slices(1, 2));
    expect_refused(HasSubstr("184467440737095516"));
  }
}

/// Neither what ptcfs shows of a checkpoint, nor ranks in a folder of their own, on whatever node.
TEST_F(FlatTest, CopiesOfCheckpointsAreRefused) {
  for (const unsigned other : {1u, 0u}) {
    SCOPED_TRACE(other);
    clear();
    put(other, "model.safetensors", slices(0, 1));
    put(other, "step1/rank/1/model.safetensors", slices(1, 2));
    EXPECT_THAT(refusal(0), AllOf(HasSubstr("step1/rank/1/model.safetensors"),
                                  HasSubstr("is of a rank"), HasSubstr("commit step1/rank/")));
    clear();
    put(other, "model.safetensors", slices(0, 1));
    put(other, "copy/hf/model.safetensors", slices(0, 1));
    put(other, "copy/meta.json", R"({"format": "ptc-checkpoint/1", "name": "base"})");
    EXPECT_THAT(refusal(0), HasSubstr("copy/meta.json and copy/hf/ are of a checkpoint's own"));
    put(other, "copy/meta.json", R"({"format": "of another program"})");
    Result<> taken = cluster_.job(0, "job")->commit("base", "base");
    ASSERT_TRUE(taken.has_value()) << taken.error().message();
    Result<> removed = cluster_.job(0, "job")->remove_checkpoint("base");
    ASSERT_TRUE(removed.has_value()) << removed.error().message();
  }
}

/// Whatever their names are.
TEST_F(FlatTest, TwoFilesOfOneProcessDoNotHoldAParameterTwice) {
  const auto file = [](Shape shape, DType dtype, char value) {
    std::string bytes(value == 'h' ? 4 : 8, value);
    return safetensors_file({{"w", dtype, std::move(shape)}}, {bytes});
  };
  put(0, "left.safetensors", file({2}, DType::kF32, 'a'));
  put(0, "right.safetensors", file({2, 1}, DType::kF32, 'a'));
  EXPECT_THAT(refusal(0), AllOf(HasSubstr("w is [2] in left.safetensors and [2, 1] in "
                                          "right.safetensors: they may be of several ranks"),
                                HasSubstr("if a single process wrote both, into rank/0/")));
  put(0, "right.safetensors", file({2}, DType::kF32, 'b'));
  EXPECT_THAT(refusal(0), HasSubstr("w has other values in right.safetensors than in "
                                    "left.safetensors: they may be of several ranks"));
  // The same once more, a copy of another type, and what lies in another directory.
  put(0, "right.safetensors", file({2}, DType::kF32, 'a'));
  put(0, "half.safetensors", file({2}, DType::kF16, 'h'));
  put(0, "average/left.safetensors", file({2}, DType::kF32, 'b'));
  commit(0);
}

}  // namespace
}  // namespace ptc::testing
