#include <fcntl.h>
#include <sys/stat.h>

#include "reshard/intake/found_files.h"
#include "store/base/decimal.h"
#include "store/base/file.h"
#include "store/base/json.h"

namespace ptc {
namespace {

constexpr size_t kMaxCountBytes = 64;

Result<> add_count(std::optional<FoundCount>& all, FoundCount one) {
  if (all && all->count != one.count)
    return invalid_argument(
        "{} says that {} samples are consumed, and {} that {} are: a checkpoint has one count",
        all->file, all->count, one.file, one.count);
  if (!all) all = std::move(one);
  return ok();
}

}  // namespace

Result<std::optional<FoundCount>> find_consumed(int dir_fd, const std::vector<Found>& found,
                                                const std::vector<FilesElsewhere>& elsewhere) {
  std::optional<FoundCount> all;
  const std::string name(kConsumedFile);
  struct stat st {};
  if (dir_fd >= 0 && fstatat(dir_fd, name.c_str(), &st, AT_SYMLINK_NOFOLLOW) == 0) {
    if (!S_ISREG(st.st_mode)) return invalid_argument("{} is no ordinary file", name);
    PTC_TRY(const bool busy, open_for_writing(dir_fd, name));
    if (busy) return make_error(Code::kBusy, "{} is still open for writing", name);
    PTC_TRY(const std::string text, read_text_file(dir_fd, name, kMaxCountBytes, FileKind::kOwn));
    const std::optional<uint64_t> count = parse_count(text);
    if (!count)
      return invalid_argument("{}: {} is not a count of samples in decimal digits", name,
                              ptc::quoted(text));
    PTC_TRY(add_count(all, {*count, name}));
  }
  for (const Found& file : found) {
    if (file.path != name || file.version.bytes > kMaxCountBytes || file.node != nullptr) continue;
    PTC_TRY(const std::string text,
            read_text_file(dir_fd, file.source(), kMaxCountBytes, FileKind::kOwn));
    if (const auto count = parse_count(text)) {
      PTC_TRY(add_count(all, {*count, file.source()}));
    }
  }
  for (const FilesElsewhere& node : elsewhere) {
    PTC_TRY(const auto text, text_in_listing(node.listing, name));
    if (!text) continue;
    const size_t end = text->find(' ');
    const auto count = parse_count(text->substr(0, end));
    if (!count || end == text->npos)
      return make_error(Code::kCorrupt, "node {}: its list of files is damaged", node.node);
    PTC_TRY(
        add_count(all, {*count, fmt::format("{} on node {}", text->substr(end + 1), node.node)}));
  }
  return all;
}

}  // namespace ptc
