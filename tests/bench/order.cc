// What a lookup in a shuffled order costs, against reading a shuffled table of all samples in
// memory: positions one after the other (as ranks read them), 10⁸ samples.
//
//   ptc_order_bench
#include <fmt/format.h>

#include <chrono>
#include <numeric>
#include <vector>

#include "dataset/order/sample_order.h"

namespace ptc {
namespace {

constexpr uint64_t kSamples = 100'000'000, kLookups = 4'000'000;

template <class Lookup>
double nanoseconds(const Lookup& lookup) {
  const auto start = std::chrono::steady_clock::now();
  uint64_t sum = 0;
  for (uint64_t p = 0; p < kLookups; ++p) sum += lookup(p);
  const std::chrono::duration<double, std::nano> time = std::chrono::steady_clock::now() - start;
  if (sum == 0) fmt::print("impossible\n");
  return time.count() / kLookups;
}

void compare() {
  std::vector<uint32_t> table(kSamples);
  std::iota(table.begin(), table.end(), 0);
  const double plain = nanoseconds([&](uint64_t p) { return table[p]; });
  fmt::print("table: {:.1f} ns a lookup, {} MiB\n", plain, kSamples * 4 >> 20);
  for (const char* name : {"global", "block:100", "none"}) {
    const auto start = std::chrono::steady_clock::now();
    const SampleOrder order(kSamples, Shuffle::parse(name).value(), 1, 0);
    const std::chrono::duration<double, std::micro> begun =
        std::chrono::steady_clock::now() - start;
    const double time = nanoseconds([&](uint64_t p) { return order.at(p); });
    fmt::print("{}: {:.1f} ns a lookup, {:.1f} µs to begin\n", name, time, begun.count());
  }
}

}  // namespace
}  // namespace ptc

int main() { ptc::compare(); }
