// readdir and readdirplus, of directories that nobody opens.
#pragma once

#include "fs/kernel/fuse_request.h"

namespace ptc {

/// Answers that directories need no opening, which the kernel remembers for the whole mount. From
/// then on it keeps every listing, for as long as the directory's time of modification stays the
/// same.
void on_opendir(fuse_req_t raw, fuse_ino_t inode, fuse_file_info* info);
void on_readdir(fuse_req_t raw, fuse_ino_t inode, size_t size, off_t offset, fuse_file_info* info);
void on_readdirplus(fuse_req_t raw, fuse_ino_t inode, size_t size, off_t offset,
                    fuse_file_info* info);

}  // namespace ptc
