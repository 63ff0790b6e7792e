// Nodes of one process that talk over real sockets.
#pragma once

#include <chrono>
#include <functional>
#include <thread>

#include "store/rpc/peer_server.h"
#include "store/rpc/peers.h"
#include "store/transport/device.h"
#include "store/transport/tcp.h"
#include "transport_world.h"

namespace ptc {

/// Whether so many connections were refused, once the server's threads have come so far.
inline bool comes_to_refuse(const PeerServer& server, uint64_t count) {
  for (int i = 0; i < 2000 && server.refused() < count; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  return server.refused() == count;
}

/// Nodes n0, n1 …; n0 fetches, the others serve. `devices`, if any, are those that each has.
class TcpWorld final : public TransportWorld {
 public:
  using Auth = std::function<PeerAuth(const std::string& node)>;
  explicit TcpWorld(
      size_t count = 4, PeersOptions options = {},
      Auth auth = [](const std::string&) { return PeerAuth{}; }, const std::string& devices = "")
      : auth_(std::move(auth)) {
    options.node = "n0";
    options.auth = auth_("n0");
    if (options.cluster.empty()) options.cluster = "test";
    peers_ = Peers::create(options).value();
    transport_ = make_tcp_transport(*peers_, make_loopback_transport());
    for (size_t node = 0; node < count; ++node) {
      ImageStoreOptions with;
      if (!devices.empty()) with.devices = Devices::open(devices).value();
      if (node == 0 && !devices.empty())
        transport_ = make_device_transport(with.devices, std::move(transport_));
      stores_.push_back(ImageStore::open(directory() + "/" + name(node), with).value());
      servers_.push_back(node == 0 ? nullptr : start(node));
      if (node > 0) peers_->set(name(node), servers_[node]->address());
    }
  }

  static std::string name(size_t node) { return "n" + std::to_string(node); }
  PeerServerOptions server_options(size_t node) {
    PeerServerOptions options;
    options.listen = "127.0.0.1:0";
    options.node = name(node);
    options.cluster = "test";
    options.images = stores_[node].get();
    options.auth = auth_(name(node));
    return options;
  }
  std::unique_ptr<PeerServer> start(size_t node) {
    return PeerServer::start(server_options(node)).value();
  }

  size_t nodes() const override { return stores_.size(); }
  ImageStore& store(size_t node) override { return *stores_[node]; }
  ImageRef seen(size_t node, const ImageRef& image) override {
    if (node == 0) return image;
    return std::make_shared<const Image>(image->id(), MemoryPlace{name(node)}, image->bytes());
  }
  Transport& transport() override { return *transport_; }
  Peers& peers() { return *peers_; }
  std::unique_ptr<PeerServer>& server(size_t node) { return servers_[node]; }
  /// What n0 counted of another node.
  PeerNumbers numbers(size_t node) {
    for (const PeerNumbers& one : peers_->numbers())
      if (one.node == name(node)) return one;
    return {};
  }

 private:
  const Auth auth_;
  std::vector<std::unique_ptr<ImageStore>> stores_;
  std::vector<std::unique_ptr<PeerServer>> servers_;
  std::unique_ptr<Peers> peers_;
  std::unique_ptr<Transport> transport_;
};

}  // namespace ptc
