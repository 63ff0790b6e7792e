#include "store/meta/etcd_http.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>

#include "store/net/address.h"
#include "store/net/byte_stream.h"

namespace ptc {

namespace http = boost::beast::http;

namespace {

constexpr uint64_t kMaxAnswerBytes = 128 << 20;
constexpr size_t kReadBytes = 64 << 10;
constexpr int kSilenceSeconds = 5;  // then TCP asks whether the other side is there, three times
constexpr auto kRest = std::chrono::seconds(2);  // in which what has begun to come comes whole
constexpr auto kNoSilence =
    std::chrono::hours(24);  // until then the deadline is over, or TCP has found out

void keep_alive(int socket) {
  int yes = 1, seconds = kSilenceSeconds, interval = 1, tries = 3;
  ::setsockopt(socket, SOL_SOCKET, SO_KEEPALIVE, &yes, sizeof yes);
  ::setsockopt(socket, IPPROTO_TCP, TCP_KEEPIDLE, &seconds, sizeof seconds);
  ::setsockopt(socket, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof interval);
  ::setsockopt(socket, IPPROTO_TCP, TCP_KEEPCNT, &tries, sizeof tries);
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
      endpoint.port.size() > 5 ||
      endpoint.port.find_first_not_of("0123456789") != std::string::npos)
    return wrong();
  return endpoint;
}

struct HttpConnection::Impl {
  using Parser = http::response_parser<http::string_body>;

  HttpEndpoint endpoint;
  std::shared_ptr<const TlsSource> certificates;
  std::unique_ptr<ByteStream> stream;  // while connected
  boost::beast::flat_buffer buffer;    // of which no parser has seen anything
  std::unique_ptr<Parser> lines;       // of the answer that comes in lines

  Error failed(std::string_view doing, const Error& error) {
    lines.reset();
    stream.reset();
    buffer.clear();
    if (error.code() == Code::kCancelled)
      return Error(Code::kCancelled, endpoint.text + ": stopped");
    return make_error(Code::kUnavailable, "{}: {}{}{}", endpoint.text, doing,
                      doing.empty() ? "" : ": ", error.message());
  }
  Error failed(std::string_view doing, const boost::system::error_code& error) {
    return failed(doing, Error(Code::kUnavailable, error.message()));
  }

  asio::awaitable<void> wake(Until until) {
    stream->attach(co_await asio::this_coro::executor);
    stream->set_patience({kNoSilence, until.deadline, std::move(until.stop)});
  }

  Task<> connect(Until until) {
    if (stream) co_return ok();
    PeerAddress address{endpoint.host, endpoint.port};
    Patience patience{kNoSilence, until.deadline, until.stop};
    auto socket = co_await connect_to(std::move(address), std::move(patience));
    if (!socket) co_return failed("", socket.error());
    stream = std::make_unique<ByteStream>(std::move(socket).value());
    keep_alive(stream->fd());
    if (!endpoint.tls) co_return ok();
    co_await wake(std::move(until));
    const std::shared_ptr<const TlsContext> context = certificates->context();
    auto started = co_await stream->start_tls(*context, TlsSession::Side::kClient, endpoint.host);
    if (!started) co_return failed("TLS handshake", started.error());
    co_return ok();
  }

  Task<> send(std::string target, Headers headers, std::string body, Until until) {
    PTC_CO_TRY(co_await connect(until));
    co_await wake(std::move(until));
    std::string head = fmt::format(
        "POST {} HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n",
        target, endpoint.text.substr(endpoint.text.find("//") + 2), body.size());
    for (const auto& [name, value] : headers) head += fmt::format("{}: {}\r\n", name, value);
    head += "\r\n";
    iovec pieces[] = {piece_of(head), piece_of(body)};
    auto sent = co_await stream->send(pieces);
    if (!sent) co_return failed("sending", sent.error());
    co_return ok();
  }

  /// Puts behind the buffer what comes next.
  Task<> read_some() {
    const auto space = buffer.prepare(kReadBytes);
    const std::span<char> bytes(static_cast<char*>(space.data()), space.size());
    PTC_CO_TRY(const size_t got, co_await stream->receive_some(bytes));
    buffer.commit(got);
    if (got == 0) co_return Error(Code::kUnavailable, "the other side closed the connection");
    co_return ok();
  }

  /// Gives the parser what is in the buffer.
  boost::system::error_code parse(Parser& to) {
    while (!to.is_done() && buffer.size() > 0) {
      boost::system::error_code error;
      size_t used = to.put(buffer.data(), error);
      buffer.consume(used);
      if (error == http::error::need_more) break;
      if (error) return error;
    }
    return {};
  }

  /// Reads an answer, or until its head is there.
  Task<> receive(Parser& to, bool head_only) {
    to.eager(true);
    while (head_only ? !to.is_header_done() : !to.is_done()) {
      auto read = co_await read_some();
      if (!read) co_return failed("waiting for the answer", read.error());
      if (auto error = parse(to)) co_return failed("waiting for the answer", error);
    }
    co_return ok();
  }

  Task<std::optional<std::string>> read_line(std::chrono::milliseconds patience,
                                             std::stop_token stop) {
    const Deadline until = std::chrono::steady_clock::now() + patience;
    Until wait{until + kRest, std::move(stop)};
    co_await wake(std::move(wait));
    for (;;) {
      std::string& text = lines->get().body();
      if (size_t end = text.find('\n'); end != std::string::npos) {
        std::string line = text.substr(0, end);
        text.erase(0, end + 1);
        co_return std::optional(std::move(line));
      }
      if (lines->is_done() && !text.empty())
        co_return std::optional(std::exchange(text, std::string()));
      if (lines->is_done()) co_return failed("reading", http::error::end_of_stream);
      if (text.size() > kMaxAnswerBytes) co_return failed("reading", http::error::body_limit);
      const auto left =
          std::chrono::ceil<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
      auto came = co_await stream->wait_to_receive(std::max(left, std::chrono::milliseconds(0)));
      if (!came) co_return failed("reading", came.error());
      if (!came.value()) co_return std::optional<std::string>();
      auto read = co_await read_some();
      if (!read) co_return failed("reading", read.error());
      if (auto error = parse(*lines)) co_return failed("reading", error);
    }
  }
};

HttpConnection::HttpConnection(const HttpEndpoint& endpoint, std::shared_ptr<const TlsSource> tls)
    : impl_(std::make_unique<Impl>()) {
  impl_->endpoint = endpoint;
  impl_->certificates = std::move(tls);
}

HttpConnection::~HttpConnection() = default;

void HttpConnection::rest() {
  if (!impl_->stream) return;
  impl_->stream->detach();
  impl_->stream->set_patience({});
}

Task<> HttpConnection::connect(Until until) { return impl_->connect(std::move(until)); }

Task<HttpConnection::Response> HttpConnection::post(std::string target, Headers headers,
                                                    std::string body, Until until) {
  PTC_CO_TRY(co_await impl_->send(std::move(target), std::move(headers), std::move(body),
                                  std::move(until)));
  Impl::Parser parser;
  parser.body_limit(kMaxAnswerBytes);
  PTC_CO_TRY(co_await impl_->receive(parser, false));
  if (!parser.keep_alive()) impl_->stream.reset();
  Response response{parser.get().result_int(), std::move(parser.get().body())};
  co_return response;
}

Task<unsigned> HttpConnection::start(std::string target, Headers headers, std::string body,
                                     Until until) {
  PTC_CO_TRY(co_await impl_->send(std::move(target), std::move(headers), std::move(body),
                                  std::move(until)));
  impl_->lines = std::make_unique<Impl::Parser>();
  impl_->lines->body_limit(boost::none);
  PTC_CO_TRY(co_await impl_->receive(*impl_->lines, true));
  co_return impl_->lines->get().result_int();
}

Task<std::optional<std::string>> HttpConnection::read_line(std::chrono::milliseconds patience,
                                                           std::stop_token stop) {
  return impl_->read_line(patience, std::move(stop));
}

}  // namespace ptc
