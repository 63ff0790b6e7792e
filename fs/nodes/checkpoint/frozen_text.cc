#include "fs/nodes/checkpoint/frozen_text.h"

#include <utility>

#include "fs/nodes/checkpoint/file_set_dir.h"
#include "fs/nodes/text_file.h"

namespace ptc {

FrozenText::FrozenText(std::shared_ptr<CheckpointView> checkpoint, std::string key, Make make,
                       bool of_all)
    : Node(std::move(key)),
      checkpoint_(std::move(checkpoint)),
      make_(std::move(make)),
      of_all_(of_all) {}

FsResult<struct stat> FrozenText::attributes() {
  struct stat stat = checkpoint_->attributes(S_IFREG | 0444, checkpoint_->path_of(key()));
  if (of_all_) {
    const ReadRights& rights = checkpoint_->checkpoint->rights_of_all();
    stat.st_mode = S_IFREG | rights.mode;
    stat.st_uid = rights.uid;
    stat.st_gid = rights.gid;
  }
  stat.st_size = static_cast<off_t>(text().size());
  return stat;
}

FsResult<Opened> FrozenText::open(const Caller&, int flags) {
  if (!opens_to_read(flags)) return Errno{EROFS};
  return Opened{make_text_handle(text()), IoMode::kKeepCache, 0};
}

}  // namespace ptc
