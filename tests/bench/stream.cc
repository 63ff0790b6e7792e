// One stream between two nodes, for stream.py to compare with iperf3.
//
//   ptc_stream_bench serve DIR MIB     an image of so many MiB; prints "ADDRESS ID", ends with its
//                                      input
//   ptc_stream_bench fetch ADDRESS ID MIB RUN
//     Fetches into memory that was used before, prints seconds. RUN 0: all of it; else every other
//       run of
//     so many bytes, one behind the other.
#include <fmt/format.h>
#include <sys/mman.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "store/rpc/peer_server.h"
#include "store/transport/tcp.h"

namespace ptc {
namespace {

constexpr size_t kHugePage = 2 << 20;

template <class T>
T or_exit(Result<T> result) {
  if (result) return std::move(result).value();
  fmt::print(stderr, "{}\n", result.error().message());
  std::exit(1);
}

int serve(const std::string& directory, uint64_t bytes) {
  auto images = or_exit(ImageStore::open(directory));
  ImageWriter writer = or_exit(images->create(bytes));
  const std::vector<std::byte> piece(1 << 20, std::byte{0x5a});
  for (uint64_t at = 0; at < bytes; at += piece.size()) (void)writer.write(at, piece);
  ImageRef image = or_exit(images->publish(std::move(writer)));
  auto server = or_exit(PeerServer::start(
      {.listen = "127.0.0.1:0", .node = "server", .cluster = "bench", .images = images.get()}));
  fmt::print("{} {}\n", server->address(), image->id().text);
  std::fflush(stdout);
  while (std::getchar() != EOF) {
  }
  return 0;
}

int fetch(const std::string& address, const std::string& id, uint64_t bytes, uint64_t run) {
  auto peers = or_exit(Peers::create({.node = "client", .cluster = "bench"}));
  peers->set("server", address);
  auto transport = make_tcp_transport(*peers, make_loopback_transport());
  const Image image(ImageId{id}, MemoryPlace{"server"}, bytes);
  StridedCopy copy;
  copy.run_bytes = bytes;
  if (run != 0) {
    copy.run_bytes = run;
    copy.level_count = 1;
    copy.levels[0] = {bytes / run / 2, 2 * run, run};
  }
  const uint64_t wanted = copy.total_bytes();
  auto* target = static_cast<std::byte*>(
      std::aligned_alloc(kHugePage, wanted + kHugePage - wanted % kHugePage));
  madvise(target, wanted, MADV_HUGEPAGE);  // as the memory of images and of gathered files is
  std::memset(target, 1, wanted);
  FetchItem warm_up{&image, copy, 0, 4096, in_host_memory(target)};
  if (auto done = transport->fetch({&warm_up, 1}, {}); !done) return 1;
  auto start = std::chrono::steady_clock::now();
  FetchItem item{&image, copy, 0, wanted, in_host_memory(target)};
  auto done = transport->fetch({&item, 1}, {});
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  if (!done) {
    fmt::print(stderr, "{}\n", done.error().message());
    return 1;
  }
  fmt::print("{:.6f}\n", took.count());
  return 0;
}

}  // namespace
}  // namespace ptc

int main(int count, char** arguments) {
  const std::string what = count > 1 ? arguments[1] : "";
  auto number = [&](int i) { return std::strtoull(arguments[i], nullptr, 10); };
  if (what == "serve" && count == 4) return ptc::serve(arguments[2], number(3) << 20);
  if (what == "fetch" && count == 6)
    return ptc::fetch(arguments[2], arguments[3], number(4) << 20, number(5));
  fmt::print(stderr, "usage: ptc_stream_bench serve DIR MIB, or fetch ADDRESS ID MIB RUN\n");
  return 2;
}
