// The threads that take a mount's requests: how many there are, and what interrupts them.
#include "fs/kernel/server_threads.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <future>
#include <thread>

#include "fs/kernel/stuck_check.h"
#include "store/base/file.h"

namespace ptc {
namespace {

using std::chrono::milliseconds;

constexpr int kWake = SIGUSR2;

/// Requests of one byte: 'b' is at work until all are released, 'w' waits for others as long, 'q'
/// is answered at once. At work is who reads from a pipe.
class ServerThreadsTest : public testing::Test {
 protected:
  void SetUp() override {
    struct sigaction wake = {};
    wake.sa_handler = [](int) {};
    ::sigaction(kWake, &wake, nullptr);
    int ends[2];
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends), 0);
    ours_ = UniqueFd(ends[0]);
    theirs_ = UniqueFd(ends[1]);
    ASSERT_EQ(::pipe(ends), 0);
    hold_ = UniqueFd(ends[0]);
    release_ = UniqueFd(ends[1]);
  }
  void TearDown() override {
    release_ = UniqueFd();
    if (servers_ == nullptr) return;
    ours_ = UniqueFd();
    servers_->stop();
  }

  void start(unsigned most) {
    auto serve = [this](ServerThreads::Place& place) { this->serve(place); };
    servers_ = std::make_unique<ServerThreads>(
        ServerThreads::Options{most, kWake, std::move(serve), [this] { ++stirred_; }});
    ASSERT_TRUE(servers_->start());
  }
  void serve(ServerThreads::Place& place) {
    while (!place.is_spare()) {
      char request = 0;
      place.receives();
      const ssize_t got = ::read(theirs_.get(), &request, 1);
      const int error = errno;
      place.received(got > 0);
      if (got < 0 && error == EINTR) continue;
      if (got <= 0) break;
      if (request == 'w' && !servers_->note_waiting(1)) ++alone_;
      if (request != 'q') be_at_work(request == 'w' ? waiting_ : at_work_);
      if (request == 'w') servers_->note_waiting(-1);
      ++done_;
      place.served();
    }
  }
  void be_at_work(std::atomic<int>& count) {
    ++count;
    char nothing = 0;
    if (::read(hold_.get(), &nothing, 1) < 0) ++interrupted_;
    --count;
  }
  void ask(char request, int times = 1) {
    for (int i = 0; i < times; ++i) ASSERT_EQ(::write(ours_.get(), &request, 1), 1);
  }
  template <class True>
  static void until(True yes) {
    while (!yes()) std::this_thread::sleep_for(milliseconds(1));
  }

  UniqueFd ours_, theirs_, hold_, release_;
  std::unique_ptr<ServerThreads> servers_;
  std::atomic<int> at_work_{0}, waiting_{0}, done_{0}, alone_{0}, interrupted_{0}, stirred_{0};
};

TEST_F(ServerThreadsTest, OthersBeginWhileAllAreAtWork) {
  start(6);
  EXPECT_EQ(servers_->threads(), 2);
  ask('b', 5);
  until([&] { return at_work_ == 5 && servers_->threads() == 6; });
  ask('b', 3);
  until([&] { return at_work_ == 6; });
  std::this_thread::sleep_for(milliseconds(50));
  EXPECT_EQ(servers_->threads(), 6);
  EXPECT_EQ(at_work_, 6);
  release_ = UniqueFd();
  until([&] { return done_ == 8; });
}

TEST_F(ServerThreadsTest, StuckAreThoseThatAreAllAtWorkAndBeginNothing) {
  StuckCheck check(std::chrono::seconds(10));
  StuckCheck::Clock::time_point now{};
  uint64_t begun = 6;
  const auto is_stuck = [&](int seconds) {
    return check.look(servers_->none_is_free(), begun, now + std::chrono::seconds(seconds))
        .has_value();
  };
  start(6);
  ask('b', 5);
  until([&] { return at_work_ == 5 && servers_->threads() == 6; });
  EXPECT_FALSE(is_stuck(0) || is_stuck(100));  // one is free
  ask('b');
  until([&] { return at_work_ == 6 && servers_->none_is_free(); });
  EXPECT_FALSE(is_stuck(200) || is_stuck(209));
  EXPECT_TRUE(is_stuck(210) && is_stuck(400));
  ++begun;  // it went on in between
  EXPECT_FALSE(is_stuck(410) || is_stuck(419));
  EXPECT_TRUE(is_stuck(420));
  release_ = UniqueFd();
  until([&] { return done_ == 6; });
  EXPECT_FALSE(is_stuck(430));
}

TEST_F(ServerThreadsTest, WhatWaitsLeavesThreadsToAllElse) {
  start(3);
  ask('w', 40);
  until([&] { return waiting_ == 40; });
  ask('b', 2);
  until([&] { return at_work_ == 2; });
  ask('q');
  until([&] { return done_ == 1; });
  EXPECT_LE(servers_->threads(), 43);
  EXPECT_EQ(alone_, 0);
  release_ = UniqueFd();
  until([&] { return done_ == 43 && servers_->threads() <= 3; });
}

TEST_F(ServerThreadsTest, ThoseThatNobodyNeedsEndAndWhoIsAtWorkIsNotInterrupted) {
  start(24);
  ask('b', 20);
  until([&] { return at_work_ == 20 && servers_->threads() >= 21; });
  for (int i = 0; i < 10; ++i) {
    const char go = 1;
    ASSERT_EQ(::write(release_.get(), &go, 1), 1);
  }
  until([&] { return done_ == 10; });
  servers_->end_spare();
  EXPECT_GE(servers_->threads(), 21);  // they were needed a moment ago
  until([&] {
    servers_->end_spare();
    return servers_->threads() <= 11;
  });
  for (int i = 0; i < 1000; ++i) servers_->end_spare();
  EXPECT_EQ(interrupted_, 0);
  EXPECT_EQ(at_work_, 10);
  EXPECT_EQ(servers_->threads(), 11);  // and one for whatever comes
  release_ = UniqueFd();
  until([&] {
    servers_->end_spare();
    return servers_->threads() == 2;
  });
  ask('q', 100);
  until([&] { return done_ == 120; });
}

TEST_F(ServerThreadsTest, EndsWhileThreadsComeAndGo) {
  start(8);
  std::atomic<bool> end = false;
  std::thread reaper([&] {
    while (!end) servers_->end_spare();
  });
  for (int round = 0; round < 300; ++round) {
    ask('q', 20);
    ask('b', 4);
    const std::string go(4, 'g');
    ASSERT_EQ(::write(release_.get(), go.data(), go.size()), 4);
    until([&] { return done_ == 24 * (round + 1); });
  }
  end = true;
  reaper.join();
  EXPECT_EQ(interrupted_, 0);
}

TEST_F(ServerThreadsTest, TellsOfTheNextRequestOnce) {
  start(4);
  ask('q');
  until([&] { return done_ == 1; });
  EXPECT_EQ(stirred_, 0);
  servers_->tell_next();
  ask('q', 10);
  until([&] { return done_ == 11; });
  EXPECT_EQ(stirred_, 1);
  EXPECT_FALSE(servers_->is_gone());
  ours_ = UniqueFd();
  until([&] { return servers_->wait(milliseconds(10)); });
  EXPECT_TRUE(servers_->is_gone());
  EXPECT_GE(stirred_, 2);
}

}  // namespace
}  // namespace ptc
