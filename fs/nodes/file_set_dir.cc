#include "fs/nodes/file_set_dir.h"

#include <fcntl.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "fs/nodes/content_file.h"

namespace ptc {
namespace {

size_t lower_bound(const FileSet& set, std::string_view path) {
  const auto& all = set.entries();
  auto found = std::lower_bound(all.begin(), all.end(), path,
                                [](const FileSet::Entry& e, std::string_view p) { return e.path < p; });
  return static_cast<size_t>(found - all.begin());
}

}  // namespace

bool opens_to_read(int flags) {
  return (flags & O_ACCMODE) == O_RDONLY && (flags & O_TRUNC) == 0;
}

FileSetDir::FileSetDir(JobViewRef job, std::shared_ptr<CheckpointView> checkpoint,
                       std::string path, FileSetRef set, std::string prefix)
    : FrozenDir(std::move(job), std::move(checkpoint), std::move(path)), set_(std::move(set)),
      prefix_(std::move(prefix)) {}

FsResult<NodeRef> FileSetDir::find(const std::string& name) {
  const auto& all = set_->entries();
  if (NodeRef known = job()->tree().table().find(key_of(*checkpoint(), path_of(name)))) {
    return known;
  }
  std::string wanted = prefix_ + name;
  size_t at = lower_bound(*set_, wanted);
  if (at < all.size() && all[at].path == wanted) {
    return intern(std::make_shared<ContentFile>(job(), checkpoint(), path_of(name), set_, at));
  }
  wanted += '/';
  at = lower_bound(*set_, wanted);
  if (at == all.size() || !all[at].path.starts_with(wanted)) return Errno{ENOENT};
  return intern(
      std::make_shared<FileSetDir>(job(), checkpoint(), path_of(name), set_, std::move(wanted)));
}

FsResult<std::vector<DirEntry>> FileSetDir::entries() {
  const auto& all = set_->entries();
  std::vector<DirEntry> result;
  for (size_t at = lower_bound(*set_, prefix_);
       at < all.size() && all[at].path.starts_with(prefix_);) {
    std::string_view rest = std::string_view(all[at].path).substr(prefix_.size());
    size_t slash = rest.find('/');
    if (slash == std::string_view::npos) {
      result.push_back(entry(std::string(rest), S_IFREG));
      ++at;
      continue;
    }
    std::string name(rest.substr(0, slash));
    std::string after = prefix_ + name + static_cast<char>('/' + 1);  // behind all of name/
    result.push_back(entry(std::move(name), S_IFDIR));
    at = lower_bound(*set_, after);
  }
  return result;
}

}  // namespace ptc
