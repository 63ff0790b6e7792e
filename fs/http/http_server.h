// HTTP/1.1 on one thread, for people who look and programs that collect: answers GET and HEAD from
// memory. There is no authentication, so it is for loopback, or for networks that are trusted.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "store/base/error.h"

namespace ptc {

struct HttpReply {
  unsigned status = 200;
  std::string content_type = "text/plain; charset=utf-8";
  std::string body;
  // What a browser may do with it.
  std::string content_security_policy = "default-src 'none'; frame-ancestors 'none'";
};

struct HttpLimits {
  size_t header_bytes = 8 << 10;
  size_t connections = 64;                   // further ones wait in the kernel's queue
  std::chrono::milliseconds request{5'000};  // from the end of an answer to that of a header
  std::chrono::milliseconds reply{30'000};   // until a client has taken an answer
};

/// Where to listen: "127.0.0.1:9090", "[::1]:9090", "localhost:9090", and ":9090", which is
/// 127.0.0.1. Port 0: one that is free.
struct HttpAddress {
  std::string host, port;
  static Result<HttpAddress> parse(std::string_view text);
};

/// Asked only by its address, by localhost, by this machine's name or the name it was told to
/// listen on: a web page elsewhere, whose name leads here (DNS rebinding), gets 421.
class HttpServer {
 public:
  /// What to answer to a path, "/" first, without the query, not decoded. Called on the server's
  /// thread; what it throws is logged and is a 500.
  using Answer = std::function<HttpReply(std::string_view path)>;

  /// Takes the port; nobody is answered before serve(). Errors say what to do.
  static Result<std::unique_ptr<HttpServer>> listen(const HttpAddress& address,
                                                    const HttpLimits& limits = {});
  /// Closes every connection at once.
  ~HttpServer();

  void serve(Answer answer);

  const std::string& url() const;  // "http://127.0.0.1:9090/", with the true port
  bool loopback() const;

 private:
  struct Impl;
  explicit HttpServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ptc
