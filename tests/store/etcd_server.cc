#include "etcd_server.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <boost/json/serialize.hpp>
#include <chrono>
#include <filesystem>
#include <thread>

#include "store/meta/etcd_json.h"

namespace ptc {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

/// A port that is free now.
int free_port() {
  UniqueFd fd(::socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in address{.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
  socklen_t length = sizeof address;
  PTC_CHECK(::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), length) == 0);
  PTC_CHECK(::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &length) == 0);
  return ntohs(address.sin_port);
}

std::string local_url(const std::string& scheme) {
  return fmt::format("{}://127.0.0.1:{}", scheme, free_port());
}

}  // namespace

bool EtcdServers::installed() { return ::system("command -v etcd > /dev/null") == 0; }

EtcdServers::EtcdServers(int count, std::string scheme, std::vector<std::string> options,
                         std::shared_ptr<const TlsSource> tls)
    : options_(std::move(options)), tls_(std::move(tls)) {
  for (int i = 0; i < count; ++i)
    members_.push_back({.client_url = local_url(scheme), .peer_url = local_url("http")});
  for (int i = 0; i < count; ++i) start(i);
  for (int i = 0; i < count; ++i) wait_until_serving(i);
}

EtcdServers::~EtcdServers() {
  for (size_t i = 0; i < members_.size(); ++i) signal(static_cast<int>(i), SIGKILL);
}

std::vector<std::string> EtcdServers::endpoints() const {
  std::vector<std::string> urls;
  for (const Member& member : members_) urls.push_back(member.client_url);
  return urls;
}

void EtcdServers::start(int member) {
  Member& self = members_[member];
  std::string name = fmt::format("m{}", member);
  std::string cluster;
  for (size_t i = 0; i < members_.size(); ++i)
    cluster += fmt::format("{}m{}={}", i == 0 ? "" : ",", i, members_[i].peer_url);
  std::vector<std::string> words = {"etcd",
                                    "--name",
                                    name,
                                    "--data-dir",
                                    dir_.file(name),
                                    "--log-level",
                                    "error",
                                    "--listen-client-urls",
                                    self.client_url,
                                    "--advertise-client-urls",
                                    self.client_url,
                                    "--listen-peer-urls",
                                    self.peer_url,
                                    "--initial-advertise-peer-urls",
                                    self.peer_url,
                                    "--initial-cluster",
                                    cluster};
  words.insert(words.end(), options_.begin(), options_.end());
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  UniqueFd log =
      open_file(AT_FDCWD, dir_.file(name + ".log"), O_WRONLY | O_CREAT | O_APPEND).value();
  self.pid = ::fork();
  if (self.pid != 0) return;
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  ::dup2(log.get(), 1);
  ::dup2(log.get(), 2);
  ::execvp(arguments[0], arguments.data());
  ::_exit(127);
}

void EtcdServers::lose_data(int member) {
  std::filesystem::remove_all(dir_.file(fmt::format("m{}", member)));
}

void EtcdServers::signal(int member, int number) {
  pid_t& pid = members_[member].pid;
  if (pid < 0) return;
  ::kill(pid, number);
  if (number != SIGKILL) return;
  ::waitpid(pid, nullptr, 0);
  pid = -1;
}

std::optional<json::object> EtcdServers::post(const std::string& method,
                                              const json::object& request, int member,
                                              std::string token) const {
  HttpConnection connection(parse_endpoint(members_[member].client_url).value(), tls_);
  const HttpConnection::Until until{std::chrono::steady_clock::now() + seconds(3), {}};
  HttpConnection::Headers headers;
  if (!token.empty()) headers.emplace_back("Authorization", token);
  auto response = run_here([&](IoExecutor) {
    return connection.post("/v3/" + method, headers, json::serialize(request), until);
  });
  connection.rest();
  if (!response) return std::nullopt;
  return parse_json(response.value().body).value().as_object();
}

void EtcdServers::wait_until_serving(int member) const {
  auto end = std::chrono::steady_clock::now() + seconds(60);
  while (std::chrono::steady_clock::now() < end) {
    auto answer = post("kv/range", {{"key", to_base64("none")}}, member);
    if (answer && answer->contains("header")) return;
    std::this_thread::sleep_for(milliseconds(20));
  }
  std::string log = dir_.file(fmt::format("m{}.log", member));
  FAIL() << "etcd does not serve: " << read_text_file(AT_FDCWD, log, 1 << 20).value();
}

int EtcdServers::leader(int member) const {
  auto status = post("maintenance/status", {}, member);
  if (!status || !status->contains("leader")) return -1;
  for (size_t i = 0; i < members_.size(); ++i) {
    auto other =
        members_[i].pid < 0 ? std::nullopt : post("maintenance/status", {}, static_cast<int>(i));
    if (other && object_field(*other, "header").at("member_id") == status->at("leader"))
      return static_cast<int>(i);
  }
  return -1;
}

void EtcdServers::compact() const {
  json::object now = post("kv/range", {{"key", to_base64("none")}}).value();
  json::object answer =
      post("kv/compaction",
           {{"revision", object_field(now, "header").at("revision")}, {"physical", true}})
          .value();
  EXPECT_FALSE(answer.contains("error")) << json::serialize(answer);
}

EtcdServers* shared_etcd() {
  static std::unique_ptr<EtcdServers> one =
      EtcdServers::installed() ? std::make_unique<EtcdServers>(1) : nullptr;
  return one.get();
}

EtcdOptions etcd_options(std::vector<std::string> endpoints) {
  static std::atomic<int> used = 0;
  return {.endpoints = std::move(endpoints), .cluster = fmt::format("test-{}", ++used)};
}

}  // namespace ptc
