#include "fs/nodes/text_file.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <tuple>
#include <utility>

namespace ptc {
namespace {

class TextHandle : public Handle {
 public:
  explicit TextHandle(std::string text) : text_(std::move(text)) {}
  std::optional<std::string_view> text_of_open() const override { return text_; }
  FsResult<size_t> read(std::span<std::byte> out, uint64_t offset, const Interrupted&) override {
    if (offset >= text_.size()) return size_t{0};
    size_t size = std::min<size_t>(out.size(), text_.size() - offset);
    std::memcpy(out.data(), text_.data() + offset, size);
    return size;
  }

 private:
  const std::string text_;
};

}  // namespace

std::unique_ptr<Handle> make_text_handle(std::string text) {
  return std::make_unique<TextHandle>(std::move(text));
}

FsResult<struct stat> TextFile::attributes() {
  struct stat owner = owner_();
  struct stat stat = virtual_stat(S_IFREG | (owner.st_mode & 0444), owner.st_uid, owner.st_gid,
                                  owner.st_mtim, inode_of(key()));
  stat.st_size = static_cast<off_t>(text_().size());
  return stat;
}

FsResult<Opened> TextFile::open(const Caller& caller, int flags) {
  if ((flags & O_ACCMODE) != O_RDONLY || (flags & O_TRUNC) != 0) return Errno{EROFS};
  // The kernel has looked at the mode, which may have been another; and the text must be of one
  // mode, for what it tells depends on that.
  constexpr int kMostTries = 20;
  struct stat before = owner_();
  for (int tries = 0; tries < kMostTries; ++tries) {
    if (!caller.may(before.st_uid, before.st_gid, before.st_mode, S_IROTH)) return Errno{EACCES};
    std::string text = text_();
    const struct stat after = owner_();
    if (std::tie(after.st_mode, after.st_uid, after.st_gid) ==
        std::tie(before.st_mode, before.st_uid, before.st_gid))
      return Opened{make_text_handle(std::move(text)), IoMode::kDirect, 0};
    before = after;
  }
  return Errno{EAGAIN};
}

}  // namespace ptc
