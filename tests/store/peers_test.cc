#include "store/rpc/peers.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <future>
#include <mutex>
#include <thread>

#include "store/rpc/frame.h"
#include "tcp_world.h"
#include "tests/support/relay.h"

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
  EXPECT_TRUE(
      has_error(peers.call("n1", "refuse", "x", 10s), Code::kNoSpace, "no room for \"it\""));
  EXPECT_TRUE(has_error(peers.call("n1", "throw", "x", 10s), Code::kInternal, "oh"));
  EXPECT_TRUE(has_error(peers.call("n1", "nothing", "x", 10s), Code::kUnavailable, "'nothing'"));
  world.server(1)->handles_all();
  EXPECT_TRUE(
      has_error(peers.call("n1", "nothing", "x", 10s), Code::kInvalidArgument, "'nothing'"));
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

TEST(Peers, ManyAreAskedAtTheSameTimeByOneThread) {
  TcpWorld world(4);
  std::atomic<int> inside{0}, most{0};
  for (size_t node : {1, 2, 3}) {
    world.server(node)->handle(
        "who", [&, node](std::string_view request, const std::string&) -> Result<std::string> {
          const int now = ++inside;
          for (int seen = most; seen < now && !most.compare_exchange_weak(seen, now);) {
          }
          while (most < 30) std::this_thread::sleep_for(1ms);  // until all are being asked
          if (node == 2) return Error(Code::kBusy, "not now");
          return fmt::format("{} {}", node, request);
        });
  }
  std::vector<std::string> bodies;
  for (int i = 0; i < 30; ++i) bodies.push_back(std::to_string(i));
  std::vector<Peers::Call> calls;
  for (int i = 0; i < 30; ++i) calls.push_back({TcpWorld::name(1 + i % 3), "who", bodies[i]});
  calls.push_back({"n9", "who", ""});
  const auto answers = world.peers().call_all(calls, {}, 30s);
  ASSERT_EQ(answers.size(), calls.size());
  for (int i = 0; i < 30; ++i) {
    if (i % 3 == 1) EXPECT_TRUE(has_error(answers[i], Code::kBusy, "not now"));
    else EXPECT_EQ(answers[i].value(), fmt::format("{} {}", 1 + i % 3, i));
  }
  EXPECT_TRUE(has_error(answers.back(), Code::kUnavailable, "n9"));
  EXPECT_TRUE(world.peers().call_all({}, {}, 30s).empty());
}

/// How many are being asked, and how many were at a time. Who waits does not look again and again:
/// hundreds that did would leave the others no processor.
class Inside {
 public:
  void enter() {
    std::lock_guard lock(mutex_);
    most_ = std::max(most_, ++now_);
    changed_.notify_all();
  }
  void leave() {
    std::lock_guard lock(mutex_);
    --now_;
  }
  void ask_second() {
    std::lock_guard lock(mutex_);
    ++second_;
    changed_.notify_all();
  }
  void begin_anew() {
    std::lock_guard lock(mutex_);
    most_ = 0;
  }
  /// Whether so many were inside at a time before long.
  bool comes_to(int count) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, 50s, [&] { return most_ >= count; });
  }
  bool second_is_asked(int times) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, 50s, [&] { return second_ >= times; });
  }
  int most() {
    std::lock_guard lock(mutex_);
    return most_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int now_ = 0, most_ = 0, second_ = 0;  // guarded
};

TEST(Peers, AsManyWaitAtATimeAsWhoAsksSays) {
  constexpr int kCalls = 330;
  TcpWorld world(4);
  Inside inside;
  int wanted = 0;
  for (size_t node : {1, 2, 3})
    world.server(node)->handle("wait", [&](std::string_view, const std::string&) {
      inside.enter();
      const bool came = inside.comes_to(wanted);
      inside.leave();
      return Result<std::string>(came ? "all" : "some");
    });
  std::vector<Peers::Call> calls;
  for (int i = 0; i < kCalls; ++i) calls.push_back({TcpWorld::name(1 + i % 3), "wait", ""});
  for (const size_t at_once : {SIZE_MAX, size_t{7}}) {
    wanted = static_cast<int>(std::min<size_t>(at_once, kCalls));
    inside.begin_anew();
    for (const auto& answer : world.peers().call_all(calls, {.at_once = at_once}, 60s)) {
      ASSERT_TRUE(is_ok(answer));
      EXPECT_EQ(answer.value(), "all");
    }
    EXPECT_EQ(inside.most(), wanted);
  }
}

TEST(Peers, WhoseConnectionBrokeIsAskedAgainWhileOthersWait) {
  constexpr int kWaiting = 310;
  TcpWorld world(4);
  std::atomic<int> asked_3{0};
  Inside inside;
  world.server(1)->handle("work", [&](std::string_view, const std::string&) {
    inside.enter();
    const bool all = inside.comes_to(kWaiting);
    return Result<std::string>(all && inside.second_is_asked(2) ? "the other came back"
                                                                : "in vain");
  });
  const std::string answer(100'000, 'x');
  world.server(2)->handle("work", [&](std::string_view, const std::string&) {
    inside.ask_second();
    return Result<std::string>(answer);
  });
  world.server(3)->handle("work", [&](std::string_view, const std::string&) {
    ++asked_3;
    return Result<std::string>(answer);
  });
  Relay breaks_once(world.server(2)->address(), [](int connection) {
    return connection == 0 ? Relay::Plan{.cut_after = 20'000} : Relay::Plan{};
  });
  Relay breaks(world.server(3)->address(), [](int) { return Relay::Plan{.cut_after = 20'000}; });
  world.peers().set("n2", breaks_once.address());
  world.peers().set("n3", breaks.address());
  std::vector<Peers::Call> calls(kWaiting, {"n1", "work", ""});
  calls.push_back({"n2", "work", ""});
  calls.push_back({"n3", "work", ""});
  auto answers = world.peers().call_all(calls, {.at_once = SIZE_MAX, .again = true}, 60s);
  EXPECT_TRUE(is_broken_off(answers.back().error())) << "twice is enough";
  EXPECT_EQ(asked_3, 2);
  answers.pop_back();
  ASSERT_TRUE(is_ok(answers.back()));
  EXPECT_EQ(answers.back().value(), answer);
  answers.pop_back();
  for (const auto& one : answers) {
    ASSERT_TRUE(is_ok(one));
    EXPECT_EQ(one.value(), "the other came back");
  }
  answers = world.peers().call_all({{"n3", "work", ""}}, {}, 60s);
  EXPECT_TRUE(is_broken_off(answers.front().error()));
  EXPECT_EQ(asked_3, 3) << "once, unless it may be done twice";
}

TEST(Peers, WhoIsCancelledWaitsNoLonger) {
  TcpWorld world(4, {.silence = 60s});
  std::promise<void> end;
  const std::shared_future<void> ended = end.get_future().share();
  std::atomic<int> asked{0};
  for (size_t node : {1, 2, 3})
    world.server(node)->handle("wait", [&asked, ended](std::string_view, const std::string&) {
      ++asked;
      ended.wait();
      return Result<std::string>("");
    });
  std::vector<Peers::Call> calls;
  for (int i = 0; i < 300; ++i)
    calls.push_back({TcpWorld::name(1 + i % 3), "wait", ""});  // not all at once
  std::stop_source stop;
  std::thread canceller([&] {
    while (asked < 100) std::this_thread::sleep_for(1ms);
    stop.request_stop();
  });
  for (const auto& answer : world.peers().call_all(calls, {}, 60s, stop.get_token()))
    EXPECT_TRUE(has_error(answer, Code::kCancelled));
  canceller.join();
  end.set_value();
}

TEST(Peers, AHandlerThatTakesLongIsNoDeadNode) {
  TcpWorld world(2, {.silence = 1500ms});
  world.server(1)->handle("sleep", [](std::string_view, const std::string&) {
    std::this_thread::sleep_for(3s);
    return Result<std::string>("slept");
  });
  EXPECT_EQ(world.peers().call("n1", "sleep", "", 60s).value(), "slept");
}

TEST(Peers, ACallEndsAtItsDeadlineAndWhenItIsCancelled) {
  TcpWorld world(2);
  std::atomic<bool> go{false};
  world.server(1)->handle("wait", [&](std::string_view, const std::string&) {
    while (!go) std::this_thread::sleep_for(10ms);
    return Result<std::string>("");
  });
  const Result<std::string> late = world.peers().call("n1", "wait", "", 200ms);
  EXPECT_TRUE(has_error(late, Code::kUnavailable, "not known"));
  EXPECT_FALSE(is_broken_off(late.error()));
  std::stop_source stop;
  std::thread canceller([&] {
    std::this_thread::sleep_for(100ms);
    stop.request_stop();
  });
  EXPECT_TRUE(
      has_error(world.peers().call("n1", "wait", "", 60s, stop.get_token()), Code::kCancelled));
  canceller.join();
  go = true;
}

TEST(Peers, ADeadNodeIsNoticed) {
  TcpWorld world(2, {.silence = 1500ms});
  world.server(1)->handle(
      "wait", [&](std::string_view, const std::string&) { return Result<std::string>(""); });
  Relay relay(world.server(1)->address(), [](int) { return Relay::Plan{.stall_after = 300}; });
  world.peers().set("n1", relay.address());
  Result<std::string> answer = std::string();
  while (answer) answer = world.peers().call("n1", "wait", "", 60s);
  EXPECT_TRUE(has_error(answer, Code::kUnavailable, "no answer in time"));
  EXPECT_FALSE(is_broken_off(answer.error())) << "it may be at it";
  EXPECT_EQ(world.numbers(1).broken_connections, 1u);
}

TEST(Peers, ADamagedAnswerIsNoAnswer) {
  TcpWorld world(2);
  world.server(1)->handle("text", [&](std::string_view, const std::string&) {
    std::string text(100'000, ' ');
    for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>(i * i >> 3);
    return Result<std::string>(text);
  });
  Relay relay(world.server(1)->address(), [](int) { return Relay::Plan{.swap_at = 50'001}; });
  world.peers().set("n1", relay.address());
  const Result<std::string> damaged = world.peers().call("n1", "text", "", 60s);
  EXPECT_TRUE(has_error(damaged, Code::kUnavailable, "damaged"));
  EXPECT_TRUE(is_broken_off(damaged.error()));
  EXPECT_EQ(world.numbers(1).checksum_failures, 1u);
}

TEST(Peers, ABodyThatIsTooLongIsRefusedBeforeItIsSent) {
  TcpWorld world(2);
  const std::string body(kMaxCallBytes + 1, '\0');
  EXPECT_TRUE(has_error(world.peers().call("n1", "x", body, 60s), Code::kInvalidArgument));
  EXPECT_EQ(world.numbers(1).connections, 0u);
}

TEST(Peers, ARemovedNodeIsNotAskedAndCountersStay) {
  TcpWorld world(2);
  world.server(1)->handle("echo", [](std::string_view request, const std::string&) {
    return Result<std::string>(std::string(request));
  });
  EXPECT_TRUE(is_ok(world.peers().call("n1", "echo", "x", 10s)));
  world.peers().remove("n1");
  EXPECT_TRUE(has_error(world.peers().call("n1", "echo", "x", 10s), Code::kUnavailable, "address"));
  EXPECT_EQ(world.numbers(1).connections, 1u);
  EXPECT_EQ(world.numbers(1).bytes_sent, world.server(1)->numbers()[0].bytes_received);
}

}  // namespace
}  // namespace ptc
