// What a framework's processes saved together, each into its own node's incoming/: the nodes have
// some of its files each, and one of them what says of all what is in them.
#include <array>
#include <atomic>
#include <deque>
#include <filesystem>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "store/codec/pickle_writer.h"
#include "store/codec/torch_compose.h"
#include "tests/reshard/cluster_fixture.h"
#include "tests/reshard/saved_buckets.h"
#include "tests/reshard/saved_trees.h"
#include "tests/support/becomes.h"

namespace ptc::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// Of torch.save's, with zeros in its tensors.
class ZerosFile {
 public:
  using Kind = TorchStep::Kind;
  static TorchStep key(std::string_view name) { return {Kind::kKey, std::string(name), 0}; }
  void add(std::vector<TorchStep> path, Shape shape) {
    values_.push_back({std::move(path)});
    values_.back().dtype = DType::kF32;
    values_.back().shape = shape;
  }
  /// `opcodes`: of a pickle.
  void add(std::vector<TorchStep> path, const std::string& opcodes) {
    texts_.push_back("\x80\x02" + opcodes + ".");
    pickles_.push_back(Pickle::parse(texts_.back()).value());
    values_.push_back({std::move(path), &pickles_.back(), pickles_.back().root()});
  }
  std::string bytes() const {
    const TorchLayout made = compose_torch_file(values_).value();
    std::string file(made.zip.file_bytes, '\0');
    for (const ZipWriter::Piece& piece : made.zip.pieces)
      file.replace(piece.offset, piece.bytes.size(), piece.bytes);
    return file;
  }

 private:
  std::vector<TorchPathValue> values_;
  std::deque<std::string> texts_;
  std::deque<Pickle> pickles_;
};

/// A stage of two, with the distributed optimizer's state, as Megatron-LM saves it.
void write_megatron_stage(const std::string& directory, char stage) {
  const auto text = [](std::string_view value) {
    return std::string("U") + static_cast<char>(value.size()) + std::string(value);
  };
  ZerosFile model, state;
  model.add({ZerosFile::key("args")}, "cargparse\nNamespace\n)\x81}(" + text("num_layers") + "K\2" +
                                          text("pipeline_model_parallel_size") + "K\2ub");
  model.add({ZerosFile::key("checkpoint_version")}, "K\3");
  model.add({ZerosFile::key("note")}, std::string("K") + stage);
  model.add({ZerosFile::key("model"), ZerosFile::key("decoder.layers.0.input_layernorm.weight")},
            Shape{10});
  const TorchStep buffer{ZerosFile::Kind::kNumberKey, {}, 0},
      types{ZerosFile::Kind::kTypesKey, "torch.float32,torch.float32", 0};
  state.add({ZerosFile::key("buckets_coalesced")}, "\x88");
  for (const char* key : {"param", "exp_avg", "exp_avg_sq"})
    state.add({buffer, types, ZerosFile::key(key)}, Shape{10});
  std::filesystem::create_directories(directory);
  write_file(directory + "/model_optim_rng.pt", model.bytes());
  write_file(directory + "/distrib_optim.pt", state.bytes());
}

/// What Megatron-LM says of itself beside torch_dist's: names of its arguments, and each one's
/// number.
template <class... Arguments>
std::string common_file(const Arguments&... named) {
  std::string opcodes = "cargparse\nNamespace\n)\x81}(";
  const auto add = [&](const auto& one) {
    if constexpr (std::is_integral_v<std::decay_t<decltype(one)>>) {
      opcodes += std::string("M") + static_cast<char>(one & 0xFF) + static_cast<char>(one >> 8);
    } else {
      const std::string_view name = one;
      opcodes += std::string("U") + static_cast<char>(name.size()) + std::string(name);
    }
  };
  (add(named), ...);
  ZerosFile file;
  file.add({ZerosFile::key("args")}, opcodes + "ub");
  file.add({ZerosFile::key("checkpoint_version")}, "K\3");
  file.add({ZerosFile::key("optimizer"), ZerosFile::key("param_state_sharding_type")},
           "U\x0e"
           "dp_reshardable");
  return file.bytes();
}

class TreesTest : public ClusterTest {
 protected:
  TreesTest() {
    sample_ = llama_sample(false, 4);
    EXPECT_TRUE(cluster_.store(0).create_job("job").has_value());
    saved_ = dcp_files(sample_.tensors, sample_.bytes, 5);
    EXPECT_GE(saved_.size(), 5u);
    saved_["config.json"] = sample_.config;
  }
  void put(unsigned node, const std::string& name, const std::string& content) {
    write_file(incoming(node) + "/" + name, content);
  }
  void clear() {
    for (unsigned node = 0; node < 3; ++node) std::filesystem::remove_all(incoming(node));
  }
  /// The `.metadata` is the first's, the files are everybody's in turn.
  void put_all(const std::vector<unsigned>& nodes, const std::string& below = "") {
    size_t next = 0;
    for (const auto& [name, content] : saved_) {
      const bool of_first = !name.ends_with(".distcp");
      put(of_first ? nodes.front() : nodes[next++ % nodes.size()], below + name, content);
    }
  }
  std::string refusal(unsigned leader) {
    Result<> refused = cluster_.job(leader, "job")->commit("base", "base");
    EXPECT_TRUE(refused.has_error());
    EXPECT_EQ(cluster_.job(leader, "job")->find_checkpoint("base"), nullptr);
    return refused.has_error() ? refused.error().message() : "";
  }
  void expect_sample(unsigned node) {
    const CheckpointRef checkpoint = cluster_.job(node, "job")->find_checkpoint("base");
    ASSERT_NE(checkpoint, nullptr);
    expect_model(*checkpoint, sample_);
    for (const char* layout : {R"({"tp": 1, "pp": 1, "dp": 1})", R"({"tp": 2, "pp": 2, "dp": 1})"})
      expect_layout(*checkpoint, sample_, spec_of(layout));
    const auto verified = cluster_.job(node, "job")->verify("base");
    EXPECT_TRUE(verified.has_value()) << verified.error().message();
  }
  void remove() {
    ASSERT_TRUE(cluster_.job(0, "job")->remove_checkpoint("base").has_value());
    cluster_.wait_settled();
  }

  std::map<std::string, std::string> saved_;  // by name
};

TEST_F(TreesTest, WhatDcpSavedMayBeWrittenOnAnyNode) {
  for (const std::vector<unsigned>& nodes :
       {std::vector<unsigned>{0, 1}, {1, 0}, {2, 1}, {0, 1, 2}, {1, 2, 0}})
    for (const std::string below : {"", "rank/0/"}) {
      SCOPED_TRACE(fmt::format("{}.metadata on w{}, with {} nodes", below, nodes[0], nodes.size()));
      clear();
      put_all(nodes, below);
      const uint64_t before = cluster_.bytes_moved();
      std::atomic<uint64_t> moved = 0;
      {
        // Right before the decision, after which all is brought to where its rank runs.
        const auto looking =
            cluster_.loses.during([&](const std::string&, std::string_view method) {
              if (method == "job/hide") moved = cluster_.bytes_moved() - before + 1;
              return false;
            });
        commit(0);
      }
      EXPECT_EQ(moved, 1u) << "nobody was asked, or a tensor's bytes have moved";
      cluster_.wait_settled();
      for (unsigned node = 0; node < 3; ++node) expect_sample(node);
      remove();
    }
}

/// It has no values beside tensors. To find that out all tables are read, which each rank of a
/// layout would do again.
TEST_F(TreesTest, ThatThereAreNoValuesIsFoundOutOnce) {
  saved_ = dcp_files(sample_.tensors, sample_.bytes, 3, {});
  put_all({0});
  commit(0);
  const CheckpointRef checkpoint = cluster_.job(0, "job")->find_checkpoint("base");
  const auto of_rank = [&] {
    const auto values = checkpoint->values_of_dcp().value();
    EXPECT_TRUE(values->empty());
    return std::weak_ptr(values);
  };
  of_rank();
  EXPECT_FALSE(of_rank().expired());
}

/// Each of the two is on other nodes, and no node has some of all.
TEST_F(TreesTest, OfSeveralDirectoriesEachMayBeOnOtherNodes) {
  std::vector<TensorInfo> tensors[2];
  std::vector<std::string> contents[2];
  for (size_t i = 0; i < sample_.tensors.size(); ++i) {
    tensors[i % 2].push_back(sample_.tensors[i]);
    contents[i % 2].push_back(sample_.bytes[i]);
  }
  for (unsigned leader = 0; leader < 3; ++leader) {
    SCOPED_TRACE(leader);
    clear();
    for (const unsigned first : {0u, 1u}) {
      saved_ = dcp_files(tensors[first], contents[first], 3);
      put_all({first, first + 1}, first == 0 ? "model_0/" : "more_0/");
    }
    put(2, "scheduler.pt", torch_file({}, {}));
    put(2, "config.json", sample_.config);
    commit(leader);
    cluster_.wait_settled();
    for (unsigned node = 0; node < 3; ++node) {
      const CheckpointRef checkpoint = cluster_.job(node, "job")->find_checkpoint("base");
      ASSERT_NE(checkpoint, nullptr);
      expect_model(*checkpoint, sample_);
    }
    remove();
  }
}

TEST_F(TreesTest, WhatOfItIsMissingIsNamed) {
  put_all({0, 1});
  const auto last = std::prev(saved_.end(), 2);  // before config.json
  ASSERT_TRUE(last->first.ends_with(".distcp"));
  for (unsigned node = 0; node < 3; ++node)
    std::filesystem::remove(incoming(node) + "/" + last->first);
  for (unsigned leader = 0; leader < 3; ++leader)
    EXPECT_THAT(refusal(leader),
                HasSubstr(fmt::format(".metadata names {}, which is missing", last->first)));
  put(2, last->first, last->second.substr(0, 700));
  for (unsigned leader = 0; leader < 3; ++leader)
    EXPECT_THAT(refusal(leader), HasSubstr(fmt::format("'{}' has 700 bytes", last->first)));
  put(2, last->first, last->second);
  put(1, last->first, last->second);
  EXPECT_THAT(refusal(0), HasSubstr("was written on two nodes, w1 and w2"));
  std::filesystem::remove(incoming(1) + "/" + last->first);
  std::filesystem::remove(incoming(0) + "/.metadata");
  for (unsigned leader = 0; leader < 3; ++leader)
    EXPECT_THAT(refusal(leader), HasSubstr("there is no .metadata beside it, on any node"));
  put(2, ".metadata", saved_[".metadata"]);
  commit(1);
  cluster_.wait_settled();
  expect_sample(0);
}

/// Its node says so of an item, and not which tensor's it is.
TEST_F(TreesTest, WhatIsWrongInAFileElsewhereIsSaid) {
  put_all({0, 1});
  for (const auto& [name, content] : saved_)
    if (name.ends_with(".distcp")) put(1, name, "x" + content.substr(1));
  for (const auto& [name, content] : saved_)
    if (name.ends_with(".distcp")) std::filesystem::remove(incoming(0) + "/" + name);
  // Several are read at once; which of them is named is the one that was read first.
  for (unsigned leader = 0; leader < 3; ++leader)
    EXPECT_THAT(refusal(leader),
                AllOf(HasSubstr(".distcp: tensor '"), HasSubstr("it is no zip archive")));
}

/// Whoever fails to answer then: all is where it was, and the same commit again is whole.
TEST_F(TreesTest, ANodeThatIsLostWhileItReadsLosesNothing) {
  put_all({0, 1});
  {
    const auto losing = cluster_.loses.during(
        [](const std::string&, std::string_view method) { return method == "job/read"; });
    EXPECT_NE(refusal(0), "");
  }
  cluster_.wait_settled();
  EXPECT_TRUE(std::filesystem::exists(incoming(0) + "/.metadata"));
  const auto there = [&] {
    size_t files = 0;
    for (unsigned node = 0; node < 2; ++node)
      for (const auto& [name, content] : saved_)
        files += std::filesystem::exists(incoming(node) + "/" + name);
    return files == saved_.size();
  };
  EXPECT_TRUE(becomes(there));
  commit(1);
  cluster_.wait_settled();
  expect_sample(2);
}

/// Before it has done what it was asked, or when its answer was on the way.
TEST_F(TreesTest, ANodeThatEndsWhileItReadsOrHashesEndsNoMoreThanThatCommit) {
  put_all({0, 1});
  for (const char* method : {"job/read", "job/hash"})
    for (const bool answers : {false, true}) {
      SCOPED_TRACE(fmt::format("{} {}", method, answers));
      std::atomic<bool> ended = false;
      std::jthread ending;  // it waits for whom the node has not answered
      {
        const auto end = [&](const std::string& node, std::string_view asked) {
          if (node != "w1" || asked != method) return ended && node == "w1";
          if (!ended.exchange(true)) ending = std::jthread([&] { cluster_.stop(1); });
          return true;
        };
        const auto before =
            cluster_.loses.during([&](const std::string& node, std::string_view asked) {
              return answers ? ended && node == "w1" : end(node, asked);
            });
        const auto behind = cluster_.breaks.during(
            [&](const std::string&, const std::string& node, std::string_view asked,
                const std::string&) { return answers && end(node, asked); });
        Result<> refused = cluster_.job(0, "job")->commit("base", "base");
        ASSERT_TRUE(refused.has_error());
        EXPECT_EQ(refused.error().errno_value(), EAGAIN) << refused.error().message();
        EXPECT_THAT(refused.error().message(), HasSubstr("node w1"));
        EXPECT_TRUE(ended);
        ending.join();
      }
      for (const unsigned node : {0u, 2u})
        EXPECT_EQ(cluster_.job(node, "job")->find_checkpoint("base"), nullptr);
      EXPECT_NE(refusal(0), "");  // not without what it has
      cluster_.start(1);
      cluster_.wait_settled();
      EXPECT_TRUE(becomes([&] {
        size_t files = 0;
        for (unsigned node = 0; node < 2; ++node)
          for (const auto& [name, content] : saved_)
            files += std::filesystem::exists(incoming(node) + "/" + name) &&
                     read_file(incoming(node) + "/" + name) == content;
        return files == saved_.size();
      }));
      commit(0);
      cluster_.wait_settled();
      for (unsigned node = 0; node < 3; ++node) expect_sample(node);
      remove();
      put_all({0, 1});
    }
}

/// However much is read of their files, and however often.
TEST_F(TreesTest, OtherNodesListTheirDirectoriesOnce) {
  put_all({0, 1, 2});
  std::mutex mutex;
  std::map<std::string, unsigned> asked;
  {
    const auto counting = cluster_.loses.during([&](const std::string&, std::string_view method) {
      std::lock_guard lock(mutex);
      ++asked[std::string(method)];
      return false;
    });
    commit(0);
  }
  EXPECT_EQ(asked["job/take"], 2u);
  EXPECT_EQ(asked["job/read"], 2u);  // where the arrays of all items are
  EXPECT_EQ(asked["job/hash"], 2u);
}

/// common.pt says how many rows of the vocabulary are no padding, wherever it is.
TEST_F(TreesTest, WhatTorchDistSavedMayBeWrittenOnAnyNode) {
  std::vector<TensorInfo> tensors(2);
  tensors[0].name = "embedding.word_embeddings.weight";
  tensors[0].shape = Shape{512, 2};
  tensors[1].name = "decoder.layers.mlp.linear_fc2.weight";
  tensors[1].shape = Shape{4, 2, 3};
  std::vector<std::string> contents;
  for (TensorInfo& tensor : tensors) {
    tensor.dtype = DType::kF32;
    std::string& content = contents.emplace_back();
    for (uint64_t i = 0; i < Box::whole(tensor.shape).volume() * 4; ++i)
      content += static_cast<char>(i % 251);
  }
  const std::string common = common_file("num_layers", 4, "tensor_model_parallel_size", 2,
                                         "vocab_size", 300, "make_vocab_size_divisible_by", 128);
  saved_ = dcp_files(tensors, contents, 3);
  const std::string top = "iter_0000100/";
  for (const unsigned leader : {0u, 1u, 2u}) {
    SCOPED_TRACE(leader);
    clear();
    put_all({0, 1}, top);
    put(1, top + "common.pt", common);
    put(0, top + "metadata.json", "{}");
    put(0, "latest_checkpointed_iteration.txt", "100");
    commit(leader);
    cluster_.wait_settled();
    const CheckpointRef checkpoint = cluster_.job(2, "job")->find_checkpoint("base");
    ASSERT_NE(checkpoint, nullptr);
    std::map<std::string, std::string> shapes;
    for (const TensorInfo& tensor : checkpoint->model().tensors())
      shapes[tensor.name] = tensor.shape.to_string();
    EXPECT_EQ(shapes["embedding.word_embeddings.weight"], "[384, 2]");
    EXPECT_EQ(shapes["decoder.layers.3.mlp.linear_fc2.weight"], "[2, 3]");
    const auto files = checkpoint->model_files();
    ASSERT_TRUE(files.has_value()) << files.error().message();
    const std::string array =
        read_content(*files.value(), "decoder/layers/3/mlp/linear_fc2/weight.npy");
    EXPECT_TRUE(array.ends_with(contents[1].substr(72)));
    const std::string rows = read_content(*files.value(), "embedding/word_embeddings/weight.npy");
    EXPECT_TRUE(rows.ends_with(contents[0].substr(0, 384 * 8)));
    EXPECT_EQ(read_content(*checkpoint->rank_files(LayoutSpec(), 0).value(), top + "common.pt"),
              common);
    remove();
  }
}

/// Of its weights' first elements and those of the master copies, which tell whose these are.
TEST_F(TreesTest, BucketsMayLieOnOtherNodesThanWhatIsInThem) {
  World world;
  world.layers = 2;
  world.data_ranks = 2;
  world.bucket = 300;
  Saved saved(world, 1);
  std::vector<DcpNewTensor> tensors;
  std::vector<std::vector<std::string>> contents;
  for (const DcpTensor& tensor : saved.metadata.tensors) {
    DcpNewTensor& made = tensors.emplace_back();
    made.name = tensor.name;
    made.dtype = tensor.dtype;
    made.shape = tensor.shape;
    std::vector<std::string>& chunks = contents.emplace_back();
    for (const DcpChunk& chunk : tensor.chunks) {
      made.chunks.push_back(chunk.box);
      const std::vector<float>& array = saved.arrays.at(chunk.item.offset);
      chunks.emplace_back(reinterpret_cast<const char*>(array.data()),
                          array.size() * sizeof(float));
    }
  }
  std::vector<DcpNewValue> values;
  for (const DcpValue& value : saved.metadata.values)
    values.push_back({value.name, {}, dcp_value("]}U\2lrK\1sa")});
  saved_ = dcp_files(tensors, values, contents, 4000);
  ASSERT_GT(saved_.size(), 6u);
  const std::string top = "iter_0000100/";
  std::string state;  // where all is on one node
  for (const std::vector<unsigned>& nodes :
       {std::vector<unsigned>{0}, {0, 1}, {1, 0}, {1, 2}, {2, 0, 1}}) {
    SCOPED_TRACE(fmt::format("first w{} of {}", nodes[0], nodes.size()));
    clear();
    put_all(nodes, top);
    put(nodes.back(), top + "common.pt",
        common_file("num_layers", 2, "tensor_model_parallel_size", 1,
                    "pipeline_model_parallel_size", 1));
    put(nodes.front(), top + "metadata.json", "{}");
    put(nodes.front(), "latest_checkpointed_iteration.txt", "100");
    commit(0);
    cluster_.wait_settled();
    const CheckpointRef checkpoint = cluster_.job(2, "job")->find_checkpoint("base");
    ASSERT_NE(checkpoint, nullptr);
    std::string sums;
    const Manifest& manifest = checkpoint->manifest();
    for (size_t i = 0; i < manifest.checksums.size(); ++i)
      sums += manifest.model->tensors()[i].name + " " + manifest.checksums[i].to_hex() + "\n";
    EXPECT_THAT(sums, HasSubstr("exp_avg_sq"));
    EXPECT_THAT(sums, ::testing::Not(HasSubstr("bucket_idx")));
    if (state.empty()) state = sums;
    EXPECT_EQ(sums, state);
    EXPECT_TRUE(cluster_.job(1, "job")->verify("base").has_value());
    remove();
  }
}

/// Not as if there were none: what it says of the model would be missed.
TEST_F(TreesTest, ADamagedCommonFileIsNamedWithItsNode) {
  put_all({0, 1}, "iter_0000100/");
  put(0, "iter_0000100/metadata.json", "{}");
  put(0, "latest_checkpointed_iteration.txt", "100");
  const std::string common = common_file("num_layers", 4);
  put(1, "iter_0000100/common.pt", common.substr(0, common.size() - 30));
  for (const unsigned leader : {0u, 2u})
    EXPECT_THAT(refusal(leader),
                HasSubstr("iter_0000100/common.pt on node w1: no end of a zip directory"));
  EXPECT_THAT(refusal(1), HasSubstr("iter_0000100/common.pt: no end of a zip directory"));
  // Written anew beside the mount, while it is read.
  put(1, "iter_0000100/common.pt", common);
  {
    const auto writing = cluster_.loses.during([&](const std::string&, std::string_view method) {
      if (method == "job/read") put(1, "iter_0000100/common.pt", common + "more");
      return false;
    });
    EXPECT_THAT(refusal(0),
                AllOf(HasSubstr("node w1: "), HasSubstr("common.pt was written while")));
  }
}

/// What lies where in the optimizer's file the model beside it says, on the node that has both.
TEST_F(TreesTest, MegatronsDistributedOptimizerMayBeWrittenOnAnyNode) {
  const std::string text = R"({"tp": 1, "pp": 2, "dp": 1})";
  edit(0, text);
  cluster_.wait_settled();
  for (unsigned node : {0u, 1u})
    write_megatron_stage(fmt::format("{}/rank/{}", incoming(node), node), static_cast<char>(node));
  const std::string file = read_file(incoming(1) + "/rank/1/distrib_optim.pt");
  commit(0);
  cluster_.wait_settled();
  const JobRef job = cluster_.job(2, "job");
  const CheckpointRef checkpoint = job->find_checkpoint("base");
  EXPECT_EQ(read_content(*checkpoint->rank_files(spec_of(text), 1).value(), "distrib_optim.pt"),
            file);
  edit(2, R"({"tp": 1, "pp": 1, "dp": 1})");
  cluster_.wait_settled();
  EXPECT_EQ(checkpoint->model().tensors().size(), 8u);
  EXPECT_TRUE(job->verify("base").has_value());
}

/// Directories have the numbers that those of all nodes give them.
TEST_F(TreesTest, MegatronsTreesMayBeWrittenOnAnyNode) {
  const LayoutSpec spec = spec_of(R"({"tp": 1, "pp": 2, "dp": 1})");
  const std::string name = "/iter_0000100/mp_rank_00_00";
  for (const auto& [first, second, leader] : std::vector<std::array<unsigned, 3>>{
           {0, 1, 0}, {1, 0, 0}, {1, 2, 0}, {2, 1, 2}, {0, 0, 1}}) {
    SCOPED_TRACE(fmt::format("stages on w{} and w{}, led by w{}", first, second, leader));
    clear();
    write_megatron_stage(incoming(first) + name + "0", 5);
    write_megatron_stage(incoming(second) + name + "1", 6);
    put(first, "latest_checkpointed_iteration.txt", "100");
    std::vector<std::string> files;
    for (const auto& [node, stage] : {std::pair(first, "0"), {second, "1"}})
      for (const char* file : {"/model_optim_rng.pt", "/distrib_optim.pt"})
        files.push_back(read_file(incoming(node) + name + stage + file));
    ASSERT_NE(files[0], files[2]);
    commit(leader);
    cluster_.wait_settled();
    const CheckpointRef checkpoint = cluster_.job(1, "job")->find_checkpoint("base");
    ASSERT_NE(checkpoint, nullptr);
    EXPECT_EQ(checkpoint->manifest().written_spec.name(), spec.name());
    size_t next = 0;
    for (const uint64_t rank : {0, 1})
      for (const char* file : {"model_optim_rng.pt", "distrib_optim.pt"})
        EXPECT_EQ(read_content(*checkpoint->rank_files(spec, rank).value(), file), files[next++]);
    EXPECT_EQ(checkpoint->model().tensors().size(), 8u);
    EXPECT_TRUE(cluster_.job(1, "job")->verify("base").has_value());
    remove();
  }
  clear();
  write_megatron_stage(incoming(0) + name + "0", 5);
  for (unsigned leader = 0; leader < 3; ++leader)
    EXPECT_THAT(refusal(leader), HasSubstr("there is no mp_rank_00_001/model_optim_rng.pt"));
  write_megatron_stage(incoming(1) + "/iter_0000200/mp_rank_00_001", 6);
  for (unsigned leader = 0; leader < 3; ++leader)
    EXPECT_THAT(refusal(leader), HasSubstr("are of two iterations"));
  std::filesystem::remove_all(incoming(1));
  write_megatron_stage(incoming(1) + name + "0", 5);
  EXPECT_THAT(refusal(0), HasSubstr("was written on two nodes, this one and w1"));
}

}  // namespace
}  // namespace ptc::testing
