// All threads of a program under one cooperative scheduler: exactly one of them runs at a time, and
// wherever it would wait (a mutex, a condition variable, a futex, another thread's end, a time) a
// seeded generator picks who runs next. Time is the scheduler's: it jumps to the next deadline when
// nobody can run. The same seed gives the same run.
//
// The code under it is not changed: a program that links interpose.cc has the functions of libc
// that wait, read the clock or draw random bytes replaced (its target needs ENABLE_EXPORTS). They
// are themselves outside of run().
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace ptc::sim {

using Time = std::chrono::nanoseconds;  // since the scheduler's clock was 0

struct SchedulerOptions {
  uint64_t seed = 0;
  /// Before one of so many locks of a mutex another thread may come first; 0: never.
  unsigned preempt_every = 8;
  Time step = std::chrono::microseconds(1);  // what one turn costs
  /// Of many thousands. The kernel keeps those that wait for a futex in 512 lists, which it goes
  /// through to find one of them: then threads hand over by signals.
  bool many_threads = false;
  /// Called when no thread can run and none waits for a time, with what each waits for, as one line
  /// a thread. Must not return. Not given: prints that, and ends the process with status 70.
  std::function<void(const std::string& threads)> on_deadlock;
};

struct RunResult {
  uint64_t hash = 0;   // of who ran when, and of what was noted
  uint64_t steps = 0;  // how often one was picked
  Time time{};         // at the end
};

/// Runs `body` and every thread that it starts. Those must have ended when it returns: else that is
/// a deadlock. Threads: one run at a time in a process.
RunResult run(SchedulerOptions options, const std::function<void()>& body);

/// Of a thread within run(): the time, 64 random bits, and something that the hash shall cover.
Time now();
uint64_t turns_taken();  // so far
uint64_t random();
void note(std::string_view text);
/// What the calling thread is called where threads are listed.
void name_thread(std::string name);
/// One line a thread: what it is called, and what it waits for.
std::string list_threads();

/// Threads of one group stand still and go on together; a thread is of the group of the one that
/// started it, the first of group 0. Time goes on meanwhile: what waits longer than its deadline
/// finds that over.
int set_group(int group);  // returns what it was
void freeze(int group);
void thaw(int group);

/// The clock on the wall is so much ahead for the threads of a group.
void set_wall_offset(int group, Time offset);
/// Called when a thread of a group is about to write to a file, to sync or to rename one: 0, or the
/// errno with which that fails instead. Until the end of run(), or another is set.
enum class FileCall { kWrite, kSync, kRename };
void on_file_call(std::function<int(int group, FileCall call)> hook);

/// For what is shared and has no lock: the one who runs changes it, and wakes those that wait for
/// `key`.
bool wait_until(const void* key, Time deadline);
void sleep(Time time);
void wake_all(const void* key);

/// For interpose.cc. Within run(), by the thread that runs; true for no other.
bool managed();
/// Waits until woken by `key`: true, or until the deadline: false. `what` is said of a deadlock.
bool wait(const void* key, std::optional<Time> deadline, const char* what);
/// Wakes at most `count` of those that wait for the key, whichever; how many.
size_t wake(const void* key, size_t count);
/// Others may run first; `maybe_yield`: now and then.
void yield();
void maybe_yield();
Time wall_offset();
int file_call(FileCall call);
/// The calling thread starts another, whose `body` runs as a thread of the scheduler. `key` is
/// woken at its end.
class Thread;
Thread* add_thread();
void run_thread(Thread* thread, const std::function<void()>& body);
void forget_thread(Thread* thread);  // it could not be started
bool has_ended(const Thread* thread);
void free_thread(Thread* thread);  // it has ended, and nobody will ask

/// Real functions of libc.
int real_mutex_trylock(void* mutex);
long raw_futex(uint32_t* word, int operation, uint32_t value);

}  // namespace ptc::sim
