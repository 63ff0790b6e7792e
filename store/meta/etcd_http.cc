#include "store/meta/etcd_http.h"

#include <netinet/tcp.h>

#include <atomic>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/ssl/context.hpp>
#include <boost/asio/ssl/host_name_verification.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>
#include <boost/beast/ssl/ssl_stream.hpp>

namespace ptc {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using asio::ip::tcp;
using ErrorCode = boost::system::error_code;

namespace {

constexpr uint64_t kMaxAnswerBytes = 128 << 20;
constexpr size_t kReadBytes = 64 << 10;
constexpr int kSilenceSeconds = 5;  // then TCP asks whether the other side is there, three times

void keep_alive(tcp::socket& socket) {
  ErrorCode ignored;
  socket.set_option(tcp::no_delay(true), ignored);
  socket.set_option(asio::socket_base::keep_alive(true), ignored);
  int seconds = kSilenceSeconds, interval = 1, tries = 3;
  ::setsockopt(socket.native_handle(), IPPROTO_TCP, TCP_KEEPIDLE, &seconds, sizeof seconds);
  ::setsockopt(socket.native_handle(), IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof interval);
  ::setsockopt(socket.native_handle(), IPPROTO_TCP, TCP_KEEPCNT, &tries, sizeof tries);
}

}  // namespace

Result<HttpEndpoint> parse_endpoint(std::string_view text) {
  HttpEndpoint endpoint{.text = std::string(text.substr(0, text.size() - text.ends_with('/')))};
  auto wrong = [&] {
    return invalid_argument("'{}' is no address of etcd; it looks like http://10.0.0.1:2379", text);
  };
  std::string_view rest = endpoint.text;
  endpoint.tls = rest.starts_with("https://");
  if (!endpoint.tls && !rest.starts_with("http://")) return wrong();
  rest.remove_prefix(endpoint.tls ? 8 : 7);
  size_t host_end = rest.starts_with('[') ? rest.find(']') : rest.find(':');
  bool brackets = rest.starts_with('[');
  if (brackets && host_end == std::string_view::npos) return wrong();
  endpoint.host = rest.substr(brackets, host_end - brackets);
  rest.remove_prefix(std::min(rest.size(), host_end + brackets));
  endpoint.port = rest.empty() ? "2379" : std::string(rest.substr(1));
  if (endpoint.host.empty() || (!rest.empty() && rest[0] != ':') || endpoint.port.empty() ||
      endpoint.port.size() > 5 || endpoint.port.find_first_not_of("0123456789") != std::string::npos)
    return wrong();
  return endpoint;
}

struct HttpConnection::Impl {
  using Plain = beast::tcp_stream;
  using Tls = beast::ssl_stream<beast::tcp_stream>;
  using Parser = http::response_parser<http::string_body>;

  HttpEndpoint endpoint;
  std::shared_ptr<const TlsSource> certificates;
  std::atomic<bool> stopped = false;
  asio::io_context io{1};
  // One of them while connected.
  std::unique_ptr<Plain> plain;
  std::unique_ptr<Tls> tls;
  beast::flat_buffer buffer;
  std::unique_ptr<Parser> parser;  // of the answer in lines
  bool reading = false;            // a read for it is under way
  ErrorCode read_error;

  bool connected() const { return plain != nullptr || tls != nullptr; }
  beast::tcp_stream& bottom() { return tls ? beast::get_lowest_layer(*tls) : *plain; }
  void close() {
    parser.reset();
    tls.reset();
    plain.reset();
    buffer.clear();
  }

  Error failed(std::string_view doing, const ErrorCode& error) {
    close();
    if (stopped) return Error(Code::kCancelled, endpoint.text + ": stopped");
    std::string reason = error == beast::error::timeout ? "no answer in time" : error.message();
    return make_error(Code::kUnavailable, "{}: {}: {}", endpoint.text, doing, reason);
  }

  /// Starts an operation with a handler, and runs until it is done or its time is up.
  template <class Start>
  ErrorCode finish(Start start) {
    ErrorCode result = asio::error::operation_aborted;
    if (stopped) return result;
    start([&result](ErrorCode error, auto&&...) { result = error; });
    io.restart();
    io.run();
    return result;
  }
  template <class Start>
  ErrorCode finish_on_stream(Deadline deadline, Start start) {
    bottom().expires_at(deadline);
    ErrorCode error = finish([&](auto handler) {
      tls ? start(*tls, std::move(handler)) : start(*plain, std::move(handler));
    });
    if (connected()) bottom().expires_never();
    return error;
  }

  std::unique_ptr<Tls> new_tls_stream() {
    const std::shared_ptr<const TlsContext> context = certificates->context();
    ::SSL_CTX_up_ref(context->get());
    asio::ssl::context shared(context->get());  // gives that reference back
    return std::make_unique<Tls>(io, shared);
  }

  Result<> connect(Deadline deadline) {
    if (connected()) return ok();
    tcp::resolver resolver(io);
    tcp::resolver::results_type addresses;
    ErrorCode error = finish([&](auto handler) {
      resolver.async_resolve(endpoint.host, endpoint.port,
                             [&addresses, handler](ErrorCode e, auto found) mutable {
                               addresses = std::move(found);
                               handler(e);
                             });
    });
    if (error) return failed("looking up the name", error);
    if (endpoint.tls)
      tls = new_tls_stream();
    else
      plain = std::make_unique<Plain>(io);
    bottom().expires_at(deadline);
    error = finish([&](auto handler) { bottom().async_connect(addresses, handler); });
    if (error) return failed("connecting", error);
    keep_alive(bottom().socket());
    if (tls == nullptr) return ok();
    ::SSL_set_tlsext_host_name(tls->native_handle(), endpoint.host.c_str());
    tls->set_verify_callback(asio::ssl::host_name_verification(endpoint.host), error);
    error = finish([&](auto handler) {
      tls->async_handshake(asio::ssl::stream_base::client, handler);
    });
    if (error) return failed("TLS handshake", error);
    return ok();
  }

  Result<> send(std::string_view target, const Headers& headers, std::string body,
                Deadline deadline) {
    PTC_TRY(connect(deadline));
    std::string request = fmt::format(
        "POST {} HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n",
        target, endpoint.text.substr(endpoint.text.find("//") + 2), body.size());
    for (const auto& [name, value] : headers) request += fmt::format("{}: {}\r\n", name, value);
    request += "\r\n" + body;
    ErrorCode error = finish_on_stream(deadline, [&](auto& stream, auto handler) {
      asio::async_write(stream, asio::buffer(request), std::move(handler));
    });
    if (error) return failed("sending", error);
    return ok();
  }

  /// Reads into the buffer what comes next, of which the parser has seen nothing.
  template <class Handler>
  void start_reading(Handler handler) {
    auto space = buffer.prepare(kReadBytes);
    auto keep = [this, handler = std::move(handler)](ErrorCode error, size_t bytes) mutable {
      buffer.commit(bytes);
      handler(error);
    };
    tls ? tls->async_read_some(space, std::move(keep)) : plain->async_read_some(space, std::move(keep));
  }

  /// Gives the parser what is in the buffer.
  ErrorCode parse(Parser& to) {
    while (!to.is_done() && buffer.size() > 0) {
      ErrorCode error;
      size_t used = to.put(buffer.data(), error);
      buffer.consume(used);
      if (error == http::error::need_more) break;
      if (error) return error;
    }
    return {};
  }

  /// Reads an answer, or until its head is there.
  Result<> receive(Parser& to, Deadline deadline, bool head_only) {
    to.eager(true);
    while (head_only ? !to.is_header_done() : !to.is_done()) {
      ErrorCode error = finish_on_stream(
          deadline, [&](auto&, auto handler) { start_reading(std::move(handler)); });
      if (!error) error = parse(to);
      if (error) return failed("waiting for the answer", error);
    }
    return ok();
  }
};

HttpConnection::HttpConnection(const HttpEndpoint& endpoint, std::shared_ptr<const TlsSource> tls)
    : impl_(std::make_unique<Impl>()) {
  impl_->endpoint = endpoint;
  impl_->certificates = std::move(tls);
}

HttpConnection::~HttpConnection() = default;

Result<> HttpConnection::connect(Deadline deadline) { return impl_->connect(deadline); }

Result<HttpConnection::Response> HttpConnection::post(std::string_view target,
                                                      const Headers& headers, std::string body,
                                                      Deadline deadline) {
  PTC_TRY(impl_->send(target, headers, std::move(body), deadline));
  Impl::Parser parser;
  parser.body_limit(kMaxAnswerBytes);
  PTC_TRY(impl_->receive(parser, deadline, false));
  if (!parser.keep_alive()) impl_->close();
  return Response{parser.get().result_int(), std::move(parser.get().body())};
}

Result<unsigned> HttpConnection::start(std::string_view target, const Headers& headers,
                                       std::string body, Deadline deadline) {
  PTC_TRY(impl_->send(target, headers, std::move(body), deadline));
  impl_->parser = std::make_unique<Impl::Parser>();
  impl_->parser->body_limit(boost::none);
  PTC_TRY(impl_->receive(*impl_->parser, deadline, true));
  return impl_->parser->get().result_int();
}

Result<std::optional<std::string>> HttpConnection::read_line(std::chrono::milliseconds patience) {
  auto until = std::chrono::steady_clock::now() + patience;
  for (;;) {
    std::string& text = impl_->parser->get().body();
    if (size_t end = text.find('\n'); end != std::string::npos) {
      std::string line = text.substr(0, end);
      text.erase(0, end + 1);
      return std::optional(std::move(line));
    }
    if (impl_->parser->is_done() && !text.empty())
      return std::optional(std::exchange(text, std::string()));
    if (impl_->parser->is_done()) return impl_->failed("reading", http::error::end_of_stream);
    if (text.size() > kMaxAnswerBytes) return impl_->failed("reading", http::error::body_limit);
    if (!impl_->reading) {
      impl_->reading = true;
      impl_->start_reading([impl = impl_.get()](ErrorCode error) {
        impl->reading = false;
        impl->read_error = error;
      });
    }
    if (impl_->stopped) impl_->bottom().cancel();
    impl_->io.restart();
    impl_->io.run_until(until);
    if (impl_->reading) return std::optional<std::string>();
    if (!impl_->read_error) impl_->read_error = impl_->parse(*impl_->parser);
    if (impl_->read_error) return impl_->failed("reading", impl_->read_error);
  }
}

void HttpConnection::stop() {
  impl_->stopped = true;
  asio::post(impl_->io, [impl = impl_.get()] {
    if (impl->connected()) impl->bottom().cancel();
  });
}

}  // namespace ptc
