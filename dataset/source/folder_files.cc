#include "dataset/source/folder_files.h"

#include <dirent.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>

#include "dataset/source/caught.h"
#include "dataset/source/own_files.h"
#include "store/base/file.h"
#include "store/base/json.h"

namespace ptc {
namespace {

constexpr size_t kMaxFolderDepth = 100;
constexpr uint32_t kFilesInGroup = 8192;

/// Collects the files of directories.
class FolderWalk {
 public:
  FolderWalk(const ShardList& list, const SourceAccess& access, FolderFiles& files,
             std::stop_token stop)
      : list_(list), access_(access), files_(files), stop_(std::move(stop)) {}

  Result<> add(const ListedShard& named) {
    if (access_.is_folder(list_.roots[named.root] + '/' + named.name))
      return folder(named.root, named.name, 0);
    return file(named.root, named.name);
  }

 private:
  Result<> file(uint32_t root, const std::string& name) {
    const auto format = list_.detected ? format_of_name(name) : std::nullopt;
    if (format) {
      return invalid_argument(
          "{}: shards of {} lie below the directory; name where they are, {}, or say \"format\": "
          "\"files\" if each is "
          "a sample",
          ptc::quoted(list_.roots[root] + '/' + name), format_name(*format),
          ptc::quoted(list_.roots[root] + "/*/"));
    }
    std::vector<FileGroup>& groups = files_.groups;
    if (groups.empty() || groups.back().root != root || groups.back().count == kFilesInGroup)
      groups.push_back({.root = root});
    groups.back().names.append(name).push_back('\0');
    ++groups.back().count;
    return ok();
  }

  Result<> folder(uint32_t root, const std::string& name, size_t depth) {
    PTC_TRY(unless_stopped(stop_));
    const std::string path = list_.roots[root] + '/' + name;
    if (depth > kMaxFolderDepth)
      return invalid_argument("{}: directories nested deeper than {}", ptc::quoted(path),
                              kMaxFolderDepth);
    PTC_TRY(own_.refuse(path));
    PTC_TRY(const FileStamp stamp, stamp_at(access_, path));
    files_.directories.push_back({.root = root, .name = name, .stamp = stamp});
    PTC_TRY(const auto entries, entries_of(access_, path, stop_));
    std::vector<std::string>
        names;  // with '/' behind a directory's, which makes the order that of whole paths
    for (const FolderEntry& entry : entries) {
      PTC_TRY(unless_stopped(stop_));
      std::string found = name.empty() ? "" : name + '/';
      found += entry.name;
      if (entry.type == DT_DIR) {
        names.push_back(found + '/');
        continue;
      }
      if (entry.type == DT_LNK) {
        const std::string link = path + '/' + entry.name;
        PTC_TRY(own_.refuse(link));
        const auto target = access_.stat(link);
        if (target ? !S_ISREG(target.value().st_mode)
                   : target.error().code() != Code::kPermissionDenied)
          continue;
      }
      names.push_back(found);
    }
    std::sort(names.begin(), names.end());
    for (std::string& found : names) {
      if (!found.ends_with('/')) {
        PTC_TRY(file(root, found));
        continue;
      }
      found.pop_back();
      PTC_TRY(folder(root, found, depth + 1));
    }
    return ok();
  }

  const ShardList& list_;
  const SourceAccess& access_;
  FolderFiles& files_;
  OwnFiles own_;
  std::stop_token stop_;
};

}  // namespace

Result<std::vector<FolderEntry>> entries_of(const SourceAccess& access, const std::string& path,
                                            const std::stop_token& stop) {
  PTC_TRY(auto entries, access.entries(path, stop));
  std::erase_if(entries, [](const FolderEntry& entry) { return entry.name.starts_with('.'); });
  return entries;
}

Result<FileStamp> stamp_of(int fd) {
  struct stat facts;
  if (::fstat(fd, &facts) != 0) return errno_error(errno, "fstat");
  return stamp_of(facts);
}

Result<FileStamp> stamp_of(const struct stat& facts) {
  if (!S_ISREG(facts.st_mode) && !S_ISDIR(facts.st_mode))
    return invalid_argument("not a regular file");
  return FileStamp{.bytes = static_cast<uint64_t>(facts.st_size),
                   .mtime_ns = facts.st_mtim.tv_sec * 1'000'000'000 + facts.st_mtim.tv_nsec,
                   .inode = facts.st_ino};
}

Result<FileStamp> stamp_at(const SourceAccess& access, const std::string& path) {
  PTC_TRY(const UniqueFd fd, access.open(path, Wanted::kFileOrFolder));
  return stamp_of(fd.get());
}

Result<FolderFiles> list_files(const ShardList& list, const SourceAccess& access,
                               std::stop_token stop) {
  PTC_TRY(const ActingAs as, access.act());
  FolderFiles files;
  FolderWalk walk(list, access, files, std::move(stop));
  for (const ListedShard& named : list.shards) {
    PTC_TRY(walk.add(named));
  }
  return files;
}

bool unchanged(const ShardList& list, const SourceAccess& access,
               const std::vector<ListedShard>& directories, const std::stop_token& stop) {
  const auto as = access.act();
  return as &&
         std::all_of(directories.begin(), directories.end(), [&](const ListedShard& directory) {
           if (stop.stop_requested()) return false;
           const auto stamp = stamp_at(access, list.roots[directory.root] + '/' + directory.name);
           return stamp && stamp.value() == directory.stamp;
         });
}

}  // namespace ptc
