// <job>/: the names ptcfs has in it, and the user's own files.
#pragma once

#include <string>
#include <vector>

#include "fs/nodes/real_node.h"

namespace ptc {

class JobDir : public RealNode {
 public:
  /// The node of this job's directory. Errors: ENOMEM, EMFILE.
  static FsResult<NodeRef> make(const JobViewRef& job);

  NameLife name_life() const override { return NameLife::kUntilTold; }
  double attribute_seconds() const override { return job().hidden().any() ? 0 : kCacheSeconds; }
  bool is_agreed_on() const override { return true; }
  FsResult<struct stat> attributes() override;
  FsResult<> set_attributes(const AttributeChange& change, Handle* handle) override;
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
  FsResult<> unlink(const std::string& name) override;
  FsResult<> remove_directory(const std::string& name) override;

  /// What the job may have on each node (QuotaLimit::parse()). Names that begin so are root's.
  static constexpr const char* kQuotaXattr = "trusted.ptc.quota";
  FsResult<std::string> get_xattr(const std::string& name) override;
  FsResult<> set_xattr(const std::string& name, std::string_view value, int flags) override;
  FsResult<> remove_xattr(const std::string& name) override;

  EditableFile* editable(const std::string& name) override;
  bool reserved(const std::string& name) const override;

 private:
  JobDir(JobViewRef view, HostFile file);
  /// The node of a name that belongs to ptcfs and shows now; null otherwise.
  FsResult<NodeRef> own_name(const std::string& name);
  FsResult<NodeRef> refuse_own_name(const std::string& name);
};

}  // namespace ptc
