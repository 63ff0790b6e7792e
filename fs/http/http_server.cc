#include "fs/http/http_server.h"

#include <fcntl.h>
#include <pthread.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <array>
#include <boost/asio/as_tuple.hpp>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/buffer.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/string.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <boost/beast/http/empty_body.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/read.hpp>
#include <boost/beast/http/string_body.hpp>
#include <boost/beast/http/write.hpp>
#include <charconv>
#include <exception>
#include <thread>
#include <utility>
#include <vector>

namespace ptc {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using asio::ip::tcp;
using boost::system::error_code;
using Request = http::request_parser<http::empty_body>;
using Response = http::response<http::string_body>;

constexpr auto kTuple = asio::as_tuple(asio::use_awaitable);
constexpr auto kLinger = std::chrono::seconds(1);
constexpr size_t kLingerBytes = 1 << 20;

std::string_view view(beast::string_view text) { return {text.data(), text.size()}; }

HttpReply refusal(http::status status, std::string_view why) {
  HttpReply reply;
  reply.status = static_cast<unsigned>(status);
  reply.body = fmt::format("{} {}: {}\n", reply.status, view(http::obsolete_reason(status)), why);
  return reply;
}

/// "[::1]:80" → "::1", "localhost:80" → "localhost".
std::string_view without_port(std::string_view host) {
  if (host.starts_with('[')) {
    const size_t end = host.find(']');
    return end == std::string_view::npos ? host : host.substr(1, end - 1);
  }
  return host.substr(0, host.find(':'));
}

bool is_literal(std::string_view host) {
  error_code error;
  asio::ip::make_address(std::string(host), error);
  return !error;
}

std::string_view without_query(std::string_view target) {
  return target.substr(0, target.find_first_of("?#"));
}

std::string machine_name() {
  char name[256] = {};
  return ::gethostname(name, sizeof name - 1) == 0 ? name : "localhost";
}

}  // namespace

Result<HttpAddress> HttpAddress::parse(std::string_view text) {
  const size_t colon = text.rfind(':');
  std::string_view host = text.substr(0, colon);
  std::string_view port = colon == std::string_view::npos ? "" : text.substr(colon + 1);
  unsigned number = 0;
  auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), number);
  const bool bracketed = host.starts_with('[') && host.ends_with(']') && host.size() > 2;
  if (bracketed) host = host.substr(1, host.size() - 2);
  const bool plain = host.find_first_of("[]/@ ") == std::string_view::npos &&
                     (bracketed || host.find(':') == std::string_view::npos);
  if (port.empty() || error != std::errc() || end != port.data() + port.size() || number > 65535 ||
      !plain)
    return invalid_argument(
        "'{}' is no address to listen on; it is like 127.0.0.1:9090, "
        "[::1]:9090 or :9090",
        text);
  return HttpAddress{host.empty() ? "127.0.0.1" : std::string(host), std::string(port)};
}

struct HttpServer::Impl {
  explicit Impl(const HttpLimits& given) : limits(given) {}

  const HttpLimits limits;
  std::vector<std::string> names{"localhost", machine_name()};
  std::string url;
  bool loopback = false;
  std::unique_ptr<AccessLog> log;  // null: none
  AtOnce at_once;
  Answer answer;  // of the pages' thread
  asio::io_context io{1};
  tcp::acceptor acceptor{io};
  asio::steady_timer one_less{io, asio::steady_timer::time_point::max()};
  size_t open = 0;
  size_t pages = 0;                                 // that are made, or wait for that
  std::chrono::steady_clock::time_point page_done;  // the last one, or the first of these came
  std::thread thread;
  // Its own: a page looks at all jobs, and at the store's file system. After io, which outlives it.
  asio::io_context pages_io{1};
  asio::executor_work_guard<asio::io_context::executor_type> pages_wanted{pages_io.get_executor()};
  std::thread pages_thread;

  Result<> listen(const HttpAddress& address);
  bool is_ours(std::string_view host) const;
  std::optional<HttpReply> answer_at_once(const Request& request) const;
  asio::awaitable<HttpReply> make_page(std::string target) const;
  asio::awaitable<HttpReply> page(std::string target);
  static Response response_to(const Request& request, HttpReply reply);
  HttpAccess access_of(const Request& request, const beast::tcp_stream& stream) const;

  asio::awaitable<void> accept_all();
  asio::awaitable<void> serve(beast::tcp_stream stream);
  asio::awaitable<void> close(beast::tcp_stream& stream);
};

Result<> HttpServer::Impl::listen(const HttpAddress& address) {
  error_code error;
  auto found = tcp::resolver(io).resolve(address.host, address.port, error);
  const std::string given = fmt::format("--http {}:{}", address.host, address.port);
  if (error || found.empty())
    return invalid_argument("{}: {}; give an address of this machine", given, error.message());
  const tcp::endpoint endpoint = found.begin()->endpoint();
  acceptor.open(endpoint.protocol(), error);
  if (!error) ::fcntl(acceptor.native_handle(), F_SETFD, FD_CLOEXEC);
  if (!error) acceptor.set_option(tcp::acceptor::reuse_address(true), error);
  if (!error) acceptor.bind(endpoint, error);
  if (!error) acceptor.listen(asio::socket_base::max_listen_connections, error);
  if (error) {
    const char* advice = error == asio::error::address_in_use
                             ? "; another program listens there: choose another port, or 0 for any"
                         : error == asio::error::access_denied
                             ? "; ports below 1024 are root's: choose another"
                             : "; give an address of this machine";
    return Error(Code::kUnavailable, fmt::format("{}: {}{}", given, error.message(), advice));
  }
  const tcp::endpoint bound = acceptor.local_endpoint(error);
  loopback = bound.address().is_loopback();
  const std::string host = bound.address().to_string();
  url =
      fmt::format("http://{}:{}/", bound.address().is_v6() ? "[" + host + "]" : host, bound.port());
  names.push_back(address.host);
  return ok();
}

bool HttpServer::Impl::is_ours(std::string_view host) const {
  host = without_port(host);
  for (const std::string& name : names)
    if (beast::iequals(beast::string_view(host.data(), host.size()), name)) return true;
  return is_literal(host);
}

/// nullopt: it is a page.
std::optional<HttpReply> HttpServer::Impl::answer_at_once(const Request& request) const {
  const auto& message = request.get();
  if (message.method() != http::verb::get && message.method() != http::verb::head)
    return refusal(http::status::method_not_allowed, "only GET and HEAD are answered");
  if (message.count(http::field::host) != 1 && message.version() >= 11)
    return refusal(http::status::bad_request, "one Host is needed");
  if (message.count(http::field::host) != 0 && !is_ours(view(message[http::field::host])))
    return refusal(http::status::misdirected_request,
                   "ask by address, by localhost, or by the name given to ptcfs --http");
  const std::string_view target = view(message.target());
  if (!target.starts_with('/')) return refusal(http::status::bad_request, "no such path");
  if (at_once) return at_once(without_query(target));
  return std::nullopt;
}

/// On the pages' thread.
asio::awaitable<HttpReply> HttpServer::Impl::make_page(std::string target) const {
  if (!answer) co_return refusal(http::status::service_unavailable, "ptcfs is not mounted yet");
  try {
    co_return answer(without_query(target));
  } catch (const std::exception& error) {
    spdlog::error("http: {}: {}", target, error.what());
  }
  co_return refusal(http::status::internal_server_error, "see the log of ptcfs");
}

/// Whoever waits takes a connection, so not all may wait for one that does not end.
asio::awaitable<HttpReply> HttpServer::Impl::page(std::string target) {
  const auto now = std::chrono::steady_clock::now();
  if (pages == 0) page_done = now;
  if (now - page_done > limits.page)
    co_return refusal(http::status::service_unavailable, "another page takes too long");
  ++pages;
  asio::awaitable<HttpReply> making = make_page(std::move(target));
  HttpReply reply = co_await asio::co_spawn(pages_io, std::move(making), asio::use_awaitable);
  --pages;
  page_done = std::chrono::steady_clock::now();
  co_return reply;
}

/// Its body is there also where HEAD or an unchanged tag will take it away.
Response HttpServer::Impl::response_to(const Request& request, HttpReply reply) {
  const auto& message = request.get();
  Response response(static_cast<http::status>(reply.status), 11);
  response.set(http::field::server, "ptcfs");
  response.set(http::field::content_type, reply.content_type);
  response.set(http::field::cache_control, reply.may_be_kept ? "no-cache" : "no-store");
  response.set("Content-Security-Policy", reply.content_security_policy);
  response.set("X-Content-Type-Options", "nosniff");
  response.set("Referrer-Policy", "no-referrer");
  if (response.result() == http::status::method_not_allowed)
    response.set(http::field::allow, "GET, HEAD");
  const std::string tag =
      fmt::format("\"{:x}-{:x}\"", std::hash<std::string>()(reply.body), reply.body.size());
  response.content_length(reply.body.size());
  if (response.result() == http::status::ok && reply.may_be_kept) {
    response.set(http::field::etag, tag);
    if (view(message[http::field::if_none_match]) == tag) {
      response.result(http::status::not_modified);
      response.content_length(boost::none);
      reply.body.clear();
    }
  }
  if (message.method() != http::verb::head) response.body() = std::move(reply.body);
  // A body that came along is not read, so that nothing can follow it.
  response.keep_alive(request.is_header_done() && message.keep_alive() && !request.chunked() &&
                      request.content_length().value_or(0) == 0);
  return response;
}

/// What is known of it before it is answered.
HttpAccess HttpServer::Impl::access_of(const Request& request,
                                       const beast::tcp_stream& stream) const {
  HttpAccess access;
  access.when = std::chrono::system_clock::now();
  error_code error;
  const tcp::endpoint client = stream.socket().remote_endpoint(error);
  if (!error) access.client = client.address().to_string();
  if (!request.is_header_done()) return access;
  access.method = view(request.get().method_string());
  access.path = view(request.get().target());
  return access;
}

asio::awaitable<void> HttpServer::Impl::serve(beast::tcp_stream stream) {
  beast::flat_buffer buffer;
  for (;;) {
    Request request;
    request.header_limit(static_cast<uint32_t>(limits.header_bytes));
    stream.expires_after(limits.request);
    auto [read_error, header_bytes] =
        co_await http::async_read_header(stream, buffer, request, kTuple);
    const auto began = std::chrono::steady_clock::now();
    HttpAccess access;
    if (log != nullptr) access = access_of(request, stream);
    HttpReply reply;
    std::string page_wanted;
    if (read_error == http::error::header_limit)
      reply = refusal(http::status::request_header_fields_too_large, "the header is too long");
    else if (read_error == http::error::end_of_stream || read_error == http::error::partial_message)
      break;
    else if (read_error && read_error.category() == error_code(http::error::bad_method).category())
      reply = refusal(http::status::bad_request, read_error.message());
    else if (read_error) co_return;  // gone, or too slow
    else if (std::optional<HttpReply> at_once = answer_at_once(request))
      reply = *std::move(at_once);
    else page_wanted = view(request.get().target());
    if (!page_wanted.empty()) reply = co_await page(std::move(page_wanted));
    Response response = response_to(request, std::move(reply));
    const bool last = !response.keep_alive();
    stream.expires_after(limits.reply);
    auto [write_error, bytes] = co_await http::async_write(stream, response, kTuple);
    if (log != nullptr) {
      access.status = response.result_int();
      access.bytes = bytes;
      access.seconds =
          std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
      log->note(std::move(access));
    }
    if (write_error) co_return;
    if (last) break;
  }
  co_await close(stream);
}

/// What is still coming in is taken for a moment: closing at once would make the kernel send a
/// reset, which can overtake the answer.
asio::awaitable<void> HttpServer::Impl::close(beast::tcp_stream& stream) {
  error_code ignored;
  stream.socket().shutdown(tcp::socket::shutdown_send, ignored);
  stream.expires_after(kLinger);
  std::array<char, 4096> rest;
  size_t taken = 0;
  while (taken < kLingerBytes) {
    auto [error, bytes] = co_await stream.async_read_some(asio::buffer(rest), kTuple);
    if (error) break;
    taken += bytes;
  }
}

asio::awaitable<void> HttpServer::Impl::accept_all() {
  asio::steady_timer pause(io);
  for (;;) {
    while (open >= limits.connections) co_await one_less.async_wait(kTuple);
    auto [error, socket] = co_await acceptor.async_accept(kTuple);
    if (error) {  // no descriptors, say
      pause.expires_after(std::chrono::milliseconds(100));
      co_await pause.async_wait(kTuple);
      continue;
    }
    ++open;
    auto done = [this](std::exception_ptr thrown) {
      --open;
      one_less.cancel();
      if (thrown) spdlog::warn("http: a connection was given up");
    };
    asio::co_spawn(io, serve(beast::tcp_stream(std::move(socket))), done);
  }
}

HttpServer::HttpServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Result<std::unique_ptr<HttpServer>> HttpServer::listen(const HttpAddress& address,
                                                       const HttpLimits& limits) {
  auto impl = std::make_unique<Impl>(limits);
  PTC_TRY(impl->listen(address));
  return std::unique_ptr<HttpServer>(new HttpServer(std::move(impl)));
}

void HttpServer::log_to(std::unique_ptr<AccessLog> log) { impl_->log = std::move(log); }

void HttpServer::serve(AtOnce at_once) {
  impl_->at_once = std::move(at_once);
  asio::co_spawn(impl_->io, impl_->accept_all(), [](std::exception_ptr thrown) {
    if (thrown) spdlog::error("http: no more connections are taken");
  });
  impl_->thread = std::thread([impl = impl_.get()] {
    ::pthread_setname_np(::pthread_self(), "ptcfs-http");
    impl->io.run();
  });
  impl_->pages_thread = std::thread([impl = impl_.get()] {
    ::pthread_setname_np(::pthread_self(), "ptcfs-pages");
    impl->pages_io.run();
  });
}

void HttpServer::show(Answer answer) {
  asio::post(impl_->pages_io, [impl = impl_.get(), answer = std::move(answer)]() mutable {
    impl->answer = std::move(answer);
  });
}

HttpServer::~HttpServer() {
  impl_->io.stop();
  impl_->pages_io.stop();
  if (impl_->thread.joinable()) impl_->thread.join();
  if (impl_->pages_thread.joinable()) impl_->pages_thread.join();
}

const std::string& HttpServer::url() const { return impl_->url; }
bool HttpServer::loopback() const { return impl_->loopback; }

}  // namespace ptc
