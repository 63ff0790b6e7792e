#include "fs/tree/gather_cache.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

#include "dataset/source/caught.h"
#include "store/base/mutex.h"

namespace ptc {
namespace {

using std::chrono::seconds;

// Smaller files are read in one or two requests, which cost less than making a file of them.
constexpr uint64_t kWorthBytes = 256 << 10;
constexpr uint64_t kChunkBytes = 1 << 20;
constexpr size_t kMostWanted = 64;
constexpr int kThreadsAhead = 4;
constexpr seconds kReuseAfter{5}, kDropAfter{30}, kLookEvery{5};
// For the tmpfs' own records, and for files that are dropped while somebody still has them mapped.
constexpr uint64_t kSlackBytes = 16 << 20;

}  // namespace

GatherCache::GatherCache(uint64_t limit_bytes, unsigned threads)
    : limit_bytes_(limit_bytes), team_(threads) {
  if (limit_bytes == 0) return;
  auto space = ScratchSpace::open(limit_bytes + kSlackBytes);
  if (!space) {
    spdlog::info("files that are computed on read stay in no memory of their own: {}",
                 space.error().message());
    return;
  }
  space_ = std::move(space).value();
}

GatherCache::~GatherCache() {
  MutexLock lock(mutex_);
  ending_ = true;
  queue_.clear();
  ended_.notify_all();
}

GatherCache::Numbers GatherCache::numbers() const {
  MutexLock lock(mutex_);
  Numbers numbers = counts_;
  numbers.bytes = bytes_;
  numbers.files = entries_.size();
  return numbers;
}

GatherCache::FileRef GatherCache::get(const std::string& key, const Content& content) {
  return find_or_gather(key, content, true);
}

void GatherCache::prepare(const std::string& key, const std::string& awaited,
                          std::function<Result<Content>()> make) {
  if (space_ == nullptr) return;
  MutexLock lock(mutex_);
  const auto same = [&](const Wanted& wanted) { return wanted.key == key; };
  if (entries_.contains(key) || queue_.size() >= kMostWanted ||
      std::any_of(queue_.begin(), queue_.end(), same))
    return;
  queue_.push_back({key, awaited, std::move(make)});
  begin_ahead();
}

void GatherCache::begin_ahead() {
  if (working_ahead_ >= kThreadsAhead) return;
  try {
    ahead_.run([this] { work_ahead(); });
    ++working_ahead_;
  } catch (const std::exception&) {  // no thread: the open gathers it, unless others come to it
  }
}

void GatherCache::be_given_back() {
  if (giving_back_) return;
  try {
    idle_.run([this] { give_back_idle(); });
    giving_back_ = true;
  } catch (const std::exception&) {  // no thread: the next one that is gathered tries again
  }
}

GatherCache::FileRef GatherCache::find_or_gather(const std::string& key, const Content& content,
                                                 bool opened) {
  const uint64_t bytes = content.bytes;
  if (space_ == nullptr || bytes < kWorthBytes || bytes > limit_bytes_) return nullptr;
  Files reusable;
  {
    MutexLock lock(mutex_);
    if (opened) std::erase_if(queue_, [&](const Wanted& wanted) { return wanted.key == key; });
    for (;;) {
      auto found = entries_.find(key);
      if (found == entries_.end()) break;
      if (found->second.file != nullptr) {
        if (!opened) return nullptr;
        found->second.used = Clock::now();
        found->second.once = content.once;
        ++counts_.hits;
        return found->second.file;
      }
      gathered_.wait(mutex_);
    }
    if (!make_room(bytes, reusable)) {
      ++counts_.refused;
      return nullptr;
    }
    ++counts_.misses;
    Entry& entry = entries_[key];
    entry.bytes = bytes;
    entry.once = content.once && opened;
    bytes_ += bytes;
    be_given_back();
  }
  const Gathering gathering(*this, key);
  auto file = caught([&] { return gather(content, reusable, opened); });
  if (!file) {
    spdlog::debug("not gathered: {}", file.error().message());
    return nullptr;
  }
  auto again = content.again;
  MutexLock lock(mutex_);
  Entry& entry = entries_.find(key)->second;
  entry.file = std::move(file).value();
  entry.used = Clock::now();
  entry.again = std::move(again);
  counts_.gathered_bytes += bytes;
  return entry.file;
}

GatherCache::Gathering::~Gathering() {
  MutexLock lock(cache_.mutex_);
  const auto found = cache_.entries_.find(key_);
  if (found != cache_.entries_.end() && found->second.file == nullptr) {
    cache_.bytes_ -= found->second.bytes;
    cache_.entries_.erase(found);
  }
  cache_.gathered_.notify_all();
}

Result<> GatherCache::refresh(const std::string& prefix) {
  std::vector<std::pair<std::shared_ptr<ScratchFile>, std::function<Result<Fill>()>>> files;
  {
    MutexLock lock(mutex_);
    // What is being gathered now may hold what was there before; what is begun from now on, not.
    std::set<std::string> under_way;
    for (const auto& [key, entry] : entries_)
      if (entry.file == nullptr && key.starts_with(prefix)) under_way.insert(key);
    gathered_.wait(mutex_, [&]() PTC_REQUIRES(mutex_) {
      for (const std::string& key : under_way)
        if (const auto entry = entries_.find(key);
            entry != entries_.end() && entry->second.file == nullptr)
          return false;
      return true;
    });
    for (const auto& [key, entry] : entries_)
      if (entry.file != nullptr && entry.again && key.starts_with(prefix))
        files.emplace_back(entry.file, entry.again);
  }
  Result<> result = ok();
  std::vector<std::byte> buffer(kChunkBytes);
  auto mend = [&](ScratchFile& file, const std::function<Result<Fill>()>& again) -> Result<> {
    PTC_TRY(auto fill, again());
    if (!fill) return ok();
    for (uint64_t offset = 0; offset < file.bytes(); offset += kChunkBytes) {
      const std::span<std::byte> held =
          file.memory().subspan(offset, std::min(kChunkBytes, file.bytes() - offset));
      PTC_TRY(fill(offset, std::span(buffer).first(held.size())));
      if (std::memcmp(held.data(), buffer.data(), held.size()) == 0) continue;
      std::memcpy(held.data(), buffer.data(), held.size());
    }
    return ok();
  };
  for (const auto& [file, again] : files)
    if (Result<> mended = mend(*file, again); mended.has_error()) result = std::move(mended);
  return result;
}

bool GatherCache::make_room(uint64_t bytes, Files& out) {
  using Position = std::unordered_map<std::string, Entry>::iterator;
  std::vector<Position> idle;
  uint64_t idle_bytes = 0;
  for (auto it = entries_.begin(); it != entries_.end(); ++it) {
    if (it->second.file == nullptr || it->second.file.use_count() > 1) continue;
    idle.push_back(it);
    idle_bytes += it->second.bytes;
  }
  if (bytes_ - idle_bytes + bytes > limit_bytes_) return false;
  std::sort(idle.begin(), idle.end(),
            [](const Position& a, const Position& b) { return a->second.used < b->second.used; });
  const Clock::time_point now = Clock::now();
  for (Position it : idle) {
    bool old = out.empty() && (it->second.once || now - it->second.used > kReuseAfter);
    if (bytes_ + bytes <= limit_bytes_ && !old) break;
    if (!it->second.file->unshared()) continue;  // mapped: it would take its memory all the same
    bytes_ -= it->second.bytes;
    out.push_back(std::move(it->second.file));
    entries_.erase(it);
    ++counts_.evicted_for_room;
  }
  return bytes_ + bytes <= limit_bytes_;
}

Result<std::shared_ptr<ScratchFile>> GatherCache::memory(uint64_t bytes, Files& reusable) {
  // The largest first: what it has too much is given back at once, what it lacks is fresh.
  std::sort(reusable.begin(), reusable.end(),
            [](const auto& a, const auto& b) { return a->bytes() > b->bytes(); });
  for (auto& file : reusable) {
    if (!file->unshared()) continue;
    std::shared_ptr<ScratchFile> again = std::move(file);
    reusable.clear();
    PTC_TRY(again->resize(bytes));
    return again;
  }
  reusable.clear();
  PTC_TRY(auto fresh, space_->create(bytes));
  return std::shared_ptr<ScratchFile>(std::move(fresh));
}

Result<std::shared_ptr<ScratchFile>> GatherCache::gather(const Content& content, Files& reusable,
                                                         bool opened) {
  PTC_TRY(auto file, memory(content.bytes, reusable));
  const std::span<std::byte> all = file->memory();
  if (!opened) {
    PTC_TRY(content.fill(0, all));
    return file;
  }
  const size_t chunks = (all.size() + kChunkBytes - 1) / kChunkBytes;
  auto fill = [&](size_t i) -> Result<> {
    const uint64_t begin = i * kChunkBytes;
    return content.fill(begin,
                        all.subspan(begin, std::min<uint64_t>(kChunkBytes, all.size() - begin)));
  };
  if (content.awaited.empty()) {
    PTC_TRY(team_.parallel_for(chunks, fill));
  } else {  // to start threads costs less than a chunk
    ThreadTeam own(static_cast<unsigned>(std::min<size_t>(team_.size(), chunks)));
    PTC_TRY(own.parallel_for(chunks, fill));
  }
  return file;
}

/// Of those that another thread may be waiting for, that one makes the next.
void GatherCache::work_ahead() {
  UniqueLock lock(mutex_);
  for (;;) {
    const auto next = std::find_if(
        queue_.begin(), queue_.end(),
        [&](const Wanted& one) PTC_REQUIRES(mutex_) { return !ahead_of_.contains(one.awaited); });
    if (next == queue_.end()) break;
    const Wanted wanted = std::move(*next);
    queue_.erase(next);
    ahead_of_.insert(wanted.awaited);
    lock.unlock();
    // Whatever is wrong with it, the open will say.
    (void)caught([&]() -> Result<> {
      PTC_TRY(const Content content, wanted.make());
      find_or_gather(wanted.key, content, false);
      return ok();
    });
    lock.lock();
    ahead_of_.erase(wanted.awaited);
  }
  --working_ahead_;
}

void GatherCache::give_back_idle() {
  UniqueLock lock(mutex_);
  while (!ending_ && !entries_.empty()) {
    ended_.wait_for(mutex_, kLookEvery, [this]() PTC_REQUIRES(mutex_) { return ending_; });
    drop_idle(kDropAfter);
  }
  giving_back_ = false;
}

void GatherCache::drop_unused() {
  UniqueLock lock(mutex_);
  drop_idle(seconds(0));
}

void GatherCache::drop_idle(seconds unused_for) {
  Files idle;
  const Clock::time_point now = Clock::now();
  for (auto it = entries_.begin(); it != entries_.end();) {
    Entry& entry = it->second;
    // What somebody has mapped would take its memory all the same, and could not be mended any
    // more.
    bool wanted = entry.file == nullptr || entry.file.use_count() > 1 ||
                  now - entry.used < unused_for || !entry.file->unshared();
    if (wanted) {
      ++it;
      continue;
    }
    bytes_ -= entry.bytes;
    idle.push_back(std::move(entry.file));
    it = entries_.erase(it);
    ++counts_.evicted_idle;
  }
  const MutexUnlock unlock(mutex_);
  idle.clear();  // gigabytes may go: not with the lock
}

}  // namespace ptc
