// Calls of etcd's v3 JSON gateway through whichever endpoint answers.
#pragma once

#include <atomic>
#include <stop_token>

#include "store/base/mutex.h"
#include "store/meta/etcd_http.h"
#include "store/meta/etcd_json.h"
#include "store/meta/etcd_meta.h"

namespace ptc {

/// What a client has seen of etcd: its revision only grows. One that answers with an earlier one
/// has lost data, or has those of a backup, and is not used. Threads: any.
class EtcdHistory {
 public:
  int64_t revision() const { return revision_; }
  /// An answer with this revision to what was asked when it was `asked_at` at least.
  Result<> saw(int64_t revision, int64_t asked_at, std::string_view endpoint);
  void answered();  // well
  std::optional<std::string> set_back() const;

 private:
  std::atomic<int64_t> revision_ = 0;
  mutable Mutex mutex_;
  std::optional<std::string> set_back_ PTC_GUARDED_BY(mutex_);
};

/// What the log says when etcd is silent for longer than a moment, and when it answers again: once
/// each. Threads: any.
class EtcdSilence {
 public:
  void unanswered(const std::vector<std::string>& why);
  void answered();

 private:
  std::atomic<bool> said_ = false;
};

/// MetaNumbers while they are counted. Threads: any.
class EtcdCounters {
 public:
  void ended(bool answered, std::chrono::steady_clock::duration took);
  void tried_again() { ++retries_; }
  void saw_term(uint64_t term);
  MetaNumbers numbers() const;

 private:
  std::atomic<uint64_t> calls_ = 0, failed_calls_ = 0, retries_ = 0, call_ns_ = 0, term_ = 0;
};

/// Where to go, and as whom: EtcdOptions, checked and loaded.
struct EtcdAccess {
  std::vector<HttpEndpoint> endpoints;
  std::shared_ptr<const TlsSource> tls;
  std::string user, password;  // empty: no authentication
  std::chrono::milliseconds request_timeout;
  std::chrono::milliseconds patience;
  std::shared_ptr<EtcdHistory> history = std::make_shared<EtcdHistory>();
  std::shared_ptr<EtcdSilence> silence = std::make_shared<EtcdSilence>();
  std::shared_ptr<EtcdCounters> counters = std::make_shared<EtcdCounters>();
};
Result<std::shared_ptr<const EtcdAccess>> check_access(const EtcdOptions& options);

/// Threads: any. What returns a Task is for coroutines; the rest waits for the network on the
/// calling thread itself. Errors: kUnavailable (nobody answered; it says what each endpoint did),
/// kCancelled after stop(), else what etcd said: kNotFound (a lease), kInvalidArgument,
/// kPermissionDenied, kNoSpace (its quota), kConflict (a compacted revision).
class EtcdGateway {
 public:
  using Clock = std::chrono::steady_clock;

  explicit EtcdGateway(std::shared_ptr<const EtcdAccess> access);

  /// Posts to /v3/`method` and returns the answer. For requests that may be made twice: tries one
  /// endpoint after another, from the last good one, until one answers or the deadline is over.
  /// `stop`: ends this one, in the place of stop().
  Task<json::object> ask(std::string method, json::object request, Deadline deadline,
                         std::stop_token stop);
  Task<json::object> ask(std::string method, json::object request) {
    return ask(std::move(method), std::move(request), Clock::now() + access_->patience,
               stop_.get_token());
  }
  Result<json::object> call(std::string method, json::object request, Deadline deadline);
  Result<json::object> call(std::string method, json::object request) {
    return call(std::move(method), std::move(request), Clock::now() + access_->patience);
  }

  /// For requests that must not be made twice: tries endpoints until one was sent the request.
  /// After an error, `sent` says whether it was acted upon perhaps, or may still be.
  Result<json::object> call_once(std::string method, json::object request, Deadline deadline,
                                 bool& sent);

  /// An answer that comes in lines, from the endpoint that is good for now.
  class Stream {
   public:
    Stream(EtcdGateway& gateway, size_t endpoint, std::unique_ptr<HttpConnection> connection)
        : gateway_(gateway), endpoint_(endpoint), connection_(std::move(connection)) {}
    Stream(const Stream&) = delete;
    /// The next "result"; nullopt: none within `patience`. After an error the next stream begins
    /// with another endpoint.
    Task<std::optional<json::object>> next(std::chrono::milliseconds patience);
    /// A call at the stream's own endpoint, to learn whether that still serves.
    Task<> probe(std::string method, json::object request);

   private:
    friend class EtcdGateway;
    Task<std::optional<json::object>> read(std::chrono::milliseconds patience);

    EtcdGateway& gateway_;
    size_t endpoint_;
    std::unique_ptr<HttpConnection> connection_;
  };
  Task<std::unique_ptr<Stream>> stream(std::string method, json::object request);

  /// Ends all calls and streams, those that run and those to come.
  void stop() { stop_.request_stop(); }
  Clock::duration patience() const { return access_->patience; }

 private:
  /// Whether an endpoint was sent the request, and whether it answered for good.
  enum class Reach { kNotSent, kSent, kAnswered };
  using Connection = std::unique_ptr<HttpConnection>;
  using Headers = HttpConnection::Headers;
  using Until = HttpConnection::Until;

  Connection take_connection(size_t endpoint, bool& is_new);
  void give_back(size_t endpoint, Connection connection, bool good);
  /// Counted, unless it was stopped.
  Task<json::object> ask_in_turn(std::string method, json::object request, Deadline deadline,
                                 std::stop_token stop, bool twice, bool& sent);
  Task<json::object> ask_endpoints(std::string method, json::object request, Deadline deadline,
                                   std::stop_token stop, bool twice, bool& sent);
  Task<json::object> ask_at(size_t endpoint, const std::string& method, const json::object& request,
                            Until until, Reach& reach);
  Task<json::object> ask_over(HttpConnection& connection, size_t endpoint,
                              const std::string& method, const json::object& request, Until until,
                              Reach& reach);
  Task<Headers> headers(HttpConnection& connection, size_t endpoint, Until until, Reach& reach);
  void forget_token();
  Result<json::object> parse(size_t endpoint, unsigned status, std::string_view text) const;
  Error error_of(size_t endpoint, const EtcdFailure& failure, Reach& reach) const;
  Result<> check_cluster(size_t endpoint, const json::object& answer);
  /// Of a call that reads what is agreed on: `asked_at` is what was known of its revision before.
  Result<> check_history(size_t endpoint, std::string_view method, const json::object& answer,
                         int64_t asked_at);
  /// The next call begins with another endpoint.
  void leave(size_t endpoint);
  Deadline attempt(Deadline deadline) const {
    return std::min(deadline, Clock::now() + access_->request_timeout);
  }

  std::shared_ptr<const EtcdAccess> access_;
  std::atomic<size_t> good_ = 0;  // the endpoint to begin with
  std::stop_source stop_;
  Mutex mutex_;
  std::vector<std::vector<Connection>> idle_ PTC_GUARDED_BY(mutex_);  // of each endpoint
  std::string token_ PTC_GUARDED_BY(mutex_);       // of the user; empty: to be asked for
  std::string cluster_id_ PTC_GUARDED_BY(mutex_);  // of the first that answered
};

}  // namespace ptc
