#include "fs/kernel/request_rings.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <spdlog/spdlog.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <utility>

#include "store/base/mutex.h"

namespace ptc {
namespace {

// The kernel's wire format.
struct RingRequestHead {  // of each request; also by /dev/fuse
  uint32_t length, opcode;
  uint64_t unique, node;
  uint32_t uid, gid, pid, padding;
};
struct RingReplyHead {
  uint32_t length;
  int32_t error;
  uint64_t unique;
};
struct RingCommand {
  uint64_t flags, commit_id;
  uint16_t queue;
  uint8_t padding[6];
};
constexpr uint32_t kRegister = 1, kCommitAndFetch = 2;

constexpr uint32_t kUnlink = 10, kRmdir = 11, kRename = 12, kRename2 = 45;  // of requests
constexpr int kLooks = 32;                                                  // after each of these

constexpr int kDirectAtFirst = 2;  // threads of a processor
constexpr int kMostDirect = 16;
constexpr int kFree = 2;           // entries of a queue that nothing holds that waits
constexpr size_t kRoom = 4096;     // before the payload, for what comes before it by /dev/fuse
constexpr uint64_t kEventTag = 0;  // of the keeper; other tags are entries

/// Of the kernel's processors, running or not: "0-127".
unsigned possible_processors() {
  std::ifstream file("/sys/devices/system/cpu/possible");
  std::string text;
  if (!std::getline(file, text) || text.find(',') != std::string::npos) return 0;
  const size_t dash = text.find('-');
  return static_cast<unsigned>(
             std::strtoul(text.c_str() + (dash == std::string::npos ? 0 : dash + 1), nullptr, 10)) +
         1;
}

bool is_running(unsigned processor) {
  std::ifstream file(fmt::format("/sys/devices/system/cpu/cpu{}/online", processor));
  char online = '1';  // the first has no such file
  file.get(online);
  return online == '1';
}

/// Threads that others begin run wherever this process may, also where a thread begins them that
/// stays on one processor.
void let_new_threads_run_anywhere() {
#ifdef __GLIBC__
  cpu_set_t anywhere;
  pthread_attr_t attributes;
  if (::sched_getaffinity(0, sizeof anywhere, &anywhere) != 0 ||
      ::pthread_getattr_default_np(&attributes) != 0)
    return;
  ::pthread_attr_setaffinity_np(&attributes, sizeof anywhere, &anywhere);
  ::pthread_setattr_default_np(&attributes);
  ::pthread_attr_destroy(&attributes);
#endif
}

}  // namespace

struct RequestRings::Entry {
  struct {
    std::byte head[128];       // RingRequestHead; RingReplyHead
    std::byte operation[128];  // the first of its arguments
    uint64_t flags, commit_id;
    uint32_t payload_bytes, padding;
    uint64_t reserved;
  } header = {};
  Queue& queue;
  std::byte* memory;  // kRoom, payload
  iovec parts[2] = {};
  std::atomic<uint64_t> unique{0};  // of the request that is not replied to; changed by whoever
                                    // has the entry, to 0 also by whoever replies
  bool held = false;                // guarded by the queue's mutex; so is the change to 0 then
  std::byte* payload() const { return memory + kRoom; }

  explicit Entry(Queue& of, std::byte* at, size_t payload_bytes) : queue(of), memory(at) {
    parts[0] = {&header, sizeof header};
    parts[1] = {payload(), payload_bytes};
  }
  ~Entry() { ::munmap(memory, kRoom + parts[1].iov_len); }
};

struct RequestRings::Queue {
  uint16_t number = 0;
  bool runs = false;  // its processor
  Mutex mutex;
  ConditionVariable changed;
  std::deque<Entry*> replied PTC_GUARDED_BY(mutex);  // whose replies are to be sent
  size_t adopting PTC_GUARDED_BY(mutex) = 0;         // threads that come for one of these
  int direct PTC_GUARDED_BY(mutex) = 0;              // threads, beside the keeper
  int entries PTC_GUARDED_BY(mutex) = 0;
  int held PTC_GUARDED_BY(mutex) = 0, wanted PTC_GUARDED_BY(mutex) = 0;
};

/// What this thread serves.
struct RequestRings::Serving {
  Entry* entry = nullptr;
  uint64_t unique = 0;
  bool direct = false, replied = false, sent = false, waits = false;
};
thread_local RequestRings::Serving RequestRings::serving;

RequestRings::RequestRings(Options options) : options_(std::move(options)) {}

RequestRings::~RequestRings() {
  stop();
  for (std::thread& thread : threads_) thread.join();
  if (keepers_event_ >= 0) ::close(keepers_event_);
}

Result<> RequestRings::prepare() {
  Uring ring;
  PTC_TRY(ring.open(4, 4));
  const unsigned processors = possible_processors();
  if (processors == 0) return invalid_argument("the processors' numbers have gaps");
  keepers_event_ = ::eventfd(0, EFD_CLOEXEC);
  if (keepers_event_ < 0) return errno_error(errno, "eventfd");
  for (unsigned i = 0; i < processors; ++i) {
    queues_.push_back(std::make_unique<Queue>());
    queues_.back()->number = static_cast<uint16_t>(i);
    queues_.back()->runs = is_running(i);
  }
  return ok();
}

Result<> RequestRings::start() {
  let_new_threads_run_anywhere();
  std::promise<Result<>> promise;
  std::future<Result<>> started = promise.get_future();
  try {
    MutexLock lock(mutex_);
    ++running_;
    threads_.emplace_back(
        [this, promise = std::move(promise)]() mutable { keep(std::move(promise)); });
  } catch (const std::exception& error) {
    --running_;
    over_ = true;
    return make_error(Code::kUnavailable, "a thread: {}", error.what());
  }
  PTC_TRY(started.get());
  // The last to come is the first that the kernel takes; those of the keeper are its last resort.
  for (auto& queue : queues_)
    for (int i = 0; queue->runs && i < kDirectAtFirst; ++i) {
      {
        MutexLock lock(queue->mutex);
        ++queue->direct;
      }
      begin_direct(*queue, /*first=*/true);
    }
  return ok();
}

void RequestRings::begin_direct(Queue& queue, bool first) {
  try {
    MutexLock lock(mutex_);
    if (over_) throw std::runtime_error("it ends");
    ++running_;
    try {
      threads_.emplace_back([this, &queue, first] { serve_queue(queue, first); });
    } catch (...) {
      --running_;
      throw;
    }
  } catch (const std::exception&) {  // the keeper does it
    {
      MutexLock lock(queue.mutex);
      --queue.direct;
      if (!first) --queue.adopting;
    }
    wake_keeper();
  }
}

void RequestRings::stop() {
  end();
  MutexLock lock(mutex_);
  while (running_.load() != 0) {
    for (std::thread& thread : threads_)
      ::pthread_kill(thread.native_handle(), options_.wake_signal);
    ended_.wait_for(mutex_, std::chrono::milliseconds(20));
  }
}

void RequestRings::end() {
  if (over_.exchange(true)) return;
  for (auto& queue : queues_) {
    MutexLock lock(queue->mutex);
    queue->changed.notify_all();
  }
  wake_keeper();
}

void RequestRings::one_less() {
  MutexLock lock(mutex_);  // stop() does not return before this is given back
  --running_;
  ended_.notify_all();
  options_.ended();
}

void RequestRings::wake_keeper() const {
  const uint64_t one = 1;
  if (keepers_event_ >= 0) (void)!::write(keepers_event_, &one, sizeof one);
}

/// Null without memory.
RequestRings::Entry* RequestRings::new_entry(Queue& queue) {
  void* memory = ::mmap(nullptr, kRoom + options_.payload_bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  auto entry =
      std::make_unique<Entry>(queue, static_cast<std::byte*>(memory), options_.payload_bytes);
  MutexLock lock(mutex_);
  entries_.push_back(std::move(entry));
  return entries_.back().get();
}

void RequestRings::push(Uring& ring, uint32_t operation, Entry& entry) {
  const RingCommand command = {
      0, operation == kCommitAndFetch ? entry.header.commit_id : 0, entry.queue.number, {}};
  ring.push({.file = options_.device,
             .operation = operation,
             .address = reinterpret_cast<uint64_t>(entry.parts),
             .length = 2,
             .own = std::as_bytes(std::span(&command, 1)),
             .tag = reinterpret_cast<uint64_t>(&entry)});
}

/// The thread of one entry.
void RequestRings::serve_queue(Queue& queue, bool first) {
  cpu_set_t here;
  CPU_ZERO(&here);
  CPU_SET(queue.number, &here);
  ::sched_setaffinity(0, sizeof here, &here);  // fails where it may not run there: then elsewhere
  Uring ring;
  const bool opened = !ring.open(4, 4).has_error();
  Entry* mine = opened && first ? new_entry(queue) : nullptr;
  if (mine != nullptr) {
    MutexLock lock(queue.mutex);
    ++queue.entries;
    push(ring, kRegister, *mine);
  }
  if (!first && !opened) {
    MutexLock lock(queue.mutex);
    --queue.adopting;
  }
  bool adopts = !first;
  while (opened && !over_) {
    if (mine == nullptr) {
      if (!std::exchange(adopts, false)) {
        MutexLock lock(queue.mutex);
        ++queue.adopting;
      }
      mine = adopt(queue);
      if (mine == nullptr) break;
      push(ring, kCommitAndFetch, *mine);
    }
    const int failed = ring.enter(/*wait=*/true);
    if (failed != 0 && failed != -EINTR && failed != -EAGAIN && failed != -EBUSY) break;
    Uring::Completion done;
    if (!ring.pop(done)) continue;
    mine = nullptr;
    if (done.result == -ENOTCONN || done.result == -ECONNABORTED) end();
    if (done.result != 0) break;
    Entry& entry = *reinterpret_cast<Entry*>(done.tag);
    if (!serve(entry, /*direct=*/true)) continue;
    push(ring, kCommitAndFetch, entry);
    mine = &entry;
  }
  if (mine != nullptr) (void)ring.enter(/*wait=*/false);  // a reply may be among it
  {
    MutexLock lock(queue.mutex);
    --queue.direct;
  }
  wake_keeper();
  one_less();
}

/// Whose reply this thread sends from now on; waits for it. Null at the end.
RequestRings::Entry* RequestRings::adopt(Queue& queue) {
  MutexLock lock(queue.mutex);
  queue.changed.wait(queue.mutex,
                     [&]() PTC_REQUIRES(queue.mutex) { return !queue.replied.empty() || over_; });
  --queue.adopting;
  if (queue.replied.empty()) return nullptr;
  Entry* entry = queue.replied.front();
  queue.replied.pop_front();
  return entry;
}

/// One entry of the keeper in each queue: without that, the kernel sends nothing by rings. 0, or an
/// errno.
int RequestRings::register_all(Uring& ring) {
  int refused = 0;
  for (auto& queue : queues_) {
    Entry* entry = new_entry(*queue);
    if (entry == nullptr) {
      refused = ENOMEM;
      break;
    }
    {
      MutexLock lock(queue->mutex);
      ++queue->entries;
    }
    push(ring, kRegister, *entry);
  }
  if (refused != 0) {  // the kernel waits for the rest, unless one is wrong
    const RingCommand wrong = {0, 0, UINT16_MAX, {}};
    ring.push({.file = options_.device,
               .operation = kRegister,
               .address = 0,
               .length = 0,
               .own = std::as_bytes(std::span(&wrong, 1)),
               .tag = kEventTag});
  }
  if (const int failed = ring.enter(/*wait=*/false); failed != 0) refused = -failed;
  // What is refused completes at once.
  Uring::Completion done;
  while (ring.pop(done))
    if (done.result < 0 && refused == 0) refused = -done.result;
  return refused;
}

void RequestRings::keep(std::promise<Result<>> started) {
  Uring ring;
  auto opened = ring.open(64, 1024);
  const int refused = opened.has_error() ? EOPNOTSUPP : register_all(ring);
  if (refused != 0) {
    over_ = true;
    started.set_value(opened.has_error() ? std::move(opened)
                                         : errno_error(refused, "the kernel refuses a queue"));
    return one_less();
  }
  started.set_value(ok());
  uint64_t event = 0;
  auto listen = [&] { ring.push_read(keepers_event_, &event, sizeof event, kEventTag); };
  Uring::Completion done;
  listen();
  while (!over_) {
    const int failed = ring.enter(/*wait=*/true);
    if (failed != 0 && failed != -EINTR && failed != -EAGAIN && failed != -EBUSY) break;
    while (ring.pop(done)) {
      if (done.tag == kEventTag) {
        listen();
        look_after(ring);
        continue;
      }
      Entry& entry = *reinterpret_cast<Entry*>(done.tag);
      if (done.result == -ENOTCONN || done.result == -ECONNABORTED) end();
      if (done.result != 0) continue;
      try {
        ++running_;
        std::thread([this, &entry] { serve_alone(entry); }).detach();
      } catch (const std::exception&) {
        --running_;
        RingRequestHead head;
        std::memcpy(&head, entry.header.head, sizeof head);
        const RingReplyHead sorry = {sizeof sorry, -ENOMEM, head.unique};
        std::memcpy(entry.header.head, &sorry, sizeof sorry);
        entry.header.payload_bytes = 0;
        push(ring, kCommitAndFetch, entry);
      }
    }
  }
  end();
  one_less();
}

/// What no other thread comes for, and what is to be added.
void RequestRings::look_after(Uring& ring) {
  for (auto& queue : queues_) {
    int wanted = 0;
    {
      MutexLock lock(queue->mutex);
      while (queue->replied.size() > queue->adopting) {
        push(ring, kCommitAndFetch, *queue->replied.front());
        queue->replied.pop_front();
      }
      wanted = std::exchange(queue->wanted, 0);
    }
    for (; wanted > 0; --wanted) {
      Entry* entry = new_entry(*queue);
      if (entry != nullptr) {
        push(ring, kRegister, *entry);
        continue;
      }
      MutexLock lock(queue->mutex);
      --queue->entries;
    }
  }
}

void RequestRings::serve_alone(Entry& entry) {
  serve(entry, /*direct=*/false);
  one_less();
}

/// True: replied to, and the reply is to be sent.
bool RequestRings::serve(Entry& entry, bool direct) {
  RingRequestHead head;
  std::memcpy(&head, entry.header.head, sizeof head);
  if (looks_.load(std::memory_order_relaxed) > 0) {
    --looks_;
    options_.process_forgets();
  }
  // As it comes by /dev/fuse: in one piece, which ends with the payload.
  const size_t payload_bytes = entry.header.payload_bytes;
  const size_t operation_bytes = head.length - sizeof head - payload_bytes;
  std::byte* begin = entry.payload() - operation_bytes - sizeof head;
  std::memcpy(begin, &head, sizeof head);
  std::memcpy(begin + sizeof head, entry.header.operation, operation_bytes);
  entry.unique = head.unique;
  serving = {.entry = &entry, .unique = head.unique, .direct = direct};
  options_.process(begin, head.length);
  const Serving served = std::exchange(serving, {});
  if (head.opcode == kUnlink || head.opcode == kRmdir || head.opcode == kRename ||
      head.opcode == kRename2)
    looks_ = kLooks;
  if (!served.replied) hold(entry, head.unique);  // it queues, or somebody else has replied
  if (!served.replied || served.sent) return false;
  if (served.waits) release(entry);
  else entry.unique = 0;
  return true;
}

/// Its request waits for others.
void RequestRings::hold(Entry& entry, uint64_t unique) {
  Queue& queue = entry.queue;
  {
    MutexLock lock(queue.mutex);
    if (entry.unique != unique || entry.held) return;  // replied to by now; by somebody else
    entry.held = true;
    ++queue.held;
    if (queue.entries - queue.held >= kFree) return;
    ++queue.entries;
    ++queue.wanted;
  }
  wake_keeper();
}

void RequestRings::release(Entry& entry) {
  MutexLock lock(entry.queue.mutex);
  entry.unique = 0;
  if (std::exchange(entry.held, false)) --entry.queue.held;
}

/// To whoever sends its reply. It may be another's from then on.
void RequestRings::hand_over(Entry& entry) {
  Queue& queue = entry.queue;
  release(entry);
  bool begin = false;
  {
    MutexLock lock(queue.mutex);
    queue.replied.push_back(&entry);
    if (queue.replied.size() <= queue.adopting) return queue.changed.notify_one();
    begin = queue.runs && queue.direct < kMostDirect;
    if (begin) {
      ++queue.direct;
      ++queue.adopting;
    }
  }
  if (begin) begin_direct(queue, /*first=*/false);
  else wake_keeper();
}

RequestRings::Entry* RequestRings::find(uint64_t unique) {
  MutexLock lock(mutex_);
  for (auto& entry : entries_)
    if (entry->unique == unique) return entry.get();
  return nullptr;
}

bool RequestRings::reply(const iovec* parts, int count) {
  RingReplyHead head;
  if (count < 1 || parts[0].iov_len < sizeof head) return false;
  std::memcpy(&head, parts[0].iov_base, sizeof head);
  if (head.unique == 0) {  // no reply; what it asks of the kernel may wait for ours
    send_reply();
    return false;
  }
  const bool own = serving.entry != nullptr && serving.unique == head.unique;
  Entry* entry = own ? serving.entry : find(head.unique);
  if (entry == nullptr) return false;
  std::byte* to = entry->payload();
  size_t skip = sizeof head;
  for (int i = 0; i < count; ++i, skip = 0) {
    std::memcpy(to, static_cast<const std::byte*>(parts[i].iov_base) + skip,
                parts[i].iov_len - skip);
    to += parts[i].iov_len - skip;
  }
  std::memcpy(entry->header.head, &head, sizeof head);
  entry->header.payload_bytes = static_cast<uint32_t>(to - entry->payload());
  if (own) serving.replied = true;
  if (own && serving.direct) return true;  // with the wait for the next
  if (own) serving.sent = true;
  hand_over(*entry);
  return true;
}

bool RequestRings::note_waiting(int change) {
  if (serving.entry == nullptr) return false;
  waiting_ += change;
  if (change > 0) {
    serving.waits = true;
    hold(*serving.entry, serving.unique);
  }
  return true;
}

void RequestRings::send_reply() {
  if (serving.entry == nullptr || !serving.replied || serving.sent) return;
  serving.sent = true;
  hand_over(*serving.entry);
}

}  // namespace ptc
