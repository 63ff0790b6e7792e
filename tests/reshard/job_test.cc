// Jobs as their users meet them: commits that succeed and fail, edits, removal, losses.
#include "reshard/job/job.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <boost/json/serialize.hpp>
#include <chrono>
#include <fstream>
#include <thread>

#include "store/base/json.h"
#include "store/codec/dcp_compose.h"
#include "store/codec/dcp_metadata.h"
#include "store/codec/pickle_writer.h"
#include "tests/support/job_fixture.h"

namespace ptc::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

class JobTest : public ::testing::Test {
 protected:
  void SetUp() override {
    open();
    job_ = store_->create_job("job").value();
    sample_ = llama_sample();
  }
  void open() {
    job_.reset();
    store_.reset();
    auto store =
        JobStore::open({.directory = dir_.path(), .node = "n0", .copy_threads = 2}, nullptr);
    ASSERT_TRUE(store.has_value()) << store.error().message();
    store_ = std::move(store).value();
    job_ = store_->find("job");
  }

  /// Of the files that describe checkpoints: as of those that an older ptcfs wrote. The store ends.
  void forget_checksums() {
    job_.reset();
    store_.reset();
    const auto meta = open_sqlite_meta(dir_.path() / "meta.db").value();
    const std::vector<MetaEntry> entries = meta->list("jobs/job/checkpoints/").value();
    for (const MetaEntry& entry : entries) {
      json::value value = parse_json(entry.value).value();
      value.as_object().erase("files");
      ASSERT_TRUE(meta->commit({.puts = {{entry.key, json::serialize(value)}}}).has_value());
    }
  }
  fs::path incoming(const std::string& name) const {
    return fs::path(job_->files_dir()) / "incoming" / name;
  }
  static LayoutSpec spec(const std::string& name) { return LayoutSpec::from_name(name).value(); }

  void set_layout(const std::string& text) {
    Result<> saved = job_->save_layout(text);
    ASSERT_TRUE(saved.has_value()) << saved.error().message();
    job_->wait_settled();
  }
  void commit(const std::string& name) {
    Result<> committed = job_->commit(name, name);
    ASSERT_TRUE(committed.has_value()) << committed.error().message();
    job_->wait_settled();
  }
  /// A commit that must fail: the message, also in the .error file; nothing is lost.
  std::string refusal(const std::string& name, Code code = Code::kInvalidArgument) {
    std::map<std::string, std::string> before = tree(incoming(name));
    Result<> committed = job_->commit(name, name);
    if (committed.has_value()) return "was committed";
    EXPECT_EQ(code_name(committed.error().code()), code_name(code));
    EXPECT_EQ(tree(incoming(name)), before);
    EXPECT_EQ(read_file(incoming(name + ".error")), committed.error().message() + "\n");
    EXPECT_EQ(job_->find_checkpoint(name), nullptr);
    EXPECT_TRUE(fs::is_empty(dir_.path() / "images"));
    return committed.error().message();
  }
  /// Path → mode and content.
  static std::map<std::string, std::string> tree(const fs::path& root) {
    std::map<std::string, std::string> files;
    for (const auto& entry : fs::recursive_directory_iterator(root)) {
      if (!entry.is_regular_file() || entry.is_symlink()) continue;
      struct stat st {};
      lstat(entry.path().c_str(), &st);
      files[entry.path().lexically_relative(root)] =
          fmt::format("{:o} ", st.st_mode) + read_file(entry.path());
    }
    return files;
  }
  std::string refused_edit(const std::string& text) {
    std::string before = job_->layout_text();
    Result<> saved = job_->save_layout(text);
    if (saved.has_value()) return "was accepted";
    EXPECT_EQ(job_->layout_text(), before);
    EXPECT_THAT(job_->status_json(), HasSubstr("layout.json refused"));
    return saved.error().message();
  }
  json::object status() { return parse_json(job_->status_json()).value().as_object(); }

  TempDir dir_;
  std::unique_ptr<JobStore> store_;
  JobRef job_;
  Sample sample_;
};

TEST_F(JobTest, ACommitTakesTheFilesThemselves) {
  write_ranks(sample_, spec("tp1-pp1-dp1"), incoming("base"));
  struct stat before {};
  ASSERT_EQ(stat((incoming("base") / "rank/0/model.safetensors").c_str(), &before), 0);
  commit("base");
  CheckpointRef checkpoint = job_->find_checkpoint("base");
  auto set = checkpoint->rank_files(spec("tp1-pp1-dp1"), 0).value();
  for (size_t i = 0; i < set->entries().size(); ++i) {
    if (set->entries()[i].path != "model.safetensors") continue;
    struct stat after {};
    fstat(set->open(i).value()->image()->use_file().value().fd(), &after);
    EXPECT_EQ(after.st_ino, before.st_ino);
    EXPECT_EQ(after.st_nlink, 1u);
  }
}

TEST_F(JobTest, ACommitTakesFewDescriptors) {
  constexpr uint32_t kFiles = 300;
  const auto bytes_of = [](uint32_t i) { return std::string(16, static_cast<char>(i)); };
  const fs::path rank = incoming("base") / "rank/0";
  for (uint32_t i = 0; i < kFiles; ++i) {
    write_file(rank / fmt::format("{}.safetensors", i),
               safetensors_file({{fmt::format("w{}", i), DType::kF32, {4}, 0, 16}}, {bytes_of(i)}));
    write_file(rank / fmt::format("{}.json", i), bytes_of(i));
  }
  const auto descriptors = [] {
    return std::distance(fs::directory_iterator("/proc/self/fd"), fs::directory_iterator());
  };
  const auto before = descriptors();
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  rlimit low = limit;
  low.rlim_cur = static_cast<rlim_t>(before) + 40;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
  commit("base");
  EXPECT_LE(descriptors(), before + 8);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  auto set = job_->find_checkpoint("base")->rank_files(spec("tp1-pp1-dp1"), 0).value();
  for (const uint32_t i : {0u, kFiles - 1})
    EXPECT_EQ(read_content(*set, fmt::format("{}.json", i)), bytes_of(i));
}

TEST_F(JobTest, ACommitHashesEveryByteOnce) {
  constexpr uint64_t kBytes = 48 << 20;
  write_file(incoming("big") / "rank/0/model.safetensors",
             safetensors_file({{"big", DType::kF32, {kBytes / 4}, 0, kBytes}},
                              {std::string(kBytes, 'x')}));
  // The commit comes while the file is being hashed in the background, and goes on where that was.
  job_->note_closed("big/rank/0/model.safetensors");
  std::this_thread::sleep_for(std::chrono::milliseconds(3));
  commit("big");
  const uint64_t hashed = job_->numbers().counts.hashed_bytes;
  EXPECT_GE(hashed, kBytes);
  EXPECT_LE(hashed, kBytes + kBytes / 4) << "one unit of hashing may have been broken off";
}

TEST_F(JobTest, ReplicasOnlyChangeMovesNothing) {
  write_ranks(sample_, spec("tp1-pp1-dp1"), incoming("base"));
  commit("base");
  std::string before = job_->find_checkpoint("base")->stored()->images.front().id;
  set_layout(R"({"tp": 1, "pp": 1, "dp": 4})");
  EXPECT_EQ(job_->current_target(), "checkpoints/base/layouts/tp1-pp1-dp4");
  EXPECT_EQ(job_->find_checkpoint("base")->stored()->images.front().id, before);
  auto plan = parse_json(job_->plan_json()).value();
  EXPECT_EQ(plan.at("bytes").at("moved").to_number<int>(), 0);
  EXPECT_EQ(plan.at("bytes").at("local").to_number<int>(), 0);
  EXPECT_EQ(plan.at("bytes").at("kept"), plan.at("bytes").at("total"));
  EXPECT_EQ(plan.at("files").at("written").to_number<int>(), 0);
}

TEST_F(JobTest, WhatIsEqualIsMadeOnceForAllWhoHaveIt) {
  write_ranks(sample_, spec("tp1-pp1-dp1"), incoming("base"));
  commit("base");
  const CheckpointRef checkpoint = job_->find_checkpoint("base");
  const auto set = [&](const char* layout, uint64_t rank) {
    return checkpoint->rank_files(spec(layout), rank).value();
  };
  const FileSetRef first = set("tp2-pp1-dp3", 0), second = set("tp2-pp1-dp3", 1);
  EXPECT_EQ(set("tp2-pp1-dp3", 2), first) << "a replica's files are its";
  EXPECT_EQ(set("tp2-pp1-dp3", 5), second);
  EXPECT_NE(first, second);
  const auto header = [&](const char* layout, uint32_t tp) {
    const StateFilesRef files = checkpoint->state_files(spec(layout), {.tp = tp}).value();
    for (const StateFile& file : *files)
      if (file.path == "model.safetensors") return file.layout.literals.header().data();
    return static_cast<const char*>(nullptr);
  };
  ASSERT_NE(header("tp2-pp1-dp3", 0), nullptr);
  EXPECT_EQ(header("tp2-pp1-dp3", 0), header("tp2-pp1-dp3", 1)) << "the same names and shapes";
  EXPECT_EQ(header("tp2-pp1-dp5", 1), header("tp2-pp1-dp3", 0)) << "in another layout, too";
  EXPECT_NE(header("tp1-pp1-dp5", 0), header("tp2-pp1-dp3", 0));
}

TEST_F(JobTest, ReplicasShareOneImage) {
  write_ranks(sample_, spec("tp1-pp1-dp1"), incoming("base"));
  commit("base");
  set_layout(R"({"tp": 2, "pp": 1, "dp": 3})");
  CheckpointRef checkpoint = job_->find_checkpoint("base");
  auto image_of = [&](uint64_t rank) {
    auto set = checkpoint->rank_files(spec("tp2-pp1-dp3"), rank).value();
    for (size_t i = 0; i < set->entries().size(); ++i)
      if (set->entries()[i].path == "model.safetensors")
        return set->open(i).value()->image()->id().text;
    return std::string();
  };
  EXPECT_EQ(image_of(0), image_of(2));
  EXPECT_EQ(image_of(1), image_of(5));
  EXPECT_NE(image_of(0), image_of(1));
}

TEST_F(JobTest, SameContentAgainIsNoEdit) {
  set_layout("{\"tp\": 1, \"pp\": 1, \"dp\": 2}");
  auto revision = status().at("revision");
  set_layout("{\"tp\": 1, \"pp\": 1, \"dp\": 2}");
  EXPECT_EQ(status().at("revision"), revision);
}

TEST_F(JobTest, AnyNamingOrderAndStages) {
  sample_ = llama_sample(true, 5);
  const std::vector<std::string> layouts = {
      R"({"tp": 2, "pp": 3, "dp": 1, "stages": [1, 3, 1], "naming": "stage"})",
      R"({"tp": 2, "pp": 2, "dp": 2, "order": "pp-dp-tp-ep-cp", "stages": [4, 1],
          "optimizer": "zero1"})",
      R"({"tp": 1, "pp": 3, "dp": 2, "cp": 2, "order": "dp-pp-cp-ep-tp", "stages": [2, 1, 2],
          "naming": "stage", "optimizer": "fsdp"})"};
  for (size_t i = 0; i < layouts.size(); ++i) {
    const std::string name = fmt::format("written{}", i);
    SCOPED_TRACE(name);
    set_layout(layouts[i]);
    const LayoutSpec written = Layout::parse(layouts[i]).value().spec;
    const auto files = write_ranks(sample_, written, incoming(name));
    commit(name);
    const CheckpointRef checkpoint = job_->find_checkpoint(name);
    expect_model(*checkpoint, sample_);
    for (size_t other = i + 1; other <= i + layouts.size(); ++other) {
      const std::string& text = layouts[other % layouts.size()];
      const LayoutSpec spec = Layout::parse(text).value().spec;
      SCOPED_TRACE(text);
      expect_layout(*checkpoint, sample_, spec);  // computed on read, at last stored as written
      set_layout(text);
      EXPECT_EQ(job_->current_target(),
                fmt::format("checkpoints/{}/layouts/{}", name, spec.name()));
      expect_layout(*checkpoint, sample_, spec);
    }
    for (const auto& [path, content] : files) {
      const auto set = checkpoint->rank_files(written, std::stoull(path)).value();
      EXPECT_TRUE(read_content(*set, path.substr(path.find('/') + 1)) == content) << path;
    }
  }
}

TEST_F(JobTest, TheNewestEditWins) {
  write_ranks(sample_, spec("tp1-pp1-dp1"), incoming("base"));
  commit("base");
  for (int i = 0; i < 20; ++i) {
    ASSERT_TRUE(job_->save_layout(R"({"tp": 2, "pp": 1, "dp": 1})").has_value());
    ASSERT_TRUE(job_->save_layout(R"({"tp": 1, "pp": 2, "dp": 1})").has_value());
    job_->wait_settled();
    EXPECT_EQ(job_->current_target(), "checkpoints/base/layouts/tp1-pp2-dp1");
  }
  expect_layout(*job_->find_checkpoint("base"), sample_, spec("tp1-pp2-dp1"));
  // Nothing is left of those that lost.
  size_t wanted = job_->find_checkpoint("base")->stored()->images.size();
  EXPECT_EQ(std::distance(fs::directory_iterator(dir_.path() / "images"), {}),
            static_cast<ptrdiff_t>(wanted));
}

TEST_F(JobTest, RefusesLayoutsThatDoNotFit) {
  write_ranks(sample_, spec("tp1-pp1-dp1"), incoming("base"));
  commit("base");
  EXPECT_THAT(refused_edit("{\"tp\": 2"), HasSubstr("line 1"));
  EXPECT_THAT(refused_edit(R"({"tp": 2, "pp": 1, "dp": 1, "ppp": 1})"),
              HasSubstr("did you mean 'pp'"));
  EXPECT_THAT(refused_edit(R"({"tp": 2, "pp": 1})"), HasSubstr("dp"));
  EXPECT_THAT(refused_edit(R"({"tp": 3, "pp": 1, "dp": 1})"), HasSubstr("_proj"));
  EXPECT_THAT(refused_edit("{\"tp\": 1, \"pp\": 1, \"dp\": 1,\n \"devices\": [\"w9:0\"]}"),
              AllOf(HasSubstr("line 2"), HasSubstr("node 'w9' is not part of this cluster")));
  EXPECT_THAT(refused_edit(R"({"tp": 1, "pp": 1, "dp": 2, "devices": ["n0:0"]})"),
              HasSubstr("devices"));
  EXPECT_THAT(refused_edit(R"({"tp": 1, "pp": 1, "dp": 2, "optimizer": "zero3"})"),
              HasSubstr("'optimizer' must be \"replicated\", \"zero1\" or \"fsdp\""));
  EXPECT_THAT(refused_edit(R"({"tp": 1, "pp": 2, "dp": 1, "stages": [1, 99]})"), HasSubstr("99"));
  EXPECT_EQ(job_->current_target(), "checkpoints/base/layouts/tp1-pp1-dp1");
  set_layout(R"({"tp": 2, "pp": 1, "dp": 1, "devices": ["n0:0", "n0:1"]})");
  EXPECT_TRUE(status().at("last_error").is_null());
}

TEST_F(JobTest, RefusesCommitsAndSaysWhy) {
  set_layout(R"({"tp": 2, "pp": 1, "dp": 1})");
  const LayoutSpec two = spec("tp2-pp1-dp1");
  auto fresh = [&](const std::string& name) {
    fs::remove_all(incoming(name));
    write_ranks(sample_, two, incoming(name));
    return incoming(name) / "rank";
  };
  fs::remove_all(fresh("x") / "1");
  EXPECT_THAT(refusal("x"), HasSubstr("rank 1"));

  write_file(fresh("x") / "7/model.safetensors", "");
  EXPECT_THAT(refusal("x"), HasSubstr("rank/7 does not exist in layout tp2-pp1-dp1"));

  std::string file = read_file(fresh("x") / "1/model.safetensors");
  write_file(incoming("x") / "rank/1/model.safetensors", file.substr(0, 100));
  EXPECT_THAT(refusal("x"), HasSubstr("rank/1/model.safetensors"));

  file.replace(file.find("BF16"), 4, "BF17");
  fresh("x");
  write_file(incoming("x") / "rank/1/model.safetensors", file);
  EXPECT_THAT(refusal("x"), HasSubstr("BF17"));

  // Rank 1 wrote all of the model instead of its half.
  fresh("x");
  TempDir whole;
  write_ranks(sample_, spec("tp1-pp1-dp1"), whole.path());
  fs::copy_file(whole.path() / "rank/0/model.safetensors",
                incoming("x") / "rank/1/model.safetensors", fs::copy_options::overwrite_existing);
  EXPECT_THAT(refusal("x"), HasSubstr("rank 1"));

  write_file(fresh("x") / ".." / "notes.txt", "hello");
  EXPECT_THAT(refusal("x"), HasSubstr("'notes.txt' is not under rank/<r>/"));

  fs::create_symlink("/etc/passwd", fresh("x") / "0/link");
  EXPECT_THAT(refusal("x"), HasSubstr("symbolic link"));

  fs::create_hard_link(fresh("x") / "0/rng.bin", incoming("y"));
  EXPECT_THAT(refusal("x"), HasSubstr("hard link"));
  fs::remove(incoming("y"));

  fresh("x");
  UniqueFd writer(::open((incoming("x") / "rank/0/rng.bin").c_str(), O_WRONLY));
  EXPECT_THAT(refusal("x", Code::kBusy), HasSubstr("rank/0/rng.bin is still open for writing"));
  writer.reset();

  commit("x");
  EXPECT_FALSE(fs::exists(incoming("x.error")));
  write_ranks(sample_, two, incoming("x"));
  Result<> again = job_->commit("x", "x");
  ASSERT_TRUE(again.has_error());
  EXPECT_EQ(again.error().code(), Code::kAlreadyExists);
}

/// Who may read the job's status need not be one who may list what was to be committed.
TEST_F(JobTest, ARefusalNamesNothingToWhomItIsKeptFrom) {
  auto mode_of = [](const fs::path& path) {
    struct stat facts {};
    EXPECT_EQ(lstat(path.c_str(), &facts), 0) << path;
    return facts.st_mode & 07777;
  };
  const fs::path secret = incoming("x") / "rank/0/secret.safetensors";
  const struct {
    fs::path closed;
    mode_t mode, error_mode;
  } cases[] = {{incoming("x"), 0700, 0600},
               {incoming("x") / "rank", 0711, 0600},
               {incoming("x") / "rank/0", 0750, 0640},
               {secret, 0600, 0600},
               {incoming(""), 0700, 0644},
               {secret, 0644, 0644}};
  for (const auto& [closed, mode, error_mode] : cases) {
    SCOPED_TRACE(fmt::format("{} {:o}", closed.string(), mode));
    fs::remove_all(incoming("x"));
    write_file(secret, "no safetensors");
    for (const fs::path& path : {incoming("x"), incoming("x") / "rank", secret.parent_path()})
      ASSERT_EQ(chmod(path.c_str(), 0755), 0);
    ASSERT_EQ(chmod(secret.c_str(), 0644), 0);
    ASSERT_EQ(chmod(closed.c_str(), mode), 0);
    EXPECT_THAT(refusal("x"), HasSubstr("secret.safetensors"));
    EXPECT_EQ(mode_of(incoming("x.error")), error_mode);
    const std::string told(status().at("last_error").at("what").as_string());
    EXPECT_THAT(told, StartsWith("commit of incoming/x refused: "));
    if (closed == secret && mode == 0644) EXPECT_THAT(told, HasSubstr("secret.safetensors"));
    else
      EXPECT_EQ(told,
                "commit of incoming/x refused: incoming/x.error says why to those who may read all "
                "that was to be committed");
    ASSERT_EQ(chmod(incoming("").c_str(), 0755), 0);
  }
}

TEST_F(JobTest, ReplicasMustBeEqual) {
  set_layout(R"({"tp": 1, "pp": 1, "dp": 2})");
  write_ranks(sample_, spec("tp1-pp1-dp2"), incoming("base"));
  std::string file = read_file(incoming("base") / "rank/1/model.safetensors");
  file.back() ^= 1;
  write_file(incoming("base") / "rank/1/model.safetensors", file);
  EXPECT_THAT(refusal("base"),
              AllOf(HasSubstr("rank/0/model.safetensors and rank/1/model.safetensors"),
                    HasSubstr("replicas must be equal")));
  // Only one of them need write.
  fs::remove(incoming("base") / "rank/1/model.safetensors");
  commit("base");
  expect_layout(*job_->find_checkpoint("base"), sample_, spec("tp1-pp1-dp2"));
}

TEST_F(JobTest, TheWritersOwnLayoutAndPadding) {
  // A writer under tp 2 with something else than zeros in the padding of its vocabulary.
  const LayoutSpec two = spec("tp2-pp1-dp1");
  auto files = write_ranks(sample_, two, incoming("base"));
  write_file(incoming("base") / "layout.json", layout_json(two));
  RankParts parts = slow_rank(sample_, two, 1);
  const std::string& embedding = parts["model.safetensors"]["model.embed_tokens.weight"].bytes;
  std::string file = files["1/model.safetensors"];
  size_t at = file.find(embedding);
  ASSERT_NE(at, std::string::npos);
  for (size_t i = 0; i < 8; ++i) file[at + embedding.size() - 1 - i] = 'p';
  write_file(incoming("base") / "rank/1/model.safetensors", file);

  commit("base");  // and is brought into tp1-pp1-dp1, which is in force
  EXPECT_EQ(job_->current_target(), "checkpoints/base/layouts/tp1-pp1-dp1");
  CheckpointRef checkpoint = job_->find_checkpoint("base");
  expect_model(*checkpoint, sample_);
  for (int i = 0; i < 2; ++i) {
    auto set = checkpoint->rank_files(two, 1).value();
    EXPECT_TRUE(read_content(*set, "model.safetensors") == file);
    set_layout(R"({"tp": 2, "pp": 1, "dp": 1})");
    set_layout(R"({"tp": 2, "pp": 2, "dp": 1})");
  }
  EXPECT_TRUE(job_->verify("base").has_value());
}

TEST_F(JobTest, ShardsWithAnIndexAreOneFile) {
  std::vector<TensorEntry> entries[2];
  std::vector<std::string> bytes[2];
  std::string map;
  for (size_t i = 0; i < sample_.tensors.size(); ++i) {
    entries[i % 2].push_back(
        {sample_.tensors[i].name, sample_.tensors[i].dtype, sample_.tensors[i].shape});
    bytes[i % 2].push_back(sample_.bytes[i]);
    map += fmt::format(R"({}"{}": "model-0000{}-of-00002.safetensors")", i == 0 ? "" : ",",
                       sample_.tensors[i].name, i % 2 + 1);
  }
  fs::path rank = incoming("base") / "rank/0";
  for (int i : {0, 1})
    write_file(rank / fmt::format("model-0000{}-of-00002.safetensors", i + 1),
               safetensors_file(entries[i], bytes[i]));
  write_file(rank / "config.json", sample_.config);
  write_file(rank / "model.safetensors.index.json", "{\"weight_map\": {" + map + "}}");
  fs::rename(rank / "model-00002-of-00002.safetensors", rank / "other");
  EXPECT_THAT(refusal("base"), HasSubstr("model-00002-of-00002.safetensors, which is missing"));
  fs::rename(rank / "other", rank / "model-00002-of-00002.safetensors");
  commit("base");
  expect_layout(*job_->find_checkpoint("base"), sample_, spec("tp1-pp1-dp1"));
  set_layout(R"({"tp": 2, "pp": 2, "dp": 1})");
  expect_layout(*job_->find_checkpoint("base"), sample_, spec("tp2-pp2-dp1"));
  expect_layout(*job_->find_checkpoint("base"), sample_, spec("tp1-pp1-dp1"));
}

TEST_F(JobTest, WhatDcpSavedIsReadAsDcpSavesIt) {
  PickleWriter number;
  number.integer(7);
  const std::string pickled = std::move(number).finish();
  const Pickle seven = Pickle::parse(pickled).value();
  std::vector<DcpNewTensor> tensors;
  for (const TensorInfo& tensor : sample_.tensors)
    tensors.push_back(
        {"model." + tensor.name,
         {{TorchStep::Kind::kKey, "model", 0}, {TorchStep::Kind::kKey, tensor.name, 0}},
         tensor.dtype,
         tensor.shape,
         {Box::whole(tensor.shape)}});
  const std::vector<DcpNewValue> values = {{"epoch", {}, save_value(seven, seven.root()).value()}};
  const DcpNewCheckpoint made = compose_dcp(tensors, values, 20'000).value();
  std::vector<std::string> files;
  for (const DcpNewFile& file : made.files) {
    files.emplace_back(file.bytes, '\0');
    for (const ZipWriter::Piece& piece : file.pieces)
      files.back().replace(piece.offset, piece.bytes.size(), piece.bytes);
  }
  for (size_t t = 0; t < tensors.size(); ++t)
    files[made.places[t][0].file].replace(made.places[t][0].offset, sample_.bytes[t].size(),
                                          sample_.bytes[t]);
  for (size_t f = 0; f < files.size(); ++f)
    write_file(incoming("base") / made.files[f].name, files[f]);
  write_file(incoming("base") / ".metadata", made.metadata);
  write_file(incoming("base") / "config.json", sample_.config);
  commit("base");
  const CheckpointRef base = job_->find_checkpoint("base");
  expect_model(*base, sample_);
  set_layout(R"({"tp": 2, "pp": 2, "dp": 1})");
  expect_layout(*base, sample_, spec("tp2-pp2-dp1"));
  const auto once = base->values_of_dcp().value();
  EXPECT_EQ(once, base->values_of_dcp().value());
  const auto first = base->rank_files(spec("tp2-pp2-dp1"), 0).value(),
             last = base->rank_files(spec("tp2-pp2-dp1"), 3).value();
  EXPECT_EQ(read_content(*first, "values.pt"), once->at(""));
  EXPECT_EQ(read_content(*last, "values.pt"), once->at(""));

  // What dcp/ has is that checkpoint, and may be committed as it is.
  const FileSetRef read = base->dcp_files().value();
  for (const FileSet::Entry& entry : read->entries())
    write_file(incoming("again") / entry.path, read_content(*read, entry.path));
  write_file(incoming("again") / "config.json", sample_.config);
  const DcpMetadata metadata = parse_dcp_metadata(read_content(*read, ".metadata")).value();
  EXPECT_EQ(metadata.tensors.size(), tensors.size());
  EXPECT_EQ(metadata.tensors.front().path.size(), 2u);
  EXPECT_EQ(metadata.values.size(), 1u);
  commit("again");
  expect_model(*job_->find_checkpoint("again"), sample_);
  EXPECT_EQ(job_->find_checkpoint("again")->values_of_dcp().value()->at(""), once->at(""));
}

/// Heads of one model would be cut in half by the facts of another.
TEST_F(JobTest, FactsOfTheLastCheckpointAreOfTheSameModelAlone) {
  write_ranks(sample_, spec("tp1-pp1-dp1"), incoming("base"));
  commit("base");
  for (const bool same : {true, false}) {
    SCOPED_TRACE(same);
    Sample sample = sample_;
    if (!same)
      for (size_t i = 0; i < sample.tensors.size(); ++i) {  // twice as wide
        Shape& shape = sample.tensors[i].shape;
        shape[shape.size() - 1] *= 2;
        sample.bytes[i] += sample.bytes[i];
      }
    const std::string name = same ? "same" : "other";
    write_ranks(sample, spec("tp1-pp1-dp1"), incoming(name));
    fs::remove(incoming(name) / "rank/0/config.json");
    commit(name);
    if (same) set_layout(R"({"tp": 2, "pp": 1, "dp": 1})");
    if (same) set_layout(R"({"tp": 1, "pp": 1, "dp": 1})");
  }
  EXPECT_THAT(refused_edit(R"({"tp": 2, "pp": 1, "dp": 1})"), HasSubstr("heads"));
}

TEST_F(JobTest, KeepsTheNewestCheckpoints) {
  for (const char* name : {"a", "b", "c"}) {
    write_ranks(sample_, spec("tp1-pp1-dp1"), incoming(name));
    commit(name);
  }
  // A reader holds on to the first.
  auto set = job_->find_checkpoint("a")->model_files().value();
  FileContentRef reader = set->open(0).value();
  set_layout(R"({"tp": 1, "pp": 1, "dp": 1, "keep": 1})");
  auto gone = [&](const char* name) {
    for (int i = 0; i < 100 && job_->find_checkpoint(name) != nullptr; ++i) usleep(100'000);
    return job_->find_checkpoint(name) == nullptr;
  };
  EXPECT_TRUE(gone("b"));
  EXPECT_NE(job_->find_checkpoint("a"), nullptr);
  reader.reset();
  set.reset();
  EXPECT_TRUE(gone("a"));
  EXPECT_EQ(job_->current_target(), "checkpoints/c/layouts/tp1-pp1-dp1");
}

TEST_F(JobTest, APinnedCheckpointStays) {
  for (const char* name : {"a", "b", "c", "d"}) {
    write_ranks(sample_, spec("tp1-pp1-dp1"), incoming(name));
    commit(name);
    if (name[0] <= 'b') {
      ASSERT_TRUE(job_->pin_checkpoint(name, true).has_value());
    }
  }
  EXPECT_EQ(job_->pin_checkpoint("x", true).error().code(), Code::kNotFound);
  set_layout(R"({"tp": 2, "pp": 1, "dp": 1, "keep": 1})");
  for (int i = 0; i < 100 && job_->find_checkpoint("c") != nullptr; ++i) usleep(100'000);
  EXPECT_EQ(job_->find_checkpoint("c"), nullptr);  // keep counts the others
  EXPECT_NE(job_->find_checkpoint("a"), nullptr);
  ASSERT_TRUE(job_->pin_checkpoint("a", false).has_value());
  for (int i = 0; i < 100 && job_->find_checkpoint("a") != nullptr; ++i) usleep(100'000);
  EXPECT_EQ(job_->find_checkpoint("a"), nullptr);
  open();  // after a restart, too
  EXPECT_TRUE(job_->is_pinned("b"));
  Result<> removed = job_->remove_checkpoint("b");
  ASSERT_TRUE(removed.has_error());
  EXPECT_THAT(removed.error().message(), HasSubstr("ptc pin job/b --remove"));
  EXPECT_EQ(store_->remove_job("job", true).error().code(), Code::kPermissionDenied);
  ASSERT_TRUE(job_->pin_checkpoint("b", false).has_value());
  (void)job_->remove_checkpoint("b");  // unless `keep` was quicker
  EXPECT_EQ(job_->find_checkpoint("b"), nullptr);
}

TEST_F(JobTest, ThePlanIsAPictureToo) {
  EXPECT_THAT(job_->plan_svg(), HasSubstr("Nothing has been resharded yet"));
  write_ranks(sample_, spec("tp1-pp1-dp1"), incoming("a"));
  commit("a");
  set_layout(R"({"tp": 2, "pp": 1, "dp": 1})");
  EXPECT_THAT(job_->plan_svg(), HasSubstr("job / a: tp1-pp1-dp1 → tp2-pp1-dp1"));
  EXPECT_THAT(job_->plan_svg(), HasSubstr("<title>rank 0 → rank 1: "));
  EXPECT_THAT(job_->plan_json(), HasSubstr("\"flows\""));
}

TEST_F(JobTest, RemovingTheCurrentCheckpointFallsBackToTheOneBefore) {
  for (const char* name : {"a", "b"}) {
    write_ranks(sample_, spec("tp1-pp1-dp1"), incoming(name));
    commit(name);
  }
  ASSERT_TRUE(job_->remove_checkpoint("b").has_value());
  job_->wait_settled();
  EXPECT_EQ(job_->current_target(), "checkpoints/a/layouts/tp1-pp1-dp1");
  ASSERT_TRUE(job_->remove_checkpoint("a").has_value());
  job_->wait_settled();
  EXPECT_EQ(job_->current_target(), std::nullopt);
  EXPECT_TRUE(fs::is_empty(dir_.path() / "images"));
  ASSERT_TRUE(store_->remove_job("job", false).has_value());
}

/// Its host may be given another name, and what was carried out here need not be remembered.
TEST_F(JobTest, OfANodeThatIsAloneNothingNamesItNorIsKeptForOthers) {
  set_layout(R"({"tp": 1, "pp": 1, "dp": 1, "replicas": 1})");
  for (const char* name : {"a", "b"}) {
    write_ranks(sample_, spec("tp1-pp1-dp1"), incoming(name));
    commit(name);
  }
  set_layout(R"({"tp": 2, "pp": 1, "dp": 1, "replicas": 1, "devices": ["n0:0", "n0:1"]})");
  EXPECT_EQ(job_->current_target(), "checkpoints/b/layouts/tp2-pp1-dp1");
  EXPECT_EQ(job_->find_checkpoint("b")->stored()->nodes, std::vector<std::string>{""});
  EXPECT_TRUE(job_->verify("b").has_value());
  EXPECT_TRUE(job_->next_to_look_over(0).has_value());
  EXPECT_GT(job_->stored_bytes_here(), 0u);
  ASSERT_TRUE(job_->remove_checkpoint("a").has_value());
  ASSERT_TRUE(store_->create_job("other").has_value());
  ASSERT_TRUE(store_->remove_job("other", false).has_value());
  const Result<> drained = store_->drain("n0");
  ASSERT_TRUE(drained.has_error());
  EXPECT_THAT(drained.error().message(), HasSubstr("this cluster has one node"));
  const json::object now = status();
  EXPECT_EQ(now.at("nodes"), parse_json(R"([{"name": "n0", "state": "up"}])").value());
  EXPECT_THAT(json::serialize(now.at("warnings")), HasSubstr("this cluster has one node"));
  const auto meta = open_sqlite_meta(dir_.path() / "meta.db").value();
  const std::vector<MetaEntry> agreed = meta->list("").value();
  EXPECT_FALSE(agreed.empty());
  for (const MetaEntry& entry : agreed) {
    EXPECT_THAT(entry.key, StartsWith("jobs/job"));
    if (entry.key.ends_with("/layout")) continue;  // which the user has written
    EXPECT_THAT(entry.value, Not(HasSubstr("n0"))) << entry.key;
    EXPECT_THAT(entry.value, Not(HasSubstr("nodes"))) << entry.key;
  }
}

TEST_F(JobTest, AFlippedBitIsFoundAndStopsTheReshard) {
  write_ranks(sample_, spec("tp1-pp1-dp1"), incoming("base"));
  commit("base");
  CheckpointRef checkpoint = job_->find_checkpoint("base");
  const int64_t model = checkpoint->stored()->find(0, "model.safetensors");
  const StoredImage image = checkpoint->stored()->images.at(model);
  const ArraySlot& slot = checkpoint->stored()->layouts()[model].arrays[3];
  const std::string tensor = checkpoint->model().tensors()[slot.tensor].name;
  UniqueFd fd(::open((dir_.path() / "images" / image.id).c_str(), O_RDWR));
  char byte = 0;
  ASSERT_EQ(pread(fd.get(), &byte, 1, slot.byte_offset), 1);
  byte ^= 4;
  ASSERT_EQ(pwrite(fd.get(), &byte, 1, slot.byte_offset), 1);

  auto verified = job_->verify("base");
  ASSERT_TRUE(verified.has_error());
  EXPECT_THAT(verified.error().message(), HasSubstr(tensor));
  set_layout(R"({"tp": 2, "pp": 1, "dp": 1})");
  EXPECT_EQ(status().at("state"), "failed");
  EXPECT_THAT(job_->status_json(), HasSubstr(tensor));
  EXPECT_EQ(job_->current_target(), "checkpoints/base/layouts/tp1-pp1-dp1");
  // What was written for it is gone.
  EXPECT_EQ(std::distance(fs::directory_iterator(dir_.path() / "images"), {}), 3);
}

TEST_F(JobTest, ALostImageIsSaidAndTheRestStaysReadable) {
  const LayoutSpec stages = spec("tp1-pp2-dp1");
  set_layout(R"({"tp": 1, "pp": 2, "dp": 1})");
  write_ranks(sample_, stages, incoming("base"));
  commit("base");
  const StoredImage image =
      job_->find_checkpoint("base")->stored()->images.back();  // the last stage
  job_.reset();
  store_.reset();
  fs::resize_file(dir_.path() / "images" / image.id, 100);
  open();
  CheckpointRef checkpoint = job_->find_checkpoint("base");
  EXPECT_THAT(job_->status_json(), AllOf(HasSubstr("\"lost\""), HasSubstr("lm_head.weight")));
  EXPECT_THAT(refused_edit(R"({"tp": 1, "pp": 1, "dp": 1})"), HasSubstr("lost"));
  const SourceIndex& index = checkpoint->stored()->index();
  EXPECT_EQ(index.stored_nowhere(0, Box::whole({4})).message(),
            "tensor '" + checkpoint->model().tensors()[0].name + "', [0:4] is stored nowhere");
  auto first = checkpoint->rank_files(stages, 0).value();
  EXPECT_FALSE(read_content(*first, "model.safetensors").empty());
  auto second = checkpoint->rank_files(stages, 1).value();
  for (size_t i = 0; i < second->entries().size(); ++i)
    if (second->entries()[i].path == "model.safetensors") {
      auto content = second->open(i);
      ASSERT_TRUE(content.has_error());
      EXPECT_EQ(content.error().code(), Code::kCorrupt);
    }
}

TEST_F(JobTest, AStoreSaysWhichMemoryAnImageIsInUnlessItIsTheHosts) {
  write_ranks(sample_, spec("tp1-pp1-dp1"), incoming("base"));
  commit("base");
  fs::path stored;
  for (const auto& entry : fs::recursive_directory_iterator(dir_.path() / "jobs"))
    if (entry.path().filename().string().starts_with("stored-")) stored = entry.path();
  const std::string text = read_file(stored);
  EXPECT_THAT(text, Not(HasSubstr("memory")));
  auto open_with = [&](std::string_view memory) {
    json::value value = parse_json(text).value();
    for (json::value& image : value.at("images").as_array()) image.as_object()["memory"] = memory;
    write_file(stored, json::serialize(value));
    forget_checksums();
    open();
    return job_->find_checkpoint("base");
  };
  const CheckpointRef host = open_with("host");
  EXPECT_EQ(host->stored()->to_text(), text);
  EXPECT_TRUE(host->lost_tensors().empty());
  // A device's memory ends with the daemon.
  const CheckpointRef device = open_with("cuda:1");
  EXPECT_EQ(device->stored()->layouts().front().memory, NodeMemory::cuda(1));
  EXPECT_EQ(device->stored()->images.front().image, nullptr);
  EXPECT_EQ(device->stored()->to_text(), read_file(stored));
  EXPECT_FALSE(device->lost_tensors().empty());
  EXPECT_EQ(open_with("drum"), nullptr);
  EXPECT_THAT(job_->status_json(), HasSubstr("'drum' is no memory of a node"));
}

TEST_F(JobTest, AModelWithoutRulesIsKeptButNotCut) {
  std::vector<TensorEntry> entries = {{"thing.alpha", DType::kF32, {4, 6}}};
  write_file(incoming("base") / "rank/0/w.safetensors",
             safetensors_file(entries, {std::string(96, 'x')}));
  commit("base");
  EXPECT_THAT(refused_edit(R"({"tp": 2, "pp": 1, "dp": 1})"),
              AllOf(HasSubstr("thing.alpha"), HasSubstr("rules.json")));
  set_layout(R"({"tp": 1, "pp": 1, "dp": 2})");
}

TEST_F(JobTest, OneDaemonAStore) {
  auto second = JobStore::open({.directory = dir_.path(), .node = "n0"}, nullptr);
  ASSERT_TRUE(second.has_error());
  EXPECT_EQ(second.error().code(), Code::kBusy);
}

TEST_F(JobTest, WhoHoldsWhatWasRemovedHoldsNoMemory) {
  const LayoutSpec written = spec("tp1-pp1-dp1");
  std::vector<std::weak_ptr<const Image>> images;
  std::vector<CheckpointRef> held;
  for (const char* name : {"base", "next"}) {
    write_ranks(sample_, written, incoming(name));
    commit(name);
    held.push_back(job_->find_checkpoint(name));
    images.emplace_back(held.back()->stored()->images.front().image);
    EXPECT_FALSE(images.back().expired());
  }
  auto goes = [&](int number) {  // whoever looks at the job just now has it a moment longer
    for (int i = 0; i < 1000 && !images[number].expired(); ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return images[number].expired();
  };
  ASSERT_TRUE(job_->remove_checkpoint("base").has_value());
  EXPECT_TRUE(goes(0));
  EXPECT_FALSE(images[1].expired());
  ASSERT_TRUE(store_->remove_job("job", /*force=*/true).has_value());
  EXPECT_TRUE(goes(1));  // the kernel may know the job for long
}

TEST_F(JobTest, AnotherJobOfItsNameIsNotFollowed) {
  EXPECT_TRUE(job_->sync().has_value());
  const std::string another = R"({"created": "2026-01-01T00:00:00Z", "id": "another"})";
  ASSERT_TRUE(job_->meta().commit({.puts = {{"jobs/job", another}}}).has_value());
  const Result<> synced = job_->sync();
  ASSERT_TRUE(synced.has_error());
  EXPECT_EQ(synced.error().code(), Code::kNotFound);
}

}  // namespace
}  // namespace ptc::testing
