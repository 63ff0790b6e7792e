// A node that many ask, or come to, at the same time.
#include "store/rpc/peer_server.h"

#include <sys/resource.h>

#include <atomic>
#include <chrono>
#include <future>
#include <mutex>
#include <set>
#include <thread>

#include "tcp_world.h"

namespace ptc {
namespace {

using namespace std::chrono_literals;

/// n1 is served with options of its own.
class ServedByMany : public ::testing::Test {
 protected:
  ServedByMany() {
    rlimit files = {};
    ::getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    ::setrlimit(RLIMIT_NOFILE, &files);
  }
  PeerServer& start(const std::function<void(PeerServerOptions&)>& change) {
    PeerServerOptions options = world_.server_options(1);
    options.max_connections = 4000;
    change(options);
    world_.server(1) = PeerServer::start(options).value();
    world_.peers().set("n1", world_.server(1)->address());
    return *world_.server(1);
  }
  std::vector<Result<std::string>> ask_many(size_t count, std::string_view method,
                                            std::chrono::milliseconds timeout = 60s) {
    const std::vector<Peers::Call> calls(count, {"n1", method, ""});
    return world_.peers().call_all(calls, {.at_once = SIZE_MAX}, timeout);
  }

  TcpWorld world_{2};
};

/// Threads that have answered.
struct Threads {
  std::mutex mutex;
  std::set<std::thread::id> seen;
  void note() {
    std::lock_guard lock(mutex);
    seen.insert(std::this_thread::get_id());
  }
};

TEST_F(ServedByMany, WhatIsAnsweredAtOnceTakesFewThreads) {
  Threads threads;
  start([](auto&) {})
      .handle(
          "short",
          [&](std::string_view, const std::string&) {
            threads.note();
            std::this_thread::sleep_for(1ms);
            return Result<std::string>("done");
          },
          PeerServer::Pace::kAtOnce);
  for (const auto& answer : ask_many(1000, "short")) EXPECT_EQ(answer.value(), "done");
  EXPECT_LE(threads.seen.size(), PeerServer::kThreadsAtOnce);
}

TEST_F(ServedByMany, WhatMayWaitDelaysNothingThatIsAnsweredAtOnce) {
  std::promise<void> end;
  const std::shared_future<void> ended = end.get_future().share();
  std::atomic<size_t> inside{0};
  PeerServer& server = start([](auto&) {});
  server.handle("long", [&, ended](std::string_view, const std::string&) {
    ++inside;
    ended.wait();
    return Result<std::string>("done");
  });
  server.handle(
      "short", [](std::string_view, const std::string&) { return Result<std::string>("done"); },
      PeerServer::Pace::kAtOnce);
  auto waiting = std::async(std::launch::async, [&] { return ask_many(100, "long"); });
  while (inside < 100) std::this_thread::sleep_for(1ms);
  for (const auto& answer : ask_many(100, "short")) EXPECT_EQ(answer.value(), "done");
  end.set_value();
  for (const auto& answer : waiting.get()) EXPECT_EQ(answer.value(), "done");
}

TEST_F(ServedByMany, WhoIsTooBusySaysSoAndIsAskedAgainWhileThereIsTime) {
  constexpr size_t kMost = 8;
  std::promise<void> end;
  const std::shared_future<void> ended = end.get_future().share();
  std::atomic<size_t> inside{0}, begun{0};
  std::atomic<bool> too_many{false};
  start([](auto& options) {
    options.max_calls = kMost;
  }).handle("long", [&, ended](std::string_view, const std::string&) {
    ++begun;
    if (++inside > kMost) too_many = true;
    ended.wait();
    --inside;
    return Result<std::string>("done");
  });
  auto waiting = std::async(std::launch::async, [&] { return ask_many(4 * kMost, "long"); });
  while (inside < kMost) std::this_thread::sleep_for(1ms);
  EXPECT_TRUE(has_error(world_.peers().call("n1", "long", "", 300ms), Code::kUnavailable,
                        "it answers 8 calls already"));
  EXPECT_EQ(begun, kMost);
  end.set_value();
  for (const auto& answer : waiting.get()) EXPECT_EQ(answer.value(), "done");
  EXPECT_EQ(begun, 4 * kMost) << "each once";
  EXPECT_FALSE(too_many);
}

TEST_F(ServedByMany, WhoComesWithManyOthersIsLetInInTheEnd) {
  constexpr size_t kNodes = 400;
  PeerServer& server = start([](auto& options) { options.max_strangers = 16; });
  server.handle("hello", [](std::string_view request, const std::string& from) {
    return Result<std::string>(fmt::format("{} to {}", request, from));
  });
  std::shared_ptr<IoThreads> io = IoThreads::start().value();
  std::vector<std::unique_ptr<Peers>> nodes;
  for (size_t i = 0; i < kNodes; ++i) {
    PeersOptions options;
    options.node = fmt::format("w{}", i);
    options.cluster = "test";
    options.io = io;
    nodes.push_back(Peers::create(options).value());
  }
  std::vector<std::future<std::vector<Peers::Met>>> all;
  for (const auto& node : nodes)
    all.push_back(std::async(std::launch::async, [&] {
      return node->meet_all({{"n1", server.address()}}, "hello", "it", 5s);
    }));
  for (size_t i = 0; i < kNodes; ++i) {
    const std::vector<Peers::Met> met = all[i].get();
    ASSERT_EQ(met.size(), 1u);
    EXPECT_TRUE(is_ok(met[0].let_in));
    // Its address was not set.
    EXPECT_TRUE(has_error(met[0].answer, Code::kUnavailable, "nobody said its address"));
  }
  const size_t before = server.numbers().size();
  EXPECT_EQ(before, kNodes);
  // One that meets many takes no thread for each, and asks over the connection that let it in.
  for (size_t i = 0; i < kNodes; ++i) world_.peers().set(fmt::format("n{}", i), "127.0.0.1:1");
  world_.peers().set("n1", server.address());
  std::vector<Peers::Place> places(kNodes, {"n1", server.address()});
  places.push_back({"n9", server.address()});
  const auto met = world_.peers().meet_all(places, "hello", "it", 5s);
  for (size_t i = 0; i < kNodes; ++i) EXPECT_EQ(met[i].answer.value(), "it to n0");
  EXPECT_TRUE(has_error(met.back().let_in, Code::kUnavailable, "there is node n1 now, not n9"));
}

}  // namespace
}  // namespace ptc
