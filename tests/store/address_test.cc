// Names that a name server knows, or keeps quiet about.
#include "store/net/address.h"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <netdb.h>
#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <future>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>

#include "store/net/io_threads.h"
#include "tests/store/expect_error.h"
#include "tests/support/sockets.h"

namespace {

/// It says nothing about names that begin with "quiet" until it is woken.
struct NameServer {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::string, int> asked;
  std::set<std::string> threads;
  size_t inside = 0, most = 0;
  bool quiet = true;

  int wait(const std::string& name) {
    char thread[16] = "";
    ::pthread_getname_np(::pthread_self(), thread, sizeof thread);
    std::unique_lock lock(mutex);
    ++asked[name];
    threads.insert(thread);
    most = std::max(most, ++inside);
    changed.notify_all();
    changed.wait(lock, [&] { return !quiet; });
    --inside;
    return EAI_NONAME;
  }
  void wake() {
    std::lock_guard lock(mutex);
    quiet = false;
    changed.notify_all();
  }
} name_server;

}  // namespace

/// In place of libc's.
extern "C" int getaddrinfo(const char* name, const char* service, const addrinfo* hints,
                           addrinfo** found) {
  static const auto libcs =
      reinterpret_cast<decltype(&getaddrinfo)>(dlsym(RTLD_NEXT, "getaddrinfo"));
  const bool numeric = hints != nullptr && (hints->ai_flags & AI_NUMERICHOST) != 0;
  if (!numeric && std::string(name).starts_with("quiet")) return name_server.wait(name);
  return libcs(name, service, hints, found);
}

namespace ptc {
namespace {

using namespace std::chrono_literals;

Result<UniqueFd> connect_by_name(const std::string& name, std::chrono::milliseconds time) {
  const PeerAddress address{name, "1"};
  const Deadline deadline = std::chrono::steady_clock::now() + time;
  return run_here([&](IoExecutor) { return connect_to(address, {.deadline = deadline}); });
}

TEST(Address, ANameServerThatIsQuietKeepsFewThreadsAndNobodyWaitsForIt) {
  constexpr size_t kNames = 30, kThreads = 8;
  std::vector<std::future<Result<UniqueFd>>> waiting;
  for (size_t i = 0; i < 2 * kNames; ++i)
    waiting.push_back(std::async(std::launch::async, [i] {
      return connect_by_name("quiet" + std::to_string(i % kNames), 60s);
    }));
  {
    std::unique_lock lock(name_server.mutex);
    ASSERT_TRUE(
        name_server.changed.wait_for(lock, 30s, [&] { return name_server.inside == kThreads; }));
  }
  EXPECT_TRUE(has_error(connect_by_name("quiet0", 100ms), Code::kUnavailable, "in time"));
  EXPECT_TRUE(has_error(connect_by_name("quiet-and-late", 100ms), Code::kUnavailable, "in time"));
  EXPECT_TRUE(has_error(connect_by_name("127.0.0.1", 10s), Code::kUnavailable, "connecting to"))
      << "which is no name";
  name_server.wake();
  for (auto& one : waiting) EXPECT_TRUE(has_error(one.get(), Code::kUnavailable, "quiet"));
  std::lock_guard lock(name_server.mutex);
  EXPECT_EQ(name_server.most, kThreads);
  EXPECT_EQ(name_server.threads, std::set<std::string>{"ptcfs-names"});
  for (const auto& [name, times] : name_server.asked) EXPECT_LE(times, 2) << name;
}

TEST(Address, ANameThatIsKnownIsConnectedTo) {
  const Listener listener = listen_on(PeerAddress::parse("localhost:0").value()).value();
  Result<UniqueFd> there = connect_here({"localhost", std::to_string(listener.port)});
  EXPECT_TRUE(is_ok(there));
}

}  // namespace
}  // namespace ptc
