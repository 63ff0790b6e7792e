// <job>/dataset/: source.json, order.json, consumed, what follows from them, and the user's own
// files.
#pragma once

#include <string>

#include "fs/nodes/job/own_names_dir.h"

namespace ptc {

class DataSetDir : public OwnNamesDir {
 public:
  /// Errors: EMFILE.
  static FsResult<NodeRef> make(const JobViewRef& job);

  /// Until what it shows is known: the metadata may not answer. EAGAIN then.
  const Awaited* awaited() const override {
    return job().data_set().is_loaded() && !job().data_set_comes() ? nullptr : &loading_;
  }

  NameLife name_life() const override { return NameLife::kForever; }
  FsResult<struct stat> attributes() override;
  FsResult<> set_attributes(const AttributeChange& change, Handle* handle) override {
    job().conceal_opened(kDataSetName, change);
    PTC_TRY(RealNode::set_attributes(change, handle));
    return job().agree_on(kDataSetName, change);
  }
  EditableFile* editable(const std::string& name) override;

  /// All of ptcfs' own names show again.
  static void show_all(JobView& job);

 private:
  DataSetDir(JobViewRef view, HostFile file);
  FsResult<NodeRef> own_node(const std::string& name) override;
  FsResult<> ready() override;
  /// With all of them hidden `rmdir` forgets the data set (JobDir).
  FsResult<> unlink_own(const std::string& name) override;
  FsResult<> remove_own_directory(const std::string& name) override;

  const Awaited loading_;
};

}  // namespace ptc
