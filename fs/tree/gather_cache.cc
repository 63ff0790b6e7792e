#include "fs/tree/gather_cache.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

#include "dataset/source/caught.h"
#include "reshard/exec/thread_team.h"
#include "store/base/mutex.h"

namespace ptc {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// Smaller files are read in one or two requests, which cost less than making a file of them.
constexpr uint64_t kWorthBytes = 256 << 10;
constexpr uint64_t kPieceBytes = 1 << 20;
// Of more, whoever opens it makes none of it: an open ends when it has to.
constexpr uint64_t kTakesLongBytes = 64 << 20;
constexpr milliseconds kWaits{2000}, kLooksUpEvery{50};
constexpr size_t kMostWanted = 64;
constexpr int kThreadsAhead = 4;
constexpr seconds kReuseAfter{5}, kDropAfter{30}, kLookEvery{5};
// For the tmpfs' own records, and for files that are dropped while somebody still has them mapped.
constexpr uint64_t kSlackBytes = 16 << 20;

}  // namespace

GatherCache::GatherCache(uint64_t limit_bytes, unsigned threads)
    : limit_bytes_(limit_bytes),
      threads_(std::max(threads, 1u)),
      gathering_("ptcfs-copy", threads_) {
  if (limit_bytes == 0) return;
  auto space = ScratchSpace::open(limit_bytes + kSlackBytes);
  if (!space) {
    spdlog::info("files that are computed on read stay in no memory of their own: {}",
                 space.error().message());
    return;
  }
  space_ = std::move(space).value();
}

GatherCache::~GatherCache() { stop(); }

void GatherCache::stop() {
  {
    MutexLock lock(mutex_);
    ending_ = true;
    queue_.clear();
    ended_.notify_all();
    gathered_.notify_all();
  }
  gathering_.end();                                // what is made ahead is of data sets
  std::unordered_map<std::string, Entry> entries;  // go without the mutex
  MutexLock lock(mutex_);
  entries.swap(entries_);
  bytes_ = 0;
}

GatherCache::Numbers GatherCache::numbers() const {
  MutexLock lock(mutex_);
  Numbers numbers = counts_;
  numbers.bytes = bytes_;
  numbers.files = entries_.size();
  return numbers;
}

GatherCache::File::File(std::string key, const Content& content, uint64_t piece_bytes)
    : key_(std::move(key)),
      bytes_(content.bytes),
      piece_bytes_(piece_bytes),
      fill_(content.fill),
      pieces_((bytes_ + piece_bytes - 1) / piece_bytes),
      left_(pieces_.size()) {}

std::span<std::byte> GatherCache::File::piece(size_t i) {
  const uint64_t begin = i * piece_bytes_;
  return memory_->memory().subspan(begin, std::min(piece_bytes_, bytes_ - begin));
}

GatherCache::FileRef GatherCache::get(const std::string& key, const Content& content,
                                      const Leaves& leaves, Clock::duration waited) {
  std::optional<Files> begun;
  const FileRef file = find_or_begin(key, content, true, begun);
  if (file == nullptr) return nullptr;
  const bool all = !content.awaited.empty();
  if (begun && all) gather_alone(file, *std::move(begun));
  else if (begun) gather(file, *std::move(begun));
  if (!file->is_whole())
    wait_for(*file, all ? Clock::time_point::max() : Clock::now() + kWaits - waited, leaves);
  return file->failed_ || (all && !file->is_whole()) ? nullptr : file;
}

bool GatherCache::read(const FileRef& file, uint64_t offset, std::span<std::byte> out) {
  if (!file->begun_.load(std::memory_order_acquire) || file->failed_) return false;
  if (!file->is_whole()) {
    if (file->piece_bytes_ != kPieceBytes) return false;
    const size_t end = (offset + out.size() + kPieceBytes - 1) / kPieceBytes;
    for (size_t i = offset / kPieceBytes; i < end; ++i)
      if (!make_piece(*file, i)) return false;
  }
  std::memcpy(out.data(), file->memory_->memory().subspan(offset).data(), out.size());
  return true;
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

GatherCache::FileRef GatherCache::find_or_begin(const std::string& key, const Content& content,
                                                bool opened, std::optional<Files>& begun) {
  const uint64_t bytes = content.bytes;
  if (space_ == nullptr || bytes < kWorthBytes || bytes > limit_bytes_) return nullptr;
  Files reusable;
  MutexLock lock(mutex_);
  if (opened) std::erase_if(queue_, [&](const Wanted& wanted) { return wanted.key == key; });
  if (const auto found = entries_.find(key); found != entries_.end()) {
    if (!opened) return nullptr;
    found->second.used = Clock::now();
    found->second.once = content.once;
    ++counts_.hits;
    return found->second.file;
  }
  if (!make_room(bytes, reusable)) {
    ++counts_.refused;
    const MutexUnlock unlock(mutex_);
    reusable.clear();
    return nullptr;
  }
  const FileRef file(new File(key, content, opened ? kPieceBytes : bytes));
  entries_.emplace(key, Entry{.file = file,
                              .once = content.once && opened,
                              .used = Clock::now(),
                              .again = content.again});
  bytes_ += bytes;
  ++counts_.misses;
  be_given_back();
  begun = std::move(reusable);
  return file;
}

void GatherCache::gather(const FileRef& file, Files reusable) {
  auto begun = caught([&]() -> Result<> {
    begin_to_gather(file, std::move(reusable));
    return ok();
  });
  if (!begun) fail(*file, begun.error());
}

void GatherCache::begin_to_gather(const FileRef& file, Files reusable) {
  auto start = [this, file, reusable = std::make_shared<Files>(std::move(reusable))] {
    if (ending_ || !begin(*file, *reusable)) return;
    const size_t helpers = std::min<size_t>(threads_, file->pieces_.size()) - 1;
    try {
      for (size_t i = 0; i < helpers; ++i) gathering_.run([this, file] { work(*file); });
    } catch (const std::exception&) {  // no thread: those that are there do it all
    }
    work(*file);
  };
  if (file->bytes_ > kTakesLongBytes) {
    try {
      return gathering_.run(start);
    } catch (const std::exception&) {
    }
  }
  start();
}

void GatherCache::gather_alone(const FileRef& file, Files reusable) {
  if (!begin(*file, reusable)) return;
  auto make = [&](size_t i) -> Result<> {
    if (make_piece(*file, i)) return ok();
    return Error(Code::kCancelled, "another piece cannot be had");
  };
  // To start threads costs less than a piece.
  auto made = caught([&]() -> Result<> {
    const size_t pieces = file->pieces_.size();
    ThreadTeam own(static_cast<unsigned>(std::min<size_t>(threads_, pieces)));
    return own.parallel_for(pieces, make);
  });
  if (!made) fail(*file, made.error());
}

void GatherCache::gather_ahead(const Wanted& wanted) {
  // Whatever is wrong with it, the open will say. On this thread alone: readers need the others.
  auto made = caught([&]() -> Result<> {
    PTC_TRY(const Content content, wanted.make());
    std::optional<Files> begun;
    const FileRef file = find_or_begin(wanted.key, content, false, begun);
    if (file != nullptr && begin(*file, *begun)) make_piece(*file, 0);
    return ok();
  });
  if (!made) spdlog::debug("not gathered: {}", made.error().message());
}

bool GatherCache::begin(File& file, Files& reusable) {
  auto memory = caught([&] { return this->memory(file.bytes_, reusable); });
  if (!memory) {
    fail(file, memory.error());
    return false;
  }
  file.memory_ = std::move(memory).value();
  file.begun_.store(true, std::memory_order_release);
  return true;
}

void GatherCache::work(File& file) {
  while (!ending_ && !file.failed_) {
    const size_t i = file.next_.fetch_add(1, std::memory_order_relaxed);
    if (i >= file.pieces_.size()) return;
    make_piece(file, i);
  }
}

/// True: it is made. Who makes the last one has a whole file.
bool GatherCache::make_piece(File& file, size_t i) {
  auto was = File::Piece::kNone;
  if (!file.pieces_[i].compare_exchange_strong(was, File::Piece::kBeingMade,
                                               std::memory_order_acquire))
    return was == File::Piece::kMade;
  if (auto made = caught([&] { return file.fill_(i * file.piece_bytes_, file.piece(i)); }); !made) {
    fail(file, made.error());
    return false;
  }
  file.pieces_[i].store(File::Piece::kMade, std::memory_order_release);
  if (file.left_.fetch_sub(1, std::memory_order_acq_rel) > 1) return true;
  file.fill_ = nullptr;  // what it holds is needed no more
  MutexLock lock(mutex_);
  counts_.gathered_bytes += file.bytes_;
  if (const auto entry = entries_.find(file.key_);
      entry != entries_.end() && entry->second.file.get() == &file)
    entry->second.used = Clock::now();
  gathered_.notify_all();
  return true;
}

void GatherCache::fail(File& file, const Error& error) {
  spdlog::debug("not gathered: {}", error.message());
  FileRef gone;  // after the mutex
  MutexLock lock(mutex_);
  file.failed_ = true;
  const auto entry = entries_.find(file.key_);
  if (entry != entries_.end() && entry->second.file.get() == &file) {
    bytes_ -= file.bytes_;
    gone = std::move(entry->second.file);
    entries_.erase(entry);
  }
  gathered_.notify_all();
}

void GatherCache::wait_for(const File& file, Clock::time_point until, const Leaves& leaves) {
  auto ended = [&] { return file.is_whole() || file.failed_; };
  while (!ended() && Clock::now() < until && !(leaves && leaves())) {
    MutexLock lock(mutex_);
    gathered_.wait_for(mutex_, kLooksUpEvery, ended);
  }
}

Result<> GatherCache::refresh(const std::string& prefix) {
  std::vector<std::pair<FileRef, std::function<Result<Fill>()>>> files;
  {
    MutexLock lock(mutex_);
    // What is being gathered now may hold what was there before; what is begun from now on, not.
    std::vector<FileRef> under_way;
    for (const auto& [key, entry] : entries_) {
      if (!key.starts_with(prefix)) continue;
      if (!entry.file->is_whole()) under_way.push_back(entry.file);
      if (entry.again) files.emplace_back(entry.file, entry.again);
    }
    gathered_.wait(mutex_, [&] {
      return ending_ || std::all_of(under_way.begin(), under_way.end(), [](const FileRef& file) {
               return file->is_whole() || file->failed_;
             });
    });
    if (ending_) return ok();  // nobody reads any more
  }
  Result<> result = ok();
  std::vector<std::byte> buffer(kPieceBytes);
  auto mend = [&](ScratchFile& file, const std::function<Result<Fill>()>& again) -> Result<> {
    PTC_TRY(auto fill, again());
    if (!fill) return ok();
    for (uint64_t offset = 0; offset < file.bytes(); offset += kPieceBytes) {
      const std::span<std::byte> held =
          file.memory().subspan(offset, std::min(kPieceBytes, file.bytes() - offset));
      PTC_TRY(fill(offset, std::span(buffer).first(held.size())));
      if (std::memcmp(held.data(), buffer.data(), held.size()) == 0) continue;
      std::memcpy(held.data(), buffer.data(), held.size());
    }
    return ok();
  };
  for (const auto& [file, again] : files) {
    if (file->failed_) continue;
    Result<> mended = mend(*file->memory_, again);
    if (mended.has_error()) result = std::move(mended);
  }
  return result;
}

bool GatherCache::is_used(const FileRef& file) {
  // The count itself is read in no order with what others did who have let go; a copy is made so.
  const FileRef own = file;
  return own.use_count() > 2;
}

bool GatherCache::make_room(uint64_t bytes, Files& out) {
  using Position = std::unordered_map<std::string, Entry>::iterator;
  std::vector<Position> idle;
  uint64_t idle_bytes = 0;
  for (auto it = entries_.begin(); it != entries_.end(); ++it) {
    if (!it->second.file->is_whole() || is_used(it->second.file)) continue;
    idle.push_back(it);
    idle_bytes += it->second.file->bytes_;
  }
  if (bytes_ - idle_bytes + bytes > limit_bytes_) return false;
  std::sort(idle.begin(), idle.end(),
            [](const Position& a, const Position& b) { return a->second.used < b->second.used; });
  const Clock::time_point now = Clock::now();
  for (Position it : idle) {
    bool old = out.empty() && (it->second.once || now - it->second.used > kReuseAfter);
    if (bytes_ + bytes <= limit_bytes_ && !old) break;
    File& file = *it->second.file;
    if (!file.memory_->unshared()) continue;  // mapped: it would take its memory all the same
    bytes_ -= file.bytes_;
    out.push_back(std::move(file.memory_));
    entries_.erase(it);
    ++counts_.evicted_for_room;
  }
  return bytes_ + bytes <= limit_bytes_;
}

Result<std::unique_ptr<ScratchFile>> GatherCache::memory(uint64_t bytes, Files& reusable) {
  // The largest first: what it has too much is given back at once, what it lacks is fresh.
  std::sort(reusable.begin(), reusable.end(),
            [](const auto& a, const auto& b) { return a->bytes() > b->bytes(); });
  for (auto& file : reusable) {
    if (!file->unshared()) continue;
    std::unique_ptr<ScratchFile> again = std::move(file);
    reusable.clear();
    PTC_TRY(again->resize(bytes));
    return again;
  }
  reusable.clear();
  return space_->create(bytes);
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
    gather_ahead(wanted);
    lock.lock();
    ahead_of_.erase(wanted.awaited);
  }
  --working_ahead_;
}

void GatherCache::give_back_idle() {
  UniqueLock lock(mutex_);
  while (!ending_ && !entries_.empty()) {
    ended_.wait_for(mutex_, kLookEvery, [this] { return ending_.load(); });
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
    const bool wanted = !entry.file->is_whole() || is_used(entry.file) ||
                        now - entry.used < unused_for || !entry.file->memory_->unshared();
    if (wanted) {
      ++it;
      continue;
    }
    bytes_ -= entry.file->bytes_;
    idle.push_back(std::move(entry.file->memory_));
    it = entries_.erase(it);
    ++counts_.evicted_idle;
  }
  const MutexUnlock unlock(mutex_);
  idle.clear();  // gigabytes may go: not with the lock
}

}  // namespace ptc
