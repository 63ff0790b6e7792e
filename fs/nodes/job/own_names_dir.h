// A directory of the user's own files in which some names are ptcfs' own: <job>/ and
// <job>/dataset/.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fs/tree/real_node.h"

namespace ptc {

/// Own names cannot be made or replaced by users; what is removed of them is hidden (Whiteouts), so
/// that `rm -r` gets through, and shows again when nothing comes of that.
class OwnNamesDir : public RealNode {
 public:
  double attribute_seconds() const override { return job().hidden().any() ? 0 : kCacheSeconds; }
  bool is_agreed_on() const override { return true; }
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
  bool reserved(const std::string& name) const override;

  struct OwnName {
    std::string_view name;
    // kSaved: editable() has it; kUnlisted: a text that is not listed
    enum class Kind { kText, kSaved, kLink, kDirectory, kUnlisted } kind;
  };
  using Kind = OwnName::Kind;

 protected:
  /// `names`, in the order in which they are listed and `rm -r` goes through them, outlive it.
  /// `hidden_at`: what their paths begin with in Whiteouts.
  OwnNamesDir(JobViewRef view, HostFile file, std::string key, std::span<const OwnName> names,
              std::string hidden_at)
      : RealNode(view, std::move(file), std::move(key)),
        names_(names),
        hidden_at_(std::move(hidden_at)) {}

  /// The node of an own name that is not hidden; null: it does not show now.
  virtual FsResult<NodeRef> own_node(const std::string& name) = 0;
  /// Before any own name is looked up or listed.
  virtual FsResult<> ready() { return ok(); }
  /// Of own names; directories are empty, and no unlink comes to them.
  virtual FsResult<> unlink_own(const std::string& name) = 0;
  virtual FsResult<> remove_own_directory(const std::string& name) = 0;

  /// Null where it is hidden, or does not show now.
  FsResult<NodeRef> shown(const std::string& name);
  bool hides(std::string_view name) const { return job().hidden().hidden(path_of(name)); }
  void hide(std::string_view name) { job().hidden().hide(path_of(name)); }
  void show(std::string_view name) { job().hidden().show(path_of(name)); }

 private:
  const OwnName* own(std::string_view name) const;
  std::string path_of(std::string_view name) const { return std::string(hidden_at_).append(name); }
  FsResult<NodeRef> refuse(const std::string& name);

  const std::span<const OwnName> names_;
  const std::string hidden_at_;
};

}  // namespace ptc
