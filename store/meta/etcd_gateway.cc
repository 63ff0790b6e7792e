#include "store/meta/etcd_gateway.h"

#include <fmt/ranges.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <boost/json/serialize.hpp>

#include "store/base/mutex.h"
#include "store/tls/private_file.h"

namespace ptc {
namespace {

constexpr JsonLimits kAnswerLimits{.max_bytes = 256 << 20};
constexpr size_t kMaxIdle = 8;
constexpr std::chrono::milliseconds kPauseOfEndpoints{
    50};  // after all endpoints were tried in vain
constexpr std::chrono::seconds kMoment{
    1};  // that an election or a new start may take without a word in the log

// gRPC's status codes.
enum : int64_t {
  kGrpcInvalidArgument = 3,
  kGrpcNotFound = 5,
  kGrpcPermissionDenied = 7,
  kGrpcExhausted = 8,
  kGrpcFailedPrecondition = 9,
  kGrpcOutOfRange = 11,
  kGrpcUnauthenticated = 16,
};

bool token_refused(const EtcdFailure& failure) {
  return failure.grpc_code == kGrpcUnauthenticated ||
         failure.message.find("user name is empty") != std::string::npos ||
         failure.message.find("auth store is old") != std::string::npos;
}

}  // namespace

Result<> EtcdHistory::saw(int64_t revision, int64_t asked_at, std::string_view endpoint) {
  if (revision < asked_at) {
    MutexLock lock(mutex_);
    set_back_ =
        fmt::format("{} went back from revision {} to {}: its data were lost, or are of a backup",
                    endpoint, asked_at, revision);
    return make_error(Code::kUnavailable, "{}", *set_back_);
  }
  for (int64_t known = revision_;
       known < revision && !revision_.compare_exchange_weak(known, revision);) {
  }
  return ok();
}

void EtcdHistory::answered() {
  MutexLock lock(mutex_);
  set_back_.reset();
}

std::optional<std::string> EtcdHistory::set_back() const {
  MutexLock lock(mutex_);
  return set_back_;
}

void EtcdSilence::unanswered(const std::vector<std::string>& why) {
  if (said_.exchange(true)) return;
  spdlog::warn("etcd does not answer, and is asked again: {}", fmt::join(why, "; "));
}

void EtcdSilence::answered() {
  if (said_ && said_.exchange(false)) spdlog::info("etcd answers again");
}

void EtcdCounters::ended(bool answered, std::chrono::steady_clock::duration took) {
  ++calls_;
  if (!answered) ++failed_calls_;
  call_ns_ += static_cast<uint64_t>(std::chrono::nanoseconds(took).count());
}

void EtcdCounters::saw_term(uint64_t term) {
  for (uint64_t known = term_; known < term && !term_.compare_exchange_weak(known, term);) {
  }
}

MetaNumbers EtcdCounters::numbers() const {
  return {calls_, failed_calls_, retries_, call_ns_, term_};
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
            TlsSource::open({options.ca_file, options.certificate_file, options.key_file},
                            TlsUse::kClient));
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

Result<json::object> EtcdGateway::call(std::string method, json::object request,
                                       Deadline deadline) {
  return run_here([&](IoExecutor) {
    return ask(std::move(method), std::move(request), deadline, stop_.get_token());
  });
}

Result<json::object> EtcdGateway::call_once(std::string method, json::object request,
                                            Deadline deadline, bool& sent) {
  return run_here([&](IoExecutor) {
    return ask_in_turn(std::move(method), std::move(request), deadline, stop_.get_token(), false,
                       sent);
  });
}

Task<json::object> EtcdGateway::ask(std::string method, json::object request, Deadline deadline,
                                    std::stop_token stop) {
  bool sent = false;
  co_return co_await ask_in_turn(std::move(method), std::move(request), deadline, std::move(stop),
                                 true, sent);
}

Task<json::object> EtcdGateway::ask_in_turn(std::string method, json::object request,
                                            Deadline deadline, std::stop_token stop, bool twice,
                                            bool& sent) {
  const auto began = Clock::now();
  auto answer =
      co_await ask_endpoints(std::move(method), std::move(request), deadline, stop, twice, sent);
  if (!stop.stop_requested())
    access_->counters->ended(answer || answer.error().code() != Code::kUnavailable,
                             Clock::now() - began);
  co_return answer;
}

Task<json::object> EtcdGateway::ask_endpoints(std::string method, json::object request,
                                              Deadline deadline, std::stop_token stop, bool twice,
                                              bool& sent) {
  std::vector<std::string> tried(access_->endpoints.size());
  sent = false;
  bool is_first = true;
  const auto began = Clock::now();
  do {
    size_t first = good_, behind = 0;
    for (size_t i = 0; i < tried.size(); ++i) {
      size_t endpoint = (first + i) % tried.size();
      Reach reach = Reach::kNotSent;
      if (!std::exchange(is_first, false)) access_->counters->tried_again();
      Until until{attempt(deadline), stop};
      sent = !twice;  // until it is known, for it may throw
      auto answer = co_await ask_at(endpoint, method, request, std::move(until), reach);
      sent = !twice && !answer && reach == Reach::kSent;
      if (answer) {
        good_ = endpoint;
        access_->silence->answered();
        if (method.starts_with("kv/")) access_->history->answered();
        co_return answer;
      }
      if (reach == Reach::kAnswered || stop.stop_requested()) co_return std::move(answer).error();
      leave(endpoint);
      behind += answer.error().message() == access_->history->set_back();
      // What an attempt says that ran out of time says less than what an earlier one found.
      if (tried[endpoint].empty() || Clock::now() < deadline)
        tried[endpoint] = answer.error().message();
      if (sent) co_return std::move(answer).error();
      if (Clock::now() >= deadline) break;
    }
    if (behind == tried.size()) break;  // waiting mends nothing
    if (Clock::now() - began > kMoment) access_->silence->unanswered(tried);
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
    co_await pause(std::clamp(left, std::chrono::milliseconds(0), kPauseOfEndpoints), stop);
  } while (Clock::now() < deadline && !stop.stop_requested());
  std::erase(tried, "");
  co_return make_error(Code::kUnavailable, "etcd does not answer: {}", fmt::join(tried, "; "));
}

Task<json::object> EtcdGateway::ask_at(size_t endpoint, const std::string& method,
                                       const json::object& request, Until until, Reach& reach) {
  bool is_new = false;
  Connection connection = take_connection(endpoint, is_new);
  auto connected = co_await connection->connect(until);
  // etcd may be another since the last connection: that shows before anything is written to it.
  if (const json::array& compares = array_field(request, "compare");
      connected && is_new && method == "kv/txn" && !compares.empty()) {
    const json::object anything{{"key", compares[0].at("key")}, {"count_only", true}};
    const std::string range = "kv/range";
    Reach looked = Reach::kNotSent;
    auto same = co_await ask_over(*connection, endpoint, range, anything, until, looked);
    if (!same && looked != Reach::kAnswered) connected = std::move(same).error();
  }
  if (!connected) {
    give_back(endpoint, std::move(connection), false);
    co_return std::move(connected).error();
  }
  auto answer = co_await ask_over(*connection, endpoint, method, request, std::move(until), reach);
  give_back(endpoint, std::move(connection), reach == Reach::kAnswered);
  co_return answer;
}

Task<json::object> EtcdGateway::ask_over(HttpConnection& connection, size_t endpoint,
                                         const std::string& method, const json::object& request,
                                         Until until, Reach& reach) {
  for (bool again = !access_->user.empty();; again = false) {
    PTC_CO_TRY(auto with, co_await headers(connection, endpoint, until, reach));
    reach = Reach::kSent;
    const int64_t asked_at = access_->history->revision();
    std::string target = "/v3/" + method, body = json::serialize(request);
    PTC_CO_TRY(auto response, co_await connection.post(std::move(target), std::move(with),
                                                       std::move(body), until));
    PTC_CO_TRY(json::object answer, parse(endpoint, response.status, response.body));
    auto failure = failure_of(answer);
    if (!failure) {
      PTC_CO_TRY(check_cluster(endpoint, answer));
      PTC_CO_TRY(check_history(endpoint, method, answer, asked_at));
      reach = Reach::kAnswered;
      co_return answer;
    }
    const bool refused = token_refused(*failure);
    if (refused && !access_->user.empty()) reach = Reach::kNotSent;
    if (!again || !refused) co_return error_of(endpoint, *failure, reach);
    forget_token();
  }
}

Task<EtcdGateway::Headers> EtcdGateway::headers(HttpConnection& connection, size_t endpoint,
                                                Until until, Reach& reach) {
  Headers headers;
  if (access_->user.empty()) co_return headers;
  std::string token;
  {
    MutexLock lock(mutex_);
    token = token_;
  }
  if (token.empty()) {
    const json::object who{{"name", access_->user}, {"password", access_->password}};
    std::string target = "/v3/auth/authenticate", body = json::serialize(who);
    Headers none;
    PTC_CO_TRY(auto response, co_await connection.post(std::move(target), std::move(none),
                                                       std::move(body), std::move(until)));
    PTC_CO_TRY(json::object answer, parse(endpoint, response.status, response.body));
    if (auto failure = failure_of(answer)) {
      Error error = error_of(endpoint, *failure, reach);
      Code code = error.code() == Code::kInvalidArgument ? Code::kPermissionDenied : error.code();
      co_return make_error(code, "user '{}': {}", access_->user, error.message());
    }
    const json::value* given = answer.if_contains("token");
    if (given != nullptr && given->is_string()) token = given->get_string();
    MutexLock lock(mutex_);
    token_ = token;
  }
  headers.emplace_back("Authorization", std::move(token));
  co_return headers;
}

void EtcdGateway::forget_token() {
  MutexLock lock(mutex_);
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
    case kGrpcInvalidArgument:
    case kGrpcFailedPrecondition:
      code = Code::kInvalidArgument;
      break;
    case kGrpcNotFound:
      code = Code::kNotFound;
      break;
    case kGrpcPermissionDenied:
    case kGrpcUnauthenticated:
      code = Code::kPermissionDenied;
      break;
    case kGrpcOutOfRange:
      code = Code::kConflict;
      break;
    case kGrpcExhausted:
      if (failure.message.find("space") != std::string::npos) code = Code::kNoSpace;
      break;
    default:
      break;
  }
  // A new token may be refused by one that has just started, and then the next one is not.
  if (token_refused(failure))
    code = access_->user.empty() ? Code::kPermissionDenied : Code::kUnavailable;
  if (code != Code::kUnavailable) reach = Reach::kAnswered;
  return make_error(code, "{}: {}", access_->endpoints[endpoint].text, failure.message);
}

Result<> EtcdGateway::check_cluster(size_t endpoint, const json::object& answer) {
  const json::object& header = object_field(answer, "header");
  if (auto term = number_field(header, "raft_term"); term && term.value() > 0)
    access_->counters->saw_term(static_cast<uint64_t>(term.value()));
  const json::value* id = header.if_contains("cluster_id");
  if (id == nullptr || !id->is_string()) return ok();
  MutexLock lock(mutex_);
  if (cluster_id_.empty()) cluster_id_ = id->get_string();
  if (cluster_id_ == id->get_string()) return ok();
  return make_error(Code::kUnavailable,
                    "{} belongs to another etcd cluster than the endpoints before it",
                    access_->endpoints[endpoint].text);
}

Result<> EtcdGateway::check_history(size_t endpoint, std::string_view method,
                                    const json::object& answer, int64_t asked_at) {
  if (!method.starts_with("kv/")) return ok();  // others answer with what one member has got to
  PTC_TRY(int64_t revision, number_field(object_field(answer, "header"), "revision"));
  return access_->history->saw(revision, asked_at, access_->endpoints[endpoint].text);
}

void EtcdGateway::leave(size_t endpoint) {
  size_t expected = endpoint;
  good_.compare_exchange_strong(expected, (endpoint + 1) % access_->endpoints.size());
}

EtcdGateway::Connection EtcdGateway::take_connection(size_t endpoint, bool& is_new) {
  MutexLock lock(mutex_);
  is_new = idle_[endpoint].empty();
  if (is_new) return std::make_unique<HttpConnection>(access_->endpoints[endpoint], access_->tls);
  Connection connection = std::move(idle_[endpoint].back());
  idle_[endpoint].pop_back();
  return connection;
}

void EtcdGateway::give_back(size_t endpoint, Connection connection, bool good) {
  connection->rest();
  std::vector<Connection> broken;  // closed without the lock
  MutexLock lock(mutex_);
  if (!good) broken.swap(idle_[endpoint]);  // whatever broke it broke them
  else if (idle_[endpoint].size() < kMaxIdle) idle_[endpoint].push_back(std::move(connection));
}

Task<std::unique_ptr<EtcdGateway::Stream>> EtcdGateway::stream(std::string method,
                                                               json::object request) {
  const size_t endpoint = good_;
  auto made = std::make_unique<HttpConnection>(access_->endpoints[endpoint], access_->tls);
  auto stream = std::make_unique<Stream>(*this, endpoint, std::move(made));
  HttpConnection& connection = *stream->connection_;
  const Until until{attempt(Deadline::max()), stop_.get_token()};
  Reach ignored = Reach::kNotSent;
  auto with = co_await headers(connection, endpoint, until, ignored);
  if (with) {
    with.value().emplace_back("Grpc-Metadata-hasleader",
                              "true");  // ends it when the member is cut off
    std::string target = "/v3/" + method, body = json::serialize(request);
    auto started = co_await connection.start(std::move(target), std::move(with).value(),
                                             std::move(body), until);
    if (started) co_return stream;
    with = std::move(started).error();
  }
  leave(endpoint);
  co_return std::move(with).error();
}

Task<std::optional<json::object>> EtcdGateway::Stream::read(std::chrono::milliseconds patience) {
  PTC_CO_TRY(auto line, co_await connection_->read_line(patience, gateway_.stop_.get_token()));
  if (!line) co_return std::optional<json::object>();
  PTC_CO_TRY(json::object answer, gateway_.parse(endpoint_, 200, *line));
  Reach ignored;
  auto failure = failure_of(answer);
  if (failure && token_refused(*failure)) gateway_.forget_token();
  if (failure) co_return gateway_.error_of(endpoint_, *failure, ignored);
  json::object result = object_field(answer, "result");
  PTC_CO_TRY(gateway_.check_cluster(endpoint_, result));
  co_return std::optional(std::move(result));
}

Task<std::optional<json::object>> EtcdGateway::Stream::next(std::chrono::milliseconds patience) {
  auto result = co_await read(patience);
  if (!result) gateway_.leave(endpoint_);
  co_return result;
}

Task<> EtcdGateway::Stream::probe(std::string method, json::object request) {
  Reach reach = Reach::kNotSent;
  Until until{gateway_.attempt(Deadline::max()), gateway_.stop_.get_token()};
  auto answer = co_await gateway_.ask_at(endpoint_, method, request, std::move(until), reach);
  if (answer) co_return ok();
  gateway_.leave(endpoint_);
  co_return std::move(answer).error();
}

}  // namespace ptc
