#include "store/image/memory_reserve.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <fstream>
#include <optional>
#include <string>
#include <utility>

#include "store/base/file.h"
#include "store/base/mutex.h"

namespace ptc {
namespace {

constexpr uint64_t kHugePage = 2 << 20;
constexpr uint64_t kBlock = 16 * kHugePage;
/// Given to writers before they want it, and how often it is looked how much they took: 25 GB/s.
/// At first, when they may take theirs by fallocate(2) or want little, it is less.
constexpr uint64_t kAhead = 8 * kBlock, kAheadAtFirst = 2 * kBlock, kWritten = 1 << 20;
/// Held beyond what is wanted, if that is much: what is given before it is wanted may be of no use,
/// on another processor or at the end.
constexpr uint64_t kSpare = kAheadAtFirst + kBlock;
constexpr auto kLook = std::chrono::milliseconds(10), kLookAtFirst = std::chrono::milliseconds(2);
constexpr auto kQuiet = std::chrono::seconds(1);
constexpr auto kKeep = std::chrono::seconds(10);  // the thread, with nothing to do

std::optional<uint64_t> number_in(const std::string& path) {
  std::ifstream file(path);
  uint64_t number = 0;
  if (file >> number) return number;
  return std::nullopt;
}

/// A line "MemFree:  1234 kB", in bytes.
uint64_t of_meminfo(const std::string& meminfo, std::string_view key) {
  const size_t at = meminfo.find(key);
  if (at == std::string::npos) return 0;
  const char* text = meminfo.data() + at + key.size();
  const char* const end = meminfo.data() + meminfo.size();
  while (text != end && *text == ' ') ++text;
  uint64_t kib = 0;
  std::from_chars(text, end, kib);
  return kib << 10;
}

uint64_t beyond_an_eighth(uint64_t free, uint64_t all) {
  return free > all / 8 ? free - all / 8 : 0;
}

/// Where control groups are those of version 2; elsewhere they set no limit here.
uint64_t left_in_groups() {
  uint64_t left = UINT64_MAX;
  std::ifstream file("/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("0::/")) continue;
    std::string group = line.substr(3);
    for (;;) {
      const std::string path = "/sys/fs/cgroup" + (group == "/" ? "" : group);
      const auto most = number_in(path + "/memory.max");  // "max": no number
      const auto used = number_in(path + "/memory.current");
      if (most && used)
        left = std::min(left, beyond_an_eighth(*most - std::min(*most, *used), *most));
      if (group == "/") break;
      group = group.substr(0, std::max<size_t>(group.rfind('/'), 1));
    }
  }
  return left;
}

/// With memory behind all of it; null: there is none.
void* take_block(bool for_good) {
  void* mapping = ::mmap(nullptr, kBlock + kHugePage, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) return nullptr;
  auto* const begin = static_cast<std::byte*>(mapping);
  const uint64_t before = (kHugePage - reinterpret_cast<uintptr_t>(begin) % kHugePage) % kHugePage;
  std::byte* const block = begin + before;
  if (before > 0) ::munmap(begin, before);
  if (before < kHugePage) ::munmap(block + kBlock, kHugePage - before);
  // Hints: where there are no huge pages, or a kernel does not know one of these, it is slower.
  ::madvise(block, kBlock, MADV_HUGEPAGE);
  ::madvise(block, kBlock, MADV_DONTDUMP);
  ::madvise(block, kBlock, MADV_DONTFORK);
  if (::madvise(block, kBlock, MADV_POPULATE_WRITE) != 0) {
    if (errno != EINVAL) {
      ::munmap(block, kBlock);
      return nullptr;
    }
    for (uint64_t at = 0; at < kBlock; at += 4096) {
      volatile std::byte& page = block[at];
      page = std::byte{};
    }
  }
  if (!for_good) ::madvise(block, kBlock, MADV_FREE);
  return block;
}

}  // namespace

bool host_takes_free_memory() {
  // The order of the blocks that are reported; some huge number as long as nobody asks for reports.
  const auto order = number_in("/sys/module/page_reporting/parameters/page_reporting_order");
  return order && *order < 32;
}

uint64_t memory_to_spare() {
  auto meminfo = read_text_file(AT_FDCWD, "/proc/meminfo", 64 << 10);
  if (!meminfo) return 0;
  return std::min(beyond_an_eighth(of_meminfo(meminfo.value(), "MemFree:"),
                                   of_meminfo(meminfo.value(), "MemTotal:")),
                  left_in_groups());
}

MemoryReserve::MemoryReserve(MemoryReserveOptions options, std::function<uint64_t()> used)
    : options_(std::move(options)),
      used_(std::move(used)),
      wanted_(options_.for_good),
      last_use_(Clock::now()) {
  MutexLock lock(mutex_);
  if (options_.for_good > 0) begin_to_work();
}

MemoryReserve::~MemoryReserve() {
  thread_ = {};
  for (void* block : blocks_) ::munmap(block, kBlock);
}

void MemoryReserve::gone(uint64_t bytes) {
  if (bytes == 0) return;
  MutexLock lock(mutex_);
  wanted_ += bytes;
  if (wanted_ >= held() + kBlock) begin_to_work();
}

void MemoryReserve::begin_to_work() {
  if (!has_thread_) {
    try {  // the one before has ended
      thread_ = std::jthread([this](const std::stop_token& stop) { work(stop); });
    } catch (const std::exception&) {  // nothing is kept, for now
      return;
    }
  }
  has_thread_ = working_ = true;
  changed_.notify_all();
}

void MemoryReserve::give(uint64_t bytes) {
  if (held() == 0) return;
  MutexLock lock(mutex_);
  given_apart_ += bytes;
  give_with(bytes);
}

void MemoryReserve::give_with(uint64_t bytes) {
  last_use_ = Clock::now();
  wanted_ -= std::min(wanted_, bytes);
  const uint64_t given = std::min(given_too_much_, bytes);
  given_too_much_ -= given;
  const uint64_t needed = bytes - given;
  const size_t count =
      std::min<uint64_t>(blocks_.size(), needed / kBlock + (needed % kBlock != 0 ? 1 : 0));
  if (count == 0) return;
  given_too_much_ += count * kBlock - std::min(needed, count * kBlock);
  give_blocks(count);
}

void MemoryReserve::give_blocks(size_t count) {
  const std::vector<void*> blocks(blocks_.end() - static_cast<ptrdiff_t>(count), blocks_.end());
  blocks_.resize(blocks_.size() - count);
  held_ = blocks_.size() * kBlock;
  const MutexUnlock unlock(mutex_);
  for (void* block : blocks) ::munmap(block, kBlock);
}

void MemoryReserve::writing() {
  if (held() == 0) return;
  MutexLock lock(mutex_);
  writing_ = true;
  begin_to_work();
}

void MemoryReserve::settle() {
  MutexLock lock(mutex_);
  settled_.wait(mutex_, [this]() PTC_REQUIRES(mutex_) { return !working_; });
}

uint64_t MemoryReserve::spare_beside(uint64_t bytes) const {
  return bytes > kAhead && bytes > options_.for_good ? kSpare : 0;
}

uint64_t MemoryReserve::target() const {
  const uint64_t most = std::max(options_.for_good, options_.follows ? used_() : 0);
  const uint64_t bytes = std::min(wanted_, most);
  return (bytes + spare_beside(bytes)) / kBlock * kBlock;
}

void MemoryReserve::take() {
  const bool for_good = held() < options_.for_good;
  void* block = nullptr;
  {
    const MutexUnlock unlock(mutex_);
    if (options_.to_spare() >= kBlock) block = take_block(for_good);
  }
  if (block == nullptr) {
    wanted_ = std::min(wanted_, held() - spare_beside(held()));  // until more has gone
    return;
  }
  blocks_.push_back(block);
  held_ = blocks_.size() * kBlock;
  last_use_ = Clock::now();
}

void MemoryReserve::follow_writers(const std::stop_token& stop) {
  uint64_t seen = used_(), ahead = 0, most = kAheadAtFirst;
  given_apart_ = 0;
  auto grew = Clock::now();
  while (!stop.stop_requested() && held() > 0 && Clock::now() - grew < kQuiet) {
    if (ahead < most) {
      const uint64_t more = std::min(most - ahead, held());
      give_with(more);
      ahead += more;
    }
    changed_.wait_for(mutex_, stop, most < kAhead ? kLookAtFirst : kLook, [] { return false; });
    const uint64_t used = used_();
    if (used > seen) {
      grew = Clock::now();
      const uint64_t apart = std::min(given_apart_, used - seen), written = used - seen - apart;
      given_apart_ -= apart;
      ahead -= std::min(ahead, written);
      if (written >= kWritten) most = kAhead;
    }
    seen = used;
  }
  writing_ = false;
  wanted_ += ahead;  // nobody wanted it
}

void MemoryReserve::work(const std::stop_token& stop) {
  ::pthread_setname_np(::pthread_self(), "ptcfs-reserve");
  MutexLock lock(mutex_);
  while (!stop.stop_requested()) {
    if (writing_) {
      follow_writers(stop);
    } else if (held() > std::max(target(), options_.for_good)) {  // the store holds less by now
      give_blocks(1);
    } else if (held() < target()) {
      take();
    } else {
      wanted_ = std::min(wanted_, held() + kBlock);  // of what was left long ago nothing is left
      working_ = false;
      settled_.notify_all();
      const auto has_work = [this]() PTC_REQUIRES(mutex_) { return working_; };
      if (held() <= options_.for_good) {
        if (changed_.wait_for(mutex_, stop, kKeep, has_work)) continue;
        has_thread_ = false;
        return;
      } else if (!changed_.wait_until(mutex_, stop, last_use_ + options_.idle, has_work) &&
                 Clock::now() >= last_use_ + options_.idle) {
        wanted_ = options_.for_good;
      }
    }
  }
}

}  // namespace ptc
