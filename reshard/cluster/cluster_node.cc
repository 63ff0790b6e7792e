#include "reshard/cluster/cluster_node.h"

#include <spdlog/spdlog.h>
#include <sys/random.h>

#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>

#include "store/base/json.h"
#include "store/rpc/peer_server.h"
#include "store/rpc/peers.h"
#include "store/transport/tcp.h"

namespace ptc {
namespace {

constexpr std::string_view kPrefix = "nodes/";
constexpr auto kRetry = std::chrono::milliseconds(500);

std::string address_in(const std::string& text) {
  auto value = parse_json(text);
  if (value.has_error() || !value.value().is_object()) return "";
  const json::value* address = value.value().as_object().if_contains("address");
  return address != nullptr && address->is_string() ? std::string(address->as_string()) : "";
}

}  // namespace

struct ClusterNode::Impl final : public Cluster {
  ClusterOptions options;
  std::unique_ptr<MetaClient> meta;
  std::unique_ptr<Peers> peers;
  std::unique_ptr<PeerServer> server;
  std::atomic<JobStore*> store = nullptr;
  std::shared_ptr<void> watch;

  mutable std::mutex mutex;
  std::condition_variable_any changed;
  struct Known {
    std::string address;
    int64_t revision = 0;
    friend bool operator==(const Known&, const Known&) = default;
  };
  std::map<std::string, Known> members;  // guarded
  bool refresh = true;                         // read nodes/ again; guarded
  std::shared_ptr<MetaLease> own_lease;        // guarded
  int64_t own_revision = 0;                    // of nodes/<self>; guarded
  std::jthread follower;                       // last

  ~Impl() override {
    follower = {};
    watch.reset();
  }

  const std::string& self() const override { return options.node; }

  std::vector<std::string> alive() const override {
    std::lock_guard lock(mutex);
    std::vector<std::string> names;
    for (const auto& [name, known] : members)
      if (name != options.node || (own_lease != nullptr && own_lease->alive())) names.push_back(name);
    return names;
  }

  Result<std::string> call(const std::string& node, std::string_view method, const std::string& body,
                           std::chrono::milliseconds deadline, std::stop_token stop) override {
    return peers->call(node, method, body, deadline, std::move(stop));
  }

  MetaTransaction::Compare fence() const override {
    std::lock_guard lock(mutex);
    // A revision that no key has: nothing is decided by a node that is no member.
    const bool member = own_lease != nullptr && own_lease->alive();
    return {std::string(kPrefix) + options.node, member ? own_revision : INT64_MAX};
  }

  MetaTransaction::Compare fence_of(const std::string& node) const override {
    if (node == options.node) return fence();
    std::lock_guard lock(mutex);
    const auto known = members.find(node);
    return {std::string(kPrefix) + node, known != members.end() ? known->second.revision : INT64_MAX};
  }

  std::shared_ptr<const MetaLease> lease() const override {
    std::lock_guard lock(mutex);
    return own_lease;
  }

  Result<> forget_former_self();
  Result<> join();
  void follow(std::stop_token stop);
  Result<> read_members();
};

/// What a daemon that was killed under this name had promised to others is thrown away when its store is
/// opened: so nobody may decide anything with it from now on.
Result<> ClusterNode::Impl::forget_former_self() {
  const std::string key = std::string(kPrefix) + options.node;
  const std::string& address = options.advertise.empty() ? options.listen : options.advertise;
  PTC_TRY(auto entry, meta->get(key));
  if (!entry || address_in(entry->value) != address) return ok();
  MetaTransaction transaction;
  transaction.compares = {{key, entry->revision}};
  transaction.deletes = {key};
  PTC_TRY(meta->commit(transaction));
  return ok();
}

/// A new lease, and this node's key under it.
Result<> ClusterNode::Impl::join() {
  const std::string key = std::string(kPrefix) + options.node;
  PTC_TRY(auto entry, meta->get(key));
  const std::string address = options.advertise.empty() ? server->address() : options.advertise;
  if (entry && address_in(entry->value) != address)
    return make_error(Code::kBusy, "node {} is in the cluster already, at {}: give this one another "
                      "name (--node), or wait until the other's lease has ended",
                      options.node, address_in(entry->value));
  PTC_TRY(auto fresh, meta->lease(options.lease));
  uint64_t boot = 0;
  if (::getrandom(&boot, sizeof boot, 0) != sizeof boot) return errno_error(errno, "getrandom");
  MetaTransaction transaction;
  transaction.compares = {{key, entry ? entry->revision : 0}};
  transaction.leased_puts = {
      {key, json::serialize(json::object{{"address", address}, {"boot", fmt::format("{:016x}", boot)}})}};
  transaction.lease = fresh.get();
  PTC_TRY(int64_t revision, meta->commit(transaction));
  std::lock_guard lock(mutex);
  own_lease = std::move(fresh);
  own_revision = revision;
  refresh = true;
  changed.notify_all();
  return ok();
}

Result<> ClusterNode::Impl::read_members() {
  PTC_TRY(auto entries, meta->list(kPrefix));
  std::map<std::string, Known> now;
  for (const MetaEntry& entry : entries)
    now.emplace(entry.key.substr(kPrefix.size()), Known{address_in(entry.value), entry.revision});
  bool differs = false;
  {
    std::lock_guard lock(mutex);
    for (const auto& [name, known] : now) {
      if (members.contains(name) && members[name] == known) continue;
      differs = true;
      if (name == options.node) continue;
      peers->set(name, known.address);
      spdlog::info("node {} is there, at {}", name, known.address);
    }
    for (const auto& [name, known] : members) {
      if (now.contains(name)) continue;
      differs = true;
      if (name == options.node) continue;
      peers->remove(name);
      spdlog::warn("node {} is gone", name);
    }
    members = std::move(now);
  }
  if (JobStore* jobs = store; differs && jobs != nullptr) jobs->nodes_changed();
  return ok();
}

void ClusterNode::Impl::follow(std::stop_token stop) {
  while (!stop.stop_requested()) {
    bool read = false, lost = false;
    {
      std::unique_lock lock(mutex);
      changed.wait_for(lock, stop, kRetry, [&] { return refresh; });
      read = std::exchange(refresh, false);
      lost = own_lease != nullptr && !own_lease->alive();
    }
    if (stop.stop_requested()) return;
    if (lost) {
      spdlog::warn("the lease of node {} may have ended: it decides nothing until it has joined again",
                   options.node);
      Result<> joined = join();
      if (joined.has_value()) {
        spdlog::info("node {} has joined again", options.node);
        read = true;
        if (JobStore* jobs = store) jobs->nodes_changed();
      }
    }
    if (!read) continue;
    Result<> done = read_members();
    if (done.has_value()) continue;
    spdlog::warn("who is in the cluster cannot be read: {}", done.error().message());
    std::lock_guard lock(mutex);
    refresh = true;
  }
}

ClusterNode::ClusterNode(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ClusterNode::~ClusterNode() { leave(); }

Result<std::unique_ptr<ClusterNode>> ClusterNode::start(ClusterOptions options) {
  auto impl = std::make_unique<Impl>();
  impl->options = std::move(options);
  PTC_TRY(impl->meta, open_etcd_meta(impl->options.etcd));
  PeersOptions peers;
  peers.node = impl->options.node;
  peers.cluster = impl->options.etcd.cluster;
  peers.auth = impl->options.auth;
  PTC_TRY(impl->peers, Peers::create(std::move(peers)));
  PTC_TRY(impl->watch, impl->meta->watch(std::string(kPrefix), [node = impl.get()](const MetaEvent&) {
    std::lock_guard lock(node->mutex);
    node->refresh = true;
    node->changed.notify_all();
  }));
  PTC_TRY(impl->forget_former_self());
  PTC_TRY(impl->read_members());
  return std::unique_ptr<ClusterNode>(new ClusterNode(std::move(impl)));
}

ClusterServices ClusterNode::services() {
  Impl* impl = impl_.get();
  return {impl->meta.get(), impl,
          [impl] { return make_tcp_transport(*impl->peers, make_loopback_transport()); }};
}

Result<> ClusterNode::join(JobStore& store) {
  Impl& impl = *impl_;
  PeerServerOptions options;
  options.listen = impl.options.listen;
  options.node = impl.options.node;
  options.cluster = impl.options.etcd.cluster;
  options.auth = impl.options.auth;
  options.images = &store.images();
  PTC_TRY(impl.server, PeerServer::start(std::move(options)));
  for (const char* method : JobStore::kMethods)
    impl.server->handle(method, [&store, method](std::string_view request, const std::string&) {
      return store.answer(method, request);
    });
  impl.store = &store;
  // The key of a daemon that was killed under this name stays until its lease ends.
  const auto deadline = std::chrono::steady_clock::now() + 3 * impl.options.lease;
  Result<> joined = impl.join();
  while (joined.has_error() && joined.error().code() == Code::kConflict &&
         std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(kRetry);
    joined = impl.join();
  }
  PTC_TRY(std::move(joined));
  PTC_TRY(impl.read_members());
  impl.follower = std::jthread([node = &impl](std::stop_token stop) { node->follow(std::move(stop)); });
  store.nodes_changed();
  return ok();
}

void ClusterNode::leave() {
  if (impl_ == nullptr) return;
  Impl& impl = *impl_;
  impl.follower = {};
  std::shared_ptr<MetaLease> lease;
  {
    std::lock_guard lock(impl.mutex);
    lease = std::move(impl.own_lease);
  }
  lease.reset();
  impl.store = nullptr;
  impl.server.reset();
}

std::vector<ClusterNode::Member> ClusterNode::members() const {
  std::lock_guard lock(impl_->mutex);
  std::vector<Member> list;
  for (const auto& [name, known] : impl_->members) list.push_back({name, known.address});
  return list;
}

std::string ClusterNode::address() const {
  return impl_->server == nullptr ? "" : impl_->server->address();
}

std::vector<PeerNumbers> ClusterNode::traffic() const { return impl_->peers->numbers(); }

}  // namespace ptc
