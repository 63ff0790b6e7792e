#include "fs/nodes/checkpoint/checkpoint_dir.h"

#include <sys/xattr.h>

#include <algorithm>
#include <utility>

#include "fs/nodes/checkpoint/file_set_dir.h"
#include "fs/nodes/checkpoint/frozen_text.h"
#include "fs/nodes/checkpoint/layouts_dir.h"
#include "fs/nodes/checkpoint/sources_file.h"

namespace ptc {
namespace {

constexpr const char* kPin = "user.ptc.pin";
constexpr std::string_view kParts[] = {"meta.json", "model", "hf", "dcp", "layouts", "consumed"};

/// Whether a checkpoint has this part; all but `consumed` are always there.
bool has_part(const CheckpointView& checkpoint, std::string_view name) {
  return name != "consumed" || checkpoint.checkpoint->manifest().consumed.has_value();
}

}  // namespace

FrozenDir::FrozenDir(JobViewRef job, std::shared_ptr<CheckpointView> checkpoint, std::string key)
    : Node(std::move(key)), job_(std::move(job)), checkpoint_(std::move(checkpoint)) {}

std::string FrozenDir::child_key(std::string_view name) const {
  std::string result;
  result.reserve(key().size() + 1 + name.size());
  return result.append(key()).append(1, '/').append(name);
}

DirEntry FrozenDir::entry(std::string name, mode_t type) const {
  InodeHash inode = checkpoint_->inodes;
  if (!path().empty()) inode.add(path()).add("/");
  return {std::move(name), type, inode.add(name).value()};
}

FsResult<struct stat> FrozenDir::attributes() {
  // Whoever could not enter what was committed cannot enter the checkpoint either.
  const mode_t mode = path().empty() ? checkpoint_->checkpoint->manifest().mode & 0755 : 0755;
  struct stat stat = checkpoint_->attributes(S_IFDIR | mode, path());
  stat.st_mtim = later(stat.st_mtim, checkpoint_->hidden.restored());
  if (const int64_t counted = subdirectories_; counted >= 0) {
    stat.st_nlink += static_cast<nlink_t>(counted);
    return stat;
  }
  PTC_TRY(const auto below, subdirectories());
  if (below && entries_stay()) subdirectories_ = static_cast<int64_t>(*below);
  stat.st_nlink =
      below ? stat.st_nlink + *below : 1;  // as other file systems say that it is unknown
  return stat;
}

FsResult<std::optional<uint64_t>> FrozenDir::subdirectories() {
  PTC_TRY(auto all, entries());
  return static_cast<uint64_t>(std::count_if(
      all.begin(), all.end(), [](const DirEntry& entry) { return S_ISDIR(entry.type); }));
}

bool FrozenDir::hides(std::string_view name) const {
  const Whiteouts& hidden = checkpoint_->hidden;
  return hidden.any() && hidden.hidden(std::string(checkpoint_->path_of(child_key(name))));
}

void FrozenDir::hide(std::string_view name) {
  checkpoint_->hidden.hide(std::string(checkpoint_->path_of(child_key(name))));
}

FsResult<NodeRef> FrozenDir::lookup(const std::string& name) {
  if (hides(name)) return Errno{ENOENT};
  return find(name);
}

FsResult<std::vector<DirEntry>> FrozenDir::list() {
  PTC_TRY(auto all, entries());
  if (entries_stay()) {
    for (size_t i = 0; i < all.size(); ++i) all[i].place = i + 1;  // hidden or not
  }
  std::erase_if(all, [&](const DirEntry& entry) { return hides(entry.name); });
  return all;
}

FsResult<> FrozenDir::may_remove() const {
  if (job_->job().is_pinned(checkpoint_->checkpoint->name())) return Errno{EPERM};
  // Else what is hidden here would stay so though the removal, which is decided on, is refused.
  PTC_TRY(as_decided(job_->job().may_decide()));
  return ok();
}

FsResult<> FrozenDir::unlink(const std::string& name) {
  PTC_TRY(auto node, lookup(name));
  PTC_TRY(may_remove());
  PTC_TRY(auto stat, node->attributes());
  if (S_ISDIR(stat.st_mode)) return Errno{EISDIR};
  hide(name);
  return ok();
}

FsResult<> FrozenDir::remove_directory(const std::string& name) {
  PTC_TRY(auto node, lookup(name));
  PTC_TRY(may_remove());
  auto* directory = dynamic_cast<FrozenDir*>(node.get());
  if (directory == nullptr) return Errno{ENOTDIR};
  PTC_TRY(auto left, directory->list());
  if (!left.empty()) return Errno{ENOTEMPTY};
  hide(name);
  return ok();
}

bool CheckpointDir::all_hidden(const CheckpointView& checkpoint) {
  return std::all_of(std::begin(kParts), std::end(kParts), [&](std::string_view name) {
    return !has_part(checkpoint, name) || checkpoint.hidden.hidden(std::string(name));
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
  return pin(true);
}

/// The kernel has the directory locked meanwhile: bounded as a rename is.
FsResult<> CheckpointDir::pin(bool pinned) {
  auto decide = [view = job(), of = checkpoint()->checkpoint, pinned] {
    return as_decided(view->job().pin_checkpoint(of->name(), pinned, of->manifest().id));
  };
  return job()->tree().errands().ask(checkpoint_key(*checkpoint()), pinned ? "pin" : "unpin",
                                     decide);
}

FsResult<> CheckpointDir::remove_xattr(const std::string& name) {
  if (name != kPin) return FrozenDir::remove_xattr(name);
  if (!pinned()) return Errno{ENODATA};
  return pin(false);
}

FsResult<NodeRef> CheckpointDir::find(const std::string& name) {
  const bool text = name == "meta.json" || name == "consumed";
  if (text && has_part(*checkpoint(), name)) {
    const bool meta = name == "meta.json";  // checksums, which of small tensors tell all
    auto make = [meta](const Checkpoint& of) {
      return meta ? of.meta_json() : fmt::format("{}\n", of.manifest().consumed.value_or(0));
    };
    return intern(
        std::make_shared<FrozenText>(checkpoint(), child_key(name), std::move(make), meta));
  }
  if (name == "layouts") return intern(std::make_shared<LayoutsDir>(job(), checkpoint()));
  if (name == SourcesFile::kName)
    return intern(std::make_shared<SourcesFile>(checkpoint(), child_key(name), nullptr));
  if (name != "model" && name != "hf" && name != "dcp") return Errno{ENOENT};
  std::string key = child_key(name);
  if (NodeRef node = known(key)) return node;
  auto make = [of = checkpoint()->checkpoint, name] {
    return name == "model" ? of->model_files() : name == "hf" ? of->hf_files() : of->dcp_files();
  };
  auto source = std::make_shared<FileSetSource>(job()->tree().recent_sets(), std::move(make));
  return intern(
      std::make_shared<WholeSetDir>(job(), checkpoint(), std::move(key), std::move(source)));
}

FsResult<std::vector<DirEntry>> CheckpointDir::entries() {
  std::vector<DirEntry> result;
  for (std::string_view name : kParts) {
    if (!has_part(*checkpoint(), name)) continue;
    const bool text = name == "meta.json" || name == "consumed";
    result.push_back(entry(std::string(name), text ? S_IFREG : S_IFDIR));
  }
  return result;
}

}  // namespace ptc
