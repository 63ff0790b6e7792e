// Nodes of one process with devices that are none (HostDevice), and links between them.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "store/device/devices.h"
#include "store/device/host_link.h"
#include "store/rpc/device_links.h"
#include "store/tensor/packed_copy.h"
#include "store/transport/device.h"
#include "store/transport/nccl.h"
#include "tcp_world.h"

namespace ptc {

/// What goes wrong with links, and how many there were. Threads: any.
struct LinkFaults {
  std::atomic<int> ids{0}, made{0};
  /// Called with how many sends, or receives, of this maker's links there were.
  std::function<Result<>(int)> connects, sends, receives;
  std::function<void()> finds;                            // before there is a maker
  std::function<void(MemoryPointer, uint64_t)> received;  // after it came
  std::atomic<int> sent{0}, came{0};
};

/// Links of another maker, with faults.
class FaultyLinks final : public DeviceLinkMaker {
 public:
  FaultyLinks(std::unique_ptr<DeviceLinkMaker> real, std::shared_ptr<LinkFaults> faults)
      : real_(std::move(real)), faults_(std::move(faults)) {}
  const std::string& name() const override { return real_->name(); }
  Result<std::string> make_id() override {
    ++faults_->ids;
    return real_->make_id();
  }
  Result<std::unique_ptr<DeviceLink>> make(Device& device, const std::string& id,
                                           End end) override {
    PTC_TRY(auto link, real_->make(device, id, end));
    ++faults_->made;
    return std::make_unique<Link>(std::move(link), faults_);
  }

 private:
  class Link final : public DeviceLink {
   public:
    Link(std::unique_ptr<DeviceLink> real, std::shared_ptr<LinkFaults> faults)
        : real_(std::move(real)), faults_(std::move(faults)) {}
    Result<> connect(Deadline deadline) override {
      if (faults_->connects) {
        PTC_TRY(faults_->connects(faults_->made));
      }
      return real_->connect(deadline);
    }
    Result<> send(ConstMemoryPointer bytes, uint64_t count) override {
      const int number = ++faults_->sent;
      if (faults_->sends) {
        PTC_TRY(faults_->sends(number));
      }
      return real_->send(bytes, count);
    }
    Result<> receive(MemoryPointer to, uint64_t count) override {
      const int number = ++faults_->came;
      if (faults_->receives) {
        PTC_TRY(faults_->receives(number));
      }
      to_ = {to, count};
      return real_->receive(to, count);
    }
    Result<> wait(Deadline deadline) override {
      PTC_TRY(real_->wait(deadline));
      if (to_.second > 0 && faults_->received) faults_->received(to_.first, to_.second);
      to_ = {};
      return ok();
    }
    void abort() override { real_->abort(); }

   private:
    const std::unique_ptr<DeviceLink> real_;
    const std::shared_ptr<LinkFaults> faults_;
    std::pair<MemoryPointer, uint64_t> to_;
  };
  const std::unique_ptr<DeviceLinkMaker> real_;
  const std::shared_ptr<LinkFaults> faults_;
};

/// Counts what goes on to another transport.
class CountsBytes final : public Transport {
 public:
  explicit CountsBytes(std::unique_ptr<Transport> next) : next_(std::move(next)) {}
  Result<> fetch(std::span<FetchItem> items, std::stop_token stop,
                 std::chrono::milliseconds silence) override {
    const std::vector<FetchItem> before(items.begin(), items.end());
    Result<> fetched = next_->fetch(items, std::move(stop), silence);
    for (size_t i = 0; i < items.size(); ++i)
      bytes_ += bytes_between(items[i].copy, before[i].begin, items[i].begin);
    return fetched;
  }
  uint64_t bytes() const { return bytes_; }

 private:
  const std::unique_ptr<Transport> next_;
  std::atomic<uint64_t> bytes_{0};
};

/// A node with two devices and links.
class LinkNode {
 public:
  LinkNode(const std::string& directory, const DeviceLinksOptions& options,
           const std::string& kind = "host memory 1")
      : devices_(Devices::open("host:512M,512M").value()),
        store_(ImageStore::open(directory, {.devices = devices_}).value()),
        links_(
            devices_,
            [faults = faults_, kind]() -> Result<std::unique_ptr<DeviceLinkMaker>> {
              if (faults->finds) faults->finds();
              return std::make_unique<FaultyLinks>(std::make_unique<HostLinkMaker>(kind), faults);
            },
            options) {}

  std::unique_ptr<PeerServer> serve(const std::string& name, bool has_links = true) {
    PeerServerOptions options;
    options.listen = "127.0.0.1:0";
    options.node = name;
    options.cluster = "test";
    options.images = store_.get();
    if (has_links) options.links = &links_;
    return PeerServer::start(std::move(options)).value();
  }
  ImageRef publish(const Bytes& bytes, NodeMemory memory) {
    ImageWriter writer = store_->create(bytes.size(), ImageStore::TakeSpace::kNow, memory).value();
    EXPECT_TRUE(is_ok(writer.write(0, bytes)));
    return store_->publish(std::move(writer)).value();
  }

  const std::shared_ptr<const Devices>& devices() { return devices_; }
  ImageStore& store() { return *store_; }
  DeviceLinks& links() { return links_; }
  LinkFaults& faults() { return *faults_; }

 private:
  const std::shared_ptr<const Devices> devices_;
  const std::unique_ptr<ImageStore> store_;
  const std::shared_ptr<LinkFaults> faults_ = std::make_shared<LinkFaults>();
  DeviceLinks links_;
};

/// Nodes n0, n1 …; n0 fetches, the others serve.
class LinkWorld final : public TransportWorld {
 public:
  struct Options {
    size_t nodes = 3;
    DeviceLinksOptions links = {.chunk_bytes = 64 << 10, .most = 8};
    NcclTransportOptions transport = {};
    PeersOptions peers = {};
    bool others_have_links = true;
    std::string kind_of_others = "host memory 1";
  };
  LinkWorld() : LinkWorld(Options{}) {}
  explicit LinkWorld(const Options& options) {
    PeersOptions peers = options.peers;
    peers.node = "n0";
    peers.cluster = "test";
    peers_ = Peers::create(peers).value();
    for (size_t i = 0; i < options.nodes; ++i) {
      const std::string name = TcpWorld::name(i);
      nodes_.push_back(
          std::make_unique<LinkNode>(directory() + "/" + name, options.links,
                                     i == 0 ? "host memory 1" : options.kind_of_others));
      servers_.push_back(i == 0 ? nullptr : node(i).serve(name, options.others_have_links));
      if (i > 0) peers_->set(name, servers_[i]->address());
    }
    auto next = std::make_unique<CountsBytes>(make_device_transport(
        node(0).devices(), make_tcp_transport(*peers_, make_loopback_transport())));
    next_ = next.get();
    transport_ = make_nccl_transport(*peers_, node(0).links(), std::move(next), options.transport);
  }

  size_t nodes() const override { return nodes_.size(); }
  ImageStore& store(size_t i) override { return node(i).store(); }
  ImageRef seen(size_t i, const ImageRef& image) override {
    if (i == 0) return image;
    return std::make_shared<const Image>(
        image->id(), MemoryPlace{TcpWorld::name(i), image->place().memory}, image->bytes());
  }
  Transport& transport() override { return *transport_; }
  LinkNode& node(size_t i) { return *nodes_[i]; }
  Peers& peers() { return *peers_; }
  std::unique_ptr<PeerServer>& server(size_t i) { return servers_[i]; }
  uint64_t bytes_by_next() const { return next_->bytes(); }
  PeerNumbers numbers(size_t i) {
    for (const PeerNumbers& one : peers_->numbers())
      if (one.node == TcpWorld::name(i)) return one;
    return {};
  }

 private:
  std::unique_ptr<Peers> peers_;
  std::vector<std::unique_ptr<LinkNode>> nodes_;
  std::vector<std::unique_ptr<PeerServer>> servers_;
  CountsBytes* next_ = nullptr;
  std::unique_ptr<Transport> transport_;
};

}  // namespace ptc
