// One committed checkpoint, and every file that can be read out of it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "reshard/checkpoint/checkpoint_facts.h"
#include "reshard/checkpoint/dcp_table.h"
#include "reshard/checkpoint/file_format.h"
#include "reshard/checkpoint/known_damage.h"
#include "reshard/checkpoint/manifest.h"
#include "reshard/checkpoint/shared_results.h"
#include "reshard/exec/gather.h"
#include "reshard/ptc/layout.h"
#include "reshard/ptc/model.h"
#include "reshard/ptc/model_facts.h"
#include "store/base/error.h"
#include "store/base/mutex.h"
#include "store/image/image_store.h"

namespace ptc {

struct ServedLayout;      // reshard/serve/served_layout.h
struct DeepSpeedSources;  // reshard/checkpoint/deepspeed_folder.h

/// The bytes of one file: an image as it is, or gathered out of several when read. Holds the images
/// it needs, so it reads the same bytes whatever happens to the checkpoint meanwhile. Threads: any.
class FileContent {
 public:
  virtual ~FileContent() = default;
  virtual uint64_t bytes() const = 0;
  /// Fills `out` from `offset`; both lie within bytes().
  virtual Result<> read(uint64_t offset, std::span<std::byte> out) const = 0;
  /// The same into memory that nobody reads soon: past the caches.
  virtual Result<> read_past_caches(uint64_t offset, std::span<std::byte> out) const {
    return read(offset, out);
  }
  /// The image that is exactly this file, to be handed to the kernel; nullptr if there is none.
  virtual ImageRef image() const { return nullptr; }
  /// The same in the memory of a device of this node.
  virtual ImageRef image_in_device() const { return nullptr; }
  /// How it is gathered out of images on this node; nullptr if it is not.
  virtual const GatherProgram* program() const { return nullptr; }
  /// The other nodes that reading it may wait for: "w1", "w1, w3"; empty: none.
  virtual std::string other_nodes() const { return {}; }
};
using FileContentRef = std::shared_ptr<const FileContent>;

/// The files under one directory of a checkpoint. Immutable; threads: any.
class FileSet {
 public:
  struct Entry {
    std::string path;  // relative, '/' between components; sorted bytewise over the set
    uint64_t bytes = 0;
    std::string dtype;  // of a .npy whose type NumPy cannot say (user.ptc.dtype); else empty
    ReadRights rights;
  };
  virtual ~FileSet() = default;
  const std::vector<Entry>& entries() const { return entries_; }
  /// What it takes, roughly, with what others may share with it.
  uint64_t memory_bytes() const { return memory_bytes_; }
  /// The content of entries()[index] as it is stored now.
  virtual Result<FileContentRef> open(size_t index) const = 0;
  /// Whether entries()[index] is stored as it is: not computed when read.
  virtual bool is_stored(size_t index) const = 0;
  /// Files of one checkpoint with equal keys have equal bytes.
  std::string content_key(size_t index) const { return key_ + "/" + entries_[index].path; }

 protected:
  explicit FileSet(std::string key) : key_(std::move(key)) {}
  std::vector<Entry> entries_;
  uint64_t memory_bytes_ = 0;

 private:
  const std::string key_;
};
using FileSetRef = std::shared_ptr<const FileSet>;
using StateFilesRef = std::shared_ptr<const std::vector<StateFile>>;

/// Open files of which some bytes are on other nodes hold it, and find out by it where these lie:
/// also after they were moved, and as they were last when the checkpoint was removed.
struct RemoteFiles {
  using Clock = std::chrono::steady_clock;
  Mutex mutex;
  ConditionVariable replaced;
  std::shared_ptr<const StoredState> stored PTC_GUARDED_BY(mutex);
  std::map<std::string, Clock::time_point> absent
      PTC_GUARDED_BY(mutex);  // nodes that did not answer a read, and until when that counts
  /// What is left without some nodes. Made once, for many files lie on the same.
  struct Rest {
    std::shared_ptr<const StoredState> of;
    std::set<std::string> without;
    std::shared_ptr<const StoredState> stored;
    Rest(std::shared_ptr<const StoredState> of_given, std::set<std::string> nodes,
         std::shared_ptr<const StoredState> left)
        : of(std::move(of_given)), without(std::move(nodes)), stored(std::move(left)) {}
  };
  std::shared_ptr<const Rest> rest PTC_GUARDED_BY(mutex);  // of `stored`
  Mutex making_rest;                                       // before `mutex`
};

/// Threads: any. Everything but where the bytes lie, and which are damaged, is immutable; those are
/// replaced in one step each, the first when a reshard is committed.
class Checkpoint : public std::enable_shared_from_this<Checkpoint> {
 public:
  /// `transport` and what `catch_up` (JobServices) stands for outlive the checkpoint and everything
  /// opened from it, `results` the checkpoint. Call replace_stored() before anything is read.
  Checkpoint(std::shared_ptr<const CheckpointFacts> facts, SharedResults* results,
             Transport* transport, std::function<bool()> catch_up)
      : facts_(std::move(facts)),
        results_(results),
        transport_(transport),
        catch_up_(std::move(catch_up)) {}

  const std::string& name() const { return manifest().name; }
  const Manifest& manifest() const { return facts_->manifest; }
  /// By the rules of the commit; for what tensors are, and where no layout cuts them.
  const Model& model() const { return *manifest().model; }
  /// Manifest::model_under(), made once.
  Result<std::shared_ptr<const Model>> model_under(const LayoutSpec& spec) const;
  /// What its tensors contradict of what is said of the model, by the rules of this layout, too
  /// (contradictions()): a few sentences, each of bounded length. Made once, and again for other
  /// rules. Names and facts in it are not for all (is_open_to_all()).
  std::shared_ptr<const std::vector<std::string>> contradictions_under(
      const LayoutSpec& spec) const;
  /// check_facts() of the model under this layout, but for the layouts that it was written in or is
  /// stored in now. Names are looked at once, and again for other rules.
  Result<> check_facts_under(const LayoutSpec& spec) const;
  /// Of its manifest.
  const std::vector<TensorFacts>& tensor_facts() const { return facts_->tensors; }

  const std::vector<CheckpointFacts::LeftOut>& left_out() const { return facts_->left_out; }
  const CheckpointFacts::Uncut& zero_uncut() const { return facts_->zero_uncut; }
  /// Who may read what is computed of a tensor.
  const ReadRights& rights_of(uint32_t tensor) const { return facts_->rights_of(tensor); }
  /// Who may read what is made of all files.
  const ReadRights& rights_of_all() const { return facts_->rights_in(""); }
  /// What all who see the job may be told: names of tensors, too.
  bool is_open_to_all() const { return (rights_of_all().mode & 0004) != 0; }

  /// meta.json, as it is read.
  const std::string& meta_json() const { return facts_->meta_json(); }

  /// Results that depend on the checkpoint; `key` begins with what it is.
  SharedResults& results() const { return *results_; }
  ResultKey key(std::string_view kind) const { return ResultKey(kind).add(facts_->key); }

  /// model/: one .npy of every tensor. Built when first asked for, then kept while in use.
  Result<FileSetRef> model_files() const;
  /// hf/: shards, index, and what else rank 0 wrote.
  Result<FileSetRef> hf_files() const;
  /// dcp/: `.metadata` and `.distcp` files of PyTorch's distributed checkpointing (dcp_tree.h).
  Result<FileSetRef> dcp_files() const;
  /// layouts/<spec>/deepspeed/: a universal checkpoint of DeepSpeed's (deepspeed_folder.h).
  Result<FileSetRef> deepspeed_files(const LayoutSpec& spec) const;
  /// layouts/<spec>/rank/<r>/ without tensors/: what this rank loads.
  Result<FileSetRef> rank_files(const LayoutSpec& spec, uint64_t global_rank) const;
  /// layouts/<spec>/rank/<r>/tensors/: its sub-tensors as .npy.
  Result<FileSetRef> rank_tensors(const LayoutSpec& spec, uint64_t global_rank) const;

  /// layouts/vllm-tp8/: what a worker of an inference engine loads, and with it all other files of
  /// hf/; without one what all workers load. What cannot be made is said in a file of the set.
  Result<FileSetRef> served_files(const ServedLayout& layout, std::optional<uint32_t> worker) const;

  /// Of what Megatron-LM saved; nullopt: of anything else.
  struct MegatronTree {
    std::string in_rank;  // where the files of a rank's mp_rank_… are in rank_files(): "", "x/"
    std::optional<uint64_t> iteration;
    /// A distributed checkpoint, which Megatron cuts itself: dcp_files() under each layout.
    bool is_distributed = false;
  };
  bool is_megatron_tree() const {
    return facts_->megatron_directory.has_value() || facts_->torch_dist_directory.has_value();
  }
  Result<std::optional<MegatronTree>> megatron_tree() const;

  /// By directory the values.pt of what distributed checkpointing wrote there (dcp_values.h): made
  /// once, and all ranks' directories share it.
  using TextsByDirectory = std::map<std::string, std::string>;
  Result<std::shared_ptr<const TextsByDirectory>> values_of_dcp() const;

  /// The files of one state under `spec` with their arrays and headers, as they would be stored:
  /// the target side of a plan. Pure function of checkpoint and spec.
  Result<StateFilesRef> state_files(const LayoutSpec& spec, const StateCoords& state) const;
  /// The files of all states under `spec`, and the padding (path ""), in the order of
  /// StoredState::images.
  Result<StateFilesRef> target_images(const LayoutSpec& spec) const;

  /// Where the bytes lie now.
  std::shared_ptr<const StoredState> stored() const;
  void replace_stored(std::shared_ptr<const StoredState> stored);
  /// From now on nobody opens a file with bytes that are known to be wrong (kCorrupt), or has them
  /// from a copy that is, where another is right; who has it open keeps it. True: this was not
  /// known before.
  bool replace_damage(const KnownDamage& damage);
  /// nullptr: none is known.
  std::shared_ptr<const KnownDamage> damage() const;
  /// The checkpoint was removed: holds no image any more, for the kernel may know its names, and so
  /// this object, for long. What is open keeps its images; to open anything else is kNotFound.
  void let_go();
  bool removed() const { return removed_; }
  /// Completes a description of where bytes lie: what each image holds. Images are put in order.
  Result<std::shared_ptr<const StoredState>> make_stored(const LayoutSpec& spec,
                                                         std::vector<StoredImage> images) const;

  /// Tensors of which some part is stored nowhere any more, by name.
  std::vector<std::string> lost_tensors() const;
  /// "checkpoint base has lost 2 tensors, lm_head.weight among them"; nullopt: none.
  std::optional<std::string> loss() const;

  /// What is known of where the bytes lie is brought up to date (JobServices::catch_up); false: it
  /// was.
  bool catch_up() const { return catch_up_(); }

  /// True while a file of it is open (its FileContent lives).
  bool in_use() const { return open_token_.use_count() > 1; }
  /// After let_go() lives as long as a file is open of which some bytes are on other nodes.
  std::weak_ptr<RemoteFiles> remote_files() const;

 private:
  friend class ContentSource;
  Result<FileSetRef> cached(const std::string& key,
                            const std::function<Result<FileSetRef>()>& build) const;
  /// What all states under one spec are made of. That of the spec that was asked for last is kept:
  /// whoever walks a layout asks for one rank after the other.
  struct OfSpec;
  Result<std::shared_ptr<const OfSpec>> of_spec(const LayoutSpec& spec) const;
  Result<std::vector<Model::Held>> hold(const LayoutSpec& spec, const StateCoords& state) const;
  /// What a state holds, by file and name in it (of an .npy: "").
  using HeldByName = std::unordered_map<std::string, Model::Held>;
  Result<HeldByName> held_by_name(const OfSpec& of_spec, const StateCoords& state) const;
  std::string file_of(const Model& model, uint32_t tensor, const LayoutSpec& spec,
                      const StateCoords& state) const;
  Result<ImageLayout> written_layout(uint32_t file, const HeldByName& held) const;
  /// The same of a file that is stored as it was written, which was made for its image.
  std::optional<ImageLayout> stored_layout(uint32_t file) const;
  Result<FileOutline> outline_of(const WrittenFile& file) const;
  /// Adds what DeepSpeed's file of the model says: its values, and what the module calls tensors.
  Result<> read_deepspeed_model(DeepSpeedSources& sources) const;
  /// What distributed checkpointing wrote, by directory.
  Result<std::map<std::string, std::vector<DcpTable>>> tables_of_dcp() const;
  /// The file of this name of the rank with the same coordinates, or else of that stage, or else
  /// the first; then those of others that have tensors of these which it has not, as few as need
  /// be.
  Result<std::vector<FileOutline>> written_like(const std::string& path, const StateCoords& state,
                                                const std::vector<Model::Held>& held) const;
  /// By tensor the first file that has it, an index into Manifest::files; −1: none, as of a set.
  Result<std::shared_ptr<const std::vector<int32_t>>> first_writers() const;
  /// kInvalidArgument: what is beside tensors in files of torch's takes too much memory under this
  /// layout, where each state has its own.
  Result<> check_literals(const LayoutSpec& spec) const;
  /// What the `args` of a file of Megatron's say under a layout.
  Result<std::vector<NewArgument>> arguments_of(const std::string& path,
                                                const LayoutSpec& spec) const;
  std::vector<uint64_t> contents_of(const std::vector<Model::Held>& held) const;
  static uint32_t owner_of(const Model& model, const LayoutSpec& spec, StateCoords state,
                           const std::vector<Model::Held>& held);
  Result<FileLayoutRef> lay_out(const std::string& path, const std::vector<Model::Held>& held,
                                const LayoutSpec& spec, const StateCoords& state,
                                const std::vector<std::string>* names) const;
  /// Others have arrays of the same names and shapes: ranks that differ in tp or dp, most often,
  /// and those of other layouts. They have one, header and all, while there is such a file.
  Result<FileLayoutRef> shared_layout(const std::string& path, const std::vector<Model::Held>& held,
                                      const LayoutSpec& spec, const StateCoords& state) const;
  /// `names`: by position in `held`, in the place of the tensors' own.
  Result<StateFile> compose(const std::string& path, std::vector<Model::Held> held,
                            const LayoutSpec& spec, const StateCoords& state,
                            const std::vector<std::string>* names = nullptr) const;
  /// What all workers' files are made of.
  struct Served;
  Result<std::shared_ptr<const Served>> served(const ServedLayout& layout) const;
  Result<ImageLayout> served_file(const Served& served, uint32_t worker) const;
  /// Parameters as they are in hf/, by number.
  std::vector<uint32_t> parameters() const;
  ImageLayout padding_layout() const;
  std::vector<uint32_t> other_files(const RankCoords& coords) const;
  /// Those that are `known`, by owner and path, without layout.
  using KnownFiles = std::map<std::pair<uint32_t, std::string>, size_t>;
  Result<std::vector<StateFile>> make_state_files(const OfSpec& of_spec, const StateCoords& state,
                                                  const KnownFiles& known = {}) const;
  Result<std::vector<StateFile>> make_target_images(const LayoutSpec& spec) const;
  /// What each image holds, lost or not.
  Result<std::vector<ImageLayout>> make_layouts(const LayoutSpec& spec,
                                                const std::vector<StoredImage>& images,
                                                const std::vector<std::string>& nodes) const;

  std::shared_ptr<const StoredState> without_wrong_copies(
      const std::shared_ptr<const StoredState>& stored, const KnownDamage* damage) const;
  void set_readable(std::shared_ptr<const StoredState> readable) PTC_REQUIRES(mutex_);

  const std::shared_ptr<const CheckpointFacts> facts_;
  SharedResults* const results_;
  mutable std::atomic<bool> has_no_dcp_values_{false};  // true: it was looked for
  Transport* const transport_;
  const std::function<bool()> catch_up_;
  std::atomic<bool> removed_ = false;
  const std::shared_ptr<int> open_token_ = std::make_shared<int>(0);
  Mutex replacing_;  // before mutex_: of who replaces what is stored, or what is wrong of it
  mutable Mutex mutex_;
  std::shared_ptr<const StoredState> stored_ PTC_GUARDED_BY(mutex_);
  /// The same without copies that are known to be wrong: what is read.
  std::shared_ptr<const StoredState> readable_ PTC_GUARDED_BY(mutex_);
  std::shared_ptr<const KnownDamage> damage_ PTC_GUARDED_BY(mutex_);  // null: none
  std::shared_ptr<RemoteFiles> remote_files_ PTC_GUARDED_BY(mutex_) =
      std::make_shared<RemoteFiles>();  // null: removed
  mutable std::shared_ptr<const OfSpec> last_of_spec_ PTC_GUARDED_BY(mutex_);
  mutable std::unordered_map<std::string, std::weak_ptr<const FileSet>> file_sets_
      PTC_GUARDED_BY(mutex_);
  struct Contradicted {
    LayoutRules by;
    std::shared_ptr<const std::vector<std::string>> sentences;  // null: not looked for yet
  };
  struct Doubtful {
    LayoutRules by;
    std::shared_ptr<const DoubtfulFacts> facts;  // null: not looked for yet
  };
  mutable Doubtful doubtful_ PTC_GUARDED_BY(mutex_);
  mutable Contradicted contradicted_ PTC_GUARDED_BY(mutex_);  // by the rules asked for last
  static constexpr size_t kFewSets = 64;
  mutable size_t clean_sets_at_ PTC_GUARDED_BY(mutex_) =
      kFewSets;  // names in it; those of sets that are gone are forgotten then
};
using CheckpointRef = std::shared_ptr<Checkpoint>;

}  // namespace ptc
