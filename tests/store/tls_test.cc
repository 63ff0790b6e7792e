// The same transport with mutual TLS, and who is let in by certificate.
#include <algorithm>
#include <array>
#include <filesystem>
#include <map>

#include "certificates.h"
#include "tcp_world.h"
#include "tests/support/relay.h"
#include "transport_conformance.h"

namespace ptc {
namespace {

using namespace std::chrono_literals;

Authority& authority() {
  static Authority the_one;
  return the_one;
}
/// Each node's files are made once.
PeerAuth auth_of(const std::string& node) {
  static std::map<std::string, PeerAuth> known;
  auto found = known.find(node);
  return found != known.end() ? found->second : known[node] = authority().issue(node);
}

std::vector<TransportBackend> backends() {
  if (!Authority::possible()) return {};
  return {{"tls", [] { return std::make_unique<TcpWorld>(4, PeersOptions{}, auth_of); }}};
}
INSTANTIATE_TEST_SUITE_P(Tls, TransportConformance, testing::ValuesIn(backends()));
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(TransportConformance);

class Tls : public testing::Test {
 protected:
  void SetUp() override {
    if (!Authority::possible()) GTEST_SKIP() << "openssl is not installed";
  }
  static Result<std::string> ask(TcpWorld& world, PeerAuth auth, const std::string& self = "n0",
                                 const std::string& other = "n1") {
    world.server(1)->handle(
        "who", [](std::string_view, const std::string& from) { return Result<std::string>(from); });
    auto peers = Peers::create({.node = self, .cluster = "test", .auth = auth}).value();
    peers->set(other, world.server(1)->address());
    return peers->call(other, "who", "", 10s);
  }
};

TEST_F(Tls, TheCertificateMustNameTheNode) {
  TcpWorld world(2, {}, auth_of);
  EXPECT_EQ(ask(world, auth_of("n0")).value(), "n0");
  EXPECT_TRUE(
      has_error(ask(world, auth_of("n0"), "n5"), Code::kPermissionDenied, "not for node n5"));
  TcpWorld other(2, {}, [](const std::string& node) {
    return node == "n1" ? authority().issue("impostor", "n7") : auth_of(node);
  });
  EXPECT_TRUE(has_error(ask(other, auth_of("n0")), Code::kPermissionDenied, "not for n1"));
}

TEST_F(Tls, AnotherAuthorityOrNoneIsRefused) {
  TcpWorld world(2, {}, auth_of);
  Authority other;
  PeerAuth stranger = other.issue("n0");
  EXPECT_TRUE(has_error(ask(world, stranger), Code::kPermissionDenied, "certificate"));
  stranger.ca_file = auth_of("n0").ca_file;  // believes the server, which does not believe it
  EXPECT_TRUE(has_error(ask(world, stranger), Code::kPermissionDenied, "unknown ca"));
  EXPECT_FALSE(ask(world, {}));
  TcpWorld plain(2);
  EXPECT_TRUE(has_error(ask(plain, auth_of("n0")), Code::kUnavailable, "certificates"));
  EXPECT_TRUE(comes_to_refuse(*world.server(1), 3));
}

TEST_F(Tls, DamageIsSeenAndAskedForAgain) {
  TcpWorld world(2, {}, auth_of);
  std::mt19937_64 random(3);
  const Bytes content = random_bytes(8 << 20, random);
  ImageRef image = world.seen(1, world.publish(1, content));
  Relay relay(world.server(1)->address(), [](int connection) {
    return connection < 2 ? Relay::Plan{.swap_at = 3'000'001}
                          : Relay::Plan{.cut_after = 30'000'000};
  });
  world.peers().set("n1", relay.address());
  Bytes target(content.size());
  std::array items{FetchItem{image.get(), whole_copy(content.size()), 0, content.size(),
                             in_host_memory(target.data())}};
  ASSERT_TRUE(is_ok(world.transport().fetch(items, {})));
  EXPECT_TRUE(target == content);
  EXPECT_EQ(world.numbers(1).checksum_failures, 2u);
}

TEST_F(Tls, CertificatesAreExchangedWhileNodesRun) {
  Authority changing;
  auto files = [&](const std::string& node) { return changing.issue(node); };
  TcpWorld world(2, {}, files);
  EXPECT_TRUE(is_ok(ask(world, files("n0"))));
  Authority next;
  const PeerAuth n0 = next.issue("n0"), n1 = next.issue("n1");
  EXPECT_TRUE(has_error(ask(world, n0), Code::kPermissionDenied));
  for (const char* file : {"ca.pem", "n1.pem", "n1.key"}) {
    std::filesystem::rename(next.file(file), changing.file("new"));
    std::filesystem::rename(changing.file("new"), changing.file(file));
  }
  PeerAuth with_new = n0;
  with_new.ca_file = changing.file("ca.pem");
  EXPECT_TRUE(is_ok(ask(world, with_new)));
}

TEST_F(Tls, FilesThatCannotBeUsedSayWhy) {
  auto load = [](PeerAuth auth) { return Credentials::load(auth); };
  const PeerAuth good = authority().issue("good");
  EXPECT_TRUE(is_ok(load(good)));
  PeerAuth bad = good;
  bad.ca_file.clear();
  EXPECT_TRUE(has_error(load(bad), Code::kInvalidArgument, "three files"));
  bad = good;
  bad.ca_file = "/none";
  EXPECT_TRUE(has_error(load(bad), Code::kInvalidArgument, "/none"));
  EXPECT_TRUE(has_error(load(bad), Code::kInvalidArgument, "No such file or directory"));
  bad.ca_file = std::filesystem::path(good.ca_file).parent_path();
  EXPECT_TRUE(has_error(load(bad), Code::kInvalidArgument, "Is a directory"));
  bad.ca_file = good.key_file;
  EXPECT_TRUE(has_error(load(bad), Code::kInvalidArgument, "holds no certificates in PEM"));
  bad = good;
  bad.cert_file += ".none";
  EXPECT_TRUE(has_error(load(bad), Code::kInvalidArgument, bad.cert_file + ": No such file"));
  bad = good;
  bad.key_file += ".none";
  EXPECT_TRUE(has_error(load(bad), Code::kNotFound, bad.key_file + ": No such file"));
  bad = good;
  bad.key_file = auth_of("n0").key_file;
  EXPECT_TRUE(has_error(load(bad), Code::kInvalidArgument, "not that of the certificate"));
  bad = good;
  bad.key_file = good.cert_file;
  ::chmod(good.cert_file.c_str(), 0600);
  EXPECT_TRUE(has_error(load(bad), Code::kInvalidArgument, "no private key"));
  ::chmod(good.key_file.c_str(), 0644);
  EXPECT_TRUE(has_error(load(good), Code::kInvalidArgument, "chmod 600"));
}

}  // namespace
}  // namespace ptc
