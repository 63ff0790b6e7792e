// <job>/dataset/: source.json, order.json, consumed, what follows from them, and the user's own
// files.
#pragma once

#include <string>
#include <vector>

#include "fs/nodes/real_node.h"

namespace ptc {

class DataSetDir : public RealNode {
 public:
  /// Errors: EMFILE.
  static FsResult<NodeRef> make(const JobViewRef& job);

  /// Until what it shows is known: the metadata may not answer. EAGAIN then.
  const Awaited* awaited() const override {
    return job().data_set().is_loaded() ? nullptr : &loading_;
  }

  NameLife name_life() const override { return NameLife::kForever; }
  double attribute_seconds() const override { return job().hidden().any() ? 0 : kCacheSeconds; }
  bool is_agreed_on() const override { return true; }
  FsResult<struct stat> attributes() override;
  FsResult<> set_attributes(const AttributeChange& change, Handle* handle) override {
    PTC_TRY(RealNode::set_attributes(change, handle));
    return change.mode || change.uid || change.gid ? job().agree_on(kDataSetName)
                                                   : FsResult<>(ok());
  }
  FsResult<NodeRef> lookup(const std::string& name) override;
  FsResult<std::vector<DirEntry>> list() override;
  FsResult<Created> create(const Caller& caller, const std::string& name, mode_t mode,
                           int flags) override;
  FsResult<NodeRef> make_directory(const Caller& caller, const std::string& name,
                                   mode_t mode) override;
  FsResult<NodeRef> make_node(const Caller& caller, const std::string& name, mode_t mode) override;
  FsResult<NodeRef> make_symlink(const Caller& caller, const std::string& name,
                                 const std::string& target) override;
  FsResult<NodeRef> make_link(Node& node, const std::string& name) override;
  /// Of ptcfs' own names: they are hidden; with all of them, `rmdir` forgets the data set (JobDir).
  FsResult<> unlink(const std::string& name) override;
  FsResult<> remove_directory(const std::string& name) override;

  EditableFile* editable(const std::string& name) override;
  bool reserved(const std::string& name) const override;

  /// All of ptcfs' own names show again.
  static void show_all(JobView& job);

 private:
  DataSetDir(JobViewRef view, HostFile file);
  bool hides(const std::string& name) const;
  /// The node of a name that belongs to ptcfs and shows now; null otherwise.
  FsResult<NodeRef> own_name(const std::string& name);
  FsResult<NodeRef> refuse_own_name(const std::string& name);

  const Awaited loading_;
};

}  // namespace ptc
