// A store of one node that joins clusters, leaves them and comes back, and agreement stores that
// forget, count or keep quiet.
#pragma once

#include <gmock/gmock.h>

#include <atomic>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "reshard/node/store_membership.h"
#include "store/transport/transport.h"
#include "tests/support/job_fixture.h"
#include "tests/support/local_cluster.h"

namespace ptc::testing {

namespace fs = std::filesystem;

/// The only node of its cluster.
class OneNode final : public Cluster {
 public:
  OneNode(MetaClient& meta, std::string self)
      : self_(std::move(self)), lease_(meta.lease(std::chrono::seconds(60)).value()) {
    MetaTransaction join;
    join.leased_puts = {{"nodes/" + self_, "up"}};
    join.lease = lease_.get();
    revision_ = meta.commit(join).value();
  }
  const std::string& self() const override { return self_; }
  std::vector<std::string> alive() const override { return {self_}; }
  Result<std::string> call(const std::string& node, const PeerRow&, const std::string&,
                           std::chrono::milliseconds, std::stop_token) override {
    return make_error(Code::kUnavailable, "there is no node {}", node);
  }
  std::optional<MetaTransaction::Compare> fence() const override {
    return MetaTransaction::Compare{"nodes/" + self_, revision_};
  }
  MetaTransaction::Compare fence_of(const std::string&) const override { return *fence(); }
  std::shared_ptr<const MetaLease> lease() const override { return lease_; }

 private:
  std::string self_;
  std::shared_ptr<MetaLease> lease_;
  int64_t revision_;
};

inline ClusterServices services(MetaClient* meta, Cluster& cluster, bool join = false) {
  return {meta, &cluster, make_loopback_transport, "ptcfs", "etcd", join, {}};
}

/// How often stores are listed.
class StoreListings : public MetaClient {
 public:
  explicit StoreListings(MetaClient& meta) : meta_(meta) {}
  Result<std::optional<MetaEntry>> get(std::string_view key) override { return meta_.get(key); }
  Result<std::vector<MetaEntry>> list(std::string_view prefix) override {
    stores_listed += prefix == kStores;
    return meta_.list(prefix);
  }
  Result<int64_t> commit(const MetaTransaction& transaction) override {
    return meta_.commit(transaction);
  }
  Result<std::unique_ptr<MetaLease>> lease(std::chrono::seconds ttl) override {
    return meta_.lease(ttl);
  }
  Result<std::shared_ptr<void>> watch(std::string prefix, OnEvent on_event) override {
    return meta_.watch(std::move(prefix), std::move(on_event));
  }
  std::atomic<int> stores_listed = 0;

 private:
  MetaClient& meta_;
};

/// Tells nobody of a change.
class TellsNothing final : public StoreListings {
 public:
  using StoreListings::StoreListings;
  Result<std::shared_ptr<void>> watch(std::string, OnEvent) override {
    return std::shared_ptr<void>(std::make_shared<int>());
  }
};

/// From some moment on it is what it was before, as when a backup took its place.
class SetBack final : public StoreListings {
 public:
  explicit SetBack(MetaClient& meta) : StoreListings(meta), meta_(meta) {}
  Result<std::vector<MetaEntry>> list(std::string_view prefix) override {
    return before && prefix == "jobs/" ? *before : meta_.list(prefix);
  }
  Result<std::optional<Changes>> changes(std::string_view prefix, int64_t revision) override {
    if (!before) return meta_.changes(prefix, revision);
    Changes changes{.entries = {}, .keys = before->size()};
    for (const MetaEntry& entry : *before)
      if (entry.revision > revision) changes.entries.push_back(entry);
    return std::optional(std::move(changes));
  }
  std::optional<std::vector<MetaEntry>> before;

 private:
  MetaClient& meta_;
};

class Membership : public ::testing::Test {
 protected:
  /// Null: alone.
  Result<> open(MetaClient* meta, bool join = false, const std::string& node = "w0") {
    close();
    JobStoreOptions options;
    options.directory = dir_.path();
    options.node = node;
    options.copy_threads = 2;
    if (meta != nullptr) {
      cluster_ = std::make_unique<OneNode>(*meta, node);
      options.cluster = services(meta, *cluster_, join);
      options.cluster->join_as = join_as_;
    }
    PTC_TRY(store_, JobStore::open(options, nullptr));
    return ok();
  }
  void close() {
    store_.reset();
    cluster_.reset();
  }
  /// A store that belongs to the cluster, and has gone again.
  void on_another_node(const std::string& node, const std::function<void(JobStore&)>& does) {
    const TempDir elsewhere;
    OneNode first(*meta_, node);
    JobStoreOptions options;
    options.directory = elsewhere.path();
    options.node = node;
    options.cluster = services(meta_.get(), first);
    does(*JobStore::open(options, nullptr).value());
  }
  void begin_cluster() {
    const std::string identity = R"({"id": "0123456789abcdef", "history": 1})";
    ASSERT_TRUE(meta_->commit({.puts = {{kIdentityKey, identity}}}).has_value());
  }
  std::string refusal(MetaClient* meta, bool join = false, const std::string& node = "w0") {
    const auto before = files();
    Result<> opened = open(meta, join, node);
    if (opened.has_value()) return "it was opened";
    close();
    EXPECT_EQ(files(), before);
    return opened.error().message();
  }
  /// A job with a checkpoint, and something in incoming/.
  void make_job(const std::string& name) {
    JobRef job = store_->create_job(name).value();
    write_ranks(sample_, LayoutSpec(), fs::path(job->files_dir()) / "incoming/base");
    Result<> committed = job->commit("base", "base");
    ASSERT_TRUE(committed.has_value()) << committed.error().message();
    job->wait_settled();
    write_file(fs::path(job->files_dir()) / "incoming/next/rank/0/notes", "staged");
  }
  void expect_job(const std::string& name) {
    JobRef job = store_->find(name);
    ASSERT_NE(job, nullptr);
    CheckpointRef base = job->find_checkpoint("base");
    ASSERT_NE(base, nullptr);
    EXPECT_TRUE(base->lost_tensors().empty());
    expect_layout(*base, sample_, LayoutSpec());
    EXPECT_EQ(read_file(fs::path(job->files_dir()) / "incoming/next/rank/0/notes"), "staged");
    EXPECT_TRUE(store_->kept().empty());
    Result<std::string> verified = job->verify("base");
    EXPECT_TRUE(verified.has_value()) << verified.error().message();
  }
  /// What users wrote and images, with sizes.
  std::map<std::string, uint64_t> files() const {
    std::map<std::string, uint64_t> found;
    for (const auto& entry : fs::recursive_directory_iterator(dir_.path())) {
      const std::string path = entry.path().lexically_relative(dir_.path());
      if (entry.is_regular_file() && (path.starts_with("images/") || path.starts_with("jobs/")))
        found[path] = entry.file_size();
    }
    return found;
  }
  static void remove_all(MetaClient& meta, const std::string& prefix) {
    const std::vector<MetaEntry> entries = meta.list(prefix).value();
    for (const MetaEntry& entry : entries)
      ASSERT_TRUE(meta.commit({.deletes = {entry.key}}).has_value());
  }

  TempDir dir_;
  Sample sample_ = llama_sample();
  std::unique_ptr<MetaClient> meta_ = make_memory_meta(), other_ = make_memory_meta();
  std::unique_ptr<Cluster> cluster_;
  JobNames join_as_;
  std::unique_ptr<JobStore> store_;
};

}  // namespace ptc::testing
