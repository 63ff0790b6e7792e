// Bytes that go into a fresh file by pwrite: the kernel need not clear a page that is filled at
// once, nor take a fault for it, which together cost more than the copy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "store/base/error.h"
#include "store/transport/transport.h"

namespace ptc {

constexpr uint64_t kLongRun = 4 << 10;  // from here on a run is worth a call or an iovec of its own

/// Runs that follow each other in the file are written together. Threads: one.
class FileRuns {
 public:
  explicit FileRuns(ImageWriter& writer) : writer_(writer) {}

  /// `run` stays where it is until finish().
  void add(uint64_t offset, std::span<const std::byte> run);
  /// The first error there was.
  Result<> finish();

 private:
  void flush();

  ImageWriter& writer_;
  std::vector<std::span<const std::byte>> pieces_;  // from begin_ to end_
  uint64_t begin_ = 0, end_ = 0;
  Result<> result_ = ok();
};

/// The next bytes of an item's string, at `from`, to where they belong: its target window until
/// `target_end`, in the host's memory, by its writer where that is worth it. Errors: of writing to
/// a file.
Result<> put_runs(const FetchItem& item, uint64_t target_end, const std::byte* from);

}  // namespace ptc
