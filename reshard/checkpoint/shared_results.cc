#include "reshard/checkpoint/shared_results.h"

#include <span>

#include "store/base/mutex.h"
#include "store/tensor/checksum.h"

namespace ptc {

namespace {

constexpr size_t kLong = 1024;

std::string hex_of(std::string_view text) {
  return checksum_of_run(std::as_bytes(std::span(text)), 0).to_hex();
}

}  // namespace

ResultKey& ResultKey::add(std::string_view text) {
  all_ += fmt::format("{}:", text.size());
  text.size() > kLong ? all_ += hex_of(text) : all_ += text;
  return *this;
}

ResultKey& ResultKey::add(uint64_t number) {
  all_ += fmt::format("{};", number);
  return *this;
}

std::string ResultKey::digest() const { return fmt::format("{}-{}", hex_of(all_), all_.size()); }

std::shared_ptr<const void> SharedResults::find(const std::string& digest) const {
  SharedLock lock(mutex_);
  const auto known = results_.find(digest);
  return known != results_.end() ? known->second.lock() : nullptr;
}

std::shared_ptr<const void> SharedResults::add(const std::string& digest,
                                               std::shared_ptr<const void> made) {
  std::shared_ptr<const void> oldest;  // goes without the lock
  ExclusiveLock lock(mutex_);
  std::weak_ptr<const void>& slot = results_[digest];
  if (std::shared_ptr<const void> other = slot.lock()) return other;
  slot = made;
  if (kept_ > 0) {
    last_.push_back(made);
    if (last_.size() > kept_) {
      oldest = std::move(last_.front());
      last_.pop_front();
    }
  }
  if (results_.size() >= clean_at_) {
    std::erase_if(results_, [](const auto& result) { return result.second.expired(); });
    clean_at_ = 2 * results_.size() + 64;
  }
  return made;
}

}  // namespace ptc
