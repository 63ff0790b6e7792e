#include "reshard/node/cluster_node.h"

#include <fmt/ranges.h>

#include "reshard/node/membership.h"
#include "reshard/node/peer_service.h"
#include "reshard/node/tcp_calls.h"
#include "store/net/address.h"
#include "store/rpc/peer_server.h"
#include "store/rpc/peers.h"
#include "store/transport/nccl.h"
#include "store/transport/tcp.h"

namespace ptc {

struct ClusterNode::Impl {
  ClusterOptions options;
  std::unique_ptr<MetaClient> meta;
  std::shared_ptr<IoThreads> io;
  std::unique_ptr<Peers> peers;
  std::unique_ptr<DeviceLinks> links;  // null: none
  std::unique_ptr<TcpCalls> calls;
  std::unique_ptr<Membership> membership;  // last
};

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
  PTC_TRY(impl->options.etcd.io, IoThreads::start(1, "ptcfs-etcd"));
  // Before etcd is asked, which may take a while: a file that cannot be used is said at once.
  PeersOptions peers;
  peers.node = impl->options.node;
  peers.cluster = impl->options.etcd.cluster;
  peers.auth = impl->options.auth;
  peers.io = impl->io;
  PTC_TRY(impl->peers, Peers::create(std::move(peers)));
  PTC_TRY(impl->links, open_links(impl->options.transport, impl->options.devices,
                                  !impl->options.auth.cert_file.empty()));
  PTC_TRY(impl->meta, open_etcd_meta(impl->options.etcd));
  impl->calls = std::make_unique<TcpCalls>(*impl->peers);
  const MemberOptions member{impl->options.node, impl->options.lease};
  impl->membership = std::make_unique<Membership>(member, *impl->meta, *impl->calls);
  return std::unique_ptr<ClusterNode>(new ClusterNode(std::move(impl)));
}

ClusterServices ClusterNode::services() {
  Impl* impl = impl_.get();
  const auto over_links = [impl](std::unique_ptr<Transport> next) {
    if (impl->links == nullptr) return next;
    return make_nccl_transport(*impl->peers, *impl->links, std::move(next));
  };
  return {impl->meta.get(),
          impl->membership.get(),
          [impl] { return make_tcp_transport(*impl->peers, make_loopback_transport()); },
          impl->options.etcd.cluster,
          fmt::format("{}", fmt::join(impl->options.etcd.endpoints, ",")),
          impl->options.join,
          [impl](const std::string& store) { return impl->membership->begin(store); },
          [impl](bool is_new) { return impl->membership->check_let_in(is_new); },
          impl->options.join_as,
          over_links};
}

Result<> ClusterNode::join(JobStore& store) {
  Impl& impl = *impl_;
  PeerServerOptions options;
  options.listen = impl.options.listen;
  options.node = impl.options.node;
  options.cluster = impl.options.etcd.cluster;
  options.auth = impl.options.auth;
  options.images = &store.images();
  options.links = impl.links.get();
  options.io = impl.io;
  PTC_TRY(auto server, PeerServer::start(std::move(options)));
  serve_peers(*server, store, *impl.calls);
  const std::string address =
      impl.options.advertise.empty() ? server->address() : impl.options.advertise;
  (void)impl.calls->serve(std::move(server));
  return impl.membership->join(address, [&store] { store.nodes_changed(); });
}

void ClusterNode::leave() {
  if (impl_ == nullptr) return;
  impl_->membership->leave();
  (void)impl_->calls->serve(nullptr);
}

std::string ClusterNode::address() const { return impl_->calls->address(); }

}  // namespace ptc
