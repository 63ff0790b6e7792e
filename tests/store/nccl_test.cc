// The transport over links, with devices that are none: what NCCL does, a socket does.
#include <gmock/gmock.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <filesystem>
#include <map>
#include <sstream>
#include <thread>

#include "link_world.h"
#include "store/net/address.h"
#include "store/rpc/handshake.h"
#include "store/rpc/messages.h"
#include "transport_conformance.h"

namespace ptc {
namespace {

using namespace std::chrono_literals;
constexpr uint64_t kChunk = 64 << 10;

std::unique_ptr<TransportWorld> make_link_world() { return std::make_unique<LinkWorld>(); }
INSTANTIATE_TEST_SUITE_P(Link, TransportConformance,
                         testing::Values(TransportBackend{"link", &make_link_world}));

/// What is on a device and is to come to a device, and whether it did.
class LinkTransport : public testing::Test {
 protected:
  struct Target {
    DeviceMemory memory;
    Bytes expected;
  };

  void make(const LinkWorld::Options& options) {
    items_.clear();
    targets_.clear();  // before their device
    world_ = std::make_unique<LinkWorld>(options);
  }
  void make() { make(LinkWorld::Options{}); }

  LinkNode& node(size_t i) { return world_->node(i); }
  DeviceMemory on_device(uint32_t here, const Bytes& bytes) {
    const Devices& devices = *node(0).devices();
    DeviceMemory memory = devices.find(NodeMemory::cuda(here))->allocate(bytes.size()).value();
    EXPECT_TRUE(is_ok(devices.write(memory.begin(), bytes)));
    return memory;
  }
  Bytes back(const DeviceMemory& memory) {
    Bytes bytes(memory.bytes());
    const MemoryPointer begin = memory.begin();
    EXPECT_TRUE(
        is_ok(node(0).devices()->read({begin.memory(), begin.address()}, whole_copy(bytes.size()),
                                      0, bytes.size(), bytes.data())));
    return bytes;
  }
  ImageRef seen_on(size_t i, const Bytes& content, uint32_t there) {
    return world_->seen(i, node(i).publish(content, NodeMemory::cuda(there)));
  }

  /// An image of a node, wanted whole on a device of n0.
  void want(size_t from, uint64_t bytes, uint32_t there = 0, uint32_t here = 0) {
    const Bytes content = random_bytes(bytes, random_);
    want(seen_on(from, content, there), content, here);
  }
  void want(ImageRef image, const Bytes& content, uint32_t here = 0) {
    targets_.push_back({on_device(here, Bytes(content.size(), std::byte{1})), content});
    items_.push_back({image.get(), whole_copy(content.size()), 0, content.size(),
                      targets_.back().memory.begin()});
    images_.push_back(std::move(image));
  }
  Result<> fetch(std::stop_token stop = {}) { return world_->transport().fetch(items_, stop); }
  void expect_all_came() {
    for (size_t i = 0; i < items_.size(); ++i) {
      EXPECT_EQ(items_[i].begin, items_[i].end) << i;
      EXPECT_TRUE(back(targets_[i].memory) == targets_[i].expected) << i;
    }
  }

  std::unique_ptr<LinkWorld> world_;
  std::mt19937_64 random_{1};
  std::vector<ImageRef> images_;
  std::vector<Target> targets_;
  std::vector<FetchItem> items_;
};

/// Random items of all nodes into both devices, among them some that go another way, against a
/// plain copy; and that nothing beside them is written, and nothing of them came another way.
TEST_F(LinkTransport, RandomItemsComeOverLinksAlone) {
  const char* given = std::getenv("PTC_SEED");
  const uint64_t first = given ? std::strtoull(given, nullptr, 10) : std::random_device()();
  make();
  for (uint64_t seed = first; seed < first + 40 && !HasFailure(); ++seed) {
    SCOPED_TRACE("PTC_SEED=" + std::to_string(seed));
    std::mt19937_64 random(seed);
    struct One {
      size_t node;
      uint32_t there, here;
      StridedCopy copy;
      uint64_t at, bytes;  // in the memory of the target's device
    };
    // An image on each device of each node, and a target on each device of n0.
    std::map<std::pair<size_t, uint32_t>, Bytes> contents;
    Bytes expected[2];
    std::vector<One> all;
    for (size_t i = 1 + random() % 25; i > 0; --i) {
      One one{1 + random() % 2,
              static_cast<uint32_t>(random() % 2),
              static_cast<uint32_t>(random() % 2),
              {},
              0,
              0};
      uint64_t image_bytes = 0;
      one.copy = random_copy(random, image_bytes, one.bytes);
      if (random() % 10 == 0) {  // one of many chunks
        const uint64_t run = 1000 + random() % 3000, count = 100 + random() % 100;
        one.copy = {};
        one.copy.run_bytes = run;
        one.copy.levels[0] = {count, run + random() % 9, run + random() % 9};
        one.copy.level_count = 1;
        one.bytes = one.copy.target_end() + random() % 9;
        image_bytes = one.copy.source_end();
      }
      Bytes& image = contents[{one.node, one.there}];
      one.copy.source_offset += image.size();
      const Bytes array = random_bytes(image_bytes, random);
      image.insert(image.end(), array.begin(), array.end());
      one.at = expected[one.here].size();
      const Bytes before = random_bytes(one.bytes, random);
      expected[one.here].insert(expected[one.here].end(), before.begin(), before.end());
      all.push_back(one);
    }
    std::map<std::pair<size_t, uint32_t>, ImageRef> images;
    for (const auto& [place, content] : contents)
      images[place] = seen_on(place.first, content, place.second);
    DeviceMemory memory[2];
    for (uint32_t here : {0, 1}) memory[here] = on_device(here, expected[here]);
    std::vector<FetchItem> items;
    for (const One& one : all) {
      uint64_t begin = 0, end = one.bytes;
      if (random() % 2 == 0) {
        begin = random() % (one.bytes + 1);
        end = begin + random() % (one.bytes - begin + 1);
      }
      run_strided_copy(one.copy, contents[{one.node, one.there}].data(), begin, end,
                       expected[one.here].data() + one.at + begin);
      items.push_back({images[{one.node, one.there}].get(), one.copy, begin, end,
                       memory[one.here].begin() + one.at + begin});
    }
    ASSERT_TRUE(is_ok(world_->transport().fetch(items, {})));
    for (size_t i = 0; i < items.size(); ++i) {
      EXPECT_EQ(items[i].begin, items[i].end);
      EXPECT_EQ(items[i].target_at_begin, memory[all[i].here].begin() + all[i].at + items[i].end);
    }
    for (uint32_t here : {0, 1}) EXPECT_TRUE(back(memory[here]) == expected[here]);
  }
  EXPECT_EQ(world_->bytes_by_next(), 0u);
  EXPECT_LE(node(0).links().asked(), 8u);
  EXPECT_LE(node(0).faults().made, 8) << "they are kept";
}

TEST_F(LinkTransport, WhatIsNoDevicesGoesTheOtherWayAtTheSameTime) {
  make();
  want(1, 300'000);
  // From the host's memory of another node, and into that of this.
  const Bytes content = random_bytes(100'000, random_);
  want(world_->seen(1, node(1).publish(content, NodeMemory::host())), content);
  const ImageRef on_device = seen_on(1, content, 1);
  Bytes here(content.size());
  items_.push_back(
      {on_device.get(), whole_copy(here.size()), 0, here.size(), in_host_memory(here.data())});
  ASSERT_TRUE(is_ok(fetch()));
  EXPECT_TRUE(here == content);
  items_.pop_back();
  expect_all_came();
  EXPECT_EQ(world_->bytes_by_next(), 200'000u);
}

TEST_F(LinkTransport, ALinkIsKeptForTheNextFetch) {
  make();
  for (int i = 0; i < 5; ++i) {
    want(1, 3 * kChunk + 5);
    ASSERT_TRUE(is_ok(fetch()));
  }
  expect_all_came();
  EXPECT_EQ(node(0).faults().made, 1);
  EXPECT_EQ(node(1).faults().made, 1);
  EXPECT_EQ(node(0).links().asked(), 1u);
  EXPECT_EQ(node(1).links().answered(), 1u);
}

TEST_F(LinkTransport, OneThatTheNodeHasNoMoreIsMadeAnew) {
  make();
  want(1, 10);
  ASSERT_TRUE(is_ok(fetch()));
  // Another process under the same name: no link is known there.
  world_->server(1).reset();
  const auto again = std::make_unique<LinkNode>(world_->directory() + "/again",
                                                DeviceLinksOptions{.chunk_bytes = kChunk});
  const auto server = again->serve("n1");
  world_->peers().set("n1", server->address());
  const Bytes content = random_bytes(5 * kChunk, random_);
  want(world_->seen(1, again->publish(content, NodeMemory::cuda(0))), content);
  ASSERT_TRUE(is_ok(fetch()));
  expect_all_came();
  EXPECT_EQ(node(0).faults().made, 2);
  EXPECT_EQ(again->faults().made, 1);
  EXPECT_EQ(world_->bytes_by_next(), 0u);
}

TEST_F(LinkTransport, TheOneThatNobodyUsedForLongestGivesWay) {
  LinkWorld::Options options;
  options.links.most = 2;
  make(options);
  for (int round = 0; round < 3; ++round)
    for (uint32_t there : {0, 1})
      for (size_t from : {1, 2}) {
        want(from, kChunk + 1, there);
        ASSERT_TRUE(is_ok(fetch()));
        EXPECT_LE(node(0).links().asked(), 2u);
        EXPECT_LE(node(from).links().answered(), 4u);  // of two devices
      }
  expect_all_came();
  EXPECT_EQ(node(0).faults().made, 12);
  EXPECT_EQ(world_->bytes_by_next(), 0u);
  // The last two are still there.
  want(1, 10, 1);
  want(2, 10, 1);
  ASSERT_TRUE(is_ok(fetch()));
  EXPECT_EQ(node(0).faults().made, 12);
}

TEST_F(LinkTransport, OneThatNobodyUsesEndsAndGivesItsMemoryBack) {
  LinkWorld::Options options;
  options.links.unused = 200ms;
  make(options);
  const auto used = [&](size_t i) {
    const Device::Room room = node(i).devices()->find(NodeMemory::cuda(0))->room().value();
    return room.bytes - room.free;
  };
  want(1, 3 * kChunk);
  const uint64_t here = used(0), there = used(1);
  for (int times = 0; times < 2; ++times) {
    ASSERT_TRUE(is_ok(fetch()));
    EXPECT_EQ(node(0).links().asked(), 1u);
    EXPECT_EQ(used(0), here + 2 * kChunk);
    std::this_thread::sleep_for(100ms);
    EXPECT_EQ(node(0).links().asked(), 1u);
    for (int i = 0; i < 500 && node(0).links().asked() + node(1).links().answered() > 0; ++i)
      std::this_thread::sleep_for(10ms);
    EXPECT_EQ(used(0), here);
    EXPECT_EQ(used(1), there);
    items_[0].begin = 0;
    items_[0].target_at_begin = targets_[0].memory.begin();
  }
  EXPECT_EQ(node(0).faults().made, 2);
  EXPECT_EQ(world_->bytes_by_next(), 0u);
}

TEST_F(LinkTransport, EachDeviceHasItsLinks) {
  LinkWorld::Options options;
  options.links.most = 1;
  make(options);
  const auto ask = [&](uint32_t here, auto time) {
    return node(0).links().ask("n1", NodeMemory::cuda(0), NodeMemory::cuda(here),
                               std::chrono::steady_clock::now() + time, {});
  };
  const auto first = ask(0, 10s), second = ask(1, 0s);
  EXPECT_TRUE(is_ok(first));
  EXPECT_TRUE(is_ok(second));
  EXPECT_TRUE(has_error(ask(1, 50ms), Code::kUnavailable, "all 1 links of cuda:1"));
  EXPECT_EQ(node(0).links().asked(), 2u);
}

TEST_F(LinkTransport, LinksThatNobodyUsesMakeRoomForAnother) {
  LinkWorld::Options options;
  options.links.chunk_bytes = 100 << 20;  // of 512 MiB
  options.links.most = 8;
  make(options);
  for (const size_t from : {1, 2, 1}) {
    want(from, 1000, 0);
    want(from, 1000, 1);
    ASSERT_TRUE(is_ok(fetch()));
    items_.clear();
  }
  EXPECT_EQ(world_->bytes_by_next(), 0u);
}

TEST_F(LinkTransport, ManyFetchesAtOnceWaitForTheFewLinks) {
  LinkWorld::Options options;
  options.links.most = 2;
  make(options);
  for (uint32_t i = 0; i < 24; ++i) want(1 + i % 2, 2 * kChunk + i, i / 2 % 2, 0);
  std::vector<std::thread> threads;
  for (FetchItem& item : items_)
    threads.emplace_back([&] { EXPECT_TRUE(is_ok(world_->transport().fetch({&item, 1}, {}))); });
  for (std::thread& thread : threads) thread.join();
  expect_all_came();
  EXPECT_LE(node(0).links().asked(), 2u);
  EXPECT_EQ(world_->bytes_by_next(), 0u);
}

TEST_F(LinkTransport, ANodeWithoutLinksIsAskedOnceInAWhile) {
  LinkWorld::Options options;
  options.others_have_links = false;
  options.transport.refusal = 300ms;
  make(options);
  for (int i = 0; i < 5; ++i) {
    want(1, 1000);
    ASSERT_TRUE(is_ok(fetch()));
  }
  expect_all_came();
  EXPECT_EQ(world_->bytes_by_next(), 5'000u);
  EXPECT_EQ(world_->numbers(1).retries, 1u);
  EXPECT_EQ(node(0).faults().ids, 0) << "no id is made that nobody uses";
  std::this_thread::sleep_for(350ms);
  want(1, 1000);
  ASSERT_TRUE(is_ok(fetch()));
  EXPECT_EQ(world_->numbers(1).retries, 2u);
  expect_all_came();
}

TEST_F(LinkTransport, ANodeWithLinksOfAnotherKindTakesNoPart) {
  LinkWorld::Options options;
  options.kind_of_others = "host memory 2";
  make(options);
  for (int i = 0; i < 2; ++i) {
    want(1, 1000);
    ASSERT_TRUE(is_ok(fetch()));
  }
  expect_all_came();
  EXPECT_EQ(world_->bytes_by_next(), 2'000u);
  EXPECT_EQ(world_->numbers(1).retries, 1u);
}

TEST_F(LinkTransport, ALinkThatCannotBeMadeIsNotTriedAgainAtOnce) {
  for (const size_t bad : {0, 1}) {
    SCOPED_TRACE(bad);
    LinkWorld::Options options;
    options.links.connect = 2s;
    make(options);
    node(bad).faults().connects = [](int) -> Result<> {
      return Error(Code::kUnavailable, "no way through");
    };
    const auto before = std::chrono::steady_clock::now();
    for (int i = 0; i < 3; ++i) {
      want(1, 1000);
      ASSERT_TRUE(is_ok(fetch()));
    }
    EXPECT_LT(std::chrono::steady_clock::now() - before, 4s);
    expect_all_came();
    EXPECT_EQ(world_->bytes_by_next(), 3'000u);
    EXPECT_EQ(world_->numbers(1).retries, 1u);
    EXPECT_EQ(node(0).links().asked(), 0u);
  }
}

TEST_F(LinkTransport, WhatALinkThatBreaksDidNotBringComesTheOtherWay) {
  for (const bool sender : {false, true}) {
    SCOPED_TRACE(sender);
    make();
    const auto fails = [](int number) -> Result<> {
      if (number == 4) return Error(Code::kUnavailable, "the cable is out");
      return ok();
    };
    if (sender) node(1).faults().sends = fails;
    else node(0).faults().receives = fails;
    for (int i = 0; i < 5; ++i) want(1, 2 * kChunk);
    ASSERT_TRUE(is_ok(fetch()));
    expect_all_came();
    // Three chunks came over the link; where the sender says so, some may still be on their way.
    const uint64_t came_otherwise = world_->bytes_by_next();
    EXPECT_GE(came_otherwise, 7 * kChunk);
    EXPECT_LE(came_otherwise, (sender ? 10 : 7) * kChunk);
    EXPECT_EQ(node(0).links().asked(), 0u);
    // And the next one is made anew.
    want(1, 10);
    ASSERT_TRUE(is_ok(fetch()));
    EXPECT_EQ(world_->bytes_by_next(), came_otherwise);
    expect_all_came();
  }
}

TEST_F(LinkTransport, WhatCameDamagedIsNotTaken) {
  make();
  const Devices& devices = *node(0).devices();
  node(0).faults().received = [&, chunks = 0](MemoryPointer at, uint64_t bytes) mutable {
    if (++chunks != 3) return;
    const MemoryPointer victim = at + bytes / 2;
    Bytes one(1);
    EXPECT_TRUE(
        is_ok(devices.read({at.memory(), victim.address()}, whole_copy(1), 0, 1, one.data())));
    one[0] ^= std::byte{4};
    EXPECT_TRUE(is_ok(devices.write(victim, one)));
  };
  want(1, 5 * kChunk);
  ASSERT_TRUE(is_ok(fetch()));
  expect_all_came();
  EXPECT_EQ(world_->bytes_by_next(), 3 * kChunk);
  EXPECT_EQ(world_->numbers(1).checksum_failures, 1u);
}

TEST_F(LinkTransport, AnErrorAboutAnImageLeavesTheLink) {
  make();
  want(1, 3 * kChunk);
  want(1, 20);
  const Image gone(ImageId{"0123456789abcdef"}, {"n1", NodeMemory::cuda(0)}, 100);
  items_.push_back({&gone, whole_copy(100), 0, 100, targets_[0].memory.begin()});
  EXPECT_TRUE(has_error(fetch(), Code::kUnavailable, "0123456789abcdef"));
  EXPECT_EQ(items_.back().begin, 0u);
  EXPECT_EQ(world_->bytes_by_next(), 0u);
  items_.pop_back();
  // In another memory than it should be: by its name it is found all the same.
  const Bytes content = random_bytes(kChunk, random_);
  const ImageRef elsewhere = node(1).publish(content, NodeMemory::cuda(1));
  want(std::make_shared<const Image>(elsewhere->id(), MemoryPlace{"n1", NodeMemory::cuda(0)},
                                     content.size()),
       content);
  ASSERT_TRUE(is_ok(fetch()));
  EXPECT_EQ(world_->bytes_by_next(), kChunk);
  // Shorter than it should be.
  const ImageRef shorter = seen_on(1, Bytes(50), 0);
  items_.push_back({shorter.get(), whole_copy(100), 0, 100, targets_[0].memory.begin()});
  EXPECT_TRUE(has_error(fetch(), Code::kCorrupt, shorter->id().text));
  items_.pop_back();
  EXPECT_EQ(node(0).faults().made, 1);
  EXPECT_EQ(node(1).faults().made, 1);
  expect_all_came();
}

/// As a driver does, and NCCL: the network's threads do not wait for that, and the node pings.
TEST_F(LinkTransport, AMakerThatIsFoundSlowlyIsWaitedFor) {
  make();
  node(1).faults().finds = [] { std::this_thread::sleep_for(4s); };
  want(1, 3 * kChunk);
  ASSERT_TRUE(is_ok(fetch()));
  expect_all_came();
  EXPECT_EQ(world_->bytes_by_next(), 0u);
}

TEST_F(LinkTransport, ACallThatIsCancelledEndsAtOnce) {
  make();
  std::stop_source stop;
  std::atomic<bool> stands = false;
  node(1).faults().sends = [&](int number) -> Result<> {
    if (number == 3) {
      stands = true;
      while (!stop.stop_requested()) std::this_thread::sleep_for(1ms);
      std::this_thread::sleep_for(500ms);
    }
    return ok();
  };
  want(1, 6 * kChunk);
  std::thread canceller([&] {
    while (!stands) std::this_thread::sleep_for(1ms);
    stop.request_stop();
  });
  const Result<> fetched = fetch(stop.get_token());
  canceller.join();
  EXPECT_TRUE(has_error(fetched, Code::kCancelled));
  EXPECT_EQ(world_->bytes_by_next(), 0u);
  EXPECT_LE(items_[0].begin, 3 * kChunk);
  node(1).faults().sends = nullptr;
  ASSERT_TRUE(is_ok(fetch()));  // the rest of it
  expect_all_came();
}

/// A node in a process of its own, whose link ends as the environment says. Not a test of its own.
TEST(LinkHolder, DISABLED_Serves) {
  const std::string directory = std::getenv("PTC_HOLDER");
  const int signal = std::atoi(std::getenv("PTC_HOLDER_SIGNAL"));
  LinkNode node(directory + "/n1", {.chunk_bytes = kChunk});
  node.faults().sends = [signal](int number) -> Result<> {
    if (number != 4) return ok();
    std::this_thread::sleep_for(300ms);  // what was sent before has come
    ::kill(::getpid(), signal);
    std::this_thread::sleep_for(1s);  // until it has stopped
    return ok();
  };
  std::mt19937_64 random(77);
  const ImageRef image = node.publish(random_bytes(10 * kChunk, random), NodeMemory::cuda(0));
  const auto server = node.serve("n1");
  std::printf("\nHOLDER %s %s\n", server->address().c_str(), image->id().text.c_str());
  std::fflush(stdout);
  ::sleep(60);
}

class LinkHolderThat : public LinkTransport, public testing::WithParamInterface<int> {
 protected:
  ~LinkHolderThat() override {
    if (child_ <= 0) return;
    (void)::kill(child_, SIGKILL);
    (void)::waitpid(child_, nullptr, 0);
    (void)::close(out_);
  }
  /// The words behind HOLDER.
  std::pair<std::string, std::string> begin(int signal) {
    int ends[2];
    EXPECT_EQ(::pipe(ends), 0);
    std::string where = "PTC_HOLDER=" + world_->directory();
    std::string how = "PTC_HOLDER_SIGNAL=" + std::to_string(signal);
    child_ = ::fork();
    if (child_ == 0) {
      ::dup2(ends[1], 1);
      ::putenv(where.data());
      ::putenv(how.data());
      ::execl("/proc/self/exe", "nccl_test", "--gtest_filter=LinkHolder.DISABLED_Serves",
              "--gtest_also_run_disabled_tests", nullptr);
      ::_exit(127);
    }
    ::close(ends[1]);
    out_ = ends[0];
    std::string text;
    char some[256];
    for (;;) {
      const size_t at = text.find("HOLDER ");
      if (at != std::string::npos && text.find('\n', at) != std::string::npos) {
        std::istringstream words(text.substr(at + 7));
        std::pair<std::string, std::string> said;
        words >> said.first >> said.second;
        return said;
      }
      const ssize_t got = ::read(out_, some, sizeof some);
      if (got <= 0) return {};
      text.append(some, static_cast<size_t>(got));
    }
  }

  pid_t child_ = -1;
  int out_ = -1;
};
INSTANTIATE_TEST_SUITE_P(Signal, LinkHolderThat, testing::Values(SIGKILL, SIGSTOP));

/// It dies, or stands still, in the middle. What came stays, and another holder has the rest.
TEST_P(LinkHolderThat, EndsInTheMiddleIsGivenUpAndAnotherOneGoesOn) {
  LinkWorld::Options options;
  options.peers.silence = 2s;
  options.links.silence = 3s;
  make(options);
  world_->server(1).reset();
  std::filesystem::remove_all(world_->directory() + "/n1");
  const auto [address, id] = begin(GetParam());
  ASSERT_FALSE(id.empty());
  world_->peers().set("n1", address);
  std::mt19937_64 random(77);
  const Bytes content = random_bytes(10 * kChunk, random);
  want(std::make_shared<const Image>(ImageId{id}, MemoryPlace{"n1", NodeMemory::cuda(0)},
                                     content.size()),
       content);
  const auto before = std::chrono::steady_clock::now();
  EXPECT_TRUE(has_error(fetch(), Code::kUnavailable, "n1"));
  EXPECT_LT(std::chrono::steady_clock::now() - before, 15s);
  EXPECT_GE(items_[0].begin, 3 * kChunk);
  EXPECT_LT(items_[0].begin, content.size());
  EXPECT_EQ(node(0).links().asked(), 0u);
  // The same bytes are on n2.
  const ImageRef other = seen_on(2, content, 1);
  items_[0].source = other.get();
  ASSERT_TRUE(is_ok(fetch()));
  expect_all_came();
  EXPECT_EQ(world_->bytes_by_next(), 0u);
}

/// A node that answers a fetch on a device as `answer` wants it.
class HostileNode {
 public:
  using Answer = std::function<Task<>(Connection&)>;
  explicit HostileNode(Answer answer) : answer_(std::move(answer)) {
    auto listening = listen_on(PeerAddress::parse("127.0.0.1:0").value()).value();
    address_ = listening.address;
    listener_ = std::move(listening.fd);
    thread_ = std::thread([this] { serve(); });
  }
  ~HostileNode() {
    ending_ = true;
    ::shutdown(listener_.get(), SHUT_RDWR);
    thread_.join();
  }
  const std::string& address() const { return address_; }

 private:
  void serve() {
    while (!ending_) {
      pollfd fd{listener_.get(), POLLIN, 0};
      if (::poll(&fd, 1, 100) <= 0) continue;
      UniqueFd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!socket.valid()) continue;
      Connection connection(std::move(socket));
      (void)run_here([&](const IoExecutor& executor) {
        connection.attach(executor);
        return talk(connection);
      });
      connection.cut();
      connection.detach();
    }
  }
  Task<> talk(Connection& connection) {
    const Identity self{"n1", "test", Credentials::load({}).value()};
    PTC_CO_TRY(co_await admit(connection, self));
    PTC_CO_TRY(auto header, co_await connection.receive_header());
    PTC_CO_TRY(auto body, co_await connection.receive_body(header));
    if (header.type != FrameType::kDeviceFetch)
      co_return co_await connection.send(FrameType::kError, header.request,
                                         encode(Error(Code::kNotFound, "nothing")));
    co_return co_await answer_(connection);
  }

  const Answer answer_;
  std::string address_;
  UniqueFd listener_;
  std::atomic<bool> ending_ = false;
  std::thread thread_;
};

TEST_F(LinkTransport, ANodeThatSpeaksNonsenseHarmsNobody) {
  const auto reply = [](uint64_t bytes) {
    return std::pair{FrameType::kReply, encode(CallHeader{"", bytes})};
  };
  const auto chunk = [](uint64_t bytes) {
    return std::pair{FrameType::kDeviceChunk, encode(DeviceChunk{bytes, {}})};
  };
  using Frames = std::vector<std::pair<FrameType, std::string>>;
  const Frames scripts[] = {
      {reply(10 * kChunk)},                  // of a link that was never made
      {reply(10 * kChunk), chunk(kChunk)},   //
      {reply(5)},                            // another number of bytes
      {chunk(kChunk)},                       // before it begins
      {{FrameType::kData, "data"}},          //
      {{FrameType::kDeviceChunk, "short"}},  //
      {{FrameType::kError, "\xff"}},         //
      {{FrameType::kError, encode(Error(Code::kConflict, "make it"))},
       reply(10 * kChunk),
       chunk(2 * kChunk)},  // larger than the buffer
  };
  for (size_t i = 0; i < std::size(scripts); ++i) {
    SCOPED_TRACE(i);
    make();
    world_->server(1).reset();
    HostileNode hostile([&](Connection& connection) -> Task<> {
      for (const auto& [type, body] : scripts[i]) {
        PTC_CO_TRY(co_await connection.send(type, 0, body));
        if (type != FrameType::kError || body.size() < 5) continue;
        PTC_CO_TRY(auto header, co_await connection.receive_header());
        PTC_CO_TRY(co_await connection.receive_body(header));
      }
      co_return ok();
    });
    world_->peers().set("n1", hostile.address());
    const Image image(ImageId{"0123456789abcdef"}, {"n1", NodeMemory::cuda(0)}, 10 * kChunk);
    const DeviceMemory memory = on_device(0, Bytes(10 * kChunk));
    std::vector<FetchItem> items{{&image, whole_copy(10 * kChunk), 0, 10 * kChunk, memory.begin()}};
    EXPECT_TRUE(has_error(world_->transport().fetch(items, {}), Code::kUnavailable));
    EXPECT_EQ(items[0].begin, 0u);
    EXPECT_EQ(node(0).links().asked(), 0u);
  }
}

}  // namespace
}  // namespace ptc
