#include "fs/kernel/waits.h"

#include <pthread.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <cerrno>
#include <vector>

#include "fs/kernel/fuse_request.h"
#include "store/base/mutex.h"

namespace ptc {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kLookEvery = std::chrono::milliseconds(500);
constexpr auto kLookForTheDying = std::chrono::milliseconds(50);
constexpr auto kAskedAgain = std::chrono::milliseconds(500);
constexpr auto kKeep = std::chrono::seconds(10);  // the thread that looks, with nothing to look at

}  // namespace

WaitingRequest::WaitingRequest(fuse_req* raw, Tree& tree, const Caller& caller, Op op,
                               uint64_t inode, const Awaited& awaited, Body body)
    : raw_(raw),
      tree_(tree),
      caller_(caller),
      op_(op),
      inode_(inode),
      awaited_(awaited),
      body_(std::move(body)) {
  in_flight_.emplace(tree.stats(), op, inode, static_cast<uint32_t>(caller.pid));
}

bool WaitingRequest::claim() {
  if (claimed_.exchange(true)) return false;
  // Waits for on_interrupt(), if that runs; it is not called any more.
  fuse_req_interrupt_func(raw_, nullptr, nullptr);
  return true;
}

void WaitingRequest::ended(bool failed) {
  if (failed) in_flight_->failed();
  in_flight_.reset();
}

/// Called with the request locked: it must not be replied to here.
void WaitingRequest::on_interrupt(fuse_req*, void* self) {
  if (self == nullptr) return;
  auto* request = static_cast<WaitingRequest*>(self);
  request->interrupted_ = true;
  request->waits_->interrupts_ = true;
  request->waits_->wake();
}

void WaitingRequest::serve() {
  if (claimed_.load()) return;
  Caller caller = caller_;
  caller.queued = Clock::now() - since_;
  FuseRequest request(raw_, tree_, caller, this);
  body_(request);
}

void WaitingRequest::fail(int error) {
  if (!claim()) return;
  const auto waited = std::chrono::duration_cast<std::chrono::seconds>(Clock::now() - since_);
  if (error == ETIMEDOUT && waited.count() > 0) {  // else it was said just now
    spdlog::warn("{} of process {} has waited {} s for {}: it fails with ETIMEDOUT", op_name(op_),
                 caller_.pid, waited.count(), awaited_.name);
  }
  fuse_reply_err(raw_, error);
  ended(true);
}

Waits::Waits(Options options) : options_(std::move(options)) {}

Waits::~Waits() = default;

Waits::Shard& Waits::shard_of(const std::string& name) {
  return shards_[std::hash<std::string>()(name) % shards_.size()];
}

void Waits::wake() {
  MutexLock lock(mutex_);
  wake_.notify_all();
}

bool Waits::watch() {
  if (watching_.exchange(true)) return true;
  MutexLock lock(mutex_);
  wake_.notify_all();
  if (has_watcher_) return true;
  try {  // the one before has ended
    watcher_ = std::jthread([this](std::stop_token stop) { look_after(std::move(stop)); });
  } catch (const std::system_error&) {
    return watching_ = false;
  }
  return has_watcher_ = true;
}

bool Waits::begin(const WaitingRef& request) {
  enum class To { kServe, kQueue, kRefuse, kGiveUp };
  request->waits_ = this;
  const Awaited& awaited = request->awaited_;
  Shard& shard = shard_of(awaited.name);
  auto place = [&] {
    MutexLock lock(shard.mutex);
    if (shard.has_given_up(*request)) return To::kGiveUp;
    Lane& lane = shard.lanes[awaited.name];
    const int most = lane.running == 0 ? kMostThreads : kManyThreads;
    const bool full = !awaited.ends_itself && held_up_.load(std::memory_order_relaxed) >= most;
    const bool serve = lane.running < awaited.at_once && !full;
    if (!serve && lane.queue.size() >= kMostQueued) return To::kRefuse;
    if (serve) ++lane.running;
    else lane.queue.push_back(request);
    if (lane.running == 0) starved_ = true;
    shard.watch(request);
    // From here on it can be claimed by others; with the lock, since these free what it is called
    // with.
    fuse_req_interrupt_func(request->raw_, &WaitingRequest::on_interrupt, request.get());
    return serve ? To::kServe : To::kQueue;
  };
  const To placed = place();
  if (placed == To::kGiveUp) request->fail(ETIMEDOUT);
  else if (placed == To::kRefuse) request->fail(EAGAIN);
  // After it can be found: the watcher may look just now for the last time.
  else if (!awaited.ends_itself && !watch()) request->fail(EAGAIN);
  return placed == To::kServe;
}

WaitingRef Waits::next(const WaitingRef& done) {
  const Awaited& awaited = done->awaited_;
  Shard& shard = shard_of(awaited.name);
  MutexLock lock(shard.mutex);
  shard.unwatch(*done);
  const auto found = shard.lanes.find(awaited.name);
  Lane& lane = found->second;
  while (!lane.queue.empty()) {
    WaitingRef next = std::move(lane.queue.front());
    lane.queue.pop_front();
    if (!next->claimed_.load()) return next;
  }
  if (--lane.running == 0) shard.lanes.erase(found);
  return nullptr;
}

WaitingRef Waits::starving() {
  if (!starved_.exchange(false)) return nullptr;
  for (Shard& shard : shards_) {
    MutexLock lock(shard.mutex);
    for (auto& [name, lane] : shard.lanes) {
      if (lane.queue.empty() || lane.running > 0) continue;
      starved_ = true;  // perhaps another, too
      WaitingRef next = std::move(lane.queue.front());
      lane.queue.pop_front();
      ++lane.running;
      return next;
    }
  }
  return nullptr;
}

void Waits::run(WaitingRef request) {
  if (!begin(request)) return;
  // Of one kind all: those that queue for the same, and those that starve.
  const bool ends_itself = request->awaited_.ends_itself;
  if (!ends_itself) held_up_.fetch_add(1);
  const bool others_receive = options_.counted(1);
  while (request != nullptr) {
    if (others_receive || ends_itself) request->serve();
    else request->fail(EAGAIN);
    WaitingRef following = next(request);
    if (following == nullptr && !ends_itself) following = starving();
    if (following != nullptr) options_.goes_on();
    request = std::move(following);
  }
  if (!ends_itself) held_up_.fetch_sub(1);
  options_.counted(-1);
}

void Waits::Shard::watch(const WaitingRef& request) {
  if (request->awaited_.ends_itself) return;
  request->place_ = watched.insert(watched.end(), request);
  request->watched_ = true;
}

void Waits::Shard::unwatch(WaitingRequest& request) {
  if (std::exchange(request.watched_, false)) watched.erase(request.place_);
}

/// Those that began before; or all that were interrupted, too.
std::vector<WaitingRef> Waits::Shard::over(Clock::time_point begun_before, bool all) {
  std::vector<WaitingRef> found;
  for (auto it = watched.begin(); it != watched.end();) {
    const bool old = (*it)->since_ < begun_before;
    if (!old && !all) break;  // the rest is younger
    if ((*it)->claimed_.load()) {
      const WaitingRef done = *it++;
      unwatch(*done);
      continue;
    }
    if (old || (*it)->interrupted()) found.push_back(*it);
    ++it;
  }
  return found;
}

void Waits::Shard::give_up(const WaitingRequest& request) {
  // A process of another namespace has no number here.
  if (request.op_ != Op::kRead || request.caller_.pid == 0) return;
  given_up.push_back({request.caller_.pid, request.inode_, Clock::now() + kAskedAgain});
}

bool Waits::Shard::has_given_up(const WaitingRequest& request) {
  const auto now = Clock::now();
  while (!given_up.empty() && given_up.front().until < now) given_up.pop_front();
  return std::any_of(given_up.begin(), given_up.end(), [&](const GivenUp& one) {
    return request.op_ == Op::kRead && one.process == request.caller_.pid &&
           one.inode == request.inode_;
  });
}

void Waits::look_after(std::stop_token stop) {
  ::pthread_setname_np(::pthread_self(), "ptcfs-waits");
  bool interrupted = false;
  while (!stop.stop_requested()) {
    {
      MutexLock lock(mutex_);
      auto something = [&] { return interrupts_.load(); };
      if (interrupted) wake_.wait_for(mutex_, stop, kLookForTheDying, [] { return false; });
      else if (watching_) wake_.wait_for(mutex_, stop, kLookEvery, something);
      else if (!wake_.wait_for(mutex_, stop, kKeep,
                               [&]() PTC_REQUIRES(mutex_) { return watching_.load(); })) {
        has_watcher_ = false;
        return;
      }
    }
    if (interrupts_.exchange(false)) interrupted = true;
    watching_ = false;  // before it is looked: whoever comes meanwhile sets it again
    const Clock::time_point begun_before = Clock::now() - options_.patience;
    const bool look_at_all = std::exchange(interrupted, false);
    bool any = false;
    for (Shard& shard : shards_) {
      std::vector<WaitingRef> found;
      {
        MutexLock lock(shard.mutex);
        found = shard.over(begun_before, look_at_all);
        for (const WaitingRef& request : found)
          if (request->since_ < begun_before) shard.give_up(*request);
        any = any || !shard.watched.empty();
      }
      for (const WaitingRef& request : found) {
        if (request->since_ < begun_before) request->fail(ETIMEDOUT);
        // Any other signal waits for the reply, as with a file on a disk: programs expect no EINTR
        // of read(2), and none of memory that they have mapped.
        else if (request->caller_.is_dying()) request->fail(EINTR);
        else interrupted = true;  // it may be killed yet, and that is not told
      }
    }
    if (any) watching_ = true;
  }
}

}  // namespace ptc
