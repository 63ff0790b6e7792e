#include "store/transport/file_runs.h"

namespace ptc {
namespace {

constexpr uint64_t kWrittenAtOnce = 2 << 20;

}  // namespace

void FileRuns::add(uint64_t offset, std::span<const std::byte> run) {
  if (offset != end_ || end_ - begin_ >= kWrittenAtOnce) flush();
  if (pieces_.empty()) begin_ = end_ = offset;
  if (!pieces_.empty() && pieces_.back().data() + pieces_.back().size() == run.data())
    pieces_.back() = {pieces_.back().data(), pieces_.back().size() + run.size()};
  else pieces_.push_back(run);
  end_ += run.size();
}

Result<> FileRuns::finish() {
  flush();
  return std::exchange(result_, ok());
}

void FileRuns::flush() {
  if (!pieces_.empty() && result_.has_value()) result_ = writer_.write(begin_, pieces_);
  pieces_.clear();
}

}  // namespace ptc
