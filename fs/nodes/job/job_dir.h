// <job>/: the names ptcfs has in it, and the user's own files.
#pragma once

#include <string>

#include "fs/nodes/job/own_names_dir.h"

namespace ptc {

class JobDir : public OwnNamesDir {
 public:
  /// The node of this job's directory. Errors: ENOMEM, EMFILE.
  static FsResult<NodeRef> make(const JobViewRef& job);

  NameLife name_life() const override { return NameLife::kUntilTold; }
  FsResult<struct stat> attributes() override;
  FsResult<> set_attributes(const AttributeChange& change, Handle* handle) override;
  FsResult<NodeRef> make_directory(const Caller& caller, const std::string& name,
                                   mode_t mode) override;

  /// What the job may have on each node (QuotaLimit::parse()). Names that begin so are root's.
  static constexpr const char* kQuotaXattr = "trusted.ptc.quota";
  FsResult<std::string> get_xattr(const std::string& name) override;
  FsResult<> set_xattr(const std::string& name, std::string_view value, int flags) override;
  FsResult<> remove_xattr(const std::string& name) override;

  EditableFile* editable(const std::string& name) override;

 private:
  JobDir(JobViewRef view, HostFile file);
  FsResult<NodeRef> own_node(const std::string& name) override;
  FsResult<> unlink_own(const std::string& name) override;
  FsResult<> remove_own_directory(const std::string& name) override;
};

}  // namespace ptc
