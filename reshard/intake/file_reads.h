// What a commit reads of files to know what else is in them: bytes, and where the arrays of items
// of PyTorch's distributed checkpointing lie. A file on another node is read there, and only the
// answers travel: no tensor's bytes do.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "reshard/exec/executor.h"
#include "reshard/intake/found_files.h"
#include "store/base/error.h"
#include "store/base/mutex.h"
#include "store/codec/dcp_metadata.h"
#include "store/codec/zip.h"
#include "store/tensor/box.h"
#include "store/tensor/dtype.h"

namespace ptc {

/// What is wanted of a file.
struct FileReads {
  struct Array {
    DcpItem item;
    DType dtype = DType::kF32;
    Shape shape;
  };
  struct Range {
    uint64_t offset = 0, length = 0;
  };
  const Found* file = nullptr;
  std::vector<Array> arrays;
  std::vector<Range> ranges;
};

/// What came of it, in the same order.
struct FileParts {
  struct Array {
    uint64_t offset = 0, bytes = 0;  // in the file
    bool contiguous = true;
    std::string problem;  // why it is none that can be read; then the rest says nothing
  };
  std::vector<Array> arrays;
  std::vector<std::string> ranges;
};

/// A directory's files, listed when somebody asks first. Threads: any.
class ListedFiles {
 public:
  Result<std::shared_ptr<const std::vector<Found>>> in(int dir_fd);

 private:
  Mutex mutex_;
  std::shared_ptr<const std::vector<Found>> found_ PTC_GUARDED_BY(mutex_);
};

/// Threads: any.
class FileReader {
 public:
  /// One question holds no more than this: what it and its answer take stays far below
  /// kMaxCallBytes.
  static constexpr size_t kMostAsked = 1 << 16;
  static constexpr uint64_t kMostBytesAsked = 64 << 20;

  /// `dir_fd`: with this node's files; −1: it has none. All outlive it.
  FileReader(int dir_fd, const AskToRead& ask, Executor& executor, std::stop_token stop)
      : dir_fd_(dir_fd), ask_(ask), executor_(executor), stop_(std::move(stop)) {}

  int dir_fd() const { return dir_fd_; }
  /// Of all files, on all nodes at the same time; of several here not from within a body of the
  /// executor's team. kBusy: one is not as it was. No range is longer than kMostBytesAsked.
  Result<std::vector<FileParts>> read(const std::vector<FileReads>& wanted) const;
  /// A whole file.
  Result<std::string> text_of(const Found& file) const;
  /// For one thread, as long as this and `file` live. What is small is read once, with what is
  /// beside it.
  Result<ReadAt> open(const Found& file) const;

 private:
  Result<> read_elsewhere(const std::vector<FileReads>& wanted,
                          std::vector<FileParts>& parts) const;
  const int dir_fd_;
  const AskToRead& ask_;
  Executor& executor_;
  const std::stop_token stop_;
};

}  // namespace ptc
