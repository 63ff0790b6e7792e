#include "reshard/node/cluster_node.h"

#include <fmt/ranges.h>
#include <spdlog/spdlog.h>
#include <sys/random.h>

#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <condition_variable>
#include <map>
#include <mutex>
#include <optional>
#include <thread>

#include "reshard/node/meeting.h"
#include "reshard/node/peer_service.h"
#include "reshard/node/seen_nodes.h"
#include "store/base/json.h"
#include "store/net/address.h"
#include "store/rpc/peer_server.h"
#include "store/rpc/peers.h"
#include "store/transport/tcp.h"

namespace ptc {
namespace {

constexpr std::string_view kPrefix = kMemberKeys;
constexpr auto kRetry = std::chrono::milliseconds(500);
constexpr auto kAfterConflict = std::chrono::milliseconds(20);
constexpr auto kLook = std::chrono::seconds(1);  // whether the agreement store is what it was

std::string address_in(const std::string& text) { return json_text(text, "address"); }

}  // namespace

struct ClusterNode::Impl final : public Cluster {
  ClusterOptions options;
  std::unique_ptr<MetaClient> meta;
  std::shared_ptr<IoThreads> io;
  std::unique_ptr<Peers> peers;
  std::unique_ptr<PeerServer> server;  // guarded
  std::atomic<JobStore*> store = nullptr;
  std::optional<Meetings> meetings;  // of one attempt to join, which may take several rounds
  std::string store_id;              // since begin()
  std::shared_ptr<void> watch;

  mutable std::mutex mutex;
  std::condition_variable_any changed;
  struct Known {
    std::string address;
    int64_t revision = 0;
    friend bool operator==(const Known&, const Known&) = default;
  };
  std::map<std::string, Known> members;  // guarded
  bool refresh = true;                   // read nodes/ again; guarded
  std::shared_ptr<MetaLease> own_lease;  // guarded
  int64_t own_revision = 0;              // of nodes/<self>; guarded
  std::unique_ptr<SeenNodes> seen_nodes;
  std::jthread follower;  // last

  ~Impl() override {
    follower = {};
    watch.reset();
  }

  const std::string& self() const override { return options.node; }

  std::vector<std::string> alive() const override {
    std::lock_guard lock(mutex);
    std::vector<std::string> names;
    for (const auto& [name, known] : members)
      if (name != options.node || (own_lease != nullptr && own_lease->alive()))
        names.push_back(name);
    return names;
  }

  Result<std::string> call(const std::string& node, const PeerRow& row, const std::string& request,
                           std::chrono::milliseconds time, std::stop_token stop) override {
    return peers->call(node, row.name, request, time, std::move(stop));
  }

  std::vector<Result<std::string>> call_all(const std::vector<Question>& questions,
                                            const PeerRow& row, std::chrono::milliseconds time,
                                            std::stop_token stop) override {
    std::vector<Peers::Call> calls;
    for (const Question& one : questions) calls.push_back({one.node, row.name, one.request});
    return peers->call_all(calls, time, std::move(stop));
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
    return {std::string(kPrefix) + node,
            known != members.end() ? known->second.revision : INT64_MAX};
  }

  std::shared_ptr<const MetaLease> lease() const override {
    std::lock_guard lock(mutex);
    return own_lease;
  }

  std::vector<Seen> seen() const override { return seen_nodes->all(); }

  std::vector<PeerNumbers> traffic() const override {
    std::vector<PeerNumbers> all = peers->numbers();
    {
      std::lock_guard lock(mutex);
      if (server != nullptr)
        for (PeerNumbers& theirs : server->numbers()) all.push_back(std::move(theirs));
    }
    std::map<std::string, PeerNumbers> by_node;
    for (const PeerNumbers& one : all)
      by_node.try_emplace(one.node, PeerNumbers{one.node}).first->second.add(one);
    std::vector<PeerNumbers> numbers;
    for (auto& [node, sum] : by_node) numbers.push_back(std::move(sum));
    return numbers;
  }

  std::string listens_at() const {
    std::lock_guard lock(mutex);
    return server == nullptr ? "" : server->address();
  }

  Result<> begin(const std::string& id);
  Result<> check_not_running(const MetaEntry& entry);
  Result<> forget_former_self();
  Result<> meet_the_others(const std::string& own_address);
  Result<> join();
  void follow(std::stop_token stop);
  Result<> read_members();
};

Result<> ClusterNode::Impl::begin(const std::string& id) {
  store_id = id;
  PTC_TRY(forget_former_self());
  return read_members();
}

/// Who is killed does not answer. Another who does has a copy of this store, or is of the name by
/// mistake.
Result<> ClusterNode::Impl::check_not_running(const MetaEntry& entry) {
  const std::string address = address_in(entry.value);
  if (peers->meet(options.node, address).has_error()) return ok();
  const bool copied = json_text(entry.value, "store") == store_id;
  return make_error(
      Code::kAlreadyExists, "node {} runs at {}{}: stop it first, or give this node another {}",
      options.node, address, copied ? ", with this store or one that it was copied from" : "",
      copied ? "store" : "name (--node)");
}

/// What a daemon that was killed over this store had promised to others is thrown away when the
/// store is opened: so nobody may decide anything with it from now on.
Result<> ClusterNode::Impl::forget_former_self() {
  const std::string key = std::string(kPrefix) + options.node;
  PTC_TRY(auto entry, meta->get(key));
  if (entry) {
    PTC_TRY(check_not_running(*entry));
  }
  MetaTransaction transaction;
  transaction.puts = {{std::string(kMembership), options.node}};
  if (entry && json_text(entry->value, "store") == store_id) {
    transaction.compares = {{key, entry->revision}};
    transaction.deletes = {key};
  }
  PTC_TRY(meta->commit(transaction));
  return ok();
}

Result<> ClusterNode::Impl::meet_the_others(const std::string& own_address) {
  PTC_TRY(read_members());
  std::vector<Meetings::Other> others;
  {
    std::lock_guard lock(mutex);
    for (const auto& [name, known] : members)
      if (name != options.node) others.push_back({name, known.address, known.revision});
  }
  Result<> met = meetings->meet(others, own_address);
  if (met.has_value()) return ok();
  const bool refused = met.error().code() == Code::kPermissionDenied;
  return make_error(
      met.error().code(), "this node, {} at {}, is not let into the cluster: {}{}", options.node,
      own_address, met.error().message(),
      refused
          ? "; all nodes have the same --secret, and certificates of one authority that name them"
          : "");
}

/// A new lease, and this node's key under it.
Result<> ClusterNode::Impl::join() {
  PTC_TRY(check_identity(*meta, *this));
  const std::string key = std::string(kPrefix) + options.node;
  PTC_TRY(auto entry, meta->get(key));
  const std::string address = options.advertise.empty() ? listens_at() : options.advertise;
  // Of this store, or of one that was lost: nobody else can listen there.
  const bool former_self = entry && (json_text(entry->value, "store") == store_id ||
                                     address_in(entry->value) == address);
  if (entry && !former_self)
    return make_error(Code::kBusy,
                      "node {} is in the cluster already, at {}: give this one another "
                      "name (--node), or wait until the other's lease has ended",
                      options.node, address_in(entry->value));
  if (entry && address_in(entry->value) != address) {
    PTC_TRY(check_not_running(*entry));
  }
  PTC_TRY(auto membership, meta->get(kMembership));
  PTC_TRY(meet_the_others(address));
  PTC_TRY(auto fresh, meta->lease(options.lease));
  uint64_t boot = 0;
  if (::getrandom(&boot, sizeof boot, 0) != sizeof boot) return errno_error(errno, "getrandom");
  MetaTransaction transaction;
  transaction.compares = {{key, entry ? entry->revision : 0},
                          {std::string(kMembership), membership ? membership->revision : 0}};
  transaction.puts = {{std::string(kMembership), options.node}, SeenNodes::joined(options.node)};
  transaction.leased_puts = {
      {key,
       json::serialize(json::object{
           {"address", address}, {"store", store_id}, {"boot", fmt::format("{:016x}", boot)}})}};
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
  PTC_TRY(check_identity(*meta, *this));  // else those who were there before still count
  PTC_TRY(auto entries, meta->list(kPrefix));
  std::map<std::string, Known> now;
  for (const MetaEntry& entry : entries)
    now.emplace(entry.key.substr(kPrefix.size()), Known{address_in(entry.value), entry.revision});
  bool differs = false;
  std::vector<std::string> there;
  for (const auto& [name, known] : now) there.push_back(name);
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
  return seen_nodes->update(*this, there);
}

void ClusterNode::Impl::follow(std::stop_token stop) {
  std::string told;  // why it does not belong any more
  auto next_look = std::chrono::steady_clock::now();
  bool later = false;  // read nodes/, once that is believed
  while (!stop.stop_requested()) {
    bool read = false, lost = false;
    {
      std::unique_lock lock(mutex);
      changed.wait_for(lock, stop, kRetry, [&] { return refresh; });
      read = std::exchange(refresh, false);
      lost = own_lease != nullptr && !own_lease->alive();
    }
    if (stop.stop_requested()) return;
    if (const auto now = std::chrono::steady_clock::now(); now >= next_look) {
      next_look = now + kLook;
      const bool before = distrusted().has_value();
      (void)check_identity(*meta, *this);
      if (JobStore* jobs = store; !before && distrusted() && jobs != nullptr)
        jobs->nodes_changed();  // it looks on
    }
    if (distrusted()) {
      later = later || read;
      continue;
    }
    read = read || std::exchange(later, false);
    if (lost) {
      if (told.empty()) {
        told = "its lease may have ended";
        spdlog::warn("node {} decides nothing until it has joined again: {}", options.node, told);
        meetings.emplace(*peers);
      }
      Result<> joined = join();
      if (joined.has_value()) {
        told.clear();
        spdlog::info("node {} has joined again", options.node);
        read = true;
        if (JobStore* jobs = store) jobs->nodes_changed();
      } else if (joined.error().code() != Code::kConflict && joined.error().message() != told) {
        told = joined.error().message();
        spdlog::warn("node {} has not joined again: {}", options.node, told);
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

Result<> check(const ClusterOptions& options) {
  PTC_TRY(check_node_name(options.node));
  PTC_TRY(auto listen, PeerAddress::parse(options.listen));
  if (options.advertise.empty()) {
    if (!is_wildcard(listen)) return ok();
    return invalid_argument(
        "--listen {} is every address of this machine: --advertise HOST:PORT says at which one the "
        "other nodes find it",
        options.listen);
  }
  PTC_TRY(auto advertise, PeerAddress::parse(options.advertise));
  if (is_wildcard(advertise))
    return invalid_argument(
        "--advertise {}: other nodes cannot connect to that; give one address of this machine, or "
        "its name",
        options.advertise);
  return ok();
}

ClusterNode::ClusterNode(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ClusterNode::~ClusterNode() { leave(); }

Result<std::unique_ptr<ClusterNode>> ClusterNode::start(ClusterOptions options) {
  auto impl = std::make_unique<Impl>();
  impl->options = std::move(options);
  PTC_TRY(impl->io, IoThreads::start());
  // Of its own: images are sent from mapped pages, which may have to come from a slow disk, and the
  // lease of this node waits for nothing.
  PTC_TRY(impl->options.etcd.io, IoThreads::start(1));
  PTC_TRY(impl->meta, open_etcd_meta(impl->options.etcd));
  PTC_TRY(impl->seen_nodes, SeenNodes::open(*impl->meta));
  PeersOptions peers;
  peers.node = impl->options.node;
  peers.cluster = impl->options.etcd.cluster;
  peers.auth = impl->options.auth;
  peers.io = impl->io;
  PTC_TRY(impl->peers, Peers::create(std::move(peers)));
  PTC_TRY(impl->watch,
          impl->meta->watch(std::string(kPrefix), [node = impl.get()](const MetaEvent&) {
            std::lock_guard lock(node->mutex);
            node->refresh = true;
            node->changed.notify_all();
          }));
  return std::unique_ptr<ClusterNode>(new ClusterNode(std::move(impl)));
}

ClusterServices ClusterNode::services() {
  Impl* impl = impl_.get();
  return {impl->meta.get(),
          impl,
          [impl] { return make_tcp_transport(*impl->peers, make_loopback_transport()); },
          impl->options.etcd.cluster,
          fmt::format("{}", fmt::join(impl->options.etcd.endpoints, ",")),
          impl->options.join,
          [impl](const std::string& id) { return impl->begin(id); }};
}

Result<> ClusterNode::join(JobStore& store) {
  Impl& impl = *impl_;
  PeerServerOptions options;
  options.listen = impl.options.listen;
  options.node = impl.options.node;
  options.cluster = impl.options.etcd.cluster;
  options.auth = impl.options.auth;
  options.images = &store.images();
  options.io = impl.io;
  PTC_TRY(auto server, PeerServer::start(std::move(options)));
  PeerServer& serves = *server;
  {
    std::lock_guard lock(impl.mutex);
    impl.server = std::move(server);
  }
  serve_peers(serves, store, *impl.peers);
  impl.store = &store;
  // The key of a daemon that was killed stays until its lease ends, under this name or another.
  impl.meetings.emplace(*impl.peers);
  const auto deadline = std::chrono::steady_clock::now() + 3 * impl.options.lease;
  Result<> joined = impl.join();
  while (joined.has_error() &&
         (joined.error().code() == Code::kConflict || joined.error().code() == Code::kUnavailable ||
          joined.error().code() == Code::kBusy) &&
         std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(joined.error().code() == Code::kConflict ? kAfterConflict : kRetry);
    joined = impl.join();
  }
  PTC_TRY(std::move(joined));
  PTC_TRY(impl.read_members());
  impl.follower =
      std::jthread([node = &impl](std::stop_token stop) { node->follow(std::move(stop)); });
  store.nodes_changed();
  return ok();
}

void ClusterNode::leave() {
  if (impl_ == nullptr) return;
  Impl& impl = *impl_;
  impl.follower = {};
  std::shared_ptr<MetaLease> lease;
  std::unique_ptr<PeerServer> server;
  {
    std::lock_guard lock(impl.mutex);
    lease = std::move(impl.own_lease);
    server = std::move(impl.server);
  }
  lease.reset();
  impl.store = nullptr;
}

std::vector<ClusterNode::Member> ClusterNode::members() const {
  std::lock_guard lock(impl_->mutex);
  std::vector<Member> list;
  for (const auto& [name, known] : impl_->members) list.push_back({name, known.address});
  return list;
}

std::string ClusterNode::address() const { return impl_->listens_at(); }

}  // namespace ptc
