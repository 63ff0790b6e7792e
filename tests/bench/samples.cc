// Samples a second out of the trees of a data set, and how long its index takes, against reading
// the source's shards from front to back with pread, in the same round. Everything lies in the page
// cache: what is timed is the work.
//
//   ptc_samples_bench [MIB [DIRECTORY [ROUNDS]]]     256 MiB a format, in a directory of its own
//     below /dev/shm, 5 rounds
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <random>
#include <vector>

#include "dataset/tree/virtual_file.h"
#include "tests/dataset/shard_writers.h"

namespace ptc {
namespace {

constexpr size_t kBatch = 256, kReadBytes = 1 << 20, kShardBytes = 32 << 20;

struct Case {
  SourceFormat format;
  size_t sample_bytes;
};

std::string random_bytes(size_t size, std::mt19937_64& random) {
  std::string text(size, '\0');
  for (char& c : text) c = static_cast<char>('a' + random() % 26);
  return text;
}

void write_source(const Case& which, const std::string& dir, uint64_t bytes) {
  std::mt19937_64 random(7);
  const uint64_t shards = std::max<uint64_t>(1, bytes / kShardBytes);
  const std::string payload = random_bytes(2 * which.sample_bytes, random);
  std::vector<std::pair<std::string, std::string>> mds;
  std::vector<uint64_t> counts;
  std::vector<TestSample> samples;
  for (uint64_t shard = 0, serial = 0; shard < shards; ++shard) {
    std::string text;
    std::vector<std::string> sequences;
    samples.clear();
    for (uint64_t size = 0; size < kShardBytes; size += which.sample_bytes, ++serial) {
      const std::string data = payload.substr(
          random() % 100, (which.sample_bytes / 2 + random() % which.sample_bytes) & ~uint64_t{1});
      switch (which.format) {
        case SourceFormat::kTar:
          text += tar_member(fmt::format("{:08}.cls", serial), "7") +
                  tar_member(fmt::format("{:08}.jpg", serial), data);
          break;
        case SourceFormat::kTfrecord:
          text += tfrecord(data);
          break;
        case SourceFormat::kJsonl:
          text += "{\"text\": \"" + data + "\"}\n";
          break;
        case SourceFormat::kMegatron:
          sequences.push_back(data);
          text += data;
          break;
        case SourceFormat::kMds:
          samples.push_back({"", {{"cls", "7"}, {"jpg", data}}});
          break;
        case SourceFormat::kFiles:
          write_test_file(fmt::format("{}/{:03}/{:08}.jpg", dir, shard, serial), data);
          break;
      }
    }
    const std::string stem = fmt::format("{}/{:05}", dir, shard);
    if (which.format == SourceFormat::kTar) write_test_file(stem + ".tar", text + tar_end());
    if (which.format == SourceFormat::kTfrecord) write_test_file(stem + ".tfrecord", text);
    if (which.format == SourceFormat::kJsonl) write_test_file(stem + ".jsonl", text);
    if (which.format == SourceFormat::kMegatron) {
      write_test_file(stem + ".bin", text);
      write_test_file(stem + ".idx", megatron_idx(sequences));
    }
    if (which.format != SourceFormat::kMds) continue;
    mds.emplace_back(fmt::format("{:05}.mds", shard), mds_shard(samples));
    counts.push_back(samples.size());
    write_test_file(dir + "/" + mds.back().first, mds.back().second);
  }
  if (!mds.empty()) write_test_file(dir + "/index.json", mds_index_json(samples, mds, counts));
}

double seconds(const std::function<void()>& action) {
  const auto start = std::chrono::steady_clock::now();
  action();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void read_shards(const SampleSource& source, std::vector<std::byte>& buffer) {
  for (uint64_t shard = 0; shard < source.shards(); ++shard) {
    const UniqueFd fd(::open(source.shard_path(shard).c_str(), O_RDONLY));
    while (::read(fd.get(), buffer.data(), buffer.size()) > 0) {
    }
  }
}

void read_file(const VirtualFile& file, std::vector<std::byte>& buffer) {
  for (uint64_t at = 0; at < file.size();) at += file.read(at, buffer).value();
}

void read_tree(TreeKind kind, const SampleSourceRef& source, const std::vector<uint64_t>& ids,
               std::vector<std::byte>& buffer) {
  if (kind == TreeKind::kMegatron) {
    read_file(*make_megatron_bin(source).value(), buffer);
    return read_file(
        *make_megatron_idx(source, ids.size(), [&](uint64_t i) { return ids[i]; }).value(), buffer);
  }
  if (kind == TreeKind::kFiles) {
    for (const uint64_t id : ids) {
      const std::vector<Member> members = members_of(source, id).value();
      for (const Member& member : members) read_file(*member.file, buffer);
    }
    return;
  }
  for (size_t at = 0; at < ids.size(); at += kBatch) {
    const auto begin = ids.begin() + static_cast<ptrdiff_t>(at);
    const std::vector<uint64_t> batch(
        begin, begin + static_cast<ptrdiff_t>(std::min(kBatch, ids.size() - at)));
    read_file(*make_shard(kind, source, batch).value(), buffer);
  }
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void measure(const Case& which, const std::string& dir, uint64_t bytes, int rounds) {
  write_source(which, dir, bytes);
  const SourceSpec spec{which.format, {dir}, OnError::kRefuse};
  SampleSourceRef source;
  std::vector<std::byte> buffer(kReadBytes);
  std::vector<double> native, index;
  std::map<std::pair<TreeKind, bool>, std::vector<double>> trees;
  for (int round = 0; round < rounds; ++round) {
    index.push_back(seconds([&] {
      std::filesystem::remove(dir + ".index");
      IndexProgress progress;
      source = open_source(spec, dir + ".index", progress, {}, 1).value();
    }));
    native.push_back(seconds([&] { read_shards(*source, buffer); }));
    index.back() = native.back() / index.back();
    std::vector<uint64_t> ids(source->samples());
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = i;
    for (const bool shuffled : {false, true}) {
      if (shuffled) std::shuffle(ids.begin(), ids.end(), std::mt19937_64(round));
      for (const TreeKind kind : trees_of(*source)) {
        const double took = seconds([&] { read_tree(kind, source, ids, buffer); });
        trees[{kind, shuffled}].push_back(native.back() / took);
      }
    }
  }
  const auto samples = static_cast<double>(source->samples());
  fmt::print(
      "{} of about {} bytes: {:.0f} samples, {:.2f} bytes of index each; read natively {:.0f} "
      "samples/s, {:.1f} GB/s\n",
      format_name(which.format), which.sample_bytes, samples,
      static_cast<double>(source->index_bytes()) / samples, samples / median(native),
      static_cast<double>(source->bytes()) / median(native) / 1e9);
  fmt::print("  {:24} {:6.2f} x\n", "index, one thread", median(index));
  for (const TreeKind kind : trees_of(*source))
    fmt::print("  {:24} {:6.2f} x   shuffled {:6.2f} x\n", tree_name(kind),
               median(trees[{kind, false}]), median(trees[{kind, true}]));
}

}  // namespace
}  // namespace ptc

int main(int argc, char** argv) {
  using namespace ptc;
  const uint64_t bytes = (argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 256) << 20;
  std::string dir = std::string(argc > 2 ? argv[2] : "/dev/shm") + "/ptc-samples-XXXXXX";
  if (::mkdtemp(dir.data()) == nullptr) return fmt::print(stderr, "cannot make {}\n", dir), 1;
  const int rounds = argc > 3 ? std::max(1, std::atoi(argv[3])) : 5;
  fmt::print("Ratios: time to read the source's shards natively / time taken; more is better.\n");
  for (const Case which :
       {Case{SourceFormat::kTar, 100'000}, Case{SourceFormat::kMds, 100'000},
        Case{SourceFormat::kTfrecord, 100'000}, Case{SourceFormat::kJsonl, 4'000},
        Case{SourceFormat::kMegatron, 4'000}, Case{SourceFormat::kFiles, 100'000}}) {
    const std::string here = fmt::format("{}/{}", dir, format_name(which.format));
    measure(which, here, bytes, rounds);
    std::filesystem::remove_all(here);
  }
  std::filesystem::remove_all(dir);
}
