// A node that many ask, or come to, at the same time.
#include "store/rpc/peer_server.h"

#include <sys/resource.h>

#include <future>

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

  TcpWorld world_{2};
};

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
