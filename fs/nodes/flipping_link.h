// Symbolic links of a job that flip: current, dataset/head.
#pragma once

#include <string>
#include <utility>

#include "fs/tree/node.h"
#include "fs/tree/tree.h"

namespace ptc {

/// One node for each target, so that the kernel may cache its text. The name is looked up each
/// time: were the kernel told when it stands for another, all names would expire, and the first use
/// of the job's directory would wait until the kernel has dropped everything that it knows below.
class FlippingLink : public Node {
 public:
  /// `path`: of the link, from the job's directory.
  static FsResult<NodeRef> make(const JobViewRef& job, std::string_view path, std::string target) {
    return job->tree().table().intern(std::make_shared<FlippingLink>(job, path, std::move(target)));
  }

  FlippingLink(const JobViewRef& job, std::string_view path, std::string target)
      : Node(fmt::format("{}/{}/{}", job->key(), path, target)),
        job_(job),
        target_(std::move(target)) {}

  FsResult<struct stat> attributes() override {
    struct stat owner = job_->directory();
    struct stat stat =
        virtual_stat(S_IFLNK | 0777, owner.st_uid, owner.st_gid, owner.st_mtim, inode_of(key()));
    stat.st_size = static_cast<off_t>(target_.size());
    return stat;
  }
  FsResult<std::string> read_link() override { return target_; }

 private:
  const JobViewRef job_;
  const std::string target_;
};

}  // namespace ptc
