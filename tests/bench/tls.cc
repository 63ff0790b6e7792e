// One stream under TLS over loopback: ByteStream, which hands OpenSSL the socket itself, against
// Boost.Asio's ssl::stream, which has two buffers of its own between the two. Both between two
// threads of this process, with the same certificates, in turns.
//
//   ptc_tls_bench [MIB] [ROUNDS]      prints the speed, ssl::stream's = 1
#include <fmt/format.h>
#include <openssl/ssl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/read.hpp>
#include <boost/asio/ssl.hpp>
#include <boost/asio/write.hpp>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "store/net/byte_stream.h"
#include "store/tls/tls_context.h"

namespace ptc {
namespace {

constexpr size_t kPiece = 1 << 20;  // of a send, and of a receive
using Clock = std::chrono::steady_clock;

[[noreturn]] void give_up(const std::string& why) {
  fmt::print(stderr, "ptc_tls_bench: {}\n", why);
  std::exit(1);
}

/// Two descriptors of one TCP connection.
std::pair<UniqueFd, UniqueFd> connection() {
  asio::io_context loop;
  asio::ip::tcp::acceptor acceptor(loop, {asio::ip::address_v4::loopback(), 0});
  asio::ip::tcp::socket client(loop);
  client.connect(acceptor.local_endpoint());
  asio::ip::tcp::socket server = acceptor.accept();
  std::pair<UniqueFd, UniqueFd> ends{UniqueFd(::dup(client.native_handle())),
                                     UniqueFd(::dup(server.native_handle()))};
  client.non_blocking(true);  // of the open file, so of the duplicates too
  server.non_blocking(true);
  return ends;
}

/// From the first byte that is sent to the last that has come.
double seconds_of(const std::function<void()>& sends, const std::function<void()>& receives) {
  std::thread receiver(receives);
  const auto start = Clock::now();
  sends();
  receiver.join();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

double with_byte_stream(const TlsContext& context, uint64_t bytes) {
  auto ends = connection();
  const auto side = [&](UniqueFd end, TlsSession::Side which, bool out) {
    std::vector<std::byte> buffer(kPiece);
    ByteStream stream(std::move(end));
    const auto all = [&](IoExecutor executor) -> Task<> {
      stream.attach(executor);
      PTC_CO_TRY(co_await stream.start_tls(context, which));
      for (uint64_t done = 0; done < bytes; done += kPiece) {
        iovec piece{buffer.data(), kPiece};
        const std::span<iovec> pieces(&piece, 1);
        if (out) {
          PTC_CO_TRY(co_await stream.send(pieces));
        } else {
          PTC_CO_TRY(co_await stream.receive(pieces));
        }
      }
      co_return ok();
    };
    if (const Result<> done = run_here(all); done.has_error()) give_up(done.error().message());
    stream.detach();
  };
  return seconds_of([&] { side(std::move(ends.first), TlsSession::Side::kClient, true); },
                    [&] { side(std::move(ends.second), TlsSession::Side::kServer, false); });
}

double with_asio(const TlsContext& context, uint64_t bytes) {
  auto ends = connection();
  const auto side = [&](UniqueFd end, bool out) {
    std::vector<std::byte> buffer(kPiece);
    asio::io_context loop;
    ::SSL_CTX_up_ref(context.get());
    asio::ssl::context shared(context.get());
    asio::ssl::stream<asio::ip::tcp::socket> stream(loop, shared);
    stream.next_layer().assign(asio::ip::tcp::v4(), end.release());
    auto all = [&]() -> asio::awaitable<void> {
      co_await stream.async_handshake(
          out ? asio::ssl::stream_base::client : asio::ssl::stream_base::server,
          asio::use_awaitable);
      const asio::mutable_buffer piece(buffer.data(), kPiece);
      for (uint64_t done = 0; done < bytes; done += kPiece) {
        if (out) co_await asio::async_write(stream, piece, asio::use_awaitable);
        else co_await asio::async_read(stream, piece, asio::use_awaitable);
      }
    };
    asio::co_spawn(loop, std::move(all), [](std::exception_ptr thrown) {
      if (thrown) std::rethrow_exception(thrown);
    });
    loop.run();
  };
  return seconds_of([&] { side(std::move(ends.first), true); },
                    [&] { side(std::move(ends.second), false); });
}

int compare(uint64_t bytes, int rounds) {
  std::string directory = (std::filesystem::temp_directory_path() / "ptc-tls-XXXXXX").string();
  if (::mkdtemp(directory.data()) == nullptr) give_up("no temporary directory");
  const std::string make = fmt::format(
      "cd {} && umask 077 && openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes "
      "-days 2 -subj /O=bench -keyout key -out certificate 2> /dev/null",
      directory);
  if (std::system(make.c_str()) != 0) give_up("openssl makes no certificate");
  auto context =
      TlsContext::load({directory + "/certificate", directory + "/certificate", directory + "/key"},
                       TlsUse::kMutual);
  std::filesystem::remove_all(directory);
  if (context.has_error()) give_up(context.error().message());
  std::vector<double> ratios;
  for (int round = 0; round < rounds; ++round) {
    double own = 0, theirs = 0;
    if (round % 2 == 0) own = with_byte_stream(*context.value(), bytes);
    theirs = with_asio(*context.value(), bytes);
    if (round % 2 != 0) own = with_byte_stream(*context.value(), bytes);
    ratios.push_back(theirs / own);
  }
  std::sort(ratios.begin(), ratios.end());
  fmt::print(
      "one stream of {} MiB under TLS; speed, Boost.Asio's ssl::stream = 1\n  {:.2f}   "
      "({:.2f} to {:.2f})\n",
      bytes >> 20, ratios[ratios.size() / 2], ratios.front(), ratios.back());
  return 0;
}

}  // namespace
}  // namespace ptc

int main(int count, char** arguments) {
  const uint64_t mib = count > 1 ? std::strtoull(arguments[1], nullptr, 10) : 1024;
  const int rounds = count > 2 ? std::atoi(arguments[2]) : 5;
  if (count > 3 || mib == 0 || rounds <= 0) {
    fmt::print(stderr, "usage: ptc_tls_bench [MIB] [ROUNDS]\n");
    return 2;
  }
  return ptc::compare(mib << 20, rounds);
}
