// Random samples through each source format and each tree, at random offsets, against what the
// formats say.
#include <fmt/format.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <random>

#include "dataset/tree/virtual_file.h"
#include "tests/dataset/shard_writers.h"
#include "tests/store/expect_error.h"
#include "tests/store/temp_dir.h"

namespace ptc {
namespace {

using Fields = std::map<std::string, std::string>;

/// A source on disk, and what its samples are.
struct World {
  SampleSourceRef source;
  std::vector<Fields> samples;
  std::vector<std::string> raw;  // of tar: the members' blocks
};

class TreePropertyTest : public testing::Test {
 protected:
  TreePropertyTest() {
    const char* given = std::getenv("PTC_SEED");
    seed_ = given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device()();
    random_.seed(seed_);
    fmt::print("PTC_SEED={}\n", seed_);
  }

  uint64_t below(uint64_t bound) { return random_() % bound; }
  std::string bytes(size_t size) {
    std::string text(size, '\0');
    for (char& c : text) c = static_cast<char>(random_());
    return text;
  }
  size_t size() {
    return below(20) == 0 ? below(100'000) : below(4) == 0 ? below(3) * 512 : below(1500);
  }

  SampleSourceRef open(const std::string& path, std::optional<SourceFormat> format = {}) {
    IndexProgress progress;
    auto source = open_source({format, {path}, OnError::kRefuse}, path + ".index", progress, {}, 2);
    EXPECT_TRUE(is_ok(source)) << path;
    return source.value();
  }

  /// Sizes of shards that add up to `count`.
  std::vector<uint64_t> cuts(uint64_t count) {
    std::vector<uint64_t> sizes(1 + below(4));
    for (uint64_t i = 0; i < count; ++i) ++sizes[below(sizes.size())];
    return sizes;
  }

  World make(SourceFormat format, const std::string& dir) {
    World world;
    const uint64_t count = 1 + below(150);
    const bool uniform = below(3) > 0;
    const std::vector<std::string> names = {"jpg", "json", "seg.png"};
    const size_t fields =
        format == SourceFormat::kTar || format == SourceFormat::kMds ? 1 + below(3) : 1;
    const std::vector<std::string> fixed =
        below(2) ? std::vector<std::string>{"json"} : std::vector<std::string>();
    std::vector<TestSample> made;
    uint64_t serial = 0;
    std::vector<std::pair<std::string, std::string>> mds;
    const std::vector<uint64_t> sizes = cuts(count);
    for (size_t shard = 0; shard < sizes.size(); ++shard) {
      std::vector<TestSample> here;
      std::vector<std::string> sequences;
      std::string text;
      for (uint64_t i = 0; i < sizes[shard]; ++i, ++serial) {
        TestSample sample{below(10) == 0 ? std::string(120, 'k') + std::to_string(serial)
                                         : fmt::format("k{:04}", serial),
                          {}};
        const size_t some = format == SourceFormat::kTar && !uniform ? 1 + below(fields) : fields;
        for (size_t f = 0; f < some; ++f) {
          const bool constant =
              format == SourceFormat::kMds && names[f] == "json" && !fixed.empty();
          sample.fields.emplace_back(names[f], bytes(constant ? 10 : size()));
        }
        std::string& first = sample.fields[0].second;
        Fields expected(sample.fields.begin(), sample.fields.end());
        std::string raw;
        switch (format) {
          case SourceFormat::kTar:
            for (const auto& [name, data] : sample.fields)
              raw += tar_member(sample.key + "." + name, data, '0', serial % 2 == 0);
            text += raw;
            break;
          case SourceFormat::kTfrecord:
            raw = tfrecord(first);
            text += raw;
            expected = {{"bin", first}};
            break;
          case SourceFormat::kJsonl: {
            const std::string line =
                fmt::format("{{\"n\": {}, \"x\": \"{}\"}}", serial, std::string(below(300), 'x'));
            const bool last = i + 1 == sizes[shard] && below(2) == 0;
            text += last ? line : line + "\n";
            raw = line + "\n";
            expected = {{"json", raw}};
            break;
          }
          case SourceFormat::kMegatron:
            first.resize(first.size() / 2 * 2);
            sequences.push_back(first);
            text += first;
            expected = {{"bin", first}};
            break;
          case SourceFormat::kFiles:
            write_test_file(fmt::format("{}/{:02}/{:04}.{}", dir, shard, serial,
                                        uniform ? "jpg" : names[serial % 3]),
                            first);
            expected = {{uniform ? "jpg" : serial % 3 == 2 ? "png" : names[serial % 3], first}};
            break;
          case SourceFormat::kMds:
            break;
        }
        world.raw.push_back(raw);
        world.samples.push_back(expected);
        here.push_back(std::move(sample));
      }
      const std::string stem = fmt::format("{}/{:02}", dir, shard);
      if (format == SourceFormat::kTar) write_test_file(stem + ".tar", text + tar_end());
      if (format == SourceFormat::kTfrecord) write_test_file(stem + ".tfrecord", text);
      if (format == SourceFormat::kJsonl) write_test_file(stem + ".jsonl", text);
      if (format == SourceFormat::kMegatron) {
        write_test_file(stem + ".bin", text);
        write_test_file(stem + ".idx", megatron_idx(sequences));
      }
      if (format == SourceFormat::kMds) {
        mds.emplace_back(fmt::format("{:02}.mds", shard), mds_shard(here, fixed));
        write_test_file(stem + ".mds", mds.back().second);
      }
      made.insert(made.end(), here.begin(), here.end());
    }
    if (format == SourceFormat::kMds)
      write_test_file(dir + "/index.json", mds_index_json(made, mds, sizes, fixed));
    world.source = open(dir, format);
    EXPECT_EQ(world.source->samples(), count);
    return world;
  }

  std::string read(const VirtualFile& file, uint64_t offset, uint64_t length) {
    std::string text(length, '?');
    auto got = file.read(offset, std::as_writable_bytes(std::span(text)));
    EXPECT_TRUE(is_ok(got));
    text.resize(got ? got.value() : 0);
    return text;
  }

  /// The whole file, and whether any part of it reads the same.
  std::string whole(const VirtualFile& file) {
    const std::string all = read(file, 0, file.size() + 100);
    EXPECT_EQ(all.size(), file.size());
    for (int i = 0; i < 40; ++i) {
      const uint64_t offset = below(file.size() + 10),
                     length = below(i % 2 ? 100 : file.size() + 10);
      const std::string part = read(file, offset, length);
      EXPECT_TRUE(part == (offset < all.size() ? all.substr(offset, length) : ""))
          << offset << " + " << length;
      std::string gathered(part.size(), '\0');
      EXPECT_TRUE(is_ok(file.gather(offset, std::as_writable_bytes(std::span(gathered)))));
      EXPECT_TRUE(gathered == part) << offset << " + " << length;
    }
    return all;
  }

  /// All samples of a source, read by their fields.
  std::vector<Fields> samples_of(const SampleSource& source) {
    std::vector<Fields> samples;
    for (uint64_t id = 0; id < source.samples(); ++id) {
      samples.emplace_back();
      const std::vector<Field> fields = source.fields(id).value();
      for (const Field& field : fields) {
        std::string text(field.extent.bytes, '\0');
        EXPECT_TRUE(is_ok(source.read(field.extent.shard, field.extent.offset,
                                      std::as_writable_bytes(std::span(text)))));
        samples.back()[field.name] = text;
      }
    }
    return samples;
  }

  void check(const World& world, TreeKind kind, const std::vector<uint64_t>& ids,
             const std::string& out) {
    auto made = make_shard(kind, world.source, ids);
    ASSERT_TRUE(is_ok(made));
    const VirtualFile& file = *made.value();
    const std::string all = whole(file);
    uint64_t sum = 0;
    std::string raw, records;
    std::vector<Fields> expected;
    for (uint64_t id : ids) {
      sum += sample_bytes(kind, *world.source, id);
      expected.push_back(world.samples[id]);
      raw += world.raw[id];
      records += tfrecord(expected.back().begin()->second);
    }
    const SourceFormat format = world.source->format();
    switch (kind) {
      case TreeKind::kTar:
        EXPECT_EQ(sum + 1024, file.size());
        if (format == SourceFormat::kTar) {
          EXPECT_TRUE(all == raw + tar_end());
        }
        write_test_file(out + "/x.tar", all);
        EXPECT_EQ(samples_of(*open(out)), expected);
        break;
      case TreeKind::kMds: {
        const VirtualFileRef index = make_mds_index(
            world.source,
            {ids.size(), std::max<uint64_t>(1, ids.size()), [&](uint64_t) { return ids; }});
        write_test_file(out + "/shard.00000.mds", all);
        write_test_file(out + "/index.json", read(*index, 0, index->size()));
        if (ids.empty()) break;
        EXPECT_EQ(samples_of(*open(out)), expected);
        break;
      }
      case TreeKind::kTfrecord:
        EXPECT_EQ(sum, file.size());
        EXPECT_TRUE(all == records);
        break;
      default:
        EXPECT_EQ(sum, file.size());
        EXPECT_TRUE(all == raw);
    }
    std::filesystem::remove_all(out);
  }

  void check_members(const World& world, uint64_t id) {
    auto members = members_of(world.source, id);
    ASSERT_TRUE(is_ok(members));
    Fields found;
    std::vector<std::string> names;
    for (const Member& member : members.value()) {
      names.push_back(member.extension);
      found[member.extension] = whole(*member.file);
      const auto source_file = member.file->whole().value();
      EXPECT_EQ(source_file.has_value() && world.source->format() == SourceFormat::kFiles,
                world.source->format() == SourceFormat::kFiles);
      if (source_file) {
        EXPECT_EQ(read_test_file(source_file->path), found[member.extension]);
      }
    }
    EXPECT_EQ(found, world.samples[id]);
    EXPECT_EQ(names, member_extensions(*world.source, id).value());
  }

  void check_megatron(const World& world, const std::vector<uint64_t>& ids) {
    const std::string bin = whole(*make_megatron_bin(world.source).value());
    const std::string idx = whole(
        *make_megatron_idx(world.source, ids.size(), [&](uint64_t i) { return ids[i]; }).value());
    const std::string canonical = megatron_idx([&] {
      std::vector<std::string> sequences;
      for (uint64_t id : ids) sequences.push_back(world.samples[id].at("bin"));
      return sequences;
    }());
    const size_t places = 34 + 4 * ids.size(), documents = places + 8 * ids.size();
    EXPECT_TRUE(idx.substr(0, places) == canonical.substr(0, places));
    EXPECT_TRUE(idx.substr(documents) == canonical.substr(documents));
    for (size_t i = 0; i < ids.size(); ++i) {
      uint64_t place;
      std::memcpy(&place, &idx[places + 8 * i], sizeof place);
      const std::string& sequence = world.samples[ids[i]].at("bin");
      EXPECT_TRUE(bin.substr(place, sequence.size()) == sequence);
    }
  }

  uint64_t seed_;
  std::mt19937_64 random_;
  TempDir dir_;
};

TEST_F(TreePropertyTest, EveryTreeOfEverySource) {
  std::map<std::pair<SourceFormat, TreeKind>, int> seen;
  for (int round = 0; round < 5; ++round) {
    for (SourceFormat format :
         {SourceFormat::kTar, SourceFormat::kMds, SourceFormat::kMegatron, SourceFormat::kTfrecord,
          SourceFormat::kJsonl, SourceFormat::kFiles}) {
      SCOPED_TRACE(fmt::format("PTC_SEED={} round {} {}", seed_, round, format_name(format)));
      const World world = make(format, dir_.file(fmt::format("{}-{}", round, format_name(format))));
      std::vector<uint64_t> ids(world.samples.size());
      for (size_t i = 0; i < ids.size(); ++i) ids[i] = i;
      if (round > 0) std::shuffle(ids.begin(), ids.end(), random_);
      if (round > 1) ids.resize(below(ids.size() + 1));
      for (TreeKind kind : trees_of(*world.source)) {
        SCOPED_TRACE(std::string(tree_name(kind)));
        ++seen[{format, kind}];
        if (kind == TreeKind::kMegatron) check_megatron(world, ids);
        else if (kind == TreeKind::kFiles) check_members(world, below(world.samples.size()));
        else check(world, kind, ids, dir_.file("out"));
      }
    }
  }
  for (SourceFormat format :
       {SourceFormat::kMds, SourceFormat::kMegatron, SourceFormat::kTfrecord, SourceFormat::kJsonl})
    EXPECT_EQ((seen[{format, TreeKind::kTar}]), 5);
}

/// Where epochs meet, or a batch is padded, a tar may hold a sample more than once: no two
/// neighbours have one key.
TEST_F(TreePropertyTest, ASampleThatIsRepeatedHasAnotherKeyInATar) {
  for (int round = 0; round < 4; ++round) {
    for (SourceFormat format :
         {SourceFormat::kTar, SourceFormat::kMds, SourceFormat::kTfrecord, SourceFormat::kFiles}) {
      SCOPED_TRACE(fmt::format("PTC_SEED={} round {} {}", seed_, round, format_name(format)));
      const World world = make(format, dir_.file(fmt::format("{}-{}", round, format_name(format))));
      std::vector<uint64_t> some;
      for (uint64_t id = 0; id < world.samples.size(); ++id) {
        const bool no_room = format == SourceFormat::kTar &&
                             world.raw[id].find(std::string(90, 'k')) != std::string::npos;
        if (!no_room) some.push_back(id);
      }
      if (some.empty()) continue;
      some.resize(std::min<size_t>(some.size(), 5));
      std::vector<uint64_t> ids;
      for (uint64_t i = 0, count = 2 + below(30); i < count; ++i)
        ids.push_back(some[below(some.size())]);
      ids.push_back(ids.back());
      const VirtualFileRef file = make_shard(TreeKind::kTar, world.source, ids).value();
      const std::string all = whole(*file), out = dir_.file("out");
      write_test_file(out + "/x.tar", all);
      std::vector<Fields> expected;
      uint64_t sum = 0;
      for (const uint64_t id : ids) {
        expected.push_back(world.samples[id]);
        sum += sample_bytes(TreeKind::kTar, *world.source, id);
      }
      EXPECT_EQ(all.size(), sum + tar_end().size());
      EXPECT_EQ(samples_of(*open(out)), expected);  // which refuses a key that is there twice
      EXPECT_NE(all.find("-1."), std::string::npos);
      std::filesystem::remove_all(out);
    }
  }
}

/// Shards that number their samples alike: the index knows, and sizes are what they were.
TEST_F(TreePropertyTest, SamplesOfTwoShardsHaveOneKey) {
  const uint64_t shards = 2 + below(3), each = 1 + below(20);
  std::vector<Fields> samples;
  for (uint64_t shard = 0; shard < shards; ++shard) {
    std::string text;
    for (uint64_t i = 0; i < each; ++i) {
      samples.push_back({{"bin", bytes(size())}, {"cls", std::to_string(shard)}});
      for (const auto& [name, data] : samples.back())
        text += tar_member(fmt::format("{:04}.{}", i, name), data, '0', false);
    }
    write_test_file(fmt::format("{}/{:02}.tar", dir_.file("alike"), shard), text + tar_end());
  }
  World world{open(dir_.file("alike")), samples, {}};
  EXPECT_TRUE(world.source->keys_repeat());
  EXPECT_EQ(world.source->key(each).value(), "0000");
  std::vector<uint64_t> ids;
  for (uint64_t i = 0; i < each; ++i)
    for (uint64_t shard = 0; shard < shards; ++shard) ids.push_back(shard * each + i);
  ids.push_back(ids.front());
  const VirtualFileRef file = make_shard(TreeKind::kTar, world.source, ids).value();
  uint64_t sum = tar_end().size();
  std::vector<Fields> expected;
  for (const uint64_t id : ids) {
    sum += sample_bytes(TreeKind::kTar, *world.source, id);
    expected.push_back(samples[id]);
  }
  EXPECT_EQ(file->size(), sum);
  write_test_file(dir_.file("out") + "/x.tar", whole(*file));
  EXPECT_EQ(samples_of(*open(dir_.file("out"))), expected);
  EXPECT_FALSE(open(dir_.file("out"))->keys_repeat());
}

TEST_F(TreePropertyTest, WhatIsNotShownIsRefused) {
  const World world = make(SourceFormat::kTfrecord, dir_.file("r"));
  EXPECT_TRUE(has_error(make_shard(TreeKind::kJsonl, world.source, {}), Code::kInvalidArgument,
                        "not shown as shards of jsonl"));
  EXPECT_TRUE(has_error(make_shard(TreeKind::kFiles, world.source, {}), Code::kInvalidArgument));
  EXPECT_TRUE(has_error(make_shard(TreeKind::kTar, world.source, {world.samples.size()}),
                        Code::kInvalidArgument, "there is no sample"));
  EXPECT_TRUE(
      has_error(make_megatron_bin(world.source), Code::kInvalidArgument, "not shown as megatron"));
}

TEST_F(TreePropertyTest, AShardThatChangedIsNamed) {
  const World world = make(SourceFormat::kTar, dir_.file("t"));
  std::vector<uint64_t> ids(world.samples.size());
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = i;
  const auto file = make_shard(TreeKind::kTar, world.source, ids).value();
  (void)whole(*file);
  for (const auto& entry : std::filesystem::directory_iterator(dir_.file("t")))
    std::filesystem::resize_file(entry.path(), 1000);
  std::string text(100, '\0');
  EXPECT_TRUE(has_error(file->read(0, std::as_writable_bytes(std::span(text))), Code::kCorrupt,
                        ".tar' is not what was indexed: it has 1000 bytes"));
}

}  // namespace
}  // namespace ptc
