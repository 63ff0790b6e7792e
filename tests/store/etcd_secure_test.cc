// etcd that wants to know whom it talks to.
#include <fcntl.h>
#include <signal.h>
#include <spdlog/sinks/base_sink.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>

#include "etcd_server.h"
#include "event_log.h"
#include "expect_error.h"
#include "store/meta/etcd_json.h"

namespace ptc {
namespace {

class EtcdSecure : public testing::Test {
 protected:
  void SetUp() override {
    if (!EtcdServers::installed()) GTEST_SKIP() << "etcd is not installed";
  }
  std::string write(const std::string& name, const std::string& text, mode_t mode = 0600) {
    std::string path = dir_.file(name);
    PTC_CHECK(write_file_atomically(AT_FDCWD, path, text).has_value());
    PTC_CHECK(::chmod(path.c_str(), mode) == 0);
    return path;
  }
  static auto refused(const EtcdOptions& options, Code code, std::string_view part) {
    return has_error(open_etcd_meta(options), code, part);
  }

  TempDir dir_;
};

/// Whether the log says something while this lives.
class Said {
 public:
  explicit Said(std::string text) : sink_(std::make_shared<Sink>(std::move(text))) {
    spdlog::set_default_logger(std::make_shared<spdlog::logger>("", sink_));
  }
  ~Said() { spdlog::set_default_logger(before_); }
  Said(const Said&) = delete;
  bool within(std::chrono::seconds time) const {
    const auto until = std::chrono::steady_clock::now() + time;
    while (!sink_->said && std::chrono::steady_clock::now() < until)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    return sink_->said;
  }

 private:
  struct Sink : spdlog::sinks::base_sink<std::mutex> {
    explicit Sink(std::string looked_for) : text(std::move(looked_for)) {}
    void sink_it_(const spdlog::details::log_msg& line) override {
      if (std::string_view(line.payload.data(), line.payload.size()).find(text) !=
          std::string_view::npos)
        said = true;
    }
    void flush_() override {}
    const std::string text;
    std::atomic<bool> said = false;
  };
  const std::shared_ptr<Sink> sink_;
  const std::shared_ptr<spdlog::logger> before_ = spdlog::default_logger();
};

TEST_F(EtcdSecure, UsersAndPasswords) {
  // A server that starts again knows tokens from what it has not put into a snapshot: none of
  // these.
  EtcdServers server(1, "http", {"--snapshot-count", "1"});
  EtcdOptions options = etcd_options(server.endpoints());
  options.patience = std::chrono::seconds(2);
  std::string prefix = "/" + options.cluster + "/";
  auto ask = [&](const char* method, const json::object& request) {
    auto answer = server.post(method, request);
    EXPECT_TRUE(answer && !answer->contains("error")) << method;
  };
  json::object all = range_of(prefix);
  all["permType"] = "READWRITE";
  ask("auth/user/add", {{"name", "root"}, {"password", "secret"}});
  ask("auth/user/grant", {{"user", "root"}, {"role", "root"}});
  ask("auth/role/add", {{"name", "ptc"}});
  ask("auth/role/grant", {{"name", "ptc"}, {"perm", all}});
  ask("auth/user/add", {{"name", "ptc"}, {"password", "pass:word"}});
  ask("auth/user/grant", {{"user", "ptc"}, {"role", "ptc"}});
  ask("auth/enable", {});

  EXPECT_TRUE(refused(options, Code::kPermissionDenied, "user name is empty"));
  options.credentials_file = dir_.file("none");
  EXPECT_TRUE(refused(options, Code::kNotFound, "none"));
  options.credentials_file = write("nonsense", "no colon\n");
  EXPECT_TRUE(refused(options, Code::kInvalidArgument, "user:password"));
  options.credentials_file = write("open", "ptc:pass:word\n", 0640);
  EXPECT_TRUE(refused(options, Code::kInvalidArgument, "chmod 600"));
  options.credentials_file = write("wrong", "ptc:other\n");
  EXPECT_TRUE(refused(options, Code::kPermissionDenied, "user 'ptc'"));
  EtcdOptions others = options;
  others.cluster = "not-mine";
  options.credentials_file = others.credentials_file = write("right", "ptc:pass:word\n");
  EXPECT_TRUE(refused(others, Code::kPermissionDenied, "permission denied"));

  options.patience = std::chrono::seconds(30);  // the server has to start again, below
  auto meta = open_etcd_meta(options).value();
  EventLog log;
  auto handle = meta->watch("", log.collect()).value();
  auto lease = meta->lease(std::chrono::seconds(60)).value();
  EXPECT_TRUE(is_ok(meta->commit({.leased_puts = {{"a", "1"}}, .lease = lease.get()})));
  EXPECT_EQ(log.wait_for(1).size(), 1u);
  // Tokens do not outlive the server …
  server.signal(0, SIGKILL);
  server.start(0);
  EXPECT_TRUE(is_ok(meta->commit({.puts = {{"b", "1"}}})));
  EXPECT_EQ(log.wait_for(2).size(), 2u);
  // … nor the rights of a user, which may come back.
  const json::object root{{"name", "root"}, {"password", "secret"}};
  const auto as_root = [&](const char* method, const json::object& request) {
    const auto token = server.post("auth/authenticate", root);
    ASSERT_TRUE(token && token->contains("token"));
    const auto answer =
        server.post(method, request, 0, std::string(token->at("token").as_string()));
    EXPECT_TRUE(answer && !answer->contains("error")) << method;
  };
  const Said nothing_is_heard("nothing is heard of what others decide");
  as_root("auth/user/revoke", {{"name", "ptc"}, {"role", "ptc"}});
  server.signal(0, SIGKILL);
  server.start(0);
  const auto kept_out = meta->get("b");
  ASSERT_TRUE(kept_out.has_error());
  EXPECT_EQ(kept_out.error().code(), Code::kPermissionDenied);
  EXPECT_TRUE(nothing_is_heard.within(std::chrono::seconds(30)));
  as_root("auth/user/grant", {{"user", "ptc"}, {"role", "ptc"}});
  EXPECT_TRUE(is_ok(meta->commit({.puts = {{"c", "1"}}})));
  EXPECT_EQ(log.wait_for(3).size(), 3u);
  lease.reset();
  // At once, unless etcd is busy with passwords: then a minute later, by itself.
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(90);
  while (meta->get("a").value() != std::nullopt && std::chrono::steady_clock::now() < until)
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_EQ(meta->get("a").value(), std::nullopt);
}

TEST_F(EtcdSecure, Certificates) {
  if (std::system("command -v openssl > /dev/null") != 0)
    GTEST_SKIP() << "openssl is not installed";
  auto openssl = [&](const std::string& arguments) {
    std::string command =
        fmt::format("cd {} && openssl {} 2> /dev/null", dir_.file("."), arguments);
    ASSERT_EQ(std::system(command.c_str()), 0) << command;
  };
  write("names", "subjectAltName = IP:127.0.0.1, DNS:localhost\n");
  write("elsewhere", "subjectAltName = IP:127.0.0.2\n");
  for (const char* authority : {"ca", "other-ca"})
    openssl(
        fmt::format("req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 "
                    "-subj /O={0} -keyout {0}.key -out {0}.pem",
                    authority));
  auto certificate = [&](const std::string& name, const std::string& names) {
    openssl(
        fmt::format("req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /O={0} "
                    "-keyout {0}.key -out {0}.csr",
                    name));
    openssl(
        fmt::format("x509 -req -in {0}.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 "
                    "-extfile {1} -out {0}.pem",
                    name, names));
    ::chmod(dir_.file(name + ".key").c_str(), 0600);
  };
  certificate("server", "names");
  certificate("client", "names");
  auto tls =
      TlsSource::open({dir_.file("ca.pem"), dir_.file("client.pem"), dir_.file("client.key")},
                      TlsUse::kClient)
          .value();
  EtcdServers server(1, "https",
                     {"--cert-file", dir_.file("server.pem"), "--key-file", dir_.file("server.key"),
                      "--client-cert-auth", "--trusted-ca-file", dir_.file("ca.pem")},
                     tls);
  EtcdOptions options = etcd_options(server.endpoints());
  options.patience = std::chrono::milliseconds(2000);
  EXPECT_TRUE(refused(options, Code::kUnavailable, "certificate verify failed"));
  options.ca_file = dir_.file("other-ca.pem");
  EXPECT_TRUE(refused(options, Code::kUnavailable, "certificate verify failed"));
  options.ca_file = dir_.file("names");
  EXPECT_TRUE(refused(options, Code::kInvalidArgument, "no certificates in PEM"));
  options.ca_file = dir_.file("ca.pem");
  EXPECT_TRUE(refused(options, Code::kUnavailable, options.endpoints[0]));  // who are you?
  options.certificate_file = dir_.file("client.pem");
  EXPECT_TRUE(refused(options, Code::kInvalidArgument, "together"));
  options.key_file = dir_.file("client.key");
  ::chmod(options.key_file.c_str(), 0644);
  EXPECT_TRUE(refused(options, Code::kInvalidArgument, "chmod 600"));
  ::chmod(options.key_file.c_str(), 0600);

  options.patience = std::chrono::seconds(10);
  auto meta = open_etcd_meta(options).value();
  EventLog log;
  auto handle = meta->watch("", log.collect()).value();
  EXPECT_TRUE(is_ok(meta->commit({.puts = {{"a", std::string(1 << 20, 'x')}}})));
  EXPECT_EQ(log.wait_for(1).size(), 1u);
  std::string& address = options.endpoints[0];
  address.replace(address.find("127.0.0.1"), 9, "localhost");
  EXPECT_EQ(open_etcd_meta(options).value()->get("a").value()->value.size(), size_t{1 << 20});
  // Another authority: known to who runs as soon as it is in the files.
  const std::string ca = dir_.file("ca.pem");
  openssl(
      "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /O=next -keyout "
      "ca.key "
      "-out next.pem");
  ASSERT_EQ(::rename(dir_.file("next.pem").c_str(), ca.c_str()), 0);
  certificate("server", "names");
  certificate("client", "names");
  server.signal(0, SIGKILL);
  server.start(0);
  EXPECT_TRUE(is_ok(meta->commit({.puts = {{"b", "1"}}})));
  EXPECT_EQ(log.wait_for(2).size(), 2u);
  // A certificate that is good, but another machine's.
  certificate("server", "elsewhere");
  server.signal(0, SIGKILL);
  server.start(0);
  options.patience = std::chrono::seconds(5);  // it starts meanwhile
  EXPECT_TRUE(refused(options, Code::kUnavailable, "certificate verify failed"));
}

}  // namespace
}  // namespace ptc
