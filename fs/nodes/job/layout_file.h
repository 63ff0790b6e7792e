// <job>/layout.json and the other texts that are accepted or refused; fs/editable_file.h says how
// they are saved.
#pragma once

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
    PTC_TRY(auto handle, file_.open(caller, flags, job_));
    return Opened{std::move(handle), IoMode::kDirect, 0};
  }

 private:
  const JobViewRef job_;
  EditableFile& file_;  // in job_
};

}  // namespace ptc
