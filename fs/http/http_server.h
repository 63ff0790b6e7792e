// HTTP/1.1 for people who look and programs that collect: answers GET and HEAD from memory, on one
// thread, and pages on another, so that health is told while one of these takes long. There is no
// authentication, so it is for loopback, or for networks that are trusted.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "fs/http/access_log.h"
#include "store/base/error.h"

namespace ptc {

struct HttpReply {
  unsigned status = 200;
  std::string content_type = "text/plain; charset=utf-8";
  std::string body;
  // What a browser may do with it.
  std::string content_security_policy = "default-src 'none'; frame-ancestors 'none'";
  bool may_be_kept = true;  // and used again, when it was asked whether it is still so
};

struct HttpLimits {
  size_t header_bytes = 8 << 10;
  size_t connections = 64;                   // further ones wait in the kernel's queue
  std::chrono::milliseconds request{5'000};  // from the end of an answer to that of a header
  std::chrono::milliseconds reply{30'000};   // until a client has taken an answer
  std::chrono::milliseconds page{10'000};    // a page may take so long while others wait for it
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
  /// What to answer to a path, "/" first, without the query, not decoded. Called on a thread of its
  /// own, one after another; what it throws is logged and is a 500.
  using Answer = std::function<HttpReply(std::string_view path)>;
  /// The same for paths that must never be held up; nullopt: it is none of these. Called on the
  /// server's thread: it waits for nothing.
  using AtOnce = std::function<std::optional<HttpReply>(std::string_view path)>;

  /// Takes the port; nobody is answered before serve(). Errors say what to do.
  static Result<std::unique_ptr<HttpServer>> listen(const HttpAddress& address,
                                                    const HttpLimits& limits = {});
  /// Closes every connection at once.
  ~HttpServer();

  /// Notes each request there; before serve().
  void log_to(std::unique_ptr<AccessLog> log);
  /// Once. Until show() all but what `at_once` answers is a 503.
  void serve(AtOnce at_once);
  /// Pages, from now on. Where one of them takes too long, others are a 503.
  void show(Answer answer);

  const std::string& url() const;  // "http://127.0.0.1:9090/", with the true port
  bool loopback() const;

 private:
  struct Impl;
  explicit HttpServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ptc
