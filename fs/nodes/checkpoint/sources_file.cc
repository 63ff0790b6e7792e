#include "fs/nodes/checkpoint/sources_file.h"

#include <optional>

#include "fs/nodes/checkpoint/file_set_dir.h"
#include "fs/nodes/text_file.h"
#include "reshard/checkpoint/byte_sources.h"

namespace ptc {

/// Names and shapes are in it: who may read all of the files may read it.
FsResult<struct stat> SourcesFile::attributes() {
  PTC_TRY(const FileSetRef files, as_fs(files_->get()));
  std::optional<ReadRights> rights;
  for (const FileSet::Entry& entry : files->entries())
    rights = rights ? rights->narrowed_to(entry.rights) : entry.rights;
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
  PTC_TRY(const FileSetRef files, as_fs(files_->get()));
  return Opened{make_text_handle(byte_sources_text(*checkpoint_->checkpoint, *files)),
                IoMode::kDirect, 0};
}

}  // namespace ptc
