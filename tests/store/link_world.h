// Nodes of one process with devices that are none (HostDevice), and links between them.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "store/base/mutex.h"
#include "store/device/host_device.h"
#include "store/device/host_link.h"
#include "store/rpc/device_links.h"
#include "store/tensor/packed_copy.h"
#include "store/transport/nccl.h"
#include "tcp_world.h"

namespace ptc {

/// What goes wrong with links, and how many there were. Threads: any.
struct LinkFaults {
  std::atomic<int> ids{0}, made{0};
  /// Called with how many sends, or receives, of this maker's links there were.
  std::function<Result<>(int)> connects, sends, receives;
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

/// Between the host's memory and the devices of a node: what an item's target is moves to the other
/// side while another transport fetches it. Counts what goes this way.
class MovesTargets final : public Transport {
 public:
  /// Targets on one of `devices` move to the host; with `to_host` false, those in the host's memory
  /// move to the first of them.
  MovesTargets(std::vector<Device*> devices, bool to_host, std::unique_ptr<Transport> through)
      : devices_(std::move(devices)), to_host_(to_host), through_(std::move(through)) {}

  Result<> fetch(std::span<FetchItem> items, std::stop_token stop,
                 std::chrono::milliseconds silence) override {
    struct Moved {
      size_t item;
      Device* device;
      MemoryPointer target;  // where it is to be
      uint64_t begin, bytes, at;
    };
    std::vector<FetchItem> moved_items(items.begin(), items.end());
    std::vector<Moved> moved;
    uint64_t all = 0;
    for (size_t i = 0; i < items.size(); ++i) {
      const FetchItem& item = items[i];
      Device* const device = device_of(item.target_at_begin.memory());
      if (device == nullptr || item.begin == item.end) continue;
      moved.push_back({i, device, item.target_at_begin, item.begin, item.end - item.begin, all});
      all += item.end - item.begin;
    }
    Bytes host(to_host_ ? all : 0);
    DeviceMemory memory;
    if (!to_host_) memory = devices_[0]->allocate(all).value();
    for (const Moved& one : moved) {
      FetchItem& item = moved_items[one.item];
      item.target_at_begin =
          to_host_ ? in_host_memory(host.data() + one.at) : memory.begin() + one.at;
      item.writer = nullptr;
      PTC_TRY(copy(*one.device, item.target_at_begin, one.target, one.bytes));
    }
    Result<> fetched = through_->fetch(moved_items, std::move(stop), silence);
    for (const Moved& one : moved) {
      FetchItem& item = moved_items[one.item];
      const uint64_t came = item.begin - one.begin;
      PTC_TRY(copy(*one.device, one.target,
                   to_host_ ? in_host_memory(host.data() + one.at) : memory.begin() + one.at,
                   came));
      bytes_ += bytes_between(item.copy, one.begin, item.begin);
      item.target_at_begin = one.target + came;
      item.writer = items[one.item].writer;
    }
    std::copy(moved_items.begin(), moved_items.end(), items.begin());
    return fetched;
  }
  uint64_t bytes() const { return bytes_; }

 private:
  Device* device_of(NodeMemory memory) const {
    if (!to_host_) return memory.is_host() ? devices_[0] : nullptr;
    for (Device* device : devices_)
      if (device->memory() == memory) return device;
    return nullptr;
  }
  static Result<> copy(Device& device, MemoryPointer to, MemoryPointer from, uint64_t bytes) {
    PTC_TRY(const auto stream, device.stream());
    PTC_TRY(stream->copy(to, {from.memory(), from.address()}, bytes));
    return stream->wait();
  }

  const std::vector<Device*> devices_;
  const bool to_host_;
  const std::unique_ptr<Transport> through_;
  std::atomic<uint64_t> bytes_{0};
};

/// A node with two devices, whose images are in its store and the same on one of the devices.
class LinkNode {
 public:
  LinkNode(const std::string& directory, std::string node, const DeviceLinksOptions& options,
           std::string kind = "host memory 1")
      : node_(std::move(node)),
        store_(ImageStore::open(directory + "/" + node_).value()),
        links_({&devices_[0], &devices_[1]},
               std::make_unique<FaultyLinks>(std::make_unique<HostLinkMaker>(std::move(kind)),
                                             faults_),
               options) {}

  /// All of it on a device, too. Threads: any.
  void put(const ImageRef& image, uint32_t device) {
    const auto bytes = image->host_bytes().value();
    DeviceMemory memory = devices_[device].allocate(bytes.size()).value();
    const auto stream = devices_[device].stream().value();
    EXPECT_TRUE(is_ok(stream->copy(memory.begin(), in_host_memory(bytes.data()), bytes.size())));
    EXPECT_TRUE(is_ok(stream->wait()));
    MutexLock lock(mutex_);
    images_[image->id().text] = std::make_shared<DeviceMemory>(std::move(memory));
  }
  void forget(const ImageRef& image) {
    MutexLock lock(mutex_);
    images_.erase(image->id().text);
  }
  std::unique_ptr<PeerServer> serve(PeerServerOptions options, bool has_links = true) {
    options.images = store_.get();
    if (has_links) options.links = &links_;
    options.device_images = [this](const std::string& id) -> Result<DeviceImage> {
      MutexLock lock(mutex_);
      const auto found = images_.find(id);
      if (found == images_.end()) return make_error(Code::kNotFound, "no image {}", id);
      const MemoryPointer begin = found->second->begin();
      return DeviceImage{{begin.memory(), begin.address()}, found->second->bytes(), found->second};
    };
    return PeerServer::start(std::move(options)).value();
  }

  ImageStore& store() { return *store_; }
  HostDevice& device(uint32_t number) { return devices_[number]; }
  DeviceLinks& links() { return links_; }
  LinkFaults& faults() { return *faults_; }

 private:
  const std::string node_;
  const std::unique_ptr<ImageStore> store_;
  HostDevice devices_[2] = {HostDevice({.number = 0}), HostDevice({.number = 1})};
  const std::shared_ptr<LinkFaults> faults_ = std::make_shared<LinkFaults>();
  DeviceLinks links_;
  Mutex mutex_;
  std::map<std::string, std::shared_ptr<DeviceMemory>> images_ PTC_GUARDED_BY(mutex_);
};

/// Nodes n0, n1 …; n0 fetches, the others serve.
class LinkWorld final : public TransportWorld {
 public:
  struct Options {
    size_t nodes = 3;
    DeviceLinksOptions links = {.chunk_bytes = 64 << 10, .most = 8};
    NcclTransportOptions transport = {};
    PeersOptions peers = {};
    bool moves_targets = false;  // for tests whose targets are in the host's memory
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
      nodes_.push_back(
          std::make_unique<LinkNode>(directory(), TcpWorld::name(i), options.links,
                                     i == 0 ? "host memory 1" : options.kind_of_others));
      servers_.push_back(i == 0 ? nullptr : start(i, options.others_have_links));
      if (i > 0) peers_->set(TcpWorld::name(i), servers_[i]->address());
    }
    const std::vector<Device*> devices = {&node(0).device(0), &node(0).device(1)};
    auto next = std::make_unique<MovesTargets>(
        devices, true, make_tcp_transport(*peers_, make_loopback_transport()));
    next_ = next.get();
    transport_ = make_nccl_transport(*peers_, node(0).links(), std::move(next), options.transport);
    if (options.moves_targets)
      transport_ = std::make_unique<MovesTargets>(devices, false, std::move(transport_));
  }

  std::unique_ptr<PeerServer> start(size_t i, bool has_links = true) {
    PeerServerOptions options;
    options.listen = "127.0.0.1:0";
    options.node = TcpWorld::name(i);
    options.cluster = "test";
    return node(i).serve(std::move(options), has_links);
  }
  size_t nodes() const override { return nodes_.size(); }
  ImageStore& store(size_t i) override { return node(i).store(); }
  /// Also on a device there, and seen on that.
  ImageRef seen(size_t i, const ImageRef& image) override {
    return seen_on(i, image, static_cast<uint32_t>(image->bytes() % 2));
  }
  ImageRef seen_on(size_t i, const ImageRef& image, uint32_t device) {
    if (i == 0) return image;
    node(i).put(image, device);
    return std::make_shared<const Image>(
        image->id(), MemoryPlace{TcpWorld::name(i), NodeMemory::cuda(device)}, image->bytes());
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
  MovesTargets* next_ = nullptr;
  std::unique_ptr<Transport> transport_;
};

}  // namespace ptc
