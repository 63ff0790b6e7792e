#include "store/transport/file_runs.h"

#include <cstring>
#include <optional>

#include "store/tensor/packed_copy.h"

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

Result<> put_runs(const FetchItem& item, uint64_t target_end, const std::byte* from) {
  const bool by_writer =
      item.writer != nullptr &&
      (item.copy.run_bytes >= kLongRun ||
       bytes_between(item.copy, item.begin, target_end) == target_end - item.begin);
  std::optional<FileRuns> file;
  if (by_writer) {
    file.emplace(*item.writer);
  } else if (item.writer != nullptr) {
    PTC_TRY(item.writer->take_space(item.begin, target_end));
  }
  PTC_TRY(std::byte* const at_begin, item.target_at_begin.host());
  for_each_run(item.copy, item.begin, target_end, [&](uint64_t, uint64_t target, uint64_t run) {
    if (by_writer) file->add(target, {from, run});
    else std::memcpy(at_begin + (target - item.begin), from, run);
    from += run;
  });
  return by_writer ? file->finish() : ok();
}

}  // namespace ptc
