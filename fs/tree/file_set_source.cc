#include "fs/tree/file_set_source.h"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "store/base/mutex.h"

namespace ptc {

bool RecentSets::are_too_many() const {
  const uint64_t bytes =
      std::accumulate(held_.begin(), held_.end(), uint64_t{0},
                      [](uint64_t sum, const Held& one) { return sum + one.memory_bytes; });
  return held_.size() > kMost || (held_.size() > kAlways && bytes > kMostBytes);
}

void RecentSets::note(std::weak_ptr<FileSetSource> source, uint64_t memory_bytes) {
  std::vector<std::shared_ptr<FileSetSource>> oldest;
  {
    MutexLock lock(mutex_);
    held_.push_back({std::move(source), memory_bytes});
    if (!are_too_many()) return;
    std::erase_if(held_, [](const Held& one) { return one.source.expired(); });
    auto used = [](const Held& one) {
      const auto alive = one.source.lock();
      return alive != nullptr ? alive->used() : FileSetSource::Clock::time_point::min();
    };
    while (are_too_many()) {
      const auto found =
          std::min_element(held_.begin(), held_.end(),
                           [&](const Held& a, const Held& b) { return used(a) < used(b); });
      if (auto alive = found->source.lock()) oldest.push_back(std::move(alive));
      held_.erase(found);
    }
  }
  for (const auto& one : oldest) one->forget();
}

void RecentSets::forget_old() {
  const auto before = FileSetSource::Clock::now() - kFor;
  std::vector<std::shared_ptr<FileSetSource>> old;
  {
    MutexLock lock(mutex_);
    std::erase_if(held_, [&](const Held& one) {
      auto source = one.source.lock();
      if (source == nullptr) return true;
      if (source->used() >= before) return false;
      old.push_back(std::move(source));
      return true;
    });
  }
  for (const auto& source : old) source->forget();
}

Result<FileSetRef> FileSetSource::get() {
  {
    MutexLock lock(mutex_);
    used_ = Clock::now();
    if (set_ != nullptr) return set_;
  }
  PTC_TRY(auto set, make_());
  {
    MutexLock lock(mutex_);
    if (set_ != nullptr) return set_;  // another thread has made it, too
    set_ = set;
  }
  recent_.note(weak_from_this(), set->memory_bytes());
  return set;
}

FileSetSource::Clock::time_point FileSetSource::used() const {
  MutexLock lock(mutex_);
  return used_;
}

void FileSetSource::forget() {
  FileSetRef last;  // goes without the lock
  MutexLock lock(mutex_);
  last = std::exchange(set_, nullptr);
}

}  // namespace ptc
