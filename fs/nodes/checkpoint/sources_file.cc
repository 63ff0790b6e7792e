#include "fs/nodes/checkpoint/sources_file.h"

#include <optional>

#include "fs/nodes/checkpoint/file_set_dir.h"
#include "fs/nodes/text_file.h"
#include "reshard/checkpoint/byte_sources.h"

namespace ptc {

/// Of files their headers are in it, of a checkpoint all names and shapes: who may read all of them
/// may read it.
FsResult<struct stat> SourcesFile::attributes() {
  std::optional<ReadRights> rights;
  if (files_ == nullptr) {
    rights = checkpoint_->checkpoint->rights_of_all();
  } else {
    PTC_TRY(const FileSetRef files, as_fs(files_->get()));
    for (const FileSet::Entry& entry : files->entries())
      rights = rights ? rights->narrowed_to(entry.rights) : entry.rights;
  }
  struct stat stat = checkpoint_->attributes(S_IFREG | 0444, checkpoint_->path_of(key()));
  if (rights) {
    stat.st_mode = S_IFREG | rights->mode;
    stat.st_uid = rights->uid;
    stat.st_gid = rights->gid;
  }
  return stat;
}

FsResult<Opened> SourcesFile::open(const Caller&, int flags) {
  if (!opens_to_read(flags)) return Errno{EROFS};
  const Checkpoint& checkpoint = *checkpoint_->checkpoint;
  std::string text;
  if (files_ == nullptr) {
    text = tensor_sources_text(checkpoint);
  } else {
    PTC_TRY(const FileSetRef files, as_fs(files_->get()));
    text = byte_sources_text(checkpoint, *files);
  }
  return Opened{make_text_handle(std::move(text)), IoMode::kDirect, 0};
}

}  // namespace ptc
