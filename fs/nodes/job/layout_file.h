// <job>/layout.json and the other texts that are accepted or refused; fs/tree/editable_file.h says
// how they are saved.
#pragma once

#include <fcntl.h>

#include "fs/tree/editable_file.h"
#include "fs/tree/node.h"
#include "fs/tree/tree.h"

namespace ptc {

class LayoutFile : public Node {
 public:
  LayoutFile(JobViewRef job, EditableFile& file)
      : Node(job->key() + "/" + file.name()), job_(std::move(job)), file_(file) {}

  FsResult<struct stat> attributes() override {
    return file_.attributes(job_->directory(), inode_of(key()));
  }
  FsResult<> set_attributes(const AttributeChange& change, Handle* handle) override {
    return file_.set_attributes(change, handle);
  }
  FsResult<Opened> open(const Caller& caller, int flags) override {
    const int access = flags & O_ACCMODE;
    if (access == O_RDWR && !may_read_now(caller)) return Errno{EACCES};
    PTC_TRY(auto handle, file_.open(caller, flags, job_));
    // A mode is narrowed before the text is another one.
    if (access == O_RDONLY && !may_read_now(caller)) return Errno{EACCES};
    return Opened{std::move(handle), IoMode::kDirect, 0};
  }

 private:
  /// The kernel has looked at the mode, which may have been another.
  bool may_read_now(const Caller& caller) {
    if (!file_.was_just_narrowed()) return true;
    const struct stat now = file_.attributes(job_->directory(), inode_of(key()));
    return caller.may(now.st_uid, now.st_gid, now.st_mode, S_IROTH);
  }

  const JobViewRef job_;
  EditableFile& file_;  // in job_
};

}  // namespace ptc
