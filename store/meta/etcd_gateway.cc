#include "store/meta/etcd_gateway.h"

#include <fmt/ranges.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <boost/json/serialize.hpp>
#include <thread>

#include "store/tls/private_file.h"

namespace ptc {
namespace {

constexpr JsonLimits kAnswerLimits{.max_bytes = 256 << 20};
constexpr size_t kMaxIdle = 8;
constexpr std::chrono::milliseconds kPauseOfEndpoints{50};  // after all endpoints were tried in vain
constexpr std::chrono::seconds kMoment{1};  // that an election or a new start may take without a word in the log

// gRPC's status codes.
enum : int64_t {
  kGrpcInvalidArgument = 3, kGrpcNotFound = 5, kGrpcPermissionDenied = 7, kGrpcExhausted = 8,
  kGrpcFailedPrecondition = 9, kGrpcOutOfRange = 11, kGrpcUnauthenticated = 16,
};

bool token_refused(const EtcdFailure& failure) {
  return failure.grpc_code == kGrpcUnauthenticated ||
         failure.message.find("user name is empty") != std::string::npos ||
         failure.message.find("auth store is old") != std::string::npos;
}

}  // namespace

Result<> EtcdHistory::saw(int64_t revision, int64_t asked_at, std::string_view endpoint) {
  if (revision < asked_at) {
    std::lock_guard lock(mutex_);
    set_back_ = fmt::format("{} went back from revision {} to {}: its data were lost, or are of a backup", endpoint,
                            asked_at, revision);
    return make_error(Code::kUnavailable, "{}", *set_back_);
  }
  for (int64_t known = revision_; known < revision && !revision_.compare_exchange_weak(known, revision);) {
  }
  return ok();
}

void EtcdHistory::answered() {
  std::lock_guard lock(mutex_);
  set_back_.reset();
}

std::optional<std::string> EtcdHistory::set_back() const {
  std::lock_guard lock(mutex_);
  return set_back_;
}

void EtcdSilence::unanswered(const std::vector<std::string>& why) {
  if (said_.exchange(true)) return;
  spdlog::warn("etcd does not answer, and is asked again until it does: {}", fmt::join(why, "; "));
}

void EtcdSilence::answered() {
  if (said_ && said_.exchange(false)) spdlog::info("etcd answers again");
}

Result<std::shared_ptr<const EtcdAccess>> check_access(const EtcdOptions& options) {
  auto access = std::make_shared<EtcdAccess>();
  access->request_timeout = options.request_timeout;
  access->patience = options.patience;
  if (options.endpoints.empty()) return invalid_argument("no endpoint of etcd is given");
  for (const std::string& text : options.endpoints) {
    PTC_TRY(HttpEndpoint endpoint, parse_endpoint(text));
    if (endpoint.tls != options.endpoints[0].starts_with("https://"))
      return invalid_argument("either all endpoints of etcd are https:// or none: '{}'", text);
    access->endpoints.push_back(std::move(endpoint));
  }
  if (access->endpoints[0].tls) {
    PTC_TRY(access->tls,
            TlsSource::open({options.ca_file, options.certificate_file, options.key_file}, TlsUse::kClient));
  } else if (!(options.ca_file + options.certificate_file + options.key_file).empty()) {
    return invalid_argument("TLS files are given, but the endpoints of etcd are http://");
  }
  if (!options.credentials_file.empty()) {
    const std::string& path = options.credentials_file;
    PTC_TRY(std::string line, read_private_file(path, 4096));
    line = line.substr(0, line.find('\n'));
    size_t colon = line.find(':');
    if (colon == 0 || colon == std::string::npos)
      return invalid_argument("{}: one line 'user:password' is needed", path);
    access->user = line.substr(0, colon);
    access->password = line.substr(colon + 1);
  }
  return std::shared_ptr<const EtcdAccess>(std::move(access));
}

EtcdGateway::EtcdGateway(std::shared_ptr<const EtcdAccess> access)
    : access_(std::move(access)), idle_(access_->endpoints.size()) {}

Result<json::object> EtcdGateway::call(std::string_view method, const json::object& request,
                                       Deadline deadline) {
  bool sent = false;
  return call_in_turn(method, request, deadline, true, sent);
}

Result<json::object> EtcdGateway::call_once(std::string_view method, const json::object& request,
                                            Deadline deadline, bool& sent) {
  return call_in_turn(method, request, deadline, false, sent);
}

Result<json::object> EtcdGateway::call_in_turn(std::string_view method, const json::object& request,
                                               Deadline deadline, bool twice, bool& sent) {
  std::vector<std::string> tried(access_->endpoints.size());
  sent = false;
  const auto began = Clock::now();
  do {
    size_t first = good_, behind = 0;
    for (size_t i = 0; i < tried.size(); ++i) {
      size_t endpoint = (first + i) % tried.size();
      Reach reach = Reach::kNotSent;
      auto answer = call_at(endpoint, method, request, attempt(deadline), reach);
      if (answer) {
        good_ = endpoint;
        access_->silence->answered();
        if (method.starts_with("kv/")) access_->history->answered();
        return answer;
      }
      if (reach == Reach::kAnswered || stopped_) return std::move(answer).error();
      leave(endpoint);
      behind += answer.error().message() == access_->history->set_back();
      // What an attempt says that ran out of time says less than what an earlier one found.
      if (tried[endpoint].empty() || Clock::now() < deadline) tried[endpoint] = answer.error().message();
      if (reach == Reach::kSent && !twice) {
        sent = true;
        return std::move(answer).error();
      }
      if (Clock::now() >= deadline) break;
    }
    if (behind == tried.size()) break;  // waiting mends nothing
    if (Clock::now() - began > kMoment) access_->silence->unanswered(tried);
    std::this_thread::sleep_until(std::min(deadline, Clock::now() + kPauseOfEndpoints));
  } while (Clock::now() < deadline && !stopped_);
  std::erase(tried, "");
  return make_error(Code::kUnavailable, "etcd does not answer: {}", fmt::join(tried, "; "));
}

Result<json::object> EtcdGateway::call_at(size_t endpoint, std::string_view method,
                                          const json::object& request, Deadline deadline,
                                          Reach& reach) {
  bool is_new = false;
  Connection connection = take_connection(endpoint, true, &is_new);
  auto connected = connection->connect(deadline);
  // etcd may be another since the last connection: that shows before anything is written to it.
  if (const json::array& compares = array_field(request, "compare");
      connected && is_new && method == "kv/txn" && !compares.empty()) {
    const json::object anything{{"key", compares[0].at("key")}, {"count_only", true}};
    Reach looked = Reach::kNotSent;
    auto same = ask(*connection, endpoint, "kv/range", anything, deadline, looked);
    if (!same && looked != Reach::kAnswered) connected = std::move(same).error();
  }
  Result<json::object> answer = connected
                                    ? ask(*connection, endpoint, method, request, deadline, reach)
                                    : Result<json::object>(std::move(connected).error());
  release_connection(endpoint, connection, reach == Reach::kAnswered);
  return answer;
}

Result<json::object> EtcdGateway::ask(HttpConnection& connection, size_t endpoint,
                                      std::string_view method, const json::object& request,
                                      Deadline deadline, Reach& reach) {
  for (bool again = !access_->user.empty();; again = false) {
    PTC_TRY(auto with, headers(connection, endpoint, deadline, reach));
    reach = Reach::kSent;
    const int64_t asked_at = access_->history->revision();
    PTC_TRY(auto response, connection.post(fmt::format("/v3/{}", method), with,
                                           json::serialize(request), deadline));
    PTC_TRY(json::object answer, parse(endpoint, response.status, response.body));
    auto failure = failure_of(answer);
    if (!failure) {
      PTC_TRY(check_cluster(endpoint, answer));
      PTC_TRY(check_history(endpoint, method, answer, asked_at));
      reach = Reach::kAnswered;
      return answer;
    }
    if (!again || !token_refused(*failure)) return error_of(endpoint, *failure, reach);
    reach = Reach::kNotSent;
    forget_token();
  }
}

Result<HttpConnection::Headers> EtcdGateway::headers(HttpConnection& connection, size_t endpoint,
                                                     Deadline deadline, Reach& reach) {
  if (access_->user.empty()) return HttpConnection::Headers();
  std::string token;
  {
    std::lock_guard lock(mutex_);
    token = token_;
  }
  if (token.empty()) {
    json::object who{{"name", access_->user}, {"password", access_->password}};
    PTC_TRY(auto response, connection.post("/v3/auth/authenticate", {}, json::serialize(who), deadline));
    PTC_TRY(json::object answer, parse(endpoint, response.status, response.body));
    if (auto failure = failure_of(answer)) {
      Error error = error_of(endpoint, *failure, reach);
      Code code = error.code() == Code::kInvalidArgument ? Code::kPermissionDenied : error.code();
      return make_error(code, "user '{}': {}", access_->user, error.message());
    }
    const json::value* given = answer.if_contains("token");
    if (given != nullptr && given->is_string()) token = given->get_string();
    std::lock_guard lock(mutex_);
    token_ = token;
  }
  return HttpConnection::Headers{{"Authorization", token}};
}

void EtcdGateway::forget_token() {
  std::lock_guard lock(mutex_);
  token_.clear();
}

Result<json::object> EtcdGateway::parse(size_t endpoint, unsigned status,
                                        std::string_view text) const {
  auto value = parse_json(text, kAnswerLimits);
  if (value && value.value().is_object()) return std::move(value.value().get_object());
  return make_error(Code::kUnavailable, "{} answers HTTP {}, but not as etcd's JSON gateway (v3)",
                    access_->endpoints[endpoint].text, status);
}

Error EtcdGateway::error_of(size_t endpoint, const EtcdFailure& failure, Reach& reach) const {
  Code code = Code::kUnavailable;  // no leader, a timeout, shutting down: another may know better
  switch (failure.grpc_code) {
    case kGrpcInvalidArgument: case kGrpcFailedPrecondition: code = Code::kInvalidArgument; break;
    case kGrpcNotFound: code = Code::kNotFound; break;
    case kGrpcPermissionDenied: case kGrpcUnauthenticated: code = Code::kPermissionDenied; break;
    case kGrpcOutOfRange: code = Code::kConflict; break;
    case kGrpcExhausted:
      if (failure.message.find("space") != std::string::npos) code = Code::kNoSpace;
      break;
    default: break;
  }
  if (token_refused(failure)) code = Code::kPermissionDenied;
  if (code != Code::kUnavailable) reach = Reach::kAnswered;
  return make_error(code, "{}: {}", access_->endpoints[endpoint].text, failure.message);
}

Result<> EtcdGateway::check_cluster(size_t endpoint, const json::object& answer) {
  const json::value* id = object_field(answer, "header").if_contains("cluster_id");
  if (id == nullptr || !id->is_string()) return ok();
  std::lock_guard lock(mutex_);
  if (cluster_id_.empty()) cluster_id_ = id->get_string();
  if (cluster_id_ == id->get_string()) return ok();
  return make_error(Code::kUnavailable, "{} belongs to another etcd cluster than the endpoints before it",
                    access_->endpoints[endpoint].text);
}

Result<> EtcdGateway::check_history(size_t endpoint, std::string_view method, const json::object& answer,
                                    int64_t asked_at) {
  if (!method.starts_with("kv/")) return ok();  // others answer with what one member has got to
  PTC_TRY(int64_t revision, number_field(object_field(answer, "header"), "revision"));
  return access_->history->saw(revision, asked_at, access_->endpoints[endpoint].text);
}

void EtcdGateway::leave(size_t endpoint) {
  size_t expected = endpoint;
  good_.compare_exchange_strong(expected, (endpoint + 1) % access_->endpoints.size());
}

EtcdGateway::Connection EtcdGateway::take_connection(size_t endpoint, bool idle_too, bool* is_new) {
  std::lock_guard lock(mutex_);
  Connection connection;
  if (idle_too && !idle_[endpoint].empty()) {
    connection = std::move(idle_[endpoint].back());
    idle_[endpoint].pop_back();
  } else {
    connection = std::make_shared<HttpConnection>(access_->endpoints[endpoint], access_->tls);
    if (is_new != nullptr) *is_new = true;
  }
  if (stopped_) connection->stop();
  in_use_.push_back(connection);
  return connection;
}

void EtcdGateway::release_connection(size_t endpoint, const Connection& connection, bool keep) {
  std::lock_guard lock(mutex_);
  in_use_.remove(connection);
  if (!keep) idle_[endpoint].clear();  // whatever broke it broke them
  if (keep && idle_[endpoint].size() < kMaxIdle) idle_[endpoint].push_back(connection);
}

void EtcdGateway::stop() {
  std::lock_guard lock(mutex_);
  stopped_ = true;
  for (const Connection& connection : in_use_) connection->stop();
}

Result<std::unique_ptr<EtcdGateway::Stream>> EtcdGateway::stream(std::string_view method,
                                                                 const json::object& request) {
  size_t endpoint = good_;
  auto stream = std::make_unique<Stream>(*this, endpoint, take_connection(endpoint, false));
  HttpConnection& connection = *stream->connection_;
  Deadline deadline = attempt(Deadline::max());
  auto opened = [&]() -> Result<> {
    PTC_TRY(connection.connect(deadline));
    Reach ignored;
    PTC_TRY(auto with, headers(connection, endpoint, deadline, ignored));
    with.emplace_back("Grpc-Metadata-hasleader", "true");  // ends it when the member is cut off
    PTC_TRY(connection.start(fmt::format("/v3/{}", method), with, json::serialize(request), deadline));
    return ok();
  }();
  if (opened) return stream;
  leave(endpoint);
  return std::move(opened).error();
}

EtcdGateway::Stream::~Stream() { gateway_.release_connection(endpoint_, connection_, false); }

Result<std::optional<json::object>> EtcdGateway::Stream::next(std::chrono::milliseconds patience) {
  auto read = [&]() -> Result<std::optional<json::object>> {
    PTC_TRY(auto line, connection_->read_line(patience));
    if (!line) return std::optional<json::object>();
    PTC_TRY(json::object answer, gateway_.parse(endpoint_, 200, *line));
    Reach ignored;
    auto failure = failure_of(answer);
    if (failure && token_refused(*failure)) gateway_.forget_token();
    if (failure) return gateway_.error_of(endpoint_, *failure, ignored);
    json::object result = object_field(answer, "result");
    PTC_TRY(gateway_.check_cluster(endpoint_, result));
    return std::optional(std::move(result));
  };
  auto result = read();
  if (!result) gateway_.leave(endpoint_);
  return result;
}

Result<> EtcdGateway::Stream::probe(std::string_view method, const json::object& request) {
  Reach reach = Reach::kNotSent;
  auto answer = gateway_.call_at(endpoint_, method, request, gateway_.attempt(Deadline::max()), reach);
  if (answer) return ok();
  gateway_.leave(endpoint_);
  return std::move(answer).error();
}

}  // namespace ptc
