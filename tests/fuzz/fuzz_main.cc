// Runs a target: LLVMFuzzerTestOneInput for libFuzzer, main where there is no libFuzzer.
#include <fmt/format.h>

#include <cstdint>
#include <cstring>
#include <memory>

#include "fuzz.h"
#include "memory_meter.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  // What is made once a process, whatever the input, is not measured: the built-in rule sets.
  [[maybe_unused]] static const bool made_once = (ptc::fuzz::run({}), true);
  auto copy = std::make_unique<char[]>(size);
  if (size > 0) std::memcpy(copy.get(), data, size);
  size_t peak = 0;
  {
    ptc::fuzz::MemoryMeter meter;
    ptc::fuzz::run({copy.get(), size});
    peak = meter.peak_bytes();
  }
  const size_t most = ptc::fuzz::kMemoryAtLeast + size * ptc::fuzz::kMemoryPerByte;
  if (peak > most) {
    fmt::print(stderr, "{} bytes of input took {} bytes of memory, more than {}\n", size, peak,
               most);
    std::abort();
  }
  return 0;
}

#if !defined(PTC_LIBFUZZER)

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#if defined(PTC_SANITIZED)
#include <sanitizer/common_interface_defs.h>
#endif

namespace {

const std::string* running = nullptr;
std::string running_name;
constexpr const char* kCrashFile = "fuzz-crash.bin";

/// Keeps the input that the program is dying of.
void keep_input() {
  if (running == nullptr) return;
  const int fd = open(kCrashFile, O_WRONLY | O_CREAT | O_TRUNC, 0644);
  if (fd < 0 || write(fd, running->data(), running->size()) < 0) return;
  fmt::print(stderr, "\nthe input was {} ({} bytes), kept in {}\n", running_name, running->size(),
             kCrashFile);
}
void on_signal(int signal_number) {
  keep_input();
  signal(signal_number, SIG_DFL);
  raise(signal_number);
}

void run(std::string name, const std::string& input) {
  running_name = std::move(name);
  running = &input;
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()), input.size());
  running = nullptr;
}

using Inputs = std::vector<std::pair<std::string, std::string>>;  // name, content

Inputs read_corpus(int count, char** paths) {
  Inputs corpus;
  for (int i = 0; i < count; ++i) {
    std::vector<std::filesystem::path> files;
    if (std::filesystem::is_directory(paths[i]))
      for (const auto& entry : std::filesystem::directory_iterator(paths[i]))
        files.push_back(entry);
    else files.emplace_back(paths[i]);
    std::sort(files.begin(), files.end());
    for (const auto& file : files) {
      std::ifstream in(file, std::ios::binary);
      if (!in) fmt::print(stderr, "cannot read {}\n", file.string()), std::exit(2);
      corpus.emplace_back(file.filename(), std::string(std::istreambuf_iterator<char>(in), {}));
    }
  }
  return corpus;
}

/// A seed with some bytes flipped, removed, doubled, or taken from another.
std::string mutate(const Inputs& corpus, uint64_t seed) {
  std::mt19937_64 random(seed);
  auto below = [&](size_t n) { return n == 0 ? size_t{0} : static_cast<size_t>(random() % n); };
  std::string input = corpus[below(corpus.size())].second;
  static constexpr std::string_view kTokens[] = {"0",
                                                 "1",
                                                 "-1",
                                                 "18446744073709551615",
                                                 "9223372036854775808",
                                                 "1e999",
                                                 "null",
                                                 "true",
                                                 "{",
                                                 "}",
                                                 "[",
                                                 "]",
                                                 "\"",
                                                 ",",
                                                 ":",
                                                 "*",
                                                 "**",
                                                 "{layer}",
                                                 "{a,}",
                                                 "\\u0000",
                                                 "\\ud800",
                                                 "..",
                                                 "/"};
  for (size_t n = 1 + below(6); n > 0; --n) {
    const size_t at = below(input.size() + 1);
    const size_t length = 1 + below(std::min<size_t>(64, input.size() - at + 1));
    switch (below(7)) {
      case 0:
        if (at < input.size()) input[at] = static_cast<char>(random());
        break;
      case 1:
        if (at < input.size()) input[at] ^= static_cast<char>(1u << below(8));
        break;
      case 2:
        input.erase(at, length);
        break;
      case 3:
        input.insert(at, input.substr(at, length));
        break;
      case 4:
        input.insert(at, kTokens[below(std::size(kTokens))]);
        break;
      case 5: {
        const std::string& other = corpus[below(corpus.size())].second;
        const size_t from = below(other.size() + 1);
        input.replace(at, length, other, from, length);
        break;
      }
      default: {  // a number of 1 to 8 bytes that is at an edge
        static constexpr uint64_t kEdges[] = {
            0,          1,          0x7F,      0xFF,       0x7FFF,           0xFFFF,
            0x7FFFFFFF, 0xFFFFFFFF, INT64_MAX, UINT64_MAX, 1'000'000'000'000};
        const uint64_t number = kEdges[below(std::size(kEdges))] + below(3) - 1;
        std::memcpy(input.data() + at, &number, std::min<size_t>(1 + below(8), input.size() - at));
      }
    }
  }
  return input;
}

uint64_t number_of(const char* variable, uint64_t otherwise) {
  const char* text = std::getenv(variable);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

}  // namespace

int main(int argc, char** argv) {
  for (int fatal : {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL}) signal(fatal, on_signal);
#if defined(PTC_SANITIZED)
  __sanitizer_set_death_callback(keep_input);
#endif
  const Inputs corpus = read_corpus(argc - 1, argv + 1);
  if (corpus.empty()) return fmt::print(stderr, "usage: {} FILE-OR-FOLDER…\n", argv[0]), 2;
  for (const auto& [name, input] : corpus) run(name, input);
  const std::vector<std::string> large = ptc::fuzz::large_inputs();
  for (size_t i = 0; i < large.size(); ++i) {
    const auto start = std::chrono::steady_clock::now();
    run(fmt::format("large input {}", i), large[i]);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    fmt::print("large input {}: {} bytes, {:.3f} s\n", i, large[i].size(), took.count());
  }
  const uint64_t seed = number_of("PTC_SEED", std::random_device()());
  const uint64_t runs = number_of("PTC_FUZZ_RUNS", 5000);
  fmt::print("{} seeds, {} large inputs; {} mutations from PTC_SEED={}\n", corpus.size(),
             large.size(), runs, seed);
  for (uint64_t i = 0; i < runs; ++i)
    run(fmt::format("PTC_SEED={} PTC_FUZZ_RUNS=1", seed + i), mutate(corpus, seed + i));
}

#endif
