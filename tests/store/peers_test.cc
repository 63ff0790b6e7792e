#include "store/rpc/peers.h"

#include <atomic>
#include <chrono>
#include <thread>

#include "tcp_world.h"

namespace ptc {
namespace {

using namespace std::chrono_literals;

TEST(Peers, ACallIsAnsweredWithItsBodyOrItsError) {
  TcpWorld world(2);
  world.server(1)->handle("echo", [](std::string_view request, const std::string& from) {
    return Result<std::string>(from + ":" + std::string(request));
  });
  world.server(1)->handle("refuse", [](std::string_view, const std::string&) {
    return Result<std::string>(Error(Code::kNoSpace, "no room for \"it\""));
  });
  world.server(1)->handle("throw", [](std::string_view, const std::string&) -> Result<std::string> {
    throw std::runtime_error("oh");
  });
  Peers& peers = world.peers();
  EXPECT_EQ(peers.call("n1", "echo", "hello", 10s).value(), "n0:hello");
  EXPECT_EQ(peers.call("n1", "echo", "", 10s).value(), "n0:");
  EXPECT_TRUE(has_error(peers.call("n1", "refuse", "x", 10s), Code::kNoSpace, "no room for \"it\""));
  EXPECT_TRUE(has_error(peers.call("n1", "throw", "x", 10s), Code::kInternal, "oh"));
  EXPECT_TRUE(has_error(peers.call("n1", "nothing", "x", 10s), Code::kUnavailable, "'nothing'"));
  EXPECT_TRUE(has_error(peers.call("n7", "echo", "x", 10s), Code::kUnavailable, "n7"));
  EXPECT_EQ(world.numbers(1).connections, 1u) << "one connection serves them all";
}

TEST(Peers, LargeBodiesTravelBothWays) {
  TcpWorld world(2);
  world.server(1)->handle("twice", [](std::string_view request, const std::string&) {
    return Result<std::string>(std::string(request) + std::string(request));
  });
  std::string body((5 << 20) + 3, '\0');
  for (size_t i = 0; i < body.size(); ++i) body[i] = static_cast<char>(i * 7919 >> 3);
  EXPECT_TRUE(world.peers().call("n1", "twice", body, 30s).value() == body + body);
}

TEST(Peers, CallsOfManyThreadsGetTheirOwnAnswers) {
  TcpWorld world(3);
  for (size_t node : {1, 2}) {
    world.server(node)->handle("echo", [](std::string_view request, const std::string&) {
      return Result<std::string>(std::string(request));
    });
  }
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 50; ++i) {
        const std::string text = fmt::format("{} {}", t, i);
        EXPECT_EQ(world.peers().call(TcpWorld::name(1 + i % 2), "echo", text, 30s).value(), text);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace ptc
