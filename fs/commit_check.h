// What must hold of incoming/<name> before it is committed: nobody writes it any more.
#pragma once

#include <string>
#include <vector>

#include "fs/tree.h"

namespace ptc {

/// One attempt to commit. Seals the files of incoming/<name> against being opened for writing, and its
/// directories against changes, until it is destroyed, and for good once committed() was called.
class CommitCheck {
 public:
  CommitCheck(JobView& job, std::string name) : job_(job), name_(std::move(name)) {}
  ~CommitCheck();
  CommitCheck(const CommitCheck&) = delete;
  CommitCheck& operator=(const CommitCheck&) = delete;

  /// kBusy while a file in it is open or mapped for writing, after a moment's patience: close()
  /// returns before the kernel has told us. A file that has a hard link elsewhere is replaced by a
  /// copy, so that nobody can write it through the other name.
  Result<> prepare();
  void committed();

 private:
  struct File {
    std::string path;  // below incoming/
    std::string key;   // of its node
    bool linked_elsewhere = false;
  };
  Result<> find_files(int dir_fd, const std::string& path, unsigned depth);
  Result<> check_closed(const File& file) const;
  Result<> replace_by_copy(File& file);

  JobView& job_;
  const std::string name_;
  std::vector<File> files_;
  std::vector<std::string> keys_;
};

}  // namespace ptc
