#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "meta_conformance.h"
#include "store/base/file.h"
#include "temp_dir.h"

namespace ptc {
namespace {

/// An SQLite client that owns its directory.
class TemporarySqlite : public MetaClient {
 public:
  TemporarySqlite() : client_(open_sqlite_meta(dir_.file("meta.sqlite")).value()) {}
  Result<std::optional<MetaEntry>> get(std::string_view key) override { return client_->get(key); }
  Result<std::vector<MetaEntry>> list(std::string_view prefix) override {
    return client_->list(prefix);
  }
  Result<int64_t> commit(const MetaTransaction& t) override { return client_->commit(t); }
  Result<std::unique_ptr<MetaLease>> lease(std::chrono::seconds ttl) override {
    return client_->lease(ttl);
  }
  Result<std::shared_ptr<void>> watch(std::string prefix, OnEvent on_event) override {
    return client_->watch(std::move(prefix), std::move(on_event));
  }

 private:
  TempDir dir_;
  std::unique_ptr<MetaClient> client_;
};

INSTANTIATE_TEST_SUITE_P(
    Backends, MetaConformance,
    testing::Values(MetaBackend{"memory", make_memory_meta},
                    MetaBackend{"sqlite", [] { return std::make_unique<TemporarySqlite>(); }}),
    [](const auto& backend) { return backend.param.name; });

TEST(SqliteMeta, KeepsEverythingAndCountsOn) {
  TempDir dir;
  auto meta = open_sqlite_meta(dir.file("m")).value();
  int64_t first = meta->commit({.puts = {{"a", "1"}}}).value();
  int64_t second = meta->commit({.deletes = {"a"}}).value();
  meta.reset();
  meta = open_sqlite_meta(dir.file("m")).value();
  EXPECT_EQ(meta->get("a").value(), std::nullopt);
  EXPECT_GT(second, first);
  EXPECT_GT(meta->commit({.puts = {{"b", "1"}}}).value(), second);
}

TEST(SqliteMeta, TwoClientsOfOneFileAgree) {
  TempDir dir;
  auto one = open_sqlite_meta(dir.file("m")).value();
  auto two = open_sqlite_meta(dir.file("m")).value();
  int64_t revision = one->commit({.puts = {{"a", "1"}}}).value();
  EXPECT_EQ(two->get("a").value()->value, "1");
  EXPECT_GT(two->commit({.compares = {{"a", revision}}, .puts = {{"a", "2"}}}).value(), revision);
  EXPECT_TRUE(has_error(one->commit({.compares = {{"a", revision}}, .puts = {{"a", "3"}}}),
                        Code::kConflict));
}

TEST(SqliteMeta, WhatWasAcknowledgedSurvivesAKill) {
  TempDir dir;
  int pipe_ends[2];
  ASSERT_EQ(::pipe(pipe_ends), 0);
  pid_t child = ::fork();
  if (child == 0) {
    auto meta = open_sqlite_meta(dir.file("m"));
    for (int i = 1; meta; ++i) {
      auto committed = meta.value()->commit({.puts = {{"n", std::to_string(i)}}});
      if (!committed || ::write(pipe_ends[1], &i, sizeof i) != sizeof i) break;
    }
    ::_exit(1);
  }
  ::close(pipe_ends[1]);
  int acknowledged = 0;
  while (acknowledged < 20)
    ASSERT_EQ(::read(pipe_ends[0], &acknowledged, sizeof acknowledged), ssize_t{sizeof(int)});
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  int later = 0;
  while (::read(pipe_ends[0], &later, sizeof later) == sizeof later) acknowledged = later;
  ::close(pipe_ends[0]);
  auto meta = open_sqlite_meta(dir.file("m"));
  ASSERT_TRUE(is_ok(meta));
  EXPECT_GE(std::stoi(meta.value()->get("n").value()->value), acknowledged);
}

TEST(SqliteMeta, WhatAKilledProcessHadUnderALeaseGoesAtTheNextStart) {
  TempDir dir;
  pid_t child = ::fork();
  if (child == 0) {
    auto meta = open_sqlite_meta(dir.file("m")).value();
    auto lease = meta->lease(std::chrono::seconds(10)).value();
    auto committed = meta->commit(
        {.puts = {{"a", "1"}}, .leased_puts = {{"b", "2"}, {"c", "3"}}, .lease = lease.get()});
    (void)meta->commit({.puts = {{"c", "kept"}}});
    ::_exit(committed ? 0 : 1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  ASSERT_EQ(status, 0);
  auto meta = open_sqlite_meta(dir.file("m")).value();
  EXPECT_EQ(meta->get("a").value()->value, "1");
  EXPECT_EQ(meta->get("b").value(), std::nullopt);
  EXPECT_EQ(meta->get("c").value()->value, "kept");
  EXPECT_GT(meta->commit({.puts = {{"d", "1"}}}).value(), meta->get("c").value()->revision + 1);
}

TEST(SqliteMeta, SaysWhenItsFileIsDamaged) {
  TempDir dir;
  std::string path = dir.file("m");
  ASSERT_TRUE(is_ok(write_file_atomically(AT_FDCWD, path, std::string(8192, 'x'))));
  EXPECT_TRUE(has_error(open_sqlite_meta(path), Code::kCorrupt, path + " is damaged"));

  path = dir.file("n");
  {
    auto meta = open_sqlite_meta(path).value();
    for (int i = 0; i < 200; ++i) {
      std::string key = "key" + std::to_string(i);
      ASSERT_TRUE(is_ok(meta->commit({.puts = {{key, std::string(500, 'v')}}})));
    }
  }
  std::string file = read_text_file(AT_FDCWD, path, 10 << 20).value();
  ASSERT_GT(file.size(), 40960u);
  for (size_t i = 8192; i < 36864; ++i) file[i] = static_cast<char>(i * 31);
  ASSERT_TRUE(is_ok(write_file_atomically(AT_FDCWD, path, file)));
  EXPECT_TRUE(has_error(open_sqlite_meta(path), Code::kCorrupt, ".recover"));
}

TEST(SqliteMeta, SaysWhenItCannotBeOpened) {
  TempDir dir;
  EXPECT_TRUE(has_error(open_sqlite_meta(dir.file("none/m")), Code::kNotFound, "none/m"));
}

}  // namespace
}  // namespace ptc
