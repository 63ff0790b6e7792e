#include "dataset/source/shard_files.h"

#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "store/base/json.h"
#include "store/base/mutex.h"

namespace ptc {
namespace {

size_t quarter_of_open_files() {
  struct rlimit limit;
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return 64;
  return std::clamp<size_t>(limit.rlim_cur / 4, 16, 1024);
}

uint64_t quarter_of_memory() {
  return static_cast<uint64_t>(::sysconf(_SC_PHYS_PAGES)) *
         static_cast<uint64_t>(::sysconf(_SC_PAGESIZE)) / 4;
}

}  // namespace

ShardFiles::ShardFiles(const SampleIndex& index, SourceAccessRef access)
    : index_(index),
      access_(std::move(access)),
      most_open_(quarter_of_open_files()),
      most_mapped_(quarter_of_memory()) {}

std::string path_of_shard(const SampleIndex& index, uint64_t shard) {
  if (index.facts().format != SourceFormat::kFiles) return index.shard_path(shard);
  const ShardRecord& group = index.shard(index.shard_of(shard));
  return index.facts().roots[group.root] + '/' +
         std::string(index.file_name(group, shard - group.first_sample));
}

Error ShardFiles::changed(uint64_t shard, std::string_view what) const {
  return make_error(Code::kCorrupt,
                    "{} is not what was indexed: {}; bring it back, or save source.json again",
                    ptc::quoted(path_of_shard(index_, shard)), what);
}

Result<timespec> ShardFiles::check(uint64_t shard, int fd) const {
  struct stat facts = {};
  if (::fstat(fd, &facts) != 0)
    return errno_error(errno, ptc::quoted(path_of_shard(index_, shard)));
  PTC_TRY(const FileStamp now, stamp_of(facts));
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
  if (now.bytes != bytes)
    return changed(shard, fmt::format("it has {} bytes and had {}", now.bytes, bytes));
  if (!same) return changed(shard, "it was written or replaced since");
  return facts.st_ctim;
}

Result<UniqueFd> ShardFiles::open_now(uint64_t shard) const {
  auto opened = access_->open(path_of_shard(index_, shard), Wanted::kFile);
  if (!opened && opened.error().code() == Code::kNotFound) return changed(shard, "it is gone");
  if (!opened && opened.error().code() == Code::kInvalidArgument)
    return changed(shard, opened.error().message());
  return opened;
}

Result<> ShardFiles::may_read(std::span<const uint64_t> shards) {
  PTC_TRY(const ActingAs as, access_->act());
  for (const uint64_t shard : shards) {
    {
      MutexLock lock(mutex_);
      const auto found = by_shard_.find(shard);
      if (found != by_shard_.end() && Clock::now() - found->second->permitted < kTrusted) continue;
    }
    PTC_TRY(open(shard));
  }
  return ok();
}

uint64_t ShardFiles::bytes_to_map(uint64_t shard) const {
  return index_.facts().format == SourceFormat::kFiles ? 0 : index_.shard(shard).stamp.bytes;
}

Result<std::shared_ptr<const ShardHandle>> ShardFiles::open(uint64_t shard) {
  std::shared_ptr<const ShardHandle> known;
  bool trusted = false;
  {
    MutexLock lock(mutex_);
    if (const auto found = by_shard_.find(shard); found != by_shard_.end()) {
      recent_.splice(recent_.begin(), recent_, found->second);
      known = found->second->file;
      trusted = Clock::now() - found->second->permitted < kTrusted;
    }
  }
  if (known) {
    PTC_TRY(const timespec changed, check(shard, known->fd.get()));
    const bool untouched =
        changed.tv_sec == known->changed.tv_sec && changed.tv_nsec == known->changed.tv_nsec;
    if (trusted && untouched) return known;
  }
  const auto permitted = Clock::now();
  PTC_TRY(UniqueFd fd, open_now(shard));
  ShardHandle file{std::move(fd), {}, nullptr};
  PTC_TRY(file.changed, check(shard, file.fd.get()));
  MutexLock lock(mutex_);
  if (const auto found = by_shard_.find(shard); found != by_shard_.end()) {
    // The same file as before, and still to be read: what was mapped of it stays.
    const ShardHandle& old = *found->second->file;
    found->second->permitted = permitted;
    if (old.changed.tv_sec == file.changed.tv_sec && old.changed.tv_nsec == file.changed.tv_nsec)
      return found->second->file;
    if (old.mapping) mapped_ -= bytes_to_map(shard);
    recent_.erase(found->second);
    by_shard_.erase(found);
  }
  if (const uint64_t bytes = bytes_to_map(shard); bytes != 0 && mapped_ + bytes <= most_mapped_) {
    file.mapping = ShardMapping::make(file.fd.get(), bytes);
    if (file.mapping) mapped_ += bytes;
  }
  const auto made = std::make_shared<const ShardHandle>(std::move(file));
  recent_.push_front({shard, made, permitted});
  by_shard_[shard] = recent_.begin();
  if (recent_.size() > most_open_) {
    const Entry& last = recent_.back();
    if (last.file->mapping) mapped_ -= bytes_to_map(last.shard);
    by_shard_.erase(last.shard);
    recent_.pop_back();
  }
  return made;
}

Result<> ShardFiles::read(uint64_t shard, const ShardHandle& file, uint64_t offset,
                          std::span<std::byte> out, Stores stores) const {
  if (file.mapping && file.mapping->copy(offset, out, stores)) return ok();
  while (!out.empty()) {
    const ssize_t got = ::pread(file.fd.get(), out.data(), out.size(), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno_error(errno, ptc::quoted(path_of_shard(index_, shard)));
    if (got == 0) return changed(shard, fmt::format("it ends at byte {}", offset));
    out = out.subspan(static_cast<size_t>(got));
    offset += static_cast<uint64_t>(got);
  }
  return ok();
}

}  // namespace ptc
