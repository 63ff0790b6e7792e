// The files of folders, and what says that they are the same files.
#pragma once

#include <cstdint>
#include <stop_token>
#include <string>
#include <vector>

#include "dataset/source/shard_list.h"
#include "dataset/source/source_access.h"
#include "store/base/error.h"

namespace ptc {

/// What is in a directory, but no name that begins with '.'. In no order.
Result<std::vector<FolderEntry>> entries_of(const SourceAccess& access, const std::string& path,
                                            const std::stop_token& stop);

/// Some files of a folder, one shard of the index. Names are below the root, each with a NUL behind
/// it.
struct FileGroup {
  uint32_t root = 0;
  uint32_t count = 0;
  std::string names;
};

/// All files of a kFiles list: in the order of the list, within a directory by name, with those of
/// the directories in it. Names that begin with '.' are left out; links are followed to files, not
/// to directories.
struct FolderFiles {
  std::vector<FileGroup> groups;
  std::vector<ListedShard> directories;
};
Result<FolderFiles> list_files(const ShardList& list, const SourceAccess& access,
                               std::stop_token stop);

/// Whether the directories are what they were when their files were listed: none came, went or
/// changed its name. What became of the files themselves is seen when they are read. Stopped, it
/// does not know: false.
bool unchanged(const ShardList& list, const SourceAccess& access,
               const std::vector<ListedShard>& directories, const std::stop_token& stop);

}  // namespace ptc
