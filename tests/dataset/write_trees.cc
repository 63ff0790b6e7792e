// Writes every tree of a source into ordinary files, for readers of other people: the samples
// backwards, `per_shard` in each shard.
//
//   write_trees SOURCE OUT PER_SHARD    makes OUT/tar/000000.tar …  OUT/mds/index.json …
//                                       OUT/files/00000000_<id>.<ext>
#include <fmt/format.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <vector>

#include "dataset/tree/virtual_file.h"

namespace ptc {
namespace {

/// In small pieces, as the kernel would ask for them.
Result<> write(const VirtualFile& file, const std::string& path) {
  std::filesystem::create_directories(std::filesystem::path(path).parent_path());
  std::ofstream out(path, std::ios::binary);
  std::vector<std::byte> buffer(50'000);
  for (uint64_t at = 0; at < file.size();) {
    PTC_TRY(const size_t got, file.read(at, buffer));
    out.write(reinterpret_cast<const char*>(buffer.data()), static_cast<std::streamsize>(got));
    at += got;
  }
  return ok();
}

std::string shard_name(TreeKind kind, size_t i, size_t count) {
  return kind == TreeKind::kMds ? mds_shard_name(i, count)
                                : fmt::format("{:06}.{}", i, tree_name(kind));
}

Result<> write_shards(TreeKind kind, const SampleSourceRef& source,
                      const std::vector<uint64_t>& ids, size_t per_shard, const std::string& out) {
  const size_t count = (ids.size() + per_shard - 1) / per_shard;
  auto ids_of = [&](uint64_t shard) {
    const auto begin = ids.begin() + static_cast<ptrdiff_t>(shard * per_shard);
    return std::vector<uint64_t>(
        begin, begin + static_cast<ptrdiff_t>(std::min(per_shard, ids.size() - shard * per_shard)));
  };
  for (size_t i = 0; i < count; ++i) {
    PTC_TRY(const auto file, make_shard(kind, source, ids_of(i)));
    PTC_TRY(write(*file, out + "/" + shard_name(kind, i, count)));
  }
  if (kind != TreeKind::kMds) return ok();
  return write(*make_mds_index(source, {ids.size(), per_shard, ids_of}), out + "/index.json");
}

Result<> write_members(const SampleSourceRef& source, const std::vector<uint64_t>& ids,
                       const std::string& out) {
  for (size_t i = 0; i < ids.size(); ++i) {
    PTC_TRY(const auto members, members_of(source, ids[i]));
    for (const Member& member : members) {
      PTC_TRY(write(*member.file, fmt::format("{}/{:08}_{}.{}", out, i, ids[i], member.extension)));
    }
  }
  return ok();
}

Result<> write_all(const std::string& from, const std::string& out, size_t per_shard) {
  IndexProgress progress;
  PTC_TRY(const auto source, open_source({{}, {from}, OnError::kRefuse}, out + ".index", progress));
  std::vector<uint64_t> ids;
  for (uint64_t id = source->samples(); id > 0; --id) ids.push_back(id - 1);
  for (TreeKind kind : trees_of(*source)) {
    const std::string folder = out + "/" + std::string(tree_name(kind));
    if (kind == TreeKind::kMegatron) {
      PTC_TRY(const auto bin, make_megatron_bin(source));
      PTC_TRY(const auto idx,
              make_megatron_idx(source, ids.size(), [&](uint64_t i) { return ids[i]; }));
      PTC_TRY(write(*bin, folder + "/train.bin"));
      PTC_TRY(write(*idx, folder + "/train.idx"));
    } else if (kind == TreeKind::kFiles) {
      PTC_TRY(write_members(source, ids, folder));
    } else {
      PTC_TRY(write_shards(kind, source, ids, per_shard, folder));
    }
  }
  return ok();
}

}  // namespace
}  // namespace ptc

int main(int argc, char** argv) {
  if (argc != 4) return std::cerr << "usage: write_trees SOURCE OUT PER_SHARD\n", 2;
  const auto written =
      ptc::write_all(argv[1], argv[2], static_cast<size_t>(std::max(1, std::atoi(argv[3]))));
  if (!written) return std::cerr << written.error().message() << "\n", 1;
}
