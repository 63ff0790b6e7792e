// What the memory of this machine gives, for benchmarks to compare with: prints seconds.
//
//   ptc_baseline copy MIB THREADS        memcpy between buffers that were used before
//   ptc_baseline copy-to MIB THREADS DIR the same into a mapping of a new file there
//   ptc_baseline hash MIB THREADS        the checksum of a buffer that was written before
//   ptc_baseline keep MIB THREADS DIR    the same, and pwrite of what was hashed into a new file
//                                        there, 2 MiB at a time, with memory of this program given
//                                        back just before: the least that a copy costs which is
//                                        checked, and of whose pages nobody had one before
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "store/tensor/checksum.h"

namespace {

std::byte* memory(size_t bytes, int fd) {
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                  fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) {
    std::perror("mmap");
    std::exit(1);
  }
  if (fd < 0) madvise(at, bytes, MADV_HUGEPAGE);
  return static_cast<std::byte*>(at);
}

template <class Body>  // body(from, to) on each thread
double seconds(size_t bytes, size_t threads, Body body) {
  auto start = std::chrono::steady_clock::now();
  std::vector<std::thread> team;
  for (size_t i = 0; i < threads; ++i) {
    team.emplace_back(body, bytes / threads * i, bytes / threads * (i + 1));
  }
  for (std::thread& thread : team) thread.join();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

int main(int count, char** arguments) {
  const std::string what = count > 3 ? arguments[1] : "";
  const bool keeps = what == "keep", to_file = what == "copy-to" || keeps;
  if ((what != "copy" && what != "hash" && !to_file) || count != (to_file ? 5 : 4)) {
    std::fputs("usage: ptc_baseline copy|hash MIB THREADS, or copy-to|keep MIB THREADS DIRECTORY\n",
               stderr);
    return 2;
  }
  const size_t bytes = std::strtoull(arguments[2], nullptr, 10) << 20;
  const size_t threads = std::strtoull(arguments[3], nullptr, 10);
  std::byte* source = memory(bytes, -1);
  std::memset(source, 0x5a, bytes);
  if (what == "hash") {
    std::printf(
        "%.6f\n", seconds(bytes, threads, [&](size_t from, size_t to) {
          // In the end nobody may say that the sum was not wanted.
          volatile uint64_t lane = ptc::checksum_of_run({source + from, to - from}, from).lane[0];
          (void)lane;
        }));
    return 0;
  }
  int fd = to_file ? open(arguments[4], O_TMPFILE | O_RDWR, 0600) : -1;
  if (to_file && (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0)) {
    std::perror(arguments[4]);
    return 1;
  }
  std::byte* target = memory(bytes, keeps ? -1 : fd);
  if (keeps) {
    std::memset(target, 0, bytes);
    munmap(target, bytes);
    constexpr size_t kBlock = 2 << 20;
    std::printf("%.6f\n", seconds(bytes, threads, [&](size_t from, size_t to) {
                  for (size_t at = from; at < to; at += kBlock) {
                    const size_t size = std::min(kBlock, to - at);
                    volatile uint64_t lane = ptc::checksum_of_run({source + at, size}, at).lane[0];
                    (void)lane;
                    if (pwrite(fd, source + at, size, static_cast<off_t>(at)) !=
                        static_cast<ssize_t>(size)) {
                      std::perror("pwrite");
                      std::exit(1);
                    }
                  }
                }));
    return 0;
  }
  if (!to_file) std::memset(target, 0, bytes);
  std::printf("%.6f\n", seconds(bytes, threads, [&](size_t from, size_t to) {
                std::memcpy(target + from, source + from, to - from);
              }));
}
