// What the node that leads a commit asks another to hash, and what that knows from one question to
// the next. A node may have a million arrays, so each question is of some of them: what it and its
// answer take stays far below kMaxCallBytes, and so does the memory of both nodes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "reshard/intake/found_files.h"
#include "reshard/ptc/model.h"
#include "store/base/error.h"
#include "store/base/mutex.h"

namespace ptc {

/// Of one node, in the order of its files. One thread at a time.
class HashQuestions {
 public:
  /// All outlive it. `most`: of pieces, arrays and files together; but one array is whole.
  HashQuestions(const Model& model, const FilesElsewhere& node, std::vector<Found>& found,
                size_t most);
  bool over() const { return file_ == files_.size(); }
  /// For hash_files() there: what comes next; where all was asked, nothing is.
  std::string next();
  /// What was answered to that. kCorrupt: it is not of what was asked.
  Result<> take(const std::string& answer);
  /// Of the arrays that were asked for last.
  uint64_t bytes_asked() const { return bytes_asked_; }

 private:
  struct Asked {
    Found* file;
    size_t begin, end;  // of its arrays
  };
  Error not_of(const Found& file) const;
  const Model& model_;
  const FilesElsewhere& node_;
  const size_t most_;
  std::vector<Found*> files_;     // the node's
  size_t file_ = 0, tensor_ = 0;  // which comes next
  std::vector<Asked> asked_;
  uint64_t bytes_asked_ = 0;
};

/// A sealed directory's files, found and read when the first question needs them. Threads: any.
class FilesToHash {
 public:
  using All = std::shared_ptr<const std::vector<Found>>;
  /// With their tickets, and the sets that they are in. kBusy: one is open for writing.
  Result<All> in(int dir_fd, HashCache& hashes);
  /// One of these, with what is in it. Of what is read alone the last is kept.
  Result<std::shared_ptr<const Found>> read(int dir_fd, const All& all, uint32_t number);
  /// Something was not as it was found: it is looked for anew.
  void forget();

 private:
  Mutex mutex_;
  All found_ PTC_GUARDED_BY(mutex_);
  All with_rest_ PTC_GUARDED_BY(mutex_);  // TreeFormat::read_rest(), where somebody needs that
  std::shared_ptr<const Found> last_ PTC_GUARDED_BY(mutex_);
  uint32_t last_number_ PTC_GUARDED_BY(mutex_) = 0;
};

}  // namespace ptc
