// HTTP/1.1 to one endpoint of etcd. The only source that includes Beast is etcd_http.cc.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "store/base/error.h"
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

/// One connection, its waiting done by the caller's thread.
/// Threads: one at a time; stop() from any.
/// Errors: kUnavailable with the endpoint and the reason, after which it must be connected again;
/// kCancelled after stop(). A host name is looked up for as long as the system's resolver likes.
class HttpConnection {
 public:
  using Deadline = std::chrono::steady_clock::time_point;
  using Headers = std::vector<std::pair<std::string, std::string>>;
  struct Response {
    unsigned status = 0;
    std::string body;
  };

  /// `tls`: for an endpoint that has it.
  HttpConnection(const HttpEndpoint& endpoint, std::shared_ptr<const TlsSource> tls);
  ~HttpConnection();

  /// Nothing to do when it is connected; the others connect by themselves.
  Result<> connect(Deadline deadline);
  /// One request and its answer. After an error nobody knows whether the request was acted upon.
  Result<Response> post(std::string_view target, const Headers& headers, std::string body,
                        Deadline deadline);

  /// A request whose answer comes in lines, for as long as the other side likes. First its status; the
  /// lines of an answer other than 200 are the error. No other request may follow.
  Result<unsigned> start(std::string_view target, const Headers& headers, std::string body,
                         Deadline deadline);
  /// The next line; nullopt: none within `patience`, ask again.
  Result<std::optional<std::string>> read_line(std::chrono::milliseconds patience);

  /// Ends what is running, now and later.
  void stop();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ptc
