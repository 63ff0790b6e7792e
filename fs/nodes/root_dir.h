// The root of the mount: .ptc/ and the jobs. mkdir makes a job, rmdir removes one.
#pragma once

#include <string>
#include <vector>

#include "fs/tree/tree.h"

namespace ptc {

class RootDir : public Node {
 public:
  explicit RootDir(Tree& tree) : Node(kRootKey), tree_(tree) {}

  /// Every path begins here: whether anybody still answers is to be seen soon.
  double attribute_seconds() const override { return 1; }
  FsResult<struct stat> attributes() override;
  FsResult<> set_attributes(const AttributeChange& change, Handle* handle) override;
  FsResult<NodeRef> lookup(const std::string& name) override;
  FsResult<std::vector<DirEntry>> list() override;
  FsResult<NodeRef> make_directory(const Caller& caller, const std::string& name,
                                   mode_t mode) override;
  FsResult<> remove_directory(const std::string& name) override;

 private:
  void touch() const;
  Tree& tree_;
};

}  // namespace ptc
