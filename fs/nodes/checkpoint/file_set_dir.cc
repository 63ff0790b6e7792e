#include "fs/nodes/checkpoint/file_set_dir.h"

#include <fcntl.h>

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <utility>

#include "fs/nodes/checkpoint/content_file.h"

namespace ptc {
namespace {

/// The first of [from, to) whose path is not before `path`.
size_t lower_bound(const FileSet& set, size_t from, size_t to, std::string_view path) {
  const auto all = set.entries().begin();
  auto found =
      std::lower_bound(all + from, all + to, path,
                       [](const FileSet::Entry& e, std::string_view p) { return e.path < p; });
  return static_cast<size_t>(found - all);
}

/// Behind all that begins with `prefix`, which ends in '/'.
size_t end_of(const FileSet& set, size_t from, size_t to, std::string prefix) {
  prefix.back() += 1;
  return lower_bound(set, from, to, prefix);
}

}  // namespace

bool opens_to_read(int flags) { return (flags & O_ACCMODE) == O_RDONLY && (flags & O_TRUNC) == 0; }

FileSetDir::FileSetDir(JobViewRef job, std::shared_ptr<CheckpointView> checkpoint, std::string key,
                       FileSetSourceRef source, const FileSet& set, std::string prefix)
    : FrozenDir(std::move(job), std::move(checkpoint), std::move(key)),
      source_(std::move(source)),
      prefix_(std::move(prefix)),
      begin_(prefix_.empty() ? 0 : lower_bound(set, 0, set.entries().size(), prefix_)),
      end_(prefix_.empty() ? SIZE_MAX : end_of(set, begin_, set.entries().size(), prefix_)) {}

FileSetDir::FileSetDir(JobViewRef job, std::shared_ptr<CheckpointView> checkpoint, std::string key,
                       FileSetSourceRef source)
    : FrozenDir(std::move(job), std::move(checkpoint), std::move(key)),
      source_(std::move(source)),
      begin_(0),
      end_(SIZE_MAX) {}

FsResult<NodeRef> FileSetDir::find(const std::string& name) {
  std::string key = child_key(name);
  if (NodeRef node = known(key)) return node;
  PTC_TRY(const FileSetRef set, as_fs(source_->get()));
  std::string wanted = prefix_ + name;
  const auto& all = set->entries();
  const size_t end = std::min(end_, all.size());
  size_t at = lower_bound(*set, begin_, end, wanted);
  if (at < end && all[at].path == wanted) {
    return intern(
        std::make_shared<ContentFile>(job(), checkpoint(), std::move(key), source_, *set, at));
  }
  wanted += '/';
  at = lower_bound(*set, at, end, wanted);
  if (at == end || !all[at].path.starts_with(wanted)) return Errno{ENOENT};
  return intern(std::make_shared<FileSetDir>(job(), checkpoint(), std::move(key), source_, *set,
                                             std::move(wanted)));
}

template <class File, class Directory>
FsResult<> FileSetDir::for_each(File file, Directory directory) const {
  PTC_TRY(const FileSetRef set, as_fs(source_->get()));
  const auto& all = set->entries();
  const size_t end = std::min(end_, all.size());
  for (size_t at = begin_; at < end;) {
    std::string_view rest = std::string_view(all[at].path).substr(prefix_.size());
    size_t slash = rest.find('/');
    if (slash == std::string_view::npos) {
      file(rest);
      ++at;
    } else {
      directory(rest.substr(0, slash));
      at = end_of(*set, at, end, all[at].path.substr(0, prefix_.size() + slash + 1));
    }
  }
  return ok();
}

FsResult<std::vector<DirEntry>> FileSetDir::entries() {
  std::vector<DirEntry> result;
  PTC_TRY(for_each(
      [&](std::string_view name) { result.push_back(entry(std::string(name), S_IFREG)); },
      [&](std::string_view name) { result.push_back(entry(std::string(name), S_IFDIR)); }));
  return result;
}

FsResult<std::optional<uint64_t>> FileSetDir::subdirectories() {
  uint64_t count = 0;
  PTC_TRY(for_each([](std::string_view) {}, [&](std::string_view) { ++count; }));
  return std::optional(count);
}

}  // namespace ptc
