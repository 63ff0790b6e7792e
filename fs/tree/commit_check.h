// What must hold of incoming/<name> before it is committed, on each node that has it: nobody writes
// it any more.
#pragma once

#include <string>
#include <vector>

#include "fs/tree/tree.h"
#include "reshard/intake/seal.h"

namespace ptc {

/// One attempt to commit. Seals the files of incoming/<name> against being opened for writing, and
/// its directories against changes, until it is destroyed, and for good once committed() was
/// called.
class CommitCheck final : public Seal {
 public:
  CommitCheck(JobViewRef job, std::string name, GivesWay gives_way)
      : view_(std::move(job)),
        job_(*view_),
        name_(std::move(name)),
        owner_(std::make_shared<const GivesWay>(std::move(gives_way))) {}
  ~CommitCheck() override;
  CommitCheck(const CommitCheck&) = delete;
  CommitCheck& operator=(const CommitCheck&) = delete;

  /// kBusy while a file in it is open or mapped for writing, after a moment's patience: close()
  /// returns before the kernel has told us. A file that has a hard link elsewhere is replaced by a
  /// copy, so that nobody can write it through the other name.
  Result<> prepare();
  void committed() override;

 private:
  struct File {
    std::string path;  // below incoming/
    std::string key;   // of its node
    bool linked_elsewhere = false;
  };
  Result<> seal(const std::vector<std::string>& keys);
  Result<> find_files(int dir_fd, const std::string& path, unsigned depth);
  Result<> check_closed(const File& file) const;
  Result<> replace_by_copy(File& file);

  const JobViewRef view_;
  JobView& job_;
  const std::string name_;
  const CommitGate::Owner owner_;
  std::vector<File> files_;
  std::vector<std::string> keys_;
};

}  // namespace ptc
