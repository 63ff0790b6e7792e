// Directories made of the sorted paths of a FileSet: model/, hf/, rank/<r>/, …/tensors/.
#pragma once

#include <memory>
#include <string>
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
  const FileSetSourceRef& source() const { return source_; }
  FsResult<NodeRef> find(const std::string& name) override;
  FsResult<std::vector<DirEntry>> entries() override;
  FsResult<uint64_t> subdirectories() override;

 private:
  /// Calls one of them for every name, in order.
  template <class File, class Directory>
  FsResult<> for_each(File file, Directory directory) const;
  const FileSetSourceRef source_;
  const std::string prefix_;
  size_t begin_, end_;  // in the set
};

/// Whether open(2) flags ask for reading only; anything else is EROFS on what cannot change. (With
/// passthrough that is the one place where it can be refused, even to root.)
bool opens_to_read(int flags);

}  // namespace ptc
