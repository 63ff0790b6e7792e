// One committed checkpoint, and every file that can be read out of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "reshard/job/manifest.h"
#include "reshard/ptc/layout.h"
#include "reshard/ptc/model.h"
#include "store/base/error.h"
#include "store/image/image_store.h"

namespace ptc {

/// The bytes of one file: an image as it is, or gathered out of several when read. Holds the images
/// it needs, so it reads the same bytes whatever happens to the checkpoint meanwhile. Threads: any.
class FileContent {
 public:
  virtual ~FileContent() = default;
  virtual uint64_t bytes() const = 0;
  /// Fills `out` from `offset`; both lie within bytes().
  virtual Result<> read(uint64_t offset, std::span<std::byte> out) const = 0;
  /// The image that is exactly this file, to be handed to the kernel; nullptr if there is none.
  virtual ImageRef image() const { return nullptr; }
};
using FileContentRef = std::shared_ptr<const FileContent>;

/// The files under one directory of a checkpoint. Immutable; threads: any.
class FileSet {
 public:
  struct Entry {
    std::string path;  // relative, '/' between components; sorted bytewise over the set
    uint64_t bytes = 0;
    std::string dtype;  // of a .npy whose type NumPy cannot say (user.ptc.dtype); else empty
  };
  virtual ~FileSet() = default;
  const std::vector<Entry>& entries() const { return entries_; }
  /// The content of entries()[index] as it is stored now.
  virtual Result<FileContentRef> open(size_t index) const = 0;

 protected:
  std::vector<Entry> entries_;
};
using FileSetRef = std::shared_ptr<const FileSet>;

/// Threads: any. Everything but where the bytes lie is immutable; that is replaced in one step when
/// a reshard is committed.
class Checkpoint : public std::enable_shared_from_this<Checkpoint> {
 public:
  Checkpoint(Manifest manifest, std::string headers, StoredState stored);

  const std::string& name() const { return manifest_.name; }
  const Manifest& manifest() const { return manifest_; }
  const Model& model() const { return *manifest_.model; }

  /// meta.json, as it is read.
  const std::string& meta_json() const { return meta_json_; }

  /// model/: one .npy of every tensor. Built when first asked for, then kept while in use.
  Result<FileSetRef> model_files() const;
  /// hf/: shards, index, and what else rank 0 wrote.
  Result<FileSetRef> hf_files() const;
  /// layouts/<spec>/rank/<r>/ without tensors/: what this rank loads.
  Result<FileSetRef> rank_files(const LayoutSpec& spec, uint64_t global_rank) const;
  /// layouts/<spec>/rank/<r>/tensors/: its sub-tensors as .npy.
  Result<FileSetRef> rank_tensors(const LayoutSpec& spec, uint64_t global_rank) const;

  /// Where the bytes lie now.
  std::shared_ptr<const StoredState> stored() const;
  void replace_stored(std::shared_ptr<const StoredState> stored);

  /// The files of one state under `spec` with their arrays and headers, as they would be stored:
  /// the target side of a plan. Pure function of checkpoint and spec.
  Result<std::vector<StateFile>> state_files(const LayoutSpec& spec, const StateCoords& state) const;

 private:
  friend class GatheredSet;
  Manifest manifest_;
  std::string headers_;    // of the written files, one behind the other (manifest has the offsets)
  std::string meta_json_;
  mutable std::mutex mutex_;
  std::shared_ptr<const StoredState> stored_;                                       // guarded
  mutable std::unordered_map<std::string, std::weak_ptr<const FileSet>> file_sets_;  // guarded
};
using CheckpointRef = std::shared_ptr<Checkpoint>;

}  // namespace ptc
