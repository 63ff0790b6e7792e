#include "dataset/source/shard_files.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "store/base/json.h"

namespace ptc {
namespace {

size_t quarter_of_open_files() {
  struct rlimit limit;
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return 64;
  return std::clamp<size_t>(limit.rlim_cur / 4, 16, 1024);
}

}  // namespace

ShardFiles::ShardFiles(const SampleIndex& index) : index_(index), most_open_(quarter_of_open_files()) {}

std::string path_of_shard(const SampleIndex& index, uint64_t shard) {
  if (index.facts().format != SourceFormat::kFiles) return index.shard_path(shard);
  const ShardRecord& group = index.shard(index.shard_of(shard));
  return index.facts().roots[group.root] + '/' + std::string(index.file_name(group, shard - group.first_sample));
}

Error ShardFiles::changed(uint64_t shard, std::string_view what) const {
  return make_error(Code::kCorrupt, "{} is not what was indexed: {}; bring it back, or save source.json again",
                    ptc::quoted(path_of_shard(index_, shard)), what);
}

Result<> ShardFiles::check(uint64_t shard, int fd) const {
  PTC_TRY(const FileStamp now, stamp_of(fd));
  uint64_t bytes;
  bool same;
  if (index_.facts().format == SourceFormat::kFiles) {
    const ShardRecord& group = index_.shard(index_.shard_of(shard));
    const uint64_t i = shard - group.first_sample;
    bytes = index_.end(group, i) - index_.start(group, i);
    same = short_stamp(now) == index_.file_stamp(group, i);
  } else {
    const FileStamp& stamp = index_.shard(shard).stamp;
    bytes = stamp.bytes;
    same = now.mtime_ns == stamp.mtime_ns && now.inode == stamp.inode;
  }
  if (now.bytes != bytes) return changed(shard, fmt::format("it has {} bytes and had {}", now.bytes, bytes));
  if (!same) return changed(shard, "it was written or replaced since");
  return ok();
}

Result<std::shared_ptr<const UniqueFd>> ShardFiles::open(uint64_t shard) {
  std::shared_ptr<const UniqueFd> fd;
  {
    std::lock_guard lock(mutex_);
    if (const auto found = by_shard_.find(shard); found != by_shard_.end()) {
      recent_.splice(recent_.begin(), recent_, found->second);
      fd = found->second->fd;
    }
  }
  if (fd) {
    PTC_TRY(check(shard, fd->get()));
    return fd;
  }
  auto opened = open_file(AT_FDCWD, path_of_shard(index_, shard), O_RDONLY | O_NONBLOCK);
  if (!opened && opened.error().code() == Code::kNotFound) return changed(shard, "it is gone");
  if (!opened) return std::move(opened).error();
  fd = std::make_shared<const UniqueFd>(std::move(opened).value());
  PTC_TRY(check(shard, fd->get()));
  std::lock_guard lock(mutex_);
  if (by_shard_.contains(shard)) return fd;  // somebody else was faster
  recent_.push_front({shard, fd});
  by_shard_[shard] = recent_.begin();
  if (recent_.size() > most_open_) {
    by_shard_.erase(recent_.back().shard);
    recent_.pop_back();
  }
  return fd;
}

Result<> ShardFiles::read(uint64_t shard, int fd, uint64_t offset, std::span<std::byte> out) const {
  while (!out.empty()) {
    const ssize_t got = ::pread(fd, out.data(), out.size(), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno_error(errno, ptc::quoted(path_of_shard(index_, shard)));
    if (got == 0) return changed(shard, fmt::format("it ends at byte {}", offset));
    out = out.subspan(static_cast<size_t>(got));
    offset += static_cast<uint64_t>(got);
  }
  return ok();
}

}  // namespace ptc
