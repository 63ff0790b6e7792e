// What a committed checkpoint is: its logical tensors and the files it was written as. Immutable.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "reshard/exec/executor.h"
#include "reshard/plan/planner.h"
#include "reshard/ptc/layout.h"
#include "reshard/ptc/model.h"
#include "store/base/error.h"
#include "store/base/memory_place.h"
#include "store/image/image_store.h"
#include "store/tensor/checksum.h"

namespace ptc {

/// Who may read a file: its owner, group, and of the mode 0444. Not who may enter its directories.
struct ReadRights {
  uint32_t uid = 0, gid = 0;
  uint32_t mode = 0444;
  friend bool operator==(const ReadRights&, const ReadRights&) = default;

  /// The most that both allow to everybody.
  ReadRights narrowed_to(const ReadRights& other) const;
};

/// A file that a rank wrote. Files with tensors are kept once per state (replicas wrote the same),
/// those of `boxes` where any of their boxes is in no file before them; all others are kept for
/// every rank, byte for byte, for ever.
struct WrittenFile {
  uint64_t rank = 0;  // global, under written_spec
  std::string path;   // in the rank's directory
  uint64_t bytes = 0;
  std::string image;  // the file's image at the time of the commit

  bool has_tensors = false;
  // With tensors:
  bool dp_cut = false;  // it has tensors that are cut over dp: of its own dp rank only
  std::string set;      // a shard of a set: the name of the whole
  bool boxes =
      false;  // of a set: its arrays are the parts of tensors that its header says (dcp_sharding())
  uint64_t header_bytes = 0;   // the header as it was written, kept in headers.bin …
  uint64_t header_offset = 0;  // … at this offset
  std::string inside = {};     // the key above the model that its names are without (torch_names.h)
  // Without:
  Checksum checksum;  // of the file as a vector of bytes
  /// nullopt: written when that was not kept. Of replicas that wrote the same: of all of them.
  std::optional<ReadRights> rights;
};

/// Bytes that a rank wrote as padding of a vocabulary and that are not zero. They mean nothing, but
/// the written files must read the same for ever; so they are kept as tensors without a name.
struct Padding {
  uint32_t file = 0;    // index into files
  uint32_t tensor = 0;  // that is padded
  Box local;            // where in the local array
  Checksum checksum;
};

struct Manifest {
  std::string name;
  std::string id;  // directory name under checkpoints/; never used twice
  int64_t time_ns = 0;
  uint32_t uid = 0, gid = 0;  // owner of what was committed
  uint32_t mode = 0755;       // permissions of the directory that was committed
  LayoutSpec written_spec;
  std::shared_ptr<const Model> model;
  std::vector<Checksum> checksums;  // by tensor of the model
  std::vector<WrittenFile> files;   // by rank, then path
  std::vector<Padding> padding;
  std::string config;  // the model's config.json; empty: there is none, or a large one
  std::optional<uint64_t> consumed;  // how far the job's data set was, if the writer said so

  /// Cut by the rules of `spec`, where it has any. kInvalidArgument: they say nothing of a model
  /// like this one.
  Result<std::shared_ptr<const Model>> model_under(const LayoutSpec& spec) const;

  /// Tensors for plans and checks: the model's, then the padding.
  std::vector<TensorFacts> tensor_facts() const;
  std::vector<uint8_t> element_bits() const;
  /// "model.norm.weight"; padding is "padding of …".
  std::string tensor_name(uint32_t tensor) const;

  ReadRights rights_of(const WrittenFile& file) const {
    return file.rights.value_or(ReadRights{uid, gid});
  }

  /// The state of written_spec whose file it is (StateFile::owner).
  uint32_t owner_of(const WrittenFile& file) const;

  std::string to_text() const;
  static Result<Manifest> from_text(std::string_view text);
};

/// Two specs with the same key have the same states with the same content: they differ only in
/// replicas (cp, and dp where it cuts nothing) and in the numbering of ranks.
std::string state_key(const LayoutSpec& spec);
/// Two specs with the same text are the same.
std::string key_text(const LayoutSpec& spec);

struct FileLayout;  // reshard/checkpoint/file_format.h
using FileLayoutRef = std::shared_ptr<const FileLayout>;

/// A file with tensors, as a state has it under some spec. Of a file in which dp cuts nothing, all
/// states that differ in dp only have the same: it is stored as the file of the first of them.
struct StateFile {
  std::string path;
  ImageLayout layout;
  uint32_t owner = 0;                 // the state whose file is stored
  std::vector<uint32_t> states = {};  // that have it; filled by Checkpoint::target_images
  FileLayoutRef laid_out = nullptr;   // while it is here, others that lie so share it; may be null
};

/// One image that holds part of a checkpoint. Copies on several nodes are images of their own.
struct StoredImage {
  std::string id;
  ImageRef image;        // nullptr: lost, or on a node that is away
  uint32_t state = 0;    // under the stored spec; its owner (StateFile)
  std::string path;      // it is exactly this file of that state; empty: no file (padding, a shard)
  int32_t written = -1;  // index into Manifest::files when its arrays lie as they were written, or
                         // it is that file and has no tensors
  std::string node = {};   // that holds it; empty: the only one of a cluster of one
  NodeMemory memory = {};  // of that node
  bool missing = false;    // that node has found its file gone
};

/// What the images of a stored state hold, in their order; lost ones hold nothing. Immutable;
/// threads: any.
class StoredLayouts {
 public:
  /// `key` is no other's. `whole`: with those that are lost.
  StoredLayouts(std::vector<ImageLayout> layouts, std::vector<uint8_t> element_bits,
                std::string key, std::shared_ptr<const std::vector<ImageLayout>> whole = nullptr,
                TensorNames names = nullptr)
      : layouts_(std::move(layouts)),
        element_bits_(std::move(element_bits)),
        key_(std::move(key)),
        whole_(std::move(whole)),
        names_(std::move(names)) {}

  const std::vector<ImageLayout>& layouts() const { return layouts_; }
  /// What all of them hold, whether or not they are lost: the same for all nodes.
  const std::vector<ImageLayout>& with_lost() const { return whole_ ? *whole_ : layouts_; }
  /// Made when it is first asked for.
  const SourceIndex& index() const;
  const std::string& key() const { return key_; }

 private:
  const std::vector<ImageLayout> layouts_;
  const std::vector<uint8_t> element_bits_;
  const std::string key_;
  const std::shared_ptr<const std::vector<ImageLayout>> whole_;  // kept for when nodes come back
  const TensorNames names_;
  mutable std::once_flag indexed_;
  mutable std::unique_ptr<const SourceIndex> index_;
};

/// Where all of a checkpoint's bytes lie: one state of affairs. Immutable; threads: any.
struct StoredState {
  LayoutSpec spec;
  std::vector<StoredImage> images;
  std::vector<std::string> nodes;  // by name; ImageLayout::node counts in it
  uint32_t here = 0;               // this node in it; nodes.size(): it holds nothing
  std::shared_ptr<const StoredLayouts> held;

  const std::vector<ImageLayout>& layouts() const { return held->layouts(); }
  const SourceIndex& index() const { return held->index(); }

  /// The image that is exactly this file, the one on this node if there is one, or one that is
  /// within reach if there is one; −1: there is none.
  int64_t find(uint32_t state, std::string_view path) const;
  /// The same of a file without tensors, by its index into Manifest::files.
  int64_t find_other(uint32_t file) const;
  std::vector<ImageRef> image_refs() const;
  std::string to_text() const;

 private:
  int64_t best(uint32_t state, std::string_view path, int32_t written) const;
};

/// What StoredState::to_text() says of a state of affairs: Checkpoint::make_stored() makes one of
/// it, once its images are looked for.
struct StoredText {
  LayoutSpec spec;
  std::vector<StoredImage> images;  // without `image`
  std::vector<uint64_t> bytes;      // of each
  /// kCorrupt: it is damaged.
  static Result<StoredText> from_text(std::string_view text);
};

}  // namespace ptc
