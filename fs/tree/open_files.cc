#include "fs/tree/open_files.h"

#include <utility>

#include "store/base/mutex.h"

namespace ptc {

OpenFiles::~OpenFiles() {
  for (Shard& shard : shards_)
    for (auto& [number, file] : shard.files) (void)new std::shared_ptr(std::move(file.handle));
}

uint64_t OpenFiles::add(OpenFile file) {
  const uint64_t number = given_.fetch_add(1, std::memory_order_relaxed) + 1;
  Shard& shard = shard_of(number);
  ExclusiveLock lock(shard.mutex);
  shard.files.emplace(number, std::move(file));
  return number;
}

std::shared_ptr<Handle> OpenFiles::at(uint64_t number) const {
  Shard& shard = shard_of(number);
  SharedLock lock(shard.mutex);
  const auto found = shard.files.find(number);
  return found == shard.files.end() ? nullptr : found->second.handle;
}

OpenFile OpenFiles::take(uint64_t number) {
  Shard& shard = shard_of(number);
  ExclusiveLock lock(shard.mutex);
  const auto found = shard.files.find(number);
  if (found == shard.files.end()) return {};
  OpenFile file = std::move(found->second);
  shard.files.erase(found);
  constexpr size_t kSmall = 1024;
  if (shard.files.bucket_count() > kSmall && shard.files.size() * 8 < shard.files.bucket_count())
    shard.files.rehash(0);
  return file;
}

void OpenFiles::each(const std::function<void(uint64_t number, const OpenFile&)>& visit) const {
  for (const Shard& shard : shards_) {
    SharedLock lock(shard.mutex);
    for (const auto& [number, file] : shard.files) visit(number, file);
  }
}

}  // namespace ptc
