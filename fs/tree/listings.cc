#include "fs/tree/listings.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "store/base/mutex.h"

namespace ptc {
namespace {

constexpr uint64_t kHashed = uint64_t{1} << 40;  // from here on; below are the given places
constexpr uint64_t kHashBits = (uint64_t{1} << 60) - 1;

FsResult<Listings::Ref> list(Node& directory) {
  PTC_TRY(auto entries, directory.list());
  for (DirEntry& entry : entries) {
    if (entry.place == 0) entry.place = kHashed + (inode_of(entry.name) & kHashBits);
  }
  auto earlier = [](const DirEntry& a, const DirEntry& b) {
    return std::tie(a.place, a.name) < std::tie(b.place, b.name);
  };
  if (!std::is_sorted(entries.begin(), entries.end(), earlier)) {
    std::sort(entries.begin(), entries.end(), earlier);
  }
  for (size_t i = 1; i < entries.size(); ++i) {  // names of one hash
    entries[i].place = std::max(entries[i].place, entries[i - 1].place + 1);
  }
  return std::make_shared<const Listing>(std::move(entries));
}

}  // namespace

FsResult<Listings::Ref> Listings::fresh(Node& directory) {
  PTC_TRY(auto listing, list(directory));
  drop(directory);
  keep(directory, listing);
  return listing;
}

FsResult<Listings::Ref> Listings::kept(Node& directory) {
  {
    MutexLock lock(mutex_);
    for (auto it = kept_.begin(); it != kept_.end(); ++it) {
      if (it->key != directory.key()) continue;
      it->used = std::chrono::steady_clock::now();
      kept_.splice(kept_.begin(), kept_, it);
      return it->listing;
    }
  }
  return fresh(directory);
}

void Listings::drop(const Node& directory) {
  MutexLock lock(mutex_);
  auto found = std::find_if(kept_.begin(), kept_.end(),
                            [&](const Kept& one) { return one.key == directory.key(); });
  if (found == kept_.end()) return;
  entries_ -= found->listing->size();
  kept_.erase(found);
}

void Listings::forget_old() {
  constexpr auto kFor = std::chrono::seconds(30);
  std::list<Kept> old;  // goes without the lock
  MutexLock lock(mutex_);
  const auto before = std::chrono::steady_clock::now() - kFor;
  while (!kept_.empty() && kept_.back().used < before) {
    entries_ -= kept_.back().listing->size();
    old.splice(old.end(), kept_, std::prev(kept_.end()));
  }
}

void Listings::keep(const Node& directory, Ref listing) {
  MutexLock lock(mutex_);
  entries_ += listing->size();
  kept_.push_front({.key = directory.key(), .listing = std::move(listing)});
  while (kept_.size() > 1 && (kept_.size() > kMaxListings || entries_ > kMaxEntries)) {
    entries_ -= kept_.back().listing->size();
    kept_.pop_back();
  }
}

}  // namespace ptc
