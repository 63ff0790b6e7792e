#include "fs/tree/file_set_source.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "store/base/mutex.h"

namespace ptc {

void RecentSets::note(std::weak_ptr<FileSetSource> source) {
  std::shared_ptr<FileSetSource> oldest;
  {
    MutexLock lock(mutex_);
    sources_.push_back(std::move(source));
    if (sources_.size() <= kMost) return;
    std::erase_if(sources_, [](const auto& one) { return one.expired(); });
    if (sources_.size() <= kMost) return;
    auto used = [](const std::weak_ptr<FileSetSource>& one) {
      const auto alive = one.lock();
      return alive != nullptr ? alive->used() : FileSetSource::Clock::time_point::min();
    };
    const auto found =
        std::min_element(sources_.begin(), sources_.end(),
                         [&](const auto& a, const auto& b) { return used(a) < used(b); });
    oldest = found->lock();
    sources_.erase(found);
  }
  if (oldest != nullptr) oldest->forget();
}

void RecentSets::forget_old() {
  const auto before = FileSetSource::Clock::now() - kFor;
  std::vector<std::shared_ptr<FileSetSource>> old;
  {
    MutexLock lock(mutex_);
    std::erase_if(sources_, [&](const std::weak_ptr<FileSetSource>& one) {
      auto source = one.lock();
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
  recent_.note(weak_from_this());
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
