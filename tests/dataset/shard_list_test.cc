// What a source may ask for: how many paths, and for how long they are looked for.
#include "dataset/source/shard_list.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <new>
#include <thread>

#include "dataset/source/in_order.h"
#include "tests/store/expect_error.h"
#include "tests/store/temp_dir.h"

namespace ptc {
namespace {

const SourceAccess kOwn;

TEST(ShardList, TooManyPathsAreRefusedBeforeTheyAreMade) {
  std::string dots;
  for (int i = 0; i < 30'000; ++i) dots += "./";
  std::string four_thousand = "/";
  for (int i = 0; i < 2'000; ++i) four_thousand += "./";
  for (const std::vector<std::string>& shards : std::vector<std::vector<std::string>>{
           {"/" + dots + "tmp/{0..999999}"},  // each is no path
           {"/" + dots + "tmp/x"},
           {four_thousand + "{0..99999}"},  // 400 MB
           {four_thousand + "{1..100}{,x}/{a,b}" + std::string(100, 'z')},
           std::vector<std::string>(20'000, "/tmp/x{0..999999}")}) {
    EXPECT_TRUE(has_error(check_source({.shards = shards}, kOwn), Code::kInvalidArgument))
        << shards[0].size();
    EXPECT_TRUE(has_error(list_shards({.shards = shards}, kOwn), Code::kInvalidArgument))
        << shards[0].size();
  }
}

/// A typo must not take the samples away from who reads them.
TEST(ShardList, WhatIsInUseIsNotReplacedByWhatIsNotThere) {
  TempDir dir;
  const SourceSpec spec{.shards = {dir.file("trian"), dir.file("x{0..9}.tar")}};
  EXPECT_TRUE(is_ok(check_source(spec, kOwn)));
  EXPECT_TRUE(has_error(check_source(spec, kOwn, {}, /*in_use=*/true), Code::kNotFound));
  std::ofstream(dir.file("x7.tar")) << "x";
  EXPECT_TRUE(is_ok(check_source(spec, kOwn, {}, /*in_use=*/true)));
}

TEST(ShardList, WhatAGlobFindsCountsToo) {
  TempDir dir;
  for (const char* name : {"a", "b"})
    std::filesystem::create_directory_symlink(".", dir.file(name));
  for (int i = 0; i < 1000; ++i) std::ofstream(dir.file(fmt::format("f{}", i)));
  const std::string glob =
      dir.file("*/*/*/*/*/*/*/*/*/*/*/f*");  // 2¹¹ times the same thousand files
  EXPECT_TRUE(has_error(list_shards({.shards = {glob}}, kOwn), Code::kInvalidArgument,
                        "more than 2000000 paths"));
}

TEST(ShardList, LookingForShardsStops) {
  TempDir dir;
  for (const char* name : {"a", "b"})
    std::filesystem::create_directory_symlink(".", dir.file(name));
  std::string glob = dir.file("");
  for (int i = 0; i < 30; ++i) glob += "*/";  // 2³⁰ directories, in each of which nothing is found
  std::stop_source stop;
  std::jthread stopping([&] { stop.request_stop(); });
  EXPECT_TRUE(has_error(list_shards({.shards = {glob + "nothing"}}, kOwn, stop.get_token()),
                        Code::kCancelled));
  EXPECT_TRUE(
      has_error(check_source({.shards = {dir.file("nothing{1..1000000}")}}, kOwn, stop.get_token()),
                Code::kCancelled));
}

TEST(InOrder, WhatThreadsThrowIsAnError) {
  std::vector<uint64_t> used;
  const auto without_memory = [](uint64_t i) -> Result<int> {
    if (i == 2) throw std::bad_alloc();
    return static_cast<int>(i);
  };
  const auto use = [&](uint64_t i, Result<int> piece) -> Result<> {
    PTC_TRY(std::move(piece));
    used.push_back(i);
    return ok();
  };
  EXPECT_TRUE(has_error(in_order<int>(100, 3, {}, without_memory, use), Code::kNoSpace));
  EXPECT_EQ(used, (std::vector<uint64_t>{0, 1}));
  const auto good = [](uint64_t) -> Result<int> { return 0; };
  const auto throws = [](uint64_t, Result<int>) -> Result<> { throw std::bad_alloc(); };
  EXPECT_THROW((void)in_order<int>(100, 3, {}, good, throws),
               std::bad_alloc);  // and waits for nothing
}

}  // namespace
}  // namespace ptc
