// opendir, readdir, readdirplus, releasedir.
#pragma once

#include "fs/fuse_request.h"

namespace ptc {

void on_opendir(fuse_req_t raw, fuse_ino_t inode, fuse_file_info* info);
void on_readdir(fuse_req_t raw, fuse_ino_t inode, size_t size, off_t offset, fuse_file_info* info);
void on_readdirplus(fuse_req_t raw, fuse_ino_t inode, size_t size, off_t offset,
                    fuse_file_info* info);
void on_releasedir(fuse_req_t raw, fuse_ino_t inode, fuse_file_info* info);

}  // namespace ptc
