#include "dataset/source/shard_rights.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "store/base/file.h"
#include "tests/store/temp_dir.h"

namespace ptc {
namespace {

using Groups = std::set<gid_t>;

/// As the kernel does for who is not the owner.
bool may_read(mode_t mode, gid_t group, const Groups& groups) {
  return (mode & (groups.contains(group) ? 0040 : 0004)) != 0;
}

constexpr gid_t kJobs = 9;  // of the job, which has nothing to do with the shards

/// All sets of the groups 1, 2, 3 and the job's.
std::vector<Groups> all_readers() {
  std::vector<Groups> readers;
  for (unsigned bits = 0; bits < 16; ++bits) {
    Groups& reader = readers.emplace_back();
    for (const gid_t group : {1u, 2u, 3u})
      if ((bits & 1u << group) != 0) reader.insert(group);
    if ((bits & 1u) != 0) reader.insert(kJobs);
  }
  return readers;
}

TEST(ShardRights, LetReadWhomEachShardDoesAsFarAsAModeCanSayIt) {
  struct Shard {
    gid_t group;
    mode_t mode;
  };
  std::vector<Shard> shards;
  for (const gid_t group : {1u, 2u, 3u})
    for (const mode_t mode : {0000, 0004, 0040, 0044}) shards.push_back({group, mode});
  const std::vector<Groups> readers = all_readers();
  for (const Shard& a : shards) {
    for (const Shard& b : shards) {
      for (const Shard& c : shards) {
        ShardRights rights;
        for (const Shard& shard : {a, b, c})
          rights.add(ShardRights(shard.group, 0100600 | shard.mode, false));
        EXPECT_EQ(rights.mode() & ~mode_t{0044}, mode_t{0400});
        /// How many read by that; nullopt: somebody whom a shard does not let.
        const auto count = [&](mode_t mode, gid_t group) -> std::optional<size_t> {
          size_t let = 0;
          for (const Groups& reader : readers) {
            if (!may_read(mode, group, reader)) continue;
            for (const Shard& shard : {a, b, c})
              if (!may_read(shard.mode, shard.group, reader)) return std::nullopt;
            ++let;
          }
          return let;
        };
        const auto shown = count(rights.mode(), rights.group().value_or(kJobs));
        ASSERT_TRUE(shown) << fmt::format("{}:{:o} {}:{:o} {}:{:o}", a.group, a.mode, b.group,
                                          b.mode, c.group, c.mode);
        for (const gid_t group : {1u, 2u, 3u, kJobs})
          for (const mode_t mode : {0004, 0040, 0044})
            ASSERT_LE(count(mode, group).value_or(0), *shown) << fmt::format(
                "{}:{:o} {}:{:o} {}:{:o}", a.group, a.mode, b.group, b.mode, c.group, c.mode);
      }
    }
  }
}

TEST(ShardRights, OfNoShardAreTheOwnersAndAllOthers) {
  EXPECT_EQ(ShardRights().mode(), mode_t{0444});
  EXPECT_EQ(ShardRights().group(), std::nullopt);
}

TEST(ShardRights, AListOfAccessControlMayBeForAllOrForNobody) {
  EXPECT_EQ(ShardRights(1, 0644, true).mode(), mode_t{0444});
  EXPECT_EQ(ShardRights(1, 0640, true).mode(), mode_t{0400});
}

TEST(PathRights, AreThoseOfFilesAndOfTheDirectoriesAboveThem) {
  TempDir dir;
  ASSERT_EQ(::chmod(dir.file("").c_str(), 0755), 0);
  ASSERT_EQ(::mkdir(dir.file("sub").c_str(), 0700), 0);
  ShardRights rights;
  for (const auto& [name, mode, narrowest] : std::vector<std::tuple<std::string, mode_t, mode_t>>{
           {"a", 0755, 0444}, {"b", 0664, 0444}, {"c", 0640, 0440}, {"d", 0604, 0400}}) {
    const UniqueFd fd(::open(dir.file(name).c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    ASSERT_EQ(::fchmod(fd.get(), mode), 0);
    PathRights paths;
    rights.add(paths.of(fd.get()).value());
    EXPECT_EQ(rights.mode(), narrowest) << name;
  }
  EXPECT_EQ(rights.group(), ::getegid());
  const UniqueFd fd(::open(dir.file("sub/e").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644));
  ASSERT_EQ(::fchmod(fd.get(), 0644), 0);
  for (const auto& [mode, shown] : {std::pair(0700, 0400), std::pair(0711, 0444),
                                    std::pair(0750, 0440), std::pair(0744, 0400)}) {
    ASSERT_EQ(::chmod(dir.file("sub").c_str(), mode), 0);
    PathRights paths;
    EXPECT_EQ(paths.of(fd.get()).value().mode(), mode_t(shown)) << fmt::format("{:o}", mode);
  }
  PathRights paths;
  EXPECT_FALSE(paths.of(-1));
}

}  // namespace
}  // namespace ptc
