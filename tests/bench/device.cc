// Cuts, joins and checksums on a device, of the tensors of a Llama, in one launch each.
//
//   ptc_device_bench [--rounds N] [--host]
//
// Ratios, median and range over rounds: cut and join, of rows and of columns, as the rate of a copy
// within the device's memory of as many bytes; checksums as the rate at which that copy reads and
// writes; copies from and to registered memory of the host as those from and to any. --host: in the
// host's memory, where the figures mean nothing but that all of it runs.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "store/device/cuda_device.h"
#include "store/device/host_device.h"

namespace ptc {
namespace {

using Clock = std::chrono::steady_clock;
constexpr uint64_t kElement = 2;  // bf16

struct Matrix {
  uint64_t rows, columns;
  bool by_rows;  // how tensor parallelism cuts it
};

/// Of 32 layers.
std::vector<Matrix> llama(uint64_t hidden, uint64_t inner, int layers) {
  std::vector<Matrix> all;
  for (int i = 0; i < layers; ++i) {
    for (int k = 0; k < 3; ++k) all.push_back({hidden, hidden, true});
    all.push_back({hidden, hidden, false});
    for (int k = 0; k < 2; ++k) all.push_back({inner, hidden, true});
    all.push_back({hidden, inner, false});
  }
  return all;
}

template <class T>
T value_of(Result<T> result) {
  if (result.has_value()) return std::move(result).value();
  fmt::print(stderr, "ptc_device_bench: {}\n", result.error().message());
  std::exit(1);
}
void done(const Result<>& result) {
  if (result.has_value()) return;
  fmt::print(stderr, "ptc_device_bench: {}\n", result.error().message());
  std::exit(1);
}

class Bench {
 public:
  Bench(Device& device, int rounds, bool small)
      : device_(device),
        rounds_(rounds),
        matrices_(small ? llama(256, 1024, 2) : llama(4096, 14336, 16)) {
    for (const Matrix& one : matrices_) bytes_ += one.rows * one.columns * kElement;
    whole_ = value_of(device.allocate(bytes_));
    halves_ = value_of(device.allocate(bytes_));
    stream_ = value_of(device.stream());
    host_.resize(bytes_, std::byte{1});
    done(stream_->copy(whole_.begin(), in(host_.data()), bytes_));
    done(stream_->wait());
  }

  void run() {
    const auto copy = [&] { done(stream_->copy(halves_.begin(), in(whole_), bytes_)); };
    for (const bool by_rows : {true, false}) {
      std::vector<DeviceCopy> cut, join;
      uint64_t moved = 0, at = 0;
      for (const Matrix& one : matrices_) {
        const uint64_t bytes = one.rows * one.columns * kElement;
        if (one.by_rows == by_rows) moved += add(one, at, cut, join);
        at += bytes;
      }
      const auto launch = [&](const std::vector<DeviceCopy>& copies) {
        return [&] { done(stream_->copy_strided(copies)); };
      };
      const double part = static_cast<double>(bytes_) / static_cast<double>(moved);
      const char* what = by_rows ? "rows" : "columns";
      say(fmt::format("cut of {} in two / copy of as much", what), copy, launch(cut), part);
      say(fmt::format("join of {} / copy of as much", what), copy, launch(join), part);
    }
    std::vector<DeviceRun> runs;
    uint64_t at = 0;
    for (uint32_t i = 0; i < matrices_.size(); ++i) {
      const uint64_t bytes = matrices_[i].rows * matrices_[i].columns * kElement;
      runs.push_back({in(whole_, at), bytes, 0, i});
      at += bytes;
    }
    std::vector<Checksum> sums(matrices_.size());
    say(
        "checksums / copy, which reads and writes", copy,
        [&] { done(stream_->add_checksums(runs, sums)); }, 1);
    auto pageable = [&] { done(stream_->copy(whole_.begin(), in(host_.data()), bytes_)); };
    std::vector<std::byte> other(bytes_, std::byte{2});
    const RegisteredMemory registered = value_of(device_.register_host(other));
    say(
        "to the device from registered memory / from any", pageable,
        [&] { done(stream_->copy(whole_.begin(), in(other.data()), bytes_)); }, 1);
    fmt::print("{} tensors, {:.2f} GB on {}\n", matrices_.size(), static_cast<double>(bytes_) / 1e9,
               device_.name());
  }

 private:
  static ConstMemoryPointer in(const std::byte* host) { return in_host_memory(host); }
  static ConstMemoryPointer in(const DeviceMemory& memory, uint64_t offset = 0) {
    return {memory.begin().memory(), memory.begin().address() + offset};
  }

  /// Both halves of a matrix; how many bytes they are.
  uint64_t add(const Matrix& one, uint64_t at, std::vector<DeviceCopy>& cut,
               std::vector<DeviceCopy>& join) const {
    const Shape whole{one.rows, one.columns};
    const Shape half{one.by_rows ? one.rows / 2 : one.rows,
                     one.by_rows ? one.columns : one.columns / 2};
    const uint64_t bytes = one.rows * one.columns * kElement;
    for (const uint64_t which : {0, 1}) {
      const Dims begin{one.by_rows ? which * half[0] : 0, one.by_rows ? 0 : which * half[1]};
      const uint64_t place = at + which * bytes / 2;
      constexpr uint32_t kBits = 8 * kElement;
      cut.push_back(
          {in(whole_, at), halves_.begin() + place,
           value_of(make_strided_copy({0, whole}, begin, {0, half}, {0, 0}, half, kBits))});
      join.push_back(
          {in(halves_, place), whole_.begin() + at,
           value_of(make_strided_copy({0, half}, {0, 0}, {0, whole}, begin, half, kBits))});
    }
    return bytes;
  }

  double seconds(const std::function<void()>& work) const {
    const auto begin = Clock::now();
    work();
    done(stream_->wait());
    return std::chrono::duration<double>(Clock::now() - begin).count();
  }
  /// `times`: how much more the baseline moves.
  void say(const std::string& what, const std::function<void()>& baseline,
           const std::function<void()>& work, double times) const {
    std::vector<double> ratios;
    seconds(work);
    for (int round = 0; round < rounds_; ++round) {
      const double base = seconds(baseline);
      ratios.push_back(base / times / seconds(work));
    }
    std::sort(ratios.begin(), ratios.end());
    fmt::print("  {:52} {:.2f}   ({:.2f} to {:.2f})\n", what, ratios[ratios.size() / 2],
               ratios.front(), ratios.back());
  }

  Device& device_;
  const int rounds_;
  const std::vector<Matrix> matrices_;
  uint64_t bytes_ = 0;
  DeviceMemory whole_, halves_;
  std::vector<std::byte> host_;
  std::unique_ptr<DeviceStream> stream_;
};

int run(int argc, char** argv) {
  int rounds = 5;
  bool host = false;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--host") == 0) host = true;
    else if (std::strcmp(argv[i], "--rounds") == 0 && i + 1 < argc)
      rounds = std::max(1, std::atoi(argv[++i]));
    else {
      fmt::print(stderr, "usage: ptc_device_bench [--rounds N] [--host]\n");
      return 2;
    }
  }
  if (host) {
    HostDevice device;
    Bench(device, rounds, /*small=*/true).run();
    return 0;
  }
  auto device = open_cuda_device(0);
  if (device.has_error()) {
    fmt::print("skipped: {}\n", device.error().message());
    return 77;
  }
  Bench(*device.value(), rounds, /*small=*/false).run();
  return 0;
}

}  // namespace
}  // namespace ptc

int main(int argc, char** argv) { return ptc::run(argc, argv); }
