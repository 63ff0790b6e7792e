#include "reshard/intake/found_files.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <map>
#include <span>

#include "reshard/checkpoint/meta_format.h"
#include "reshard/intake/tree_format.h"
#include "store/base/file.h"
#include "store/base/json.h"
#include "store/base/utf8.h"

namespace ptc {
namespace {

constexpr unsigned kMaxDepth = 64;  // of directories: users nest them as deeply as they like

std::optional<uint64_t> parse_rank(std::string_view text) {
  uint64_t rank = 0;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), rank);
  if (error != std::errc() || end != text.data() + text.size() ||
      (text.size() > 1 && text[0] == '0'))
    return std::nullopt;
  return rank;
}

/// What is left to whom of the rights in a directory.
uint32_t allowed_below(const struct stat& directory) {
  return 0400u | ((directory.st_mode & S_IXGRP) != 0 ? 040u : 0u) |
         ((directory.st_mode & S_IXOTH) != 0 ? 04u : 0u);
}

/// The same of rank/ or of a rank's own directory. kInvalidArgument: it is something else.
Result<uint32_t> allowed_in(int dir_fd, const std::string& directory) {
  struct stat st {};
  if (fstatat(dir_fd, directory.c_str(), &st, AT_SYMLINK_NOFOLLOW) != 0)
    return errno_error(errno, directory);
  if (!S_ISDIR(st.st_mode))
    return invalid_argument("{} is no directory: a process' files belong into rank/0/, rank/1/ …",
                            directory);
  return 0444 & allowed_below(st);
}

/// meta.json beside what it is of: somebody has copied a checkpoint's own directory, which has the
/// same tensors in several views. `names` are in the directory `at`, "." or "rank/0/copy".
Result<> check_no_checkpoint(int dir_fd, const std::string& at,
                             const std::vector<std::string>& names) {
  constexpr std::string_view kMeta = "meta.json", kViews[] = {"hf", "layouts", "model", "dcp"};
  constexpr size_t kBeginning = 256;  // says the format
  const auto has = [&](std::string_view name) {
    return std::binary_search(names.begin(), names.end(), name);
  };
  const auto* const view = std::find_if(std::begin(kViews), std::end(kViews), has);
  if (!has(kMeta) || view == std::end(kViews)) return ok();
  const std::string below = at == "." ? "" : at + "/";
  const Result<UniqueFd> fd =
      open_file(dir_fd, fmt::format("{}{}", below, kMeta), O_RDONLY | O_NOFOLLOW | O_NONBLOCK);
  struct stat st {};
  if (!fd || fstat(fd.value().get(), &st) != 0 || !S_ISREG(st.st_mode)) return ok();
  std::string beginning(std::min<size_t>(kBeginning, static_cast<size_t>(st.st_size)), '\0');
  if (!read_exactly(fd.value().get(), std::as_writable_bytes(std::span(beginning)), 0) ||
      beginning.find(kMetaFormat) == beginning.npos)
    return ok();
  return invalid_argument(
      "{0}meta.json and {0}{1}/ are of a checkpoint's own directory, which shows its tensors "
      "several times: put here what is in its hf/ alone, or the rank/ of one of its "
      "layouts/<layout>/, beside it a layout.json that says this layout",
      below, *view);
}

Result<> walk(int dir_fd, const std::string& root, const std::string& below, uint64_t rank,
              uint32_t allowed, std::vector<Found>& found, unsigned depth = 0) {
  if (depth > kMaxDepth) {
    return invalid_argument("{}/{}: directories are nested deeper than {}", root, below, kMaxDepth);
  }
  const std::string here = below.empty() ? root : root == "." ? below : root + "/" + below;
  PTC_TRY(auto names, names_in(dir_fd, here));
  PTC_TRY(check_no_checkpoint(dir_fd, here, names));
  for (const std::string& name : names) {
    std::string path = below.empty() ? name : below + "/" + name;
    std::string full = root + "/" + path;
    struct stat st {};
    if (fstatat(dir_fd, full.c_str(), &st, AT_SYMLINK_NOFOLLOW) != 0)
      return errno_error(errno, full);
    if (!is_utf8(name)) {
      return invalid_argument(
          "the name of {} is not UTF-8, and could not be written in meta.json: rename it",
          ptc::quoted(full));
    }
    if (S_ISDIR(st.st_mode)) {
      PTC_TRY(walk(dir_fd, root, path, rank, allowed & allowed_below(st), found, depth + 1));
    } else if (S_ISREG(st.st_mode)) {
      Found file;
      file.rank = rank;
      file.path = std::move(path);
      file.version = version_of(st);
      file.links = st.st_nlink;
      file.rights = ReadRights{st.st_uid, st.st_gid, st.st_mode & allowed};
      found.push_back(std::move(file));
    } else if (S_ISLNK(st.st_mode)) {
      return invalid_argument(
          "{} is a symbolic link, and a checkpoint holds files: copy what it "
          "points to (cp -rL)",
          full);
    } else {
      return invalid_argument("{} is no ordinary file", full);
    }
  }
  return ok();
}

/// Each file once, and none with a name elsewhere.
Result<std::vector<Found>> checked(std::vector<Found> found) {
  std::map<uint64_t, uint64_t> names;  // inode → names in here
  for (const Found& file : found) ++names[file.version.inode];
  for (const Found& file : found)
    if (file.links > names[file.version.inode])
      return invalid_argument(
          "{} has another name (hard link) outside the checkpoint, through which "
          "it could be changed: remove that name first",
          file.source());
  std::sort(found.begin(), found.end(), [](const Found& a, const Found& b) {
    return std::tie(a.rank, a.path) < std::tie(b.rank, b.path);
  });
  return found;
}

/// The files of what lies in the place of rank/. They are those of rank 0, if its kind of tree does
/// not say otherwise.
Result<std::vector<Found>> find_own_tree(int dir_fd, const std::vector<std::string>& top,
                                         bool beside_others) {
  std::vector<Found> found;
  const NamesThere names(dir_fd, top);
  const TreeFormat* const tree =
      find_tree([&](const TreeFormat& one) { return one.is_there(names, beside_others); });
  if (tree == nullptr) return found;
  PTC_TRY(walk(dir_fd, ".", "", 0, 0444, found));
  std::erase_if(found, [](const Found& file) {
    return file.path == "layout.json" || file.path == kConsumedFile;
  });
  for (Found& file : found) file.at = file.path;
  PTC_TRY(tree->name_files(true, found));
  return checked(std::move(found));
}

}  // namespace

Result<> check_rank(uint64_t rank, const LayoutSpec& spec) {
  if (rank < spec.sizes.world_size()) return ok();
  return invalid_argument(
      "rank/{} does not exist in layout {}, which has {} rank{}; a writer "
      "with another layout says so in a layout.json beside rank/",
      rank, spec.name(), spec.sizes.world_size(), spec.sizes.world_size() == 1 ? "" : "s");
}

FileVersion version_of(const struct stat& st) {
  return {st.st_dev, st.st_ino, static_cast<uint64_t>(st.st_size),
          st.st_mtim.tv_sec * 1'000'000'000 + st.st_mtim.tv_nsec,
          st.st_ctim.tv_sec * 1'000'000'000 + st.st_ctim.tv_nsec};
}

Result<std::vector<Found>> find_files(int dir_fd, bool beside_others) {
  PTC_TRY(auto top, names_in(dir_fd, "."));
  PTC_TRY(check_no_checkpoint(dir_fd, ".", top));
  if (std::find(top.begin(), top.end(), "rank") == top.end()) {
    PTC_TRY(auto own, find_own_tree(dir_fd, top, beside_others));
    const bool any_part = std::any_of(top.begin(), top.end(), [](const std::string& name) {
      return tree_of_part(name) != nullptr;
    });
    if (!own.empty() || (beside_others && !any_part)) return own;
  }
  bool has_ranks = false;
  for (const std::string& name : top) {
    if (name == "rank") has_ranks = true;
    else if (const TreeFormat* tree = tree_of_part(name)) return tree->without_rest(name);
    else if (name != "layout.json" && name != kConsumedFile)
      return invalid_argument(
          "'{}' is not under rank/<r>/: a process' files belong into rank/0/, "
          "rank/1/ … (a single process: rank/0/)",
          name);
  }
  if (!has_ranks)
    return invalid_argument(
        "there is no rank/ directory: put the files of a single process into "
        "rank/0/, of several into rank/0/, rank/1/ …");
  PTC_TRY(const uint32_t allowed_in_ranks, allowed_in(dir_fd, "rank"));
  PTC_TRY(auto ranks, names_in(dir_fd, "rank"));
  std::vector<Found> found;
  for (const std::string& name : ranks) {
    std::optional<uint64_t> rank = parse_rank(name);
    if (!rank) return invalid_argument("rank/{} is not a rank's number", name);
    PTC_TRY(const uint32_t allowed, allowed_in(dir_fd, "rank/" + name));
    PTC_TRY(walk(dir_fd, "rank/" + name, "", *rank, allowed_in_ranks & allowed, found));
  }
  if (found.empty() && !beside_others) return invalid_argument("rank/ holds no files");
  PTC_TRY(for_each_tree([&](const TreeFormat& tree) { return tree.name_files(false, found); }));
  return checked(std::move(found));
}

Result<bool> open_for_writing(int dir_fd, const std::string& path) {
  PTC_TRY(auto fd, open_file(dir_fd, path, O_RDONLY | O_NOFOLLOW));
  return open_for_writing(fd.get());
}

bool open_for_writing(int fd) {
  // The kernel grants a read lease only while no description of the file can write; shared writable
  // mappings keep theirs. Where leases are not to be had (another owner's file without CAP_LEASE,
  // file systems without them) the caller's own count of open handles must do.
  if (fcntl(fd, F_SETLEASE, F_RDLCK) == 0) {
    fcntl(fd, F_SETLEASE, F_UNLCK);
    return false;
  }
  return errno == EAGAIN;
}

Result<> check_closed(int dir_fd, const std::vector<Found>& found) {
  for (const Found& file : found) {
    if (file.node != nullptr) continue;
    PTC_TRY(bool busy, open_for_writing(dir_fd, file.source()));
    if (busy) return make_error(Code::kBusy, "{} is still open for writing", file.source());
  }
  return ok();
}

Result<> begin_hashing(int dir_fd, std::vector<Found>& found, HashCache& hashes) {
  for (Found& file : found)
    if (file.node == nullptr) file.ticket = hashes.begin(file.version);
  return check_closed(dir_fd, found);
}

}  // namespace ptc
