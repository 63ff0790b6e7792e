#include "tests/support/local_cluster.h"

#include <algorithm>
#include <atomic>
#include <thread>

#include "reshard/node/peer_service.h"
#include "store/rpc/peers.h"
#include "store/tensor/packed_copy.h"
#include "store/transport/device.h"
#include "store/transport/transport.h"

namespace ptc::testing {
namespace {

unsigned number_of(const std::string& node) {
  return static_cast<unsigned>(std::stoul(node.substr(1)));
}

}  // namespace

/// A node is found by its name.
class LocalCluster::NodeCalls final : public PeerCalls {
 public:
  NodeCalls(LocalCluster& all, std::string self) : all_(all), self_(std::move(self)) {}
  void set(const std::string&, const std::string&) override {}
  void remove(const std::string&) override {}
  Result<> meet(const std::string& node, const std::string&) override {
    if (all_.serving(node, self_) != nullptr) return ok();
    return make_error(Code::kUnavailable, "node {} does not answer", node);
  }
  Result<std::string> call(const std::string& node, const PeerRow& row, const std::string& request,
                           std::chrono::milliseconds time, std::stop_token) override {
    const bool meets = row.handler == PeerHandler::kMeetings;
    all_.waits(row.name, time);
    const bool lost = !meets && all_.loses(node, row.name);
    const std::shared_ptr<JobStore> store = lost ? nullptr : all_.serving(node, self_);
    if (store == nullptr) return make_error(Code::kUnavailable, "node {} does not answer", node);
    NodeCalls& theirs = *all_.nodes_[number_of(node)]->calls;
    Result<std::string> answer = answer_peer(*store, theirs, row, request, self_);
    if (!meets && all_.breaks(self_, node, row.name, request))
      return broken_off("node " + node + " has broken the connection");
    return answer;
  }

 private:
  LocalCluster& all_;
  const std::string self_;
};

class LocalCluster::NodeTransport final : public Transport {
 public:
  explicit NodeTransport(LocalCluster& all) : all_(all), local_(make_loopback_transport()) {}
  Result<> fetch(std::span<FetchItem> items, std::stop_token stop,
                 std::chrono::milliseconds) override {
    for (FetchItem& item : items) {
      if (item.source->is_here()) {
        PTC_TRY(local_->fetch(std::span(&item, 1), stop));
        continue;
      }
      const std::string& node = item.source->node();
      const bool lost = all_.loses(node, "fetch");
      const std::shared_ptr<JobStore> store = lost ? nullptr : all_.serving(node, node);
      if (store == nullptr) return make_error(Code::kUnavailable, "node {} does not answer", node);
      auto image = store->images().open(item.source->id(), item.source->bytes());
      if (image.has_error()) return make_error(Code::kUnavailable, "{}", image.error().message());
      {
        std::lock_guard lock(all_.mutex_);
        all_.sent_[node] += bytes_between(item.copy, item.begin, item.end);
      }
      FetchItem there = item;
      there.source = image.value().get();
      const auto& devices = store->images().devices();
      if (devices == nullptr) {
        PTC_TRY(local_->fetch(std::span(&there, 1), stop));
      } else {
        PTC_TRY(make_device_transport(devices, make_loopback_transport())
                    ->fetch(std::span(&there, 1), stop));
      }
      item.begin = there.begin;
      item.target_at_begin = there.target_at_begin;
    }
    return ok();
  }

 private:
  LocalCluster& all_;
  std::unique_ptr<Transport> local_;
};

/// All nodes' metadata, as one reaches them.
class LocalCluster::NodeMeta final : public MetaClient {
  /// That the node is cut off it knows, and the store does not.
  class Lease final : public MetaLease {
   public:
    Lease(std::unique_ptr<MetaLease> lease, const std::atomic<unsigned>& fences)
        : lease_(std::move(lease)), fences_(fences), before_(fences) {}
    int64_t id() const override { return lease_->id(); }
    Clock::time_point deadline() const override {
      return fences_ != before_ ? Clock::time_point::min() : lease_->deadline();
    }

   private:
    const std::unique_ptr<MetaLease> lease_;
    const std::atomic<unsigned>& fences_;
    const unsigned before_;  // what it ends once, it has ended
  };

 public:
  NodeMeta(LocalCluster& all, std::string self)
      : all_(all), meta_(*all.meta_), self_(std::move(self)) {}
  Result<std::optional<MetaEntry>> get(std::string_view key) override { return meta_.get(key); }
  Result<std::vector<MetaEntry>> list(std::string_view prefix) override {
    all_.lists(self_, prefix);
    return meta_.list(prefix);
  }
  Result<std::optional<Changes>> changes(std::string_view prefix, int64_t revision) override {
    all_.lists(self_, std::string(prefix) + " since");
    return meta_.changes(prefix, revision);
  }
  Result<int64_t> commit(const MetaTransaction& transaction) override {
    if (std::optional<Error> refused = all_.refuses(self_, transaction)) return *std::move(refused);
    const bool commits =
        std::any_of(transaction.puts.begin(), transaction.puts.end(),
                    [](const auto& put) { return put.first.ends_with("/sequence"); });
    const int doubt = doubt_;
    if (!commits || doubt < 0) return meta_.commit(transaction);
    if (doubt > 0) (void)meta_.commit(transaction);
    return make_error(Code::kInDoubt, "the answer was lost");
  }
  Result<> settle() override {
    if (doubt_ >= 0) return make_error(Code::kUnavailable, "the metadata are away");
    return ok();
  }
  Result<std::unique_ptr<MetaLease>> lease(std::chrono::seconds ttl) override {
    if (fenced) return make_error(Code::kUnavailable, "the metadata are away");
    PTC_TRY(auto lease, meta_.lease(ttl));
    return std::unique_ptr<MetaLease>(std::make_unique<Lease>(std::move(lease), fences_));
  }
  Result<std::shared_ptr<void>> watch(std::string prefix, OnEvent on_event) override {
    return meta_.watch(std::move(prefix), std::move(on_event));
  }
  void fence(bool on) {
    fenced = on;
    if (on) ++fences_;
  }
  std::atomic<bool> fenced = false;
  void doubt(std::optional<bool> done) { doubt_ = done ? static_cast<int>(*done) : -1; }

 private:
  LocalCluster& all_;
  MetaClient& meta_;
  const std::string self_;
  std::atomic<unsigned> fences_ = 0;
  std::atomic<int> doubt_ = -1;
};

LocalCluster::LocalCluster(unsigned nodes, PieceSizes pieces,
                           const std::vector<std::string>& devices)
    : pieces_(pieces), devices_(devices), meta_(make_memory_meta()) {
  nodes_.reserve(nodes);  // those that are there look at it
  for (unsigned i = 0; i < nodes; ++i) {
    nodes_.push_back(std::make_unique<Node>());
    start(i);
  }
}

LocalCluster::~LocalCluster() {
  for (unsigned i = 0; i < nodes_.size(); ++i)
    if (nodes_[i]->store != nullptr) stop(i);
}

uint64_t LocalCluster::bytes_moved() const {
  std::lock_guard lock(mutex_);
  uint64_t bytes = 0;
  for (const auto& [node, sent] : sent_) bytes += sent;
  return bytes;
}

uint64_t LocalCluster::bytes_sent(unsigned node) const {
  std::lock_guard lock(mutex_);
  const auto sent = sent_.find(name(node));
  return sent == sent_.end() ? 0 : sent->second;
}

JobRef LocalCluster::job(unsigned node, const std::string& name) {
  // Another node's decision takes a moment to be known.
  for (int i = 0; i < 1000; ++i) {
    if (JobRef job = store(node).find(name)) return job;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return nullptr;
}

void LocalCluster::wait_seen() const {
  std::vector<std::string> running;
  {
    std::lock_guard lock(mutex_);
    running.assign(running_.begin(), running_.end());
  }
  for (const std::string& name : running) {
    const Node& node = *nodes_[number_of(name)];
    // One that knows itself to be cut off, or does not believe what it hears, sees what it saw.
    while (!node.meta->fenced && !node.membership->distrusted() &&
           node.membership->alive() != running)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void LocalCluster::stop(unsigned i) {
  Node& node = *nodes_[i];
  {
    std::lock_guard lock(mutex_);
    running_.erase(name(i));
  }
  node.membership->leave();
  wait_seen();
  // Those who ask it something now have their answers first.
  while (node.store.use_count() > 1) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  node.store.reset();
  node.membership.reset();
}

std::shared_ptr<JobStore> LocalCluster::serving(const std::string& node,
                                                const std::string& asking) {
  std::lock_guard lock(mutex_);
  if (!running_.contains(node) || !running_.contains(asking)) return nullptr;
  return nodes_[number_of(node)]->store;
}

void LocalCluster::start(unsigned i) {
  Node& node = *nodes_[i];
  node.meta = std::make_unique<NodeMeta>(*this, name(i));
  node.calls = std::make_unique<NodeCalls>(*this, name(i));
  const MemberOptions member{.node = name(i), .lease = std::chrono::seconds(60)};
  node.membership = std::make_unique<Membership>(member, *node.meta, *node.calls);
  {
    std::lock_guard lock(mutex_);
    running_.insert(name(i));
  }
  JobStoreOptions options;
  options.directory = node.dir.path();
  options.node = name(i);
  options.copy_threads = 2;
  options.pieces = pieces_;
  if (i < devices_.size()) options.devices = Devices::open(devices_[i]).value();
  ClusterServices& in = options.cluster.emplace();
  in.meta = node.meta.get();
  in.cluster = node.membership.get();
  in.transport = [this] { return std::make_unique<NodeTransport>(*this); };
  in.begin = [&](const std::string& store) { return node.membership->begin(store); };
  const auto must = [](const auto& done) {
    if (done.has_value()) return;
    ADD_FAILURE() << done.error().message();
    std::abort();
  };
  auto store = JobStore::open(options, nullptr);
  must(store);
  JobStore& opened = *store.value();
  {
    std::lock_guard lock(mutex_);
    node.store = std::move(store).value();
  }
  must(node.membership->join(name(i), [&opened] { opened.nodes_changed(); }));
  wait_seen();
}

Cluster& LocalCluster::as_seen_by(unsigned i) { return *nodes_[i]->membership; }

void LocalCluster::doubt(unsigned i, std::optional<bool> done) { nodes_[i]->meta->doubt(done); }

void LocalCluster::fence(unsigned i, bool fenced) {
  Node& node = *nodes_[i];
  node.meta->fence(fenced);
  while (!fenced && node.membership->fence()->revision == INT64_MAX)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

void LocalCluster::wait_settled() {
  for (int calm = 0; calm < 3;) {
    bool all = true;
    for (auto& node : nodes_) {
      if (node->store == nullptr) continue;
      for (const JobRef& job : node->store->jobs())
        all = all && job->sync().has_value() && job->is_settled();
    }
    calm = all ? calm + 1 : 0;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

}  // namespace ptc::testing
