#include "fs/nodes/job/own_names_dir.h"

#include <fcntl.h>

#include <algorithm>
#include <utility>

namespace ptc {

const OwnNamesDir::OwnName* OwnNamesDir::own(std::string_view name) const {
  const auto found =
      std::find_if(names_.begin(), names_.end(), [&](const auto& one) { return one.name == name; });
  return found == names_.end() ? nullptr : &*found;
}

FsResult<NodeRef> OwnNamesDir::shown(const std::string& name) {
  PTC_TRY(ready());
  return hides(name) ? FsResult<NodeRef>(NodeRef()) : own_node(name);
}

FsResult<NodeRef> OwnNamesDir::lookup(const std::string& name) {
  if (own(name) == nullptr) return RealNode::lookup(name);
  PTC_TRY(auto node, shown(name));
  if (node == nullptr) return Errno{ENOENT};
  return node;
}

FsResult<std::vector<DirEntry>> OwnNamesDir::list() {
  PTC_TRY(ready());
  PTC_TRY(auto entries, RealNode::list());
  std::erase_if(entries, [&](const DirEntry& entry) { return own(entry.name) != nullptr; });
  for (uint64_t place = 1; const OwnName& one : names_) {
    const uint64_t own_place = place++;
    if (one.kind == Kind::kUnlisted) continue;
    auto node = shown(std::string(one.name));
    if (!node || node.value() == nullptr) continue;
    PTC_TRY(auto stat, node.value()->attributes());
    entries.push_back({std::string(one.name), stat.st_mode & S_IFMT, stat.st_ino, own_place});
  }
  return entries;
}

FsResult<Created> OwnNamesDir::create(const Caller& caller, const std::string& name, mode_t mode,
                                      int flags) {
  EditableFile* file = editable(name);
  if (file == nullptr) {
    if (reserved(name)) return Errno{EPERM};
    return RealNode::create(caller, name, mode, flags);
  }
  if (file->exists() && !hides(name)) return Errno{(flags & O_EXCL) != 0 ? EEXIST : ESTALE};
  PTC_TRY(auto handle, file->create(caller, flags, mode, job().shared_from_this()));
  Opened opened{std::move(handle), IoMode::kDirect, 0};
  show(name);
  PTC_TRY(auto node, shown(name));
  if (node == nullptr) return Errno{EIO};
  return Created{std::move(node), std::move(opened)};
}

FsResult<NodeRef> OwnNamesDir::refuse(const std::string& name) {
  PTC_TRY(auto node, shown(name));
  return Errno{node == nullptr ? EPERM : EEXIST};
}

FsResult<NodeRef> OwnNamesDir::make_directory(const Caller& caller, const std::string& name,
                                              mode_t mode) {
  if (own(name) != nullptr) return refuse(name);
  return RealNode::make_directory(caller, name, mode);
}

FsResult<NodeRef> OwnNamesDir::make_node(const Caller& caller, const std::string& name,
                                         mode_t mode) {
  if (own(name) != nullptr) return refuse(name);
  return RealNode::make_node(caller, name, mode);
}

FsResult<NodeRef> OwnNamesDir::make_symlink(const Caller& caller, const std::string& name,
                                            const std::string& target) {
  if (own(name) != nullptr) return refuse(name);
  return RealNode::make_symlink(caller, name, target);
}

FsResult<NodeRef> OwnNamesDir::make_link(Node& node, const std::string& name) {
  if (own(name) != nullptr) return refuse(name);
  return RealNode::make_link(node, name);
}

FsResult<> OwnNamesDir::unlink(const std::string& name) {
  const OwnName* one = own(name);
  if (one == nullptr) return RealNode::unlink(name);
  if (one->kind == Kind::kDirectory) return Errno{EISDIR};
  return unlink_own(name);
}

FsResult<> OwnNamesDir::remove_directory(const std::string& name) {
  const OwnName* one = own(name);
  if (one == nullptr) return RealNode::remove_directory(name);
  if (one->kind != Kind::kDirectory) return Errno{ENOTDIR};
  return remove_own_directory(name);
}

bool OwnNamesDir::reserved(const std::string& name) const {
  const OwnName* one = own(name);
  return one != nullptr && one->kind != Kind::kSaved;
}

}  // namespace ptc
