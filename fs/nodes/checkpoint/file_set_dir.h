// Directories made of the sorted paths of a FileSet: model/, hf/, rank/<r>/, …/tensors/.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fs/nodes/checkpoint/checkpoint_dir.h"

namespace ptc {

/// The files of a set whose path begins with `prefix` ("" or "layers/0/"). They lie side by side in
/// the set, so nothing is built: a lookup is one binary search. `set` is what `source` gives.
class FileSetDir : public FrozenDir {
 public:
  FileSetDir(JobViewRef job, std::shared_ptr<CheckpointView> checkpoint, std::string key,
             FileSetSourceRef source, const FileSet& set, std::string prefix);

 protected:
  /// Of all files of a set that need not be there yet.
  FileSetDir(JobViewRef job, std::shared_ptr<CheckpointView> checkpoint, std::string key,
             FileSetSourceRef source);
  const FileSetSourceRef& source() const { return source_; }
  FsResult<NodeRef> find(const std::string& name) override;
  FsResult<std::vector<DirEntry>> entries() override;
  FsResult<std::optional<uint64_t>> subdirectories() override;

 private:
  /// Calls one of them for every name, in order.
  template <class File, class Directory>
  FsResult<> for_each(File file, Directory directory) const;
  const FileSetSourceRef source_;
  const std::string prefix_;
  const size_t begin_, end_;  // in the set, if that has so many
};

/// All files of a set, which is made when somebody looks for a name in here: to list the directory
/// that this one is in costs nothing.
class WholeSetDir : public FileSetDir {
 public:
  WholeSetDir(JobViewRef job, std::shared_ptr<CheckpointView> checkpoint, std::string key,
              FileSetSourceRef source)
      : FileSetDir(std::move(job), std::move(checkpoint), std::move(key), std::move(source)) {}

 private:
  FsResult<std::optional<uint64_t>> subdirectories() override { return std::optional<uint64_t>(); }
};

/// Whether open(2) flags ask for reading only; anything else is EROFS on what cannot change. (With
/// passthrough that is the one place where it can be refused, even to root.)
bool opens_to_read(int flags);

}  // namespace ptc
