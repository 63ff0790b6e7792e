// HTTP/1.1 to one endpoint of etcd. The only source that includes Beast is etcd_http.cc.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "store/base/error.h"
#include "store/net/socket.h"
#include "store/tls/tls_context.h"

namespace ptc {

/// "http://10.0.0.1:2379", "https://[fe80::1]:2379", taken apart; no port: 2379.
struct HttpEndpoint {
  bool tls = false;
  std::string host;
  std::string port;
  std::string text;  // for messages
};
Result<HttpEndpoint> parse_endpoint(std::string_view text);

/// One connection, which waits on the executor of the coroutine that uses it, and rests in between.
/// Threads: one coroutine at a time.
/// Errors: kUnavailable with the endpoint and the reason, after which it must be connected again;
/// kCancelled.
class HttpConnection {
 public:
  using Headers = std::vector<std::pair<std::string, std::string>>;
  struct Response {
    unsigned status = 0;
    std::string body;
  };
  /// When all is over, and what ends it before.
  struct Until {
    Deadline deadline;
    std::stop_token stop;
  };

  /// `tls`: for an endpoint that has it.
  HttpConnection(const HttpEndpoint& endpoint, std::shared_ptr<const TlsSource> tls);
  ~HttpConnection();

  /// Nothing to do when it is connected; the others connect by themselves.
  Task<> connect(Until until);
  /// One request and its answer. After an error nobody knows whether the request was acted upon.
  Task<Response> post(std::string target, Headers headers, std::string body, Until until);

  /// A request whose answer comes in lines, for as long as the other side likes. First its status;
  /// the lines of an answer other than 200 are the error. No other request may follow.
  Task<unsigned> start(std::string target, Headers headers, std::string body, Until until);
  /// The next line; nullopt: none within `patience`, ask again.
  Task<std::optional<std::string>> read_line(std::chrono::milliseconds patience,
                                             std::stop_token stop);

  /// No coroutine uses it for now; the next one may be of another thread.
  void rest();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ptc
