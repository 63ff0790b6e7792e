// The TCP transport on a bad network, and among bad peers.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <thread>

#include "tcp_world.h"
#include "tests/support/relay.h"

namespace ptc {
namespace {

using namespace std::chrono_literals;
using Plan = Relay::Plan;
constexpr uint64_t kHandshakeBytes = 4096;  // a Plan's counts may not fall into it

/// n1 has one image of random bytes, and n0 reaches it through the relay.
class TcpFaults : public testing::Test {
 protected:
  static constexpr size_t kBytes = 20 << 20;

  /// Patient enough for a machine that is busy with other things.
  explicit TcpFaults(PeersOptions options = {.connect = 30s, .silence = 60s})
      : world_(2, options) {}
  void go_through(Relay::Plans plans) {
    relay_ = std::make_unique<Relay>(world_.server(1)->address(), std::move(plans));
    world_.peers().set("n1", relay_->address());
  }
  FetchItem item() {
    return {image_.get(), whole_copy(kBytes), 0, kBytes, in_host_memory(target_.data())};
  }
  Result<> fetch(std::span<FetchItem> items, std::stop_token stop = {}) {
    return world_.transport().fetch(items, stop);
  }
  bool arrived(size_t bytes) {
    return std::equal(content_.begin(), content_.begin() + static_cast<ptrdiff_t>(bytes),
                      target_.begin());
  }

  TcpWorld world_;
  std::mt19937_64 random_{3};
  Bytes content_ = random_bytes(kBytes, random_);
  Bytes target_ = Bytes(kBytes);
  ImageRef image_ = world_.seen(1, world_.publish(1, content_));
  std::unique_ptr<Relay> relay_;
};

/// Gives up soon.
class TcpSilence : public TcpFaults {
 protected:
  TcpSilence() : TcpFaults({.silence = 1500ms}) {}
};

TEST_F(TcpFaults, AStreamThatIsCutGoesOnWhereItWas) {
  go_through([](int connection) {
    return connection < 3 ? Plan{.cut_after = (uint64_t{5} << 20) + 77} : Plan{};
  });
  std::array items{item()};
  ASSERT_TRUE(is_ok(fetch(items)));
  EXPECT_TRUE(arrived(kBytes));
  const PeerNumbers numbers = world_.numbers(1);
  EXPECT_EQ(numbers.retries, 3u);
  EXPECT_EQ(numbers.broken_connections, 3u);
  EXPECT_EQ(numbers.connections, 4u);
  EXPECT_LT(numbers.bytes_received, kBytes + 4 * (1 << 20))
      << "of each stream one chunk came twice";
}

TEST_F(TcpFaults, SwappedWordsAreSeenCountedAndAskedForAgain) {
  go_through([](int connection) {
    return connection < 3 ? Plan{.swap_at = (uint64_t{3} << 20) + 1001} : Plan{};
  });
  std::array items{item()};
  ASSERT_TRUE(is_ok(fetch(items)));
  EXPECT_TRUE(arrived(kBytes));
  EXPECT_EQ(world_.numbers(1).checksum_failures, 3u);
  EXPECT_EQ(relay_->connections(), 4);
}

TEST_F(TcpFaults, BytesThatAlwaysComeDamagedAreNeverDelivered) {
  go_through([](int) { return Plan{.swap_at = kHandshakeBytes}; });
  std::array items{item()};
  EXPECT_TRUE(has_error(fetch(items), Code::kUnavailable, "damaged"));
  EXPECT_EQ(items[0].begin, 0u);
  EXPECT_EQ(world_.numbers(1).checksum_failures, 5u);
}

TEST_F(TcpFaults, AfterItIsGivenUpTheSameItemsGoOnElsewhere) {
  go_through([](int connection) {
    return Plan{.cut_after = connection == 0 ? uint64_t{6} << 20 : kHandshakeBytes};
  });
  std::array items{item()};
  ASSERT_TRUE(has_error(fetch(items), Code::kUnavailable, "n1"));
  EXPECT_GT(items[0].begin, 0u);
  EXPECT_TRUE(arrived(items[0].begin));
  EXPECT_EQ(items[0].target_at_begin, in_host_memory(target_.data() + items[0].begin));
  world_.peers().set("n1", world_.server(1)->address());
  ASSERT_TRUE(is_ok(fetch(items)));
  EXPECT_TRUE(arrived(kBytes));
}

TEST_F(TcpSilence, AStreamThatStandsStillGoesOnOverAnother) {
  go_through([](int connection) {
    return connection == 0 ? Plan{.stall_after = uint64_t{5} << 20} : Plan{};
  });
  std::array items{item()};
  ASSERT_TRUE(is_ok(fetch(items)));
  EXPECT_TRUE(arrived(kBytes));
  EXPECT_GE(world_.numbers(1).retries, 1u);
}

TEST_F(TcpSilence, ANodeThatIsSilentForGoodIsUnavailable) {
  go_through(
      [](int connection) { return Plan{.stall_after = connection == 0 ? uint64_t{5} << 20 : 0}; });
  std::array items{item()};
  EXPECT_TRUE(has_error(fetch(items), Code::kUnavailable, "n1"));
  EXPECT_GT(items[0].begin, 0u);
}

TEST_F(TcpFaults, ANodeThatIsGoneIsUnavailableAndTheOthersAreNotDelayed) {
  TcpWorld world(3);
  const Bytes content = random_bytes(100'000, random_);
  ImageRef good = world.seen(2, world.publish(2, content));
  ImageRef lost = world.seen(1, world.publish(1, content));
  world.server(1).reset();
  Bytes target(200'000);
  std::array items{
      FetchItem{lost.get(), whole_copy(100'000), 0, 100'000, in_host_memory(target.data())},
      FetchItem{good.get(), whole_copy(100'000), 0, 100'000,
                in_host_memory(target.data() + 100'000)}};
  EXPECT_TRUE(has_error(world.transport().fetch(items, {}), Code::kUnavailable, "n1"));
  EXPECT_EQ(items[0].begin, 0u);
  EXPECT_EQ(items[1].begin, 100'000u);
  EXPECT_TRUE(std::equal(content.begin(), content.end(), target.begin() + 100'000));
}

TEST_F(TcpSilence, ASlowLinkIsNotADeadNode) {
  constexpr uint64_t kPart = 2 << 20;  // takes longer than n0 waits for one byte
  go_through([](int) { return Plan{.delay = 50ms}; });
  std::array items{item()};
  items[0].end = kPart;
  ASSERT_TRUE(is_ok(fetch(items)));
  EXPECT_TRUE(arrived(kPart));
}

TEST_F(TcpFaults, AStreamIsCancelledInTheMiddle) {
  go_through([](int) { return Plan{.stall_after = uint64_t{5} << 20}; });
  std::stop_source stop;
  std::thread canceller([&] {
    std::this_thread::sleep_for(200ms);
    stop.request_stop();
  });
  std::array items{item()};
  EXPECT_TRUE(has_error(fetch(items, stop.get_token()), Code::kCancelled));
  canceller.join();
  EXPECT_GT(items[0].begin, 0u);
  EXPECT_TRUE(arrived(items[0].begin));
}

TEST_F(TcpFaults, AServerThatStartsAgainIsFoundAgain) {
  std::array items{item()};
  ASSERT_TRUE(is_ok(fetch(items)));
  PeerServerOptions options = world_.server_options(1);
  options.listen = world_.server(1)->address();
  world_.server(1).reset();
  world_.server(1) = PeerServer::start(options).value();
  std::fill(target_.begin(), target_.end(), std::byte{});
  items = {item()};
  ASSERT_TRUE(is_ok(fetch(items)));
  EXPECT_TRUE(arrived(kBytes));
  EXPECT_EQ(world_.numbers(1).retries, 0u) << "the closed connection was not used";
}

TEST_F(TcpFaults, AManglingNetworkDeliversNothingWrong) {
  const char* given = std::getenv("PTC_SEED");
  const uint64_t seed = given ? std::strtoull(given, nullptr, 10) : std::random_device()();
  SCOPED_TRACE("PTC_SEED=" + std::to_string(seed));
  std::mt19937_64 random(seed);
  std::mutex mutex;
  go_through([&](int) {
    std::lock_guard lock(mutex);
    Plan plan;
    const uint64_t at = kHandshakeBytes + random() % (4 << 20);
    if (random() % 2 == 0) plan.cut_after = at;
    if (random() % 2 == 0) plan.swap_at = kHandshakeBytes + random() % (4 << 20);
    plan.piece_bytes = 1 + random() % (1 << 20);
    return plan;
  });
  std::array items{item()};
  while (!fetch(items)) ASSERT_TRUE(arrived(items[0].begin));
  EXPECT_TRUE(arrived(kBytes));
}

}  // namespace
}  // namespace ptc
