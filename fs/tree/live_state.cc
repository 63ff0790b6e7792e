#include "fs/tree/live_state.h"

#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "store/base/mutex.h"

namespace ptc {
namespace {

constexpr char kMagic[8] = {'p', 't', 'c', 'f', 's', 'L', 'i', 'v'};
constexpr size_t kLongName = 256;
constexpr size_t kNodesAtOnce = 64;  // that a part takes; beside each other
constexpr uint64_t kResent = uint64_t{1} << 63;

constexpr size_t up_to_page(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

/// Where each table begins. All of them are sparse: what was never used takes no memory.
struct Offsets {
  size_t serving, suspects, requests, nodes, long_names, files, drafts, whiteouts, end;
};

/// A free place, or the next that was never taken; 0: there is none.
LiveState::Place take(std::vector<LiveState::Place>& free, std::atomic<uint64_t>& used,
                      uint64_t most) {
  if (free.empty()) {
    const uint64_t next = used.load();
    if (next >= most) return 0;
    used.store(next + 1);
    return static_cast<LiveState::Place>(next + 1);
  }
  const LiveState::Place place = free.back();
  free.pop_back();
  return place;
}

}  // namespace

LiveState::~LiveState() {
  if (base_ != nullptr) ::munmap(base_, bytes_);
}

Result<> LiveState::map(const Limits& limits) {
  Offsets at = {};
  at.serving = up_to_page(sizeof(Header));
  at.suspects = at.serving + up_to_page(kThreads * sizeof(uint64_t));
  at.requests = at.suspects + up_to_page(kSuspects * sizeof(Suspect));
  at.nodes = at.requests + up_to_page(kRequests * sizeof(KeptRequest));
  at.long_names = at.nodes + up_to_page(limits.nodes * sizeof(KeptNode));
  at.files = at.long_names + up_to_page(limits.long_names * kLongName);
  at.drafts = at.files + up_to_page(limits.files * sizeof(KeptFile));
  at.whiteouts = at.drafts + kDrafts * sizeof(KeptDraft);
  at.end = at.whiteouts + kWhiteouts * sizeof(KeptWhiteout);
  struct stat stat = {};
  if (::fstat(fd_, &stat) != 0) return errno_error(errno, "the state of the mount");
  if (stat.st_size < static_cast<off_t>(at.end) &&
      ::ftruncate(fd_, static_cast<off_t>(at.end)) != 0)
    return errno_error(errno, "the state of the mount");
  void* mapped =
      ::mmap(nullptr, at.end, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd_, 0);
  if (mapped == MAP_FAILED) return errno_error(errno, "mapping the state of the mount");
  ::madvise(mapped, at.end, MADV_DONTDUMP);
  base_ = static_cast<std::byte*>(mapped);
  bytes_ = at.end;
  header_ = reinterpret_cast<Header*>(base_);
  serving_ = reinterpret_cast<std::atomic<uint64_t>*>(base_ + at.serving);
  suspects_ = reinterpret_cast<Suspect*>(base_ + at.suspects);
  requests_ = reinterpret_cast<KeptRequest*>(base_ + at.requests);
  nodes_ = reinterpret_cast<KeptNode*>(base_ + at.nodes);
  long_names_ = reinterpret_cast<char*>(base_ + at.long_names);
  files_ = reinterpret_cast<KeptFile*>(base_ + at.files);
  drafts_ = reinterpret_cast<KeptDraft*>(base_ + at.drafts);
  whiteouts_ = reinterpret_cast<KeptWhiteout*>(base_ + at.whiteouts);
  return ok();
}

Result<std::unique_ptr<LiveState>> LiveState::open(int fd) {
  std::unique_ptr<LiveState> state(new LiveState(fd));
  struct stat stat = {};
  if (::fstat(fd, &stat) != 0) return errno_error(errno, "the state of the mount");
  Limits limits;
  struct {
    char magic[8];
    uint32_t version, parts;
    Limits limits;
  } begin;
  static_assert(offsetof(Header, limits) == offsetof(decltype(begin), limits));
  const bool is_new = stat.st_size == 0;
  if (!is_new) {
    if (::pread(fd, &begin, sizeof begin, 0) != sizeof begin ||
        std::memcmp(begin.magic, kMagic, sizeof kMagic) != 0 || begin.version != kVersion ||
        begin.parts != kParts)
      return invalid_argument(
          "what serves the mount now is of a version that this one cannot go on for; unmount it, "
          "and mount again");
    limits = begin.limits;
  }
  PTC_TRY(state->map(limits));
  Header& header = *state->header_;
  if (is_new) {
    header.version = kVersion;
    header.parts = kParts;
    header.limits = limits;
    if (::getrandom(&header.seed, sizeof header.seed, 0) != sizeof header.seed)
      return errno_error(errno, "random numbers");
    std::memcpy(header.magic, kMagic, sizeof kMagic);
  }
  state->goes_on_ = header.mounted.load() != 0;
  header.runs.fetch_add(1);
  state->find_free();
  return state;
}

void LiveState::find_free() {
  const uint64_t nodes = header_->nodes_used.load(), names = header_->long_names_used.load(),
                 files = header_->files_used.load();
  std::vector<bool> named(names);
  for (uint64_t i = 0; i < nodes; ++i) {
    KeptNode& node = nodes_[i];
    if (node.id.load() == 0) node.long_name = 0;  // of one that was cut off
    if (node.id.load() == 0) free_[i / kNodesAtOnce % kParts].nodes.push_back(i + 1);
    else if (node.long_name != 0 && node.long_name <= names) named[node.long_name - 1] = true;
  }
  for (uint64_t i = 0; i < names; ++i)
    if (!named[i]) free_[i % kParts].long_names.push_back(i + 1);
  MutexLock lock(mutex_);
  for (uint64_t i = files; i-- > 0;)
    if (files_[i].number.load() == 0) free_files_.push_back(i + 1);
  for (size_t i = kRequests; i-- > 0;) {
    if (const uint64_t unique = requests_[i].unique.load(); unique != 0)
      begun_.emplace_back(unique, i + 1);
    else free_requests_.push_back(i + 1);
  }
  std::sort(begun_.begin(), begun_.end());
  for (size_t i = kThreads; i-- > 0;) free_threads_.push_back(i);
  for (uint64_t i = std::min<uint64_t>(header_->whiteouts_used.load(), kWhiteouts); i-- > 0;) {
    const uint64_t owner = whiteouts_[i].owner.load();
    if (owner == 0) free_whiteouts_.push_back(i + 1);
    else left_whiteouts_[owner].push_back(i + 1);
  }
  std::vector<bool> has_file(kDrafts);
  for (uint64_t i = 0; i < files; ++i)
    if (files_[i].number.load() != 0 && files_[i].draft - 1 < kDrafts)
      has_file[files_[i].draft - 1] = true;
  for (size_t i = kDrafts; i-- > 0;)
    if (!has_file[i]) {
      if (drafts_[i].taken.load() != 0) empty(drafts_[i]);
      free_drafts_.push_back(i + 1);
    }
}

uint64_t LiveState::identity(std::string_view key, uint64_t stamp) const {
  uint64_t hash = 0xcbf29ce484222325 ^ header_->seed;  // FNV-1a
  for (const unsigned char c : key) hash = (hash ^ c) * 0x100000001b3;
  hash ^= hash >> 32;
  hash = (hash ^ stamp) * 0xd6e8feb86659fd93;
  hash ^= hash >> 32;
  return hash == 0 ? 1 : hash;
}

LiveState::Place LiveState::take_node(size_t part) {
  std::vector<Place>& free = free_[part].nodes;
  if (free.empty()) {
    const uint64_t first = header_->nodes_used.fetch_add(kNodesAtOnce);
    if (first + kNodesAtOnce > header_->limits.nodes) {
      header_->nodes_used.fetch_sub(kNodesAtOnce);
      return 0;
    }
    for (uint64_t i = kNodesAtOnce; i-- > 0;) free.push_back(static_cast<Place>(first + i + 1));
  }
  const Place place = free.back();
  free.pop_back();
  return place;
}

void LiveState::give_back_node(size_t part, Place place) {
  KeptNode& kept = node(place);
  kept.id.store(0, std::memory_order_release);
  if (kept.long_name != 0) free_[part].long_names.push_back(std::exchange(kept.long_name, 0));
  free_[part].nodes.push_back(place);
}

void LiveState::set_name(size_t part, KeptNode& node, std::string_view name) {
  name = name.substr(0, 255);
  const auto bytes = static_cast<uint8_t>(name.size());
  Place place = node.long_name;
  if (name.size() > sizeof node.name) {
    std::vector<Place>& free = free_[part].long_names;
    if (place == 0 && free.empty()) {
      const uint64_t next = header_->long_names_used.fetch_add(1);
      if (next < header_->limits.long_names) free.push_back(static_cast<Place>(next + 1));
      else header_->long_names_used.fetch_sub(1);
    }
    if (place == 0 && !free.empty()) {
      place = free.back();
      free.pop_back();
    }
    if (place != 0) std::memcpy(long_names_ + (place - 1) * kLongName, name.data(), name.size());
    node.name_bytes = place == 0 ? 0 : bytes;  // without a name it is found no more
    node.long_name = place;
    return;
  }
  std::memcpy(node.name, name.data(), name.size());
  node.long_name = 0;
  node.name_bytes = bytes;
  if (place != 0) free_[part].long_names.push_back(place);
}

std::string_view LiveState::name_of(const KeptNode& node) const {
  if (node.long_name == 0) return {node.name, std::min<size_t>(node.name_bytes, sizeof node.name)};
  if (node.long_name > header_->limits.long_names) return {};
  return {long_names_ + (node.long_name - 1) * kLongName, node.name_bytes};
}

LiveState::Place LiveState::take_file() {
  MutexLock lock(mutex_);
  return take(free_files_, header_->files_used, header_->limits.files);
}

void LiveState::give_back_file(Place place) {
  file(place).number.store(0, std::memory_order_release);
  MutexLock lock(mutex_);
  free_files_.push_back(place);
}

void LiveState::each_node(const std::function<void(Place, KeptNode&)>& visit) {
  const uint64_t used = std::min(header_->nodes_used.load(), header_->limits.nodes);
  for (uint64_t i = 0; i < used; ++i)
    if (nodes_[i].id.load() != 0) visit(static_cast<Place>(i + 1), nodes_[i]);
}

void LiveState::each_file(const std::function<void(Place, KeptFile&)>& visit) {
  const uint64_t used = std::min(header_->files_used.load(), header_->limits.files);
  for (uint64_t i = 0; i < used; ++i)
    if (files_[i].number.load() != 0) visit(static_cast<Place>(i + 1), files_[i]);
}

void LiveState::empty(KeptDraft& draft) {
  draft.taken = 0;
  ::madvise(&draft, sizeof draft, MADV_REMOVE);
}

LiveState::Place LiveState::take_draft() {
  MutexLock lock(mutex_);
  if (free_drafts_.empty()) return 0;
  const Place place = free_drafts_.back();
  free_drafts_.pop_back();
  draft(place).taken = 1;
  return place;
}

void LiveState::give_back_draft(Place place) {
  empty(draft(place));
  MutexLock lock(mutex_);
  free_drafts_.push_back(place);
}

LiveState::Place LiveState::take_whiteout() {
  MutexLock lock(mutex_);
  return take(free_whiteouts_, header_->whiteouts_used, kWhiteouts);
}

void LiveState::give_back_whiteout(Place place) {
  whiteout(place).owner.store(0, std::memory_order_release);
  MutexLock lock(mutex_);
  free_whiteouts_.push_back(place);
}

std::vector<LiveState::Place> LiveState::left_whiteouts(uint64_t owner) {
  MutexLock lock(mutex_);
  const auto left = left_whiteouts_.find(owner);
  if (left == left_whiteouts_.end()) return {};
  std::vector<Place> places = std::move(left->second);
  left_whiteouts_.erase(left);
  return places;
}

LiveState::Place LiveState::begin_request(uint64_t unique, uint64_t identity) {
  Place place = 0;
  {
    MutexLock lock(mutex_);
    if (free_requests_.empty() && !begun_.empty()) {  // of the oldest nobody asks any more
      const auto oldest = std::min_element(begun_.begin(), begun_.end(), [&](auto& a, auto& b) {
        return requests_[a.second - 1].run < requests_[b.second - 1].run;
      });
      free_requests_.push_back(oldest->second);
      begun_.erase(oldest);
    }
    if (free_requests_.empty()) return 0;
    place = free_requests_.back();
    free_requests_.pop_back();
  }
  KeptRequest& kept = request(place);
  kept.identity = identity;
  kept.run = header_->runs.load();
  kept.unique.store(unique & ~kResent, std::memory_order_release);
  return place;
}

void LiveState::end_request(Place place) {
  if (place == 0) return;
  request(place).unique.store(0, std::memory_order_release);
  MutexLock lock(mutex_);
  free_requests_.push_back(place);
}

LiveState::Place LiveState::begun_request(uint64_t unique) {
  if ((unique & kResent) == 0) return 0;
  MutexLock lock(mutex_);
  const auto found = std::lower_bound(begun_.begin(), begun_.end(),
                                      std::pair<uint64_t, Place>{unique & ~kResent, 0});
  if (found == begun_.end() || found->first != (unique & ~kResent)) return 0;
  const Place place = found->second;
  begun_.erase(found);
  return place;
}

LiveState::Serving::Serving(LiveState* state) : state_(state) {
  if (state == nullptr) return;
  MutexLock lock(state->mutex_);
  if (state->free_threads_.empty()) return;
  place_ = state->free_threads_.back();
  state->free_threads_.pop_back();
  slot_ = &state->serving_[place_];
}

LiveState::Serving::~Serving() {
  if (slot_ == nullptr) return;
  end();
  MutexLock lock(state_->mutex_);
  state_->free_threads_.push_back(place_);
}

void LiveState::note_end(End how) {
  for (size_t i = 0; i < kThreads; ++i) {
    const uint64_t unique = serving_[i].exchange(0) & ~kResent;
    if (unique == 0 || how == End::kMadeRoom) continue;
    Suspect* const end = suspects_ + kSuspects;
    Suspect* one = std::find_if(suspects_, end, [&](auto& s) { return s.unique == unique; });
    if (one == end) {  // in the place of the one that was asked for first
      one = std::min_element(suspects_, end, [](auto& a, auto& b) { return a.unique < b.unique; });
      *one = {unique, 0, 0};
    }
    ++(how == End::kKilled ? one->kills : one->crashes);
  }
}

bool LiveState::is_suspect(uint64_t unique) const {
  if ((unique & kResent) == 0) return false;
  return std::any_of(suspects_, suspects_ + kSuspects, [&](const Suspect& one) {
    return one.unique == (unique & ~kResent) && one.crashes > 0;
  });
}

bool LiveState::is_poison(uint64_t unique) const {
  // A kill is somebody's, as a rule; what takes all memory ends by one, too.
  constexpr uint32_t kMostCrashes = 2, kMostKills = 20;
  if ((unique & kResent) == 0) return false;
  const Suspect* const begin = suspects_;
  return std::any_of(begin, begin + kSuspects, [&](const Suspect& one) {
    return one.unique == (unique & ~kResent) &&
           (one.crashes >= kMostCrashes || one.crashes + one.kills >= kMostKills);
  });
}

}  // namespace ptc
