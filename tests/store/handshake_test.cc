// Who is let in, and what becomes of those who speak nonsense.
#include "store/rpc/handshake.h"

#include <fcntl.h>
#include <poll.h>
#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <future>
#include <iterator>
#include <sstream>

#include "store/rpc/connection.h"
#include "store/rpc/messages.h"
#include "tcp_world.h"
#include "tests/support/sockets.h"

namespace ptc {
namespace {

using namespace std::chrono_literals;

/// A connection of a thread that waits for it.
class Stranger {
  template <class Step>
  auto here(Step step) {
    auto result = run_here([&](const IoExecutor& executor) {
      connection_.attach(executor);
      return step();
    });
    connection_.detach();
    return result;
  }

 public:
  explicit Stranger(UniqueFd socket) : connection_(std::move(socket)) {}

  Result<> greets(const std::string& other, const std::string& name = "x") {
    const Identity self{name, "test", Credentials::load({}).value()};
    return here([&] { return greet(connection_, self, other); });
  }
  Result<> sends(FrameType type, uint64_t request, std::string_view body) {
    return here([&] { return connection_.send(type, request, body); });
  }
  Result<std::string> gets(FrameType type, uint64_t request) {
    return here([&] { return connection_.expect(type, request); });
  }
  bool looks_alive() const { return connection_.looks_alive(); }
  Result<FrameHeader> receives() {
    return here([&] { return connection_.receive_header(); });
  }

 private:
  Connection connection_;
};

class Handshake : public testing::Test {
 protected:
  std::string secret_file(const std::string& name, const std::string& text, mode_t mode = 0600) {
    const std::string path = world_.directory() + "/" + name;
    std::ofstream(path) << text;
    ::chmod(path.c_str(), mode);
    return path;
  }
  PeerAuth secret(char letter) {
    return {.secret_file =
                secret_file(std::string("secret-") + letter, std::string(40, letter) + "\n")};
  }
  void start(PeerServerOptions options) {
    server_ = PeerServer::start(std::move(options)).value();
    server_->handle(
        "who", [](std::string_view, const std::string& from) { return Result<std::string>(from); });
  }
  PeerServerOptions serving(PeerAuth auth = {}) {
    PeerServerOptions options = world_.server_options(1);
    options.auth = auth;
    return options;
  }
  /// What a node gets that asks the server who it is.
  Result<std::string> ask(PeersOptions options, const std::string& other = "n1") {
    if (options.node.empty()) options.node = "asker";
    if (options.cluster.empty()) options.cluster = "test";
    auto peers = Peers::create(options).value();
    peers->set(other, server_->address());
    return peers->call(other, "who", "", 10s);
  }
  /// A connection to the server without a handshake.
  std::unique_ptr<Stranger> stranger() {
    auto address = PeerAddress::parse(server_->address()).value();
    return std::make_unique<Stranger>(connect_here(address).value());
  }
  /// Sends bytes, and what the server does then: true when it closes.
  bool is_cut_off_after(std::string_view bytes) {
    auto address = PeerAddress::parse(server_->address()).value();
    UniqueFd socket = connect_here(address).value();
    EXPECT_EQ(::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
    char rest[4096];
    for (;;) {
      if (!comes(socket.get(), POLLIN, std::chrono::steady_clock::now() + 20s)) return false;
      if (::recv(socket.get(), rest, sizeof rest, 0) <= 0) return true;
    }
  }
  std::string header(FrameType type, uint32_t bytes) {
    FrameHeaderBytes raw = encode(FrameHeader{type, 0, bytes, 0});
    return {reinterpret_cast<const char*>(raw.data()), raw.size()};
  }

  TcpWorld world_{2};
  std::unique_ptr<PeerServer> server_;
};

TEST_F(Handshake, ASharedSecretLetsInWhoKnowsIt) {
  start(serving(secret('a')));
  EXPECT_EQ(ask({.auth = secret('a')}).value(), "asker");
  EXPECT_TRUE(has_error(ask({.auth = secret('b')}), Code::kPermissionDenied, "secret is another"));
  EXPECT_TRUE(has_error(ask({}), Code::kPermissionDenied, "secret"));
  EXPECT_EQ(server_->numbers().size(), 1u);
  start(serving());
  EXPECT_TRUE(has_error(ask({.auth = secret('a')}), Code::kPermissionDenied, "no shared secret"));
}

TEST_F(Handshake, AnotherClusterAndAnotherNodeAreRefused) {
  start(serving(secret('a')));
  EXPECT_TRUE(has_error(ask({.cluster = "other", .auth = secret('a')}), Code::kPermissionDenied,
                        "of cluster other"));
  EXPECT_TRUE(comes_to_refuse(*server_, 1));
  EXPECT_TRUE(
      has_error(ask({.auth = secret('a')}, "n2"), Code::kUnavailable, "node n1 now, not n2"));
}

TEST_F(Handshake, ASecretThatOthersMayReadIsRefused) {
  auto load = [&](const std::string& path) { return Credentials::load({.secret_file = path}); };
  const std::string good(40, 'x');
  EXPECT_TRUE(is_ok(load(secret_file("good", good))));
  EXPECT_TRUE(
      has_error(load(secret_file("read", good, 0640)), Code::kInvalidArgument, "chmod 600"));
  EXPECT_TRUE(
      has_error(load(secret_file("short", "short\n")), Code::kInvalidArgument, "openssl rand"));
  EXPECT_TRUE(has_error(load(secret_file("second", good + "\nshort\n")), Code::kInvalidArgument,
                        "in line 2"));
  EXPECT_TRUE(
      has_error(load(secret_file("empty", " \n\n")), Code::kInvalidArgument, "no shared secret"));
  EXPECT_TRUE(has_error(load(secret_file("long", std::string(5000, 'x'))), Code::kInvalidArgument));
  EXPECT_TRUE(has_error(load(world_.directory()), Code::kInvalidArgument, "regular"));
  EXPECT_TRUE(has_error(load(world_.directory() + "/none"), Code::kNotFound, "none"));
}

TEST_F(Handshake, ASecretIsExchangedWhileNodesRun) {
  const std::string old_line(40, 'o'), new_line(40, 'n');
  const std::string path = secret_file("of-the-server", old_line + "\n");
  start(serving({.secret_file = path}));
  const auto asks_with = [&](const std::string& text) {
    return ask({.auth = {.secret_file = secret_file("of-the-asker", text)}});
  };
  const auto server_has = [&](const std::string& text) {
    const std::string beside = secret_file("beside", text);
    ASSERT_EQ(::rename(beside.c_str(), path.c_str()), 0);
  };
  EXPECT_TRUE(is_ok(asks_with(old_line + "\n" + new_line)));
  EXPECT_TRUE(has_error(asks_with(new_line + "\n" + old_line), Code::kPermissionDenied,
                        "secret is another"));
  server_has("\n" + old_line + " \r\n\n" + new_line);
  EXPECT_TRUE(is_ok(asks_with(new_line + "\n" + old_line)));
  EXPECT_TRUE(is_ok(asks_with(old_line + "\n" + new_line)));
  EXPECT_TRUE(has_error(asks_with(new_line), Code::kPermissionDenied,
                        "secret is another"));  // the server proves the old one
  server_has(new_line + "\n");
  EXPECT_TRUE(is_ok(asks_with(new_line)));
  EXPECT_TRUE(has_error(asks_with(old_line), Code::kPermissionDenied, "secret is another"));
  server_has("too short");
  EXPECT_TRUE(is_ok(asks_with(new_line)));
  server_has(old_line);
  EXPECT_TRUE(is_ok(asks_with(old_line)));
}

TEST_F(Handshake, OffLoopbackAListenerWantsAuthentication) {
  PeerServerOptions options = serving();
  options.listen = "0.0.0.0:0";
  EXPECT_TRUE(has_error(PeerServer::start(options), Code::kInvalidArgument, "shared secret"));
  options.auth = secret('a');
  EXPECT_TRUE(is_ok(PeerServer::start(options)));
  options.auth = {.insecure = true};
  EXPECT_TRUE(is_ok(PeerServer::start(options)));
}

TEST_F(Handshake, StrangersDoNotKeepOthersOutNorFillTheLog) {
  auto lines = std::make_shared<std::ostringstream>();
  auto logger = std::make_shared<spdlog::logger>(
      "", std::make_shared<spdlog::sinks::ostream_sink_mt>(*lines));
  auto before = spdlog::default_logger();
  spdlog::set_default_logger(logger);
  PeerServerOptions options = serving(secret('a'));
  options.max_strangers = 8;
  options.max_connections = 16;
  options.handshake = 60s;
  start(options);
  std::vector<std::unique_ptr<Stranger>> silent;
  for (int i = 0; i < 200; ++i) silent.push_back(stranger());
  EXPECT_TRUE(comes_to_refuse(*server_, 200 - 8));
  EXPECT_EQ(ask({.auth = secret('a')}).value(), "asker");
  EXPECT_TRUE(comes_to_refuse(*server_, 200 - 7));
  server_.reset();
  spdlog::set_default_logger(before);
  const std::string text = lines->str();
  EXPECT_GE(std::count(text.begin(), text.end(), '\n'), 1);
  EXPECT_LE(std::count(text.begin(), text.end(), '\n'), 10);
}

TEST_F(Handshake, ANameThatIsNoLabelIsRefused) {
  start(serving(secret('a')));
  for (const char* name : {"W1", "w.1", "../w", "-w", "w_1"})
    EXPECT_TRUE(
        has_error(ask({.node = name, .auth = secret('a')}), Code::kPermissionDenied, "DNS label"));
  for (const char* good : {"w1", "0", "a-b", "ip-10-0-0-1"})
    EXPECT_TRUE(is_ok(check_node_name(good))) << good;
  EXPECT_TRUE(is_ok(check_node_name(std::string(63, 'x'))));
  EXPECT_TRUE(
      has_error(check_node_name(std::string(64, 'x')), Code::kInvalidArgument, "DNS label"));
}

TEST_F(Handshake, EveryAddressIsNoneToConnectTo) {
  auto wildcard = [](const char* text) { return is_wildcard(PeerAddress::parse(text).value()); };
  for (const char* all : {"0.0.0.0:1", "0:1", "[::]:1", "[0:0::0]:1", "[::ffff:0.0.0.0]:1"})
    EXPECT_TRUE(wildcard(all)) << all;
  for (const char* one : {"127.0.0.1:1", "[::1]:1", "localhost:1", "w1:1"})
    EXPECT_FALSE(wildcard(one)) << one;
}

TEST_F(Handshake, AddressesThatCannotBeListenedOnSayWhatToDo) {
  start(serving());
  auto refused = [&](const std::string& listen, Code code, std::string_view part) {
    PeerServerOptions options = serving();
    options.listen = listen;
    return has_error(PeerServer::start(options), code, part);
  };
  EXPECT_TRUE(refused(server_->address(), Code::kUnavailable, "choose another port"));
  EXPECT_TRUE(refused("192.0.2.1:0", Code::kUnavailable, "address of this machine"));
  for (const char* bad : {"", "w1", "w1:", ":7070", "w1:x", "w1:70000", "1::2:7070", "a b:1"})
    EXPECT_TRUE(refused(bad, Code::kInvalidArgument, "is no address")) << bad;
}

TEST_F(Handshake, NonsenseIsCutOff) {
  start(serving());
  std::string damaged = header(FrameType::kHello, 100);
  damaged[17] ^= 1;
  const std::string hello = encode(Hello{"test", "x", std::string(kNonceBytes, 'n'), ""});
  std::mt19937_64 random(5);
  const Bytes noise = random_bytes(4000, random);
  for (const std::string& bytes : {
           std::string("GET / HTTP/1.1\r\nHost: w1:7070\r\n\r\n"), damaged,
           std::string(reinterpret_cast<const char*>(noise.data()), noise.size()),
           header(FrameType::kHello, UINT32_MAX),  // longer than a greeting may be
           header(FrameType::kFetch, 100),         // not before the greeting
           header(static_cast<FrameType>(99), 0),
           header(FrameType::kHello, 100) + std::string(100, '\xff'),
           header(FrameType::kHello, static_cast<uint32_t>(hello.size())) +
               hello,  // its checksum is 0
       })
    EXPECT_TRUE(is_cut_off_after(bytes));
  EXPECT_TRUE(comes_to_refuse(*server_, 8));
  EXPECT_EQ(ask({}).value(), "asker") << "others are served";
}

TEST_F(Handshake, WhoSaysNothingIsCutOff) {
  PeerServerOptions options = serving();
  options.handshake = 200ms;
  start(options);
  EXPECT_TRUE(is_cut_off_after(""));
  EXPECT_TRUE(is_cut_off_after(header(FrameType::kHello, 100).substr(0, 20)));
}

TEST_F(Handshake, WhoWasLetInIsCutOffForNonsenseToo) {
  start(serving());
  FetchRequest fetch;
  fetch.images = {"0123456789abcdef"};
  fetch.parts = {{.image = 0, .runs = whole_copy(10), .begin = 0, .end = 10}};
  std::string far = encode(fetch);
  far[4 + 4 + 16 + 4] = 1;  // image number 1 of one
  fetch.parts[0].runs.level_count = 1;
  fetch.parts[0].runs.levels[0] = {UINT64_MAX, UINT64_MAX, 0};
  DeviceFetchRequest device;  // with chunks of no bytes
  device.fetch.images = fetch.images;
  const std::pair<FrameType, std::string> nonsense[] = {
      {FrameType::kFetch, far},
      {FrameType::kFetch, encode(fetch)},
      {FrameType::kFetch, "\xff\xff\xff\xff"},
      {FrameType::kDeviceFetch, encode(device)},
      {FrameType::kDeviceFetch, "\xff\xff\xff\xff"},
      {FrameType::kDeviceChunk, encode(DeviceChunk{1, {}})},
      {FrameType::kCall, encode(CallHeader{"who", UINT64_MAX})},
      {FrameType::kReply, encode(CallHeader{"", 0})},
      {FrameType::kData, "data"},
  };
  for (const auto& [type, body] : nonsense) {
    auto connection = stranger();
    ASSERT_TRUE(is_ok(connection->greets("n1")));
    ASSERT_TRUE(is_ok(connection->sends(type, 5, body)));
    EXPECT_TRUE(has_error(connection->receives(), Code::kUnavailable));
  }
  EXPECT_EQ(server_->numbers()[0].broken_connections, std::size(nonsense));
  EXPECT_EQ(ask({}).value(), "asker") << "others are served";
}

TEST_F(Handshake, BeyondTheCapTheOneThatIsIdleForLongestGivesWay) {
  PeerServerOptions options = serving();
  options.max_connections = 2;
  start(options);
  std::vector<std::unique_ptr<Stranger>> idle;
  for (size_t i = 0; i < 20; ++i) {
    idle.push_back(stranger());
    ASSERT_TRUE(is_ok(idle.back()->greets("n1"))) << i;
    while (server_->numbers().empty() || server_->numbers()[0].connections < i + 1)
      std::this_thread::sleep_for(1ms);
    std::this_thread::sleep_for(5ms);
  }
  auto is_open = [&](size_t i) { return idle[i]->looks_alive(); };
  for (size_t i = 0; i < 18; ++i)
    while (is_open(i)) std::this_thread::sleep_for(1ms);
  EXPECT_TRUE(is_open(18) && is_open(19));
  EXPECT_EQ(server_->refused(), 0u);
  EXPECT_EQ(ask({}).value(), "asker");
}

TEST_F(Handshake, BeyondTheCapOneIsClosedWhenNoneIsIdle) {
  PeerServerOptions options = serving();
  options.max_connections = 2;
  start(options);
  std::promise<void> end;
  std::atomic<int> called = 0;
  server_->handle("wait",
                  [&, ended = end.get_future().share()](std::string_view, const std::string&) {
                    ++called;
                    ended.wait();
                    return Result<std::string>(std::string());
                  });
  std::vector<std::unique_ptr<Stranger>> busy;
  for (int i = 0; i < 2; ++i) {
    busy.push_back(stranger());
    EXPECT_TRUE(is_ok(busy.back()->greets("n1")));
    EXPECT_TRUE(is_ok(busy.back()->sends(FrameType::kCall, 1, encode(CallHeader{"wait", 0}))));
  }
  while (called < 2) std::this_thread::sleep_for(1ms);
  auto third = stranger();
  EXPECT_TRUE(has_error(third->greets("n1"), Code::kUnavailable));
  end.set_value();
  for (auto& one : busy) EXPECT_TRUE(is_ok(one->gets(FrameType::kReply, 1)));
  Result<std::string> answer = std::string();
  do answer = ask({});
  while (!answer);  // as soon as one is idle
  EXPECT_EQ(answer.value(), "asker");
}

size_t own_threads() {
  const auto tasks = std::filesystem::directory_iterator("/proc/self/task");
  return static_cast<size_t>(std::distance(begin(tasks), end(tasks)));
}

/// A cluster of many nodes: each keeps a connection to each, and no thread for it.
TEST_F(Handshake, ManyNodesAreLetIn) {
  PeerServerOptions options = serving();
  EXPECT_EQ(options.max_connections, descriptors_for_peers());
  start(options);
  const size_t count = std::min(descriptors_for_peers(), size_t{300});
  const size_t threads = own_threads();
  std::vector<std::unique_ptr<Stranger>> all;
  for (size_t i = 0; i < count; ++i) {
    all.push_back(stranger());
    ASSERT_TRUE(is_ok(all.back()->greets("n1", fmt::format("w{}", i)))) << i;
  }
  EXPECT_EQ(own_threads(), threads);
  EXPECT_EQ(server_->refused(), 0u);
}

TEST_F(Handshake, APeerThatReadsNothingStopsOnlyItself) {
  PeerServerOptions options = serving();
  options.silence = 300ms;
  start(options);
  std::mt19937_64 random(5);
  const Bytes content = random_bytes(32 << 20, random);
  FetchRequest fetch;
  fetch.images = {world_.publish(1, content)->id().text};
  fetch.parts = {
      {.image = 0, .runs = whole_copy(content.size()), .begin = 0, .end = content.size()}};
  auto idle = stranger();
  ASSERT_TRUE(is_ok(idle->greets("n1")));
  ASSERT_TRUE(is_ok(idle->sends(FrameType::kFetch, 1, encode(fetch))));
  EXPECT_EQ(ask({}).value(), "asker");
  while (server_->numbers()[1].broken_connections == 0) std::this_thread::sleep_for(20ms);
  EXPECT_LT(server_->numbers()[1].bytes_sent, content.size());
}

}  // namespace
}  // namespace ptc
