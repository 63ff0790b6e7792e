#include "fs/nodes/checkpoint_dir.h"

#include <sys/xattr.h>

#include <algorithm>
#include <utility>

#include "fs/nodes/file_set_dir.h"
#include "fs/nodes/layouts_dir.h"
#include "fs/nodes/text_file.h"

namespace ptc {
namespace {

constexpr const char* kPin = "user.ptc.pin";
constexpr std::string_view kNames[] = {"meta.json", "model", "hf", "layouts"};

/// meta.json: as long as the checkpoint, so worth caching.
class MetaFile : public Node {
 public:
  explicit MetaFile(std::shared_ptr<CheckpointView> checkpoint)
      : Node(FrozenDir::key_of(*checkpoint, "meta.json")), checkpoint_(std::move(checkpoint)) {}
  bool immutable() const override { return true; }
  FsResult<struct stat> attributes() override {
    struct stat stat = checkpoint_->attributes(S_IFREG | 0444, "meta.json");
    stat.st_size = static_cast<off_t>(checkpoint_->checkpoint->meta_json().size());
    return stat;
  }
  FsResult<Opened> open(const Caller&, int flags) override {
    if (!opens_to_read(flags)) return Errno{EROFS};
    return Opened{make_text_handle(checkpoint_->checkpoint->meta_json()), IoMode::kKeepCache, 0};
  }

 private:
  const std::shared_ptr<CheckpointView> checkpoint_;
};

}  // namespace

FrozenDir::FrozenDir(JobViewRef job, std::shared_ptr<CheckpointView> checkpoint, std::string path)
    : Node(key_of(*checkpoint, path)), job_(std::move(job)), checkpoint_(std::move(checkpoint)),
      path_(std::move(path)) {}

std::string FrozenDir::key_of(const CheckpointView& checkpoint, std::string_view path) {
  if (path.empty()) return checkpoint_key(checkpoint);
  return fmt::format("{}/{}", checkpoint_key(checkpoint), path);
}

std::string FrozenDir::path_of(std::string_view name) const {
  return path_.empty() ? std::string(name) : fmt::format("{}/{}", path_, name);
}

DirEntry FrozenDir::entry(std::string name, mode_t type) const {
  ino_t inode = checkpoint_->attributes(type, path_of(name)).st_ino;
  return {std::move(name), type, inode};
}

FsResult<struct stat> FrozenDir::attributes() {
  // Whoever could not enter what was committed cannot enter the checkpoint either.
  const mode_t mode = path_.empty() ? checkpoint_->checkpoint->manifest().mode & 0755 : 0755;
  struct stat stat = checkpoint_->attributes(S_IFDIR | mode, path_);
  PTC_TRY(auto all, entries());
  for (const DirEntry& entry : all) stat.st_nlink += S_ISDIR(entry.type) ? 1 : 0;
  return stat;
}

FsResult<NodeRef> FrozenDir::lookup(const std::string& name) {
  if (checkpoint_->hidden.hidden(path_of(name))) return Errno{ENOENT};
  return find(name);
}

FsResult<std::vector<DirEntry>> FrozenDir::list() {
  PTC_TRY(auto all, entries());
  std::erase_if(all, [&](const DirEntry& entry) {
    return checkpoint_->hidden.hidden(path_of(entry.name));
  });
  return all;
}

FsResult<> FrozenDir::may_remove() const {
  if (job_->job().is_pinned(checkpoint_->checkpoint->name())) return Errno{EPERM};
  return ok();
}

FsResult<> FrozenDir::unlink(const std::string& name) {
  PTC_TRY(auto node, lookup(name));
  PTC_TRY(may_remove());
  PTC_TRY(auto stat, node->attributes());
  if (S_ISDIR(stat.st_mode)) return Errno{EISDIR};
  checkpoint_->hidden.hide(path_of(name));
  return ok();
}

FsResult<> FrozenDir::remove_directory(const std::string& name) {
  PTC_TRY(auto node, lookup(name));
  PTC_TRY(may_remove());
  auto* directory = dynamic_cast<FrozenDir*>(node.get());
  if (directory == nullptr) return Errno{ENOTDIR};
  PTC_TRY(auto left, directory->list());
  if (!left.empty()) return Errno{ENOTEMPTY};
  checkpoint_->hidden.hide(path_of(name));
  return ok();
}

bool CheckpointDir::all_hidden(const CheckpointView& checkpoint) {
  return std::all_of(std::begin(kNames), std::end(kNames), [&](std::string_view name) {
    return checkpoint.hidden.hidden(std::string(name));
  });
}

bool CheckpointDir::pinned() const {
  return job()->job().is_pinned(checkpoint()->checkpoint->name());
}

FsResult<std::string> CheckpointDir::get_xattr(const std::string& name) {
  if (name == kPin && pinned()) return std::string("1");
  return Errno{ENODATA};
}

FsResult<std::vector<std::string>> CheckpointDir::list_xattrs() {
  if (!pinned()) return std::vector<std::string>();
  return std::vector<std::string>{kPin};
}

FsResult<> CheckpointDir::set_xattr(const std::string& name, std::string_view value, int flags) {
  if (name != kPin) return FrozenDir::set_xattr(name, value, flags);
  if (value != "1") return Errno{EINVAL};
  if ((flags & XATTR_CREATE) != 0 && pinned()) return Errno{EEXIST};
  if ((flags & XATTR_REPLACE) != 0 && !pinned()) return Errno{ENODATA};
  return as_fs(job()->job().pin_checkpoint(checkpoint()->checkpoint->name(), true));
}

FsResult<> CheckpointDir::remove_xattr(const std::string& name) {
  if (name != kPin) return FrozenDir::remove_xattr(name);
  if (!pinned()) return Errno{ENODATA};
  return as_fs(job()->job().pin_checkpoint(checkpoint()->checkpoint->name(), false));
}

FsResult<NodeRef> CheckpointDir::find(const std::string& name) {
  if (name == "meta.json") return intern(std::make_shared<MetaFile>(checkpoint()));
  if (name == "layouts") return intern(std::make_shared<LayoutsDir>(job(), checkpoint()));
  const Checkpoint& of = *checkpoint()->checkpoint;
  if (name != "model" && name != "hf") return Errno{ENOENT};
  if (NodeRef known = job()->tree().table().find(key_of(*checkpoint(), name))) return known;
  PTC_TRY(auto files, as_fs(name == "model" ? of.model_files() : of.hf_files()));
  return intern(std::make_shared<FileSetDir>(job(), checkpoint(), name, std::move(files), ""));
}

FsResult<std::vector<DirEntry>> CheckpointDir::entries() {
  std::vector<DirEntry> result;
  for (std::string_view name : kNames) {
    result.push_back(entry(std::string(name), name == "meta.json" ? S_IFREG : S_IFDIR));
  }
  return result;
}

}  // namespace ptc
