#include "tests/sim/scheduler.h"

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

namespace ptc::sim {

class Thread {
 public:
  explicit Thread(uint64_t number_of_it)
      : number(number_of_it), name("thread " + std::to_string(number_of_it)) {}

  const uint64_t number;
  std::string name;
  int group = 0;
  bool ended = false;
  bool freed = false;  // goes at its end
  // While it waits:
  const void* key = nullptr;
  const char* what = "to begin";
  std::optional<Time> deadline;
  bool woken = false;

  void stop();
  void go();

 private:
  uint32_t* word() { return reinterpret_cast<uint32_t*>(&may_run_); }
  std::atomic<uint32_t> may_run_{0};
  std::atomic<pid_t> id_{0};  // 0: it has not begun, or nobody wakes it by signals
};

namespace {

/// Touched by the thread that runs alone.
struct Scheduler {
  explicit Scheduler(SchedulerOptions given)
      : options(std::move(given)), turns(options.seed), bits(options.seed + 1) {}

  SchedulerOptions options;
  std::mt19937_64 turns, bits;  // who is next; what the program draws
  RunResult result;
  uint64_t next_number = 0;
  std::map<uint64_t, Thread*> threads;  // that have not ended, by number
  std::vector<Thread*> ready;
  std::map<int, std::vector<Thread*>> frozen;  // of groups that stand still, those that are ready
  std::unordered_map<const void*, std::vector<Thread*>> waiting;
  std::map<int, Time> wall_offsets;  // by group
  std::function<int(int, FileCall)> on_file_call;
  std::set<std::pair<Time, uint64_t>> deadlines;  // and the thread's number

  Thread* add() {
    auto* thread = new Thread(next_number++);
    threads.emplace(thread->number, thread);
    return thread;
  }
  void mix(uint64_t value) {
    result.hash = (result.hash ^ value) * 0x9E3779B97F4A7C15u + (result.hash >> 29);
  }

  void make_ready(Thread* thread, bool woken) {
    thread->woken = woken;
    if (thread->deadline) deadlines.erase({*thread->deadline, thread->number});
    thread->deadline.reset();
    thread->key = nullptr;
    be_ready(thread);
  }
  void be_ready(Thread* thread) {
    auto group = frozen.find(thread->group);
    thread->what = group == frozen.end() ? "for its turn" : "until it is thawed";
    (group == frozen.end() ? ready : group->second).push_back(thread);
  }
  void time_out(Thread* thread) {
    if (thread->key != nullptr) {
      auto& others = waiting[thread->key];
      std::erase(others, thread);
      if (others.empty()) waiting.erase(thread->key);
    }
    make_ready(thread, false);
  }
  Thread* pick() {
    result.time += options.step;
    do {
      if (ready.empty()) {
        if (deadlines.empty()) deadlock();
        result.time = std::max(result.time, deadlines.begin()->first);
      }
      while (!deadlines.empty() && deadlines.begin()->first <= result.time)
        time_out(threads.at(deadlines.begin()->second));
    } while (ready.empty());
    std::swap(ready[turns() % ready.size()], ready.back());
    Thread* next = ready.back();
    ready.pop_back();
    ++result.steps;
    mix(next->number);
    mix(static_cast<uint64_t>(result.time.count()));
    return next;
  }
  [[noreturn]] void deadlock() {
    const std::string text = list_threads();
    if (options.on_deadlock) options.on_deadlock(text);
    else std::fprintf(stderr, "nobody can run:\n%s", text.c_str());
    std::fflush(nullptr);
    _exit(70);
  }
};

Scheduler* scheduler = nullptr;
thread_local Thread* self = nullptr;
// How threads hand over; set before there are any.
bool by_signals = false;
sigset_t turn_signal;

void hand_over(Thread* from) {
  Thread* next = scheduler->pick();
  if (next == from) return;
  next->go();
  if (from != nullptr) from->stop();
}

}  // namespace

void Thread::stop() {
  if (by_signals) id_ = ::gettid();
  // A signal may be left of a turn that was taken without waiting for it.
  while (may_run_.exchange(0) == 0) {
    if (by_signals) ::sigwaitinfo(&turn_signal, nullptr);
    else raw_futex(word(), FUTEX_WAIT_PRIVATE, 0);
  }
}

void Thread::go() {
  may_run_ = 1;
  if (!by_signals) raw_futex(word(), FUTEX_WAKE_PRIVATE, 1);
  else if (const pid_t id = id_; id != 0) ::tgkill(::getpid(), id, SIGUSR2);
}

bool managed() { return self != nullptr; }
Time now() { return scheduler->result.time; }
uint64_t turns_taken() { return scheduler->result.steps; }
uint64_t random() { return scheduler->bits(); }
void name_thread(std::string name) { self->name = std::move(name); }

void note(std::string_view text) {
  for (char byte : text) scheduler->mix(static_cast<unsigned char>(byte));
}

std::string list_threads() {
  std::string text;
  for (const auto& [number, thread] : scheduler->threads)
    text += "  " + thread->name +
            (thread == self ? " runs" : std::string(" waits ") + thread->what) + "\n";
  return text;
}

bool wait(const void* key, std::optional<Time> deadline, const char* what) {
  Thread* me = self;
  me->key = key;
  me->what = what;
  me->deadline = deadline;
  if (key != nullptr) scheduler->waiting[key].push_back(me);
  if (deadline) scheduler->deadlines.emplace(*deadline, me->number);
  hand_over(me);
  return me->woken;
}

size_t wake(const void* key, size_t count) {
  auto found = scheduler->waiting.find(key);
  if (found == scheduler->waiting.end()) return 0;
  std::vector<Thread*>& those = found->second;
  size_t woken = 0;
  for (; woken < count && !those.empty(); ++woken) {
    const size_t i = count >= those.size() ? 0 : scheduler->turns() % those.size();
    Thread* thread = those[i];
    those.erase(those.begin() + static_cast<ptrdiff_t>(i));
    scheduler->make_ready(thread, true);
  }
  if (those.empty()) scheduler->waiting.erase(found);
  return woken;
}

bool wait_until(const void* key, Time deadline) { return wait(key, deadline, "for the world"); }
void sleep(Time time) { wait(nullptr, now() + time, "for a time"); }
void wake_all(const void* key) { wake(key, SIZE_MAX); }

int set_group(int group) {
  const int before = std::exchange(self->group, group);
  if (scheduler->frozen.contains(group)) yield();
  return before;
}

void freeze(int group) {
  auto [frozen, is_new] = scheduler->frozen.try_emplace(group);
  if (!is_new) return;
  std::erase_if(scheduler->ready, [&](Thread* thread) {
    if (thread->group == group) frozen->second.push_back(thread);
    return thread->group == group;
  });
}

void thaw(int group) {
  auto frozen = scheduler->frozen.extract(group);
  if (frozen.empty()) return;
  for (Thread* thread : frozen.mapped()) scheduler->be_ready(thread);
}

void set_wall_offset(int group, Time offset) { scheduler->wall_offsets[group] = offset; }
Time wall_offset() {
  const auto known = scheduler->wall_offsets.find(self->group);
  return known != scheduler->wall_offsets.end() ? known->second : Time();
}
void on_file_call(std::function<int(int, FileCall)> hook) {
  scheduler->on_file_call = std::move(hook);
}
int file_call(FileCall call) {
  return scheduler->on_file_call ? scheduler->on_file_call(self->group, call) : 0;
}

void yield() {
  scheduler->be_ready(self);
  hand_over(self);
}

void maybe_yield() {
  const unsigned every = scheduler->options.preempt_every;
  if (every != 0 && scheduler->turns() % every == 0) yield();
}

Thread* add_thread() {
  Thread* thread = scheduler->add();
  thread->group = self->group;
  scheduler->make_ready(thread, true);
  return thread;
}

void forget_thread(Thread* thread) {
  std::erase(scheduler->ready, thread);
  scheduler->threads.erase(thread->number);
  delete thread;
}

void run_thread(Thread* thread, const std::function<void()>& body) {
  thread->stop();
  self = thread;
  body();
  thread->ended = true;
  scheduler->threads.erase(thread->number);
  wake(thread, SIZE_MAX);
  // What its thread_local objects still do is not the scheduler's.
  self = nullptr;
  if (thread->freed) delete thread;
  hand_over(nullptr);
}

bool has_ended(const Thread* thread) { return thread->ended; }

void free_thread(Thread* thread) {
  if (thread->ended) delete thread;
  else thread->freed = true;
}

RunResult run(SchedulerOptions options, const std::function<void()>& body) {
  by_signals = options.many_threads;
  if (by_signals) {
    sigemptyset(&turn_signal);
    sigaddset(&turn_signal, SIGUSR2);
    ::pthread_sigmask(SIG_BLOCK, &turn_signal, nullptr);  // in threads that are started, too
  }
  auto whole = std::make_unique<Scheduler>(std::move(options));
  scheduler = whole.get();
  // The clock of steady_clock is not 0 either.
  scheduler->result.time = std::chrono::seconds(1000);
  std::unique_ptr<Thread> first(scheduler->add());
  self = first.get();
  self->name = "main";
  body();
  scheduler->threads.erase(first->number);
  if (!scheduler->threads.empty()) {
    self = nullptr;
    scheduler->deadlock();
  }
  self = nullptr;
  const RunResult result = scheduler->result;
  scheduler = nullptr;
  return result;
}

}  // namespace ptc::sim
