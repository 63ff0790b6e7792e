#include "fs/http/http_server.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <future>
#include <iostream>
#include <iterator>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>

#include "store/base/file.h"

namespace ptc {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

TEST(HttpAddress, IsReadAsPeopleWriteIt) {
  auto parsed = [](std::string_view text) {
    auto address = HttpAddress::parse(text);
    return address ? address.value().host + " " + address.value().port : address.error().message();
  };
  EXPECT_EQ(parsed("127.0.0.1:9090"), "127.0.0.1 9090");
  EXPECT_EQ(parsed("[::1]:0"), "::1 0");
  EXPECT_EQ(parsed(":80"), "127.0.0.1 80");
  EXPECT_EQ(parsed("localhost:9090"), "localhost 9090");
  for (const char* bad : {"", "9090", "a:", "a:b", "a:1x", "a:65536", "a:-1", "::1:80", "[::1]",
                          "[]:80", "http://a:80", "a:80/", "a b:80", "a:99999999999"})
    EXPECT_THAT(parsed(bad), HasSubstr("is no address to listen on")) << bad;
}

class HttpServerTest : public ::testing::Test {
 protected:
  void start(const HttpLimits& limits = {}) {
    auto server = HttpServer::listen({"127.0.0.1", "0"}, limits);
    ASSERT_TRUE(server) << server.error().message();
    server_ = std::move(server).value();
    server_->serve([](std::string_view path) -> std::optional<HttpReply> {
      if (path != "/at_once") return std::nullopt;
      HttpReply reply;
      reply.body = "at once";
      reply.may_be_kept = false;
      return reply;
    });
    EXPECT_THAT(ask(get("/")), StartsWith("HTTP/1.1 503 "));
    server_->show([this](std::string_view path) {
      if (path == "/slow") slow_.get_future().wait();
      if (path == "/throws") throw std::runtime_error("on purpose");
      HttpReply reply;
      reply.body = "path " + std::string(path);
      return reply;
    });
  }
  int port() const { return std::stoi(server_->url().substr(server_->url().rfind(':') + 1)); }

  UniqueFd connect() const {
    UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port()));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    return fd;
  }
  static void send(const UniqueFd& fd, const std::string& text) {
    EXPECT_EQ(::send(fd.get(), text.data(), text.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(text.size()));
  }
  /// All that comes until the server closes.
  static std::string receive(const UniqueFd& fd) {
    std::string all;
    char part[4096];
    for (ssize_t got; (got = ::recv(fd.get(), part, sizeof part, 0)) > 0;) all.append(part, got);
    return all;
  }
  std::string ask(const std::string& text) const {
    UniqueFd fd = connect();
    send(fd, text);
    return receive(fd);
  }
  static std::string get(const std::string& path, const std::string& more = "") {
    return "GET " + path + " HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + more + "\r\n";
  }

  std::promise<void> slow_;  // what /slow waits for
  std::unique_ptr<HttpServer> server_;
};

TEST_F(HttpServerTest, AnswersWithThePathAlone) {
  start();
  EXPECT_THAT(ask(get("/a%20b?c=d")), EndsWith("\r\n\r\npath /a%20b"));
  EXPECT_THAT(ask(get("/throws")), StartsWith("HTTP/1.1 500 "));
  EXPECT_THAT(ask(get("http://localhost/")), StartsWith("HTTP/1.1 400 "));
}

TEST_F(HttpServerTest, NoForeignNameLeadsHere) {
  start();
  auto with_host = [&](const std::string& host) {
    return ask("GET / HTTP/1.1\r\nHost: " + host + "\r\nConnection: close\r\n\r\n");
  };
  for (const char* ours : {"127.0.0.1", "127.0.0.1:80", "[::1]:80", "LocalHost:1", "10.1.2.3"})
    EXPECT_THAT(with_host(ours), StartsWith("HTTP/1.1 200 ")) << ours;
  for (const char* foreign : {"evil.example", "localhost.evil.example", "127.0.0.1.evil.example"})
    EXPECT_THAT(with_host(foreign), StartsWith("HTTP/1.1 421 ")) << foreign;
  EXPECT_THAT(ask("GET / HTTP/1.1\r\nConnection: close\r\n\r\n"), StartsWith("HTTP/1.1 400 "));
  EXPECT_THAT(ask("GET / HTTP/1.0\r\n\r\n"), StartsWith("HTTP/1.1 200 "));
}

TEST_F(HttpServerTest, WhatIsUnchangedIsNotSentAgain) {
  start();
  const std::string first = ask(get("/"));
  const size_t tag = first.find("ETag: ");
  ASSERT_NE(tag, std::string::npos) << first;
  const std::string value = first.substr(tag + 6, first.find('\r', tag) - tag - 6);
  EXPECT_THAT(ask(get("/", "If-None-Match: " + value + "\r\n")),
              ::testing::AllOf(StartsWith("HTTP/1.1 304 "), EndsWith("\r\n\r\n")));
  EXPECT_THAT(ask(get("/else", "If-None-Match: " + value + "\r\n")), StartsWith("HTTP/1.1 200 "));
}

TEST_F(HttpServerTest, WhatIsAnsweredAtOnceWaitsForNoPage) {
  start({.page = std::chrono::milliseconds(100)});
  UniqueFd slow = connect(), behind = connect();
  send(slow, get("/slow"));
  send(behind, get("/behind"));
  const std::string first = ask(get("/at_once?x"));
  EXPECT_THAT(first, EndsWith("\r\n\r\nat once"));
  EXPECT_THAT(first, HasSubstr("Cache-Control: no-store\r\n"));
  EXPECT_THAT(first, ::testing::Not(HasSubstr("ETag")));
  std::this_thread::sleep_for(std::chrono::milliseconds(150));
  EXPECT_THAT(ask(get("/late")), StartsWith("HTTP/1.1 503 "));
  EXPECT_THAT(ask(get("/at_once")), StartsWith("HTTP/1.1 200 "));
  slow_.set_value();
  EXPECT_THAT(receive(slow), EndsWith("path /slow"));
  EXPECT_THAT(receive(behind), EndsWith("path /behind"));
  EXPECT_THAT(ask(get("/late")), EndsWith("path /late"));
}

TEST_F(HttpServerTest, RubbishIsABadRequest) {
  start();
  EXPECT_THAT(ask("rubbish\r\n\r\n"), StartsWith("HTTP/1.1 400 "));
  EXPECT_THAT(ask(get("/", "X: " + std::string(20000, 'x') + "\r\n")), StartsWith("HTTP/1.1 431 "));
}

// Bytes are changed, cut out and put in; whatever comes, the server answers in HTTP or not at all,
// and goes on. PTC_SEED=<seed> replays one run.
TEST_F(HttpServerTest, AnyBytesAreSurvived) {
  start();
  const char* given = std::getenv("PTC_SEED");
  const uint64_t seed = given ? std::strtoull(given, nullptr, 10) : std::random_device()();
  std::cout << "PTC_SEED=" << seed << "\n";
  std::mt19937_64 random(seed);
  const std::string good[] = {
      get("/a%20b?c=d"), get("/", "If-None-Match: \"1-2\"\r\n"),
      "POST / HTTP/1.1\r\nHost: [::1]:1\r\nContent-Length: 5\r\n\r\nabcde" + get("/"),
      "GET / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nExpect: 100-continue\r\n"
      "Upgrade: h2c\r\n\r\n5\r\nabcde\r\n0\r\n\r\n"};
  for (int round = 0; round < 500; ++round) {
    std::string text = good[random() % std::size(good)];
    for (uint64_t change = random() % 4; change-- > 0;) {
      const size_t at = random() % (text.size() + 1);
      switch (random() % 3) {
        case 0:
          text.insert(at, 1, static_cast<char>(random()));
          break;
        case 1:
          text.erase(at, random() % 8);
          break;
        default:
          text.insert(at, text.substr(random() % (text.size() + 1), random() % 40));
      }
    }
    UniqueFd fd = connect();
    (void)!::send(fd.get(), text.data(), text.size(), MSG_NOSIGNAL);
    ::shutdown(fd.get(), SHUT_WR);
    const std::string answer = receive(fd);
    ASSERT_TRUE(answer.empty() || answer.starts_with("HTTP/1.1 ")) << text << "\n" << answer;
  }
  EXPECT_THAT(ask(get("/")), StartsWith("HTTP/1.1 200 "));
}

TEST_F(HttpServerTest, WhoIsTooSlowIsCutOff) {
  start({.request = std::chrono::milliseconds(100)});
  UniqueFd silent = connect(), slow = connect();
  send(slow, "GET / HT");
  EXPECT_EQ(receive(silent), "");
  EXPECT_EQ(receive(slow), "");
}

TEST_F(HttpServerTest, MoreConnectionsThanAllowedWaitTheirTurn) {
  start({.connections = 2});
  UniqueFd first = connect(), second = connect(), third = connect();
  send(third, get("/third"));
  send(first, get("/first"));
  send(second, get("/second"));
  EXPECT_THAT(receive(first), EndsWith("path /first"));
  first = UniqueFd();
  EXPECT_THAT(receive(third), EndsWith("path /third"));
  EXPECT_THAT(receive(second), EndsWith("path /second"));
}

TEST_F(HttpServerTest, EndsWithConnectionsOpen) {
  start();
  UniqueFd idle = connect(), slow = connect();
  send(slow, "GET / HT");
  server_.reset();
  EXPECT_EQ(receive(idle), "");
  EXPECT_EQ(receive(slow), "");
}

TEST_F(HttpServerTest, APortThatIsTakenIsSaid) {
  start();
  auto second = HttpServer::listen({"127.0.0.1", std::to_string(port())});
  ASSERT_FALSE(second);
  EXPECT_THAT(second.error().message(), HasSubstr("another program listens there"));
  auto elsewhere = HttpServer::listen({"192.0.2.1", "0"});
  ASSERT_FALSE(elsewhere);
  EXPECT_THAT(elsewhere.error().message(), HasSubstr("an address of this machine"));
}

}  // namespace
}  // namespace ptc
