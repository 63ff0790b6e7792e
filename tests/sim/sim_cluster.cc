#include "tests/sim/sim_cluster.h"

#include "reshard/node/peer_service.h"
#include "store/rpc/peers.h"
#include "store/tensor/packed_copy.h"
#include "store/transport/transport.h"
#include "tests/sim/member.h"

namespace ptc::sim {
namespace {

using namespace std::chrono_literals;
constexpr Time kSilence = 5s;  // until a peer that says nothing counts as dead, as in store/rpc
constexpr Time kConnect = 3s;  // until a peer has let this one in, as there
constexpr Time kStartAgain = 1s;
constexpr unsigned kManyNodes = 150;
constexpr size_t kKeptResults = 64;

unsigned number_of(const std::string& name) {
  return static_cast<unsigned>(std::stoul(name.substr(1)));
}

Error no_answer(unsigned node, std::string_view why) {
  return make_error(Code::kUnavailable, "node {} {}", SimCluster::name(node), why);
}

Error broken(unsigned node) {
  return broken_off(no_answer(node, "has broken the connection").message());
}
Error gone(unsigned node) { return broken_off(no_answer(node, "is gone").message()); }

}  // namespace

NodeCosts& NodeCosts::operator+=(const NodeCosts& other) {
  writes += other.writes;
  conflicts += other.conflicts;
  for (size_t i = 0; i < calls.size(); ++i) {
    calls[i] += other.calls[i];
    bytes_of_calls[i] += other.bytes_of_calls[i];
  }
  sent += other.sent;
  agreement += other.agreement;
  return *this;
}

NodeCosts NodeCosts::operator-(const NodeCosts& before) const {
  NodeCosts since = *this;
  since.writes -= before.writes;
  since.conflicts -= before.conflicts;
  for (size_t i = 0; i < calls.size(); ++i) {
    since.calls[i] -= before.calls[i];
    since.bytes_of_calls[i] -= before.bytes_of_calls[i];
  }
  since.sent -= before.sent;
  since.agreement -= before.agreement;
  return since;
}

void NodeCosts::raise_to(const NodeCosts& other) {
  writes = std::max(writes, other.writes);
  conflicts = std::max(conflicts, other.conflicts);
  for (size_t i = 0; i < calls.size(); ++i) {
    calls[i] = std::max(calls[i], other.calls[i]);
    bytes_of_calls[i] = std::max(bytes_of_calls[i], other.bytes_of_calls[i]);
  }
  sent = std::max(sent, other.sent);
  agreement = std::max(agreement, other.agreement);
}

struct SimCluster::Instance {
  unsigned node = 0;
  std::filesystem::path directory;
  std::shared_ptr<Life> life = std::make_shared<Life>();
  bool serving = false, joined = false;  // it answers the others; and is seen by all
  bool closing = false, closed = false;
  // Destroyed from below.
  std::unique_ptr<MetaClient> meta;
  std::unique_ptr<PeerCalls> calls;
  std::unique_ptr<Member> member;
  std::unique_ptr<JobStore> store;

  void use() { ++life->users; }
  void leave() {
    --life->users;
    wake_all(life.get());
  }
  void wait_unused() {
    while (life->users > 0) wait(life.get(), std::nullopt, "until nobody uses the node");
  }
};

/// Bytes of images on other nodes, in the order that they were asked for.
class SimCluster::Streams final : public Transport {
 public:
  Streams(SimCluster& all, unsigned self, std::shared_ptr<const Life> life)
      : all_(all), self_(self), life_(std::move(life)), local_(make_loopback_transport()) {}

  Result<> fetch(std::span<FetchItem> items, std::stop_token stop,
                 std::chrono::milliseconds) override {
    constexpr size_t kItemsAtOnce = 64;
    std::optional<Error> first_error;
    std::map<unsigned, size_t> done;          // items of a node
    std::map<const Image*, ImageRef> opened;  // on their nodes, for the items of one request
    for (size_t first = 0, count = 0; first < items.size(); first += count) {
      const Image* source = items[first].source;
      for (count = 1; first + count < items.size() && count < kItemsAtOnce &&
                      items[first + count].source == source;)
        ++count;
      const std::span<FetchItem> some = items.subspan(first, count);  // of one image
      if (source->is_here()) {
        PTC_TRY(local_->fetch(some, stop));
        continue;
      }
      if (stop.stop_requested()) return Error(Code::kCancelled, "cancelled");
      if (first_error) continue;
      const unsigned node = number_of(source->node());
      const size_t before = std::exchange(done[node], done[node] + count);
      const bool travels = before / kItemsAtOnce != done[node] / kItemsAtOnce || before == 0;
      if (travels) opened.clear();
      Result<> fetched = fetch_some(some, node, travels, opened[source], stop);
      if (fetched.has_error()) first_error = std::move(fetched).error();
    }
    if (first_error) return *std::move(first_error);
    return ok();
  }

 private:
  Result<> fetch_some(std::span<FetchItem> items, unsigned node, bool travels, ImageRef& image,
                      const std::stop_token& stop) {
    Network& network = all_.network_;
    if (travels) {
      network.travel(self_, node);
      const Time asked = now();
      while (network.is_cut(self_, node) || network.is_cut(node, self_) ||
             network.is_frozen(node)) {
        if (stop.stop_requested()) return Error(Code::kCancelled, "cancelled");
        if (now() - asked > kSilence || life_->dead) return no_answer(node, "says nothing");
        sleep(200ms);
      }
      if (network.breaks()) return no_answer(node, "has broken off");
    }
    const std::shared_ptr<Instance> source = all_.serving(node);
    if (source == nullptr || life_->dead) return no_answer(node, "is not there");
    if (image == nullptr) {
      source->use();
      auto opened =
          source->store->images().open(items.front().source->id(), items.front().source->bytes());
      source->leave();
      if (opened.has_error()) return make_error(Code::kUnavailable, "{}", opened.error().message());
      image = std::move(opened).value();
    }
    for (const FetchItem& item : items) {
      all_.bytes_moved_ += bytes_between(item.copy, item.begin, item.end);
      all_.nodes_[node].costs.sent += bytes_between(item.copy, item.begin, item.end);
    }
    std::vector<FetchItem> there(items.begin(), items.end());
    for (FetchItem& item : there) item.source = image.get();
    Result<> fetched = local_->fetch(there, stop);
    for (size_t i = 0; i < items.size(); ++i) {
      items[i].begin = there[i].begin;
      items[i].target_at_begin = there[i].target_at_begin;
    }
    return fetched;
  }

  SimCluster& all_;
  const unsigned self_;
  const std::shared_ptr<const Life> life_;
  std::unique_ptr<Transport> local_;
};

/// A node is found by its name.
class SimCluster::Calls final : public PeerCalls {
 public:
  Calls(SimCluster& all, const Instance& self) : all_(all), self_(self) {}
  void set(const std::string&, const std::string&) override {}
  void remove(const std::string&) override {}
  Result<> meet(const std::string& node, const std::string&) override {
    return all_.meet(self_, number_of(node));
  }
  // Threads of all nodes are those of one process.
  size_t meets_at_once() const override { return all_.size() > kManyNodes ? 2 : 16; }
  Result<std::string> call(const std::string& node, const PeerRow& row, const std::string& request,
                           std::chrono::milliseconds time, std::stop_token stop) override {
    return all_.call(self_, number_of(node), row, request, time, stop);
  }

 private:
  SimCluster& all_;
  const Instance& self_;
};

SimCluster::SimCluster(unsigned nodes, uint64_t seed, std::filesystem::path directory,
                       std::function<void(const std::string&)> failed)
    : directory_(std::move(directory)),
      failed_(std::move(failed)),
      network_(nodes, seed),
      agreement_(network_),
      nodes_(nodes),
      results_(std::make_shared<SharedResults>(kKeptResults)) {
  on_file_call([this](int group, FileCall call) {
    return group > 0 ? before_file_call(static_cast<unsigned>(group) - 1, call) : 0;
  });
}

SimCluster::~SimCluster() {
  on_file_call(nullptr);
  for (unsigned i = 0; i < size(); ++i) kill(i, false);
  for (Node& node : nodes_)
    if (node.keeper.joinable()) node.keeper.join();
  while (others_ > 0) wait(&others_, std::nullopt, "for the last threads");
}

std::filesystem::path SimCluster::directory(unsigned node) const {
  return directory_ / (name(node) + "-" + std::to_string(nodes_[node].directory));
}

std::shared_ptr<SimCluster::Instance> SimCluster::serving(unsigned node) const {
  const std::shared_ptr<Instance>& instance = nodes_[node].instance;
  return instance != nullptr && instance->serving ? instance : nullptr;
}

bool SimCluster::is_up(unsigned node) const {
  const std::shared_ptr<Instance> instance = serving(node);
  return instance != nullptr && instance->joined;
}

bool SimCluster::wait_up(unsigned node, Time limit) {
  const Time deadline = now() + limit;
  while (!is_up(node) && now() < deadline) sleep(50ms);
  return is_up(node);
}

Cluster& SimCluster::member(unsigned node) { return *nodes_[node].instance->member; }

NodeCosts SimCluster::costs(unsigned node) const {
  NodeCosts costs = nodes_[node].costs;
  const AgreementNumbers agreed = agreement_.numbers(node);
  costs.writes = agreed.writes;
  costs.conflicts = agreed.conflicts;
  costs.agreement = agreed.bytes;
  return costs;
}

bool SimCluster::on(unsigned node, const std::function<void(JobStore&)>& use) {
  const std::shared_ptr<Instance> instance = serving(node);
  if (instance == nullptr) return false;
  instance->use();
  const int before = set_group(group_of(node));
  use(*instance->store);
  set_group(before);
  instance->leave();
  return true;
}

void SimCluster::start(unsigned number) {
  Node& node = nodes_[number];
  if (node.wanted) return;
  node.wanted = true;
  ++node.lives;
  node.keeper = std::thread([this, number, before = std::move(node.keeper)]() mutable {
    name_thread("start of " + name(number));
    if (before.joinable()) before.join();
    if (!nodes_[number].wanted || nodes_[number].instance != nullptr) return;
    auto instance = std::make_shared<Instance>();
    nodes_[number].instance = instance;
    instance->node = number;
    instance->directory = directory(number);
    std::filesystem::create_directories(instance->directory);
    instance->use();
    set_group(group_of(number));
    open(number, instance);
    instance->leave();
  });
}

void SimCluster::open(unsigned number, const std::shared_ptr<Instance>& instance) {
  auto once = [&]() -> Result<> {
    instance->meta = agreement_.connect(number, instance->life);
    instance->calls = std::make_unique<Calls>(*this, *instance);
    const MemberOptions member{name(number)};
    instance->member = std::make_unique<Member>(member, *instance->meta, *instance->calls);
    JobStoreOptions options;
    options.directory = instance->directory;
    options.node = name(number);
    options.copy_threads = 2;
    options.results = results_;
    options.pieces = pieces_;
    ClusterServices& in = options.cluster.emplace();
    in.meta = instance->meta.get();
    in.cluster = instance->member.get();
    in.transport = [this, number, life = instance->life] {
      return std::make_unique<Streams>(*this, number, life);
    };
    in.begin = [&](const std::string& store) { return instance->member->begin(store); };
    PTC_TRY(instance->store, JobStore::open(options, nullptr));
    // Whoever sees it may ask it.
    instance->serving = !instance->life->dead;
    PTC_TRY(instance->member->join(name(number),
                                   [store = instance->store.get()] { store->nodes_changed(); }));
    instance->joined = true;
    return ok();
  };
  while (!instance->life->dead) {
    Result<> opened = once();
    if (opened.has_value()) return;
    instance->serving = false;
    const Code code = opened.error().code();
    const bool excused = code == Code::kNoSpace && nodes_[number].full;
    if (code != Code::kUnavailable && code != Code::kInDoubt && code != Code::kConflict &&
        !excused && !instance->life->dead)
      failed_(fmt::format("node {} cannot start: {}", name(number), opened.error().message()));
    instance->member->leave();
    while (instance->life->users > 1)
      wait(instance->life.get(), std::nullopt, "until nobody uses the node");
    instance->store.reset();
    instance->member.reset();
    instance->calls.reset();
    instance->meta.reset();
    sleep(kStartAgain);
  }
}

void SimCluster::close(const std::shared_ptr<Instance>& instance) {
  if (std::exchange(instance->closing, true)) {  // killed while it stops
    while (!instance->closed) wait(instance.get(), std::nullopt, "until the node is closed");
    return;
  }
  if (instance->member != nullptr) instance->member->leave();
  instance->serving = false;
  instance->wait_unused();
  instance->store.reset();
  instance->member.reset();
  instance->calls.reset();
  instance->meta.reset();
  instance->closed = true;
  wake_all(instance.get());
}

void SimCluster::stop(unsigned number) {
  Node& node = nodes_[number];
  if (!node.wanted) return;
  node.wanted = false;
  ++node.lives;
  node.keeper = std::thread([this, number, before = std::move(node.keeper)]() mutable {
    name_thread("stop of " + name(number));
    if (before.joinable()) before.join();
    std::shared_ptr<Instance> instance = nodes_[number].instance;
    if (instance == nullptr) return;  // killed meanwhile
    set_group(group_of(number));
    close(instance);
    if (nodes_[number].instance == instance) nodes_[number].instance = nullptr;
  });
}

void SimCluster::kill(unsigned number, bool keep_directory) {
  Node& node = nodes_[number];
  node.wanted = false;
  ++node.lives;
  network_.set_frozen(number, false);
  std::shared_ptr<Instance> instance = std::exchange(node.instance, nullptr);
  if (instance != nullptr) {
    instance->life->dead = true;
    instance->serving = false;
  }
  const std::filesystem::path before = directory(number);
  ++node.directory;
  if (keep_directory && std::filesystem::exists(before))
    std::filesystem::copy(
        before, directory(number),
        std::filesystem::copy_options::recursive | std::filesystem::copy_options::copy_symlinks);
  if (instance == nullptr) {
    std::filesystem::remove_all(before);
    return;
  }
  ++others_;
  std::thread([this, instance, before] {
    name_thread("end of " + name(instance->node));
    set_group(group_of(instance->node));
    close(instance);
    std::filesystem::remove_all(before);
    --others_;
    wake_all(&others_);
  }).detach();
}

void SimCluster::at_write(unsigned node, unsigned n, std::function<void()> happens) {
  nodes_[node].calls_left = n;
  nodes_[node].happens = std::move(happens);
}

int SimCluster::before_file_call(unsigned number, FileCall call) {
  Node& node = nodes_[number];
  if (node.slow_disk) sleep(std::chrono::microseconds(network_.random() % 100'000));
  if (node.calls_left > 0 && --node.calls_left == 0 && node.wanted) node.happens();
  return node.full && call == FileCall::kWrite ? ENOSPC : 0;
}

/// As a connection that two make to prove who they are: to the other and back.
Result<> SimCluster::meet(const Instance& from, unsigned to) {
  const unsigned self = from.node;
  const Time limit = now() + kConnect;
  for (;;) {
    if (from.life->dead) return no_answer(to, "cannot be reached any more");
    // Of a large cluster there are n² of these.
    if (size() > kManyNodes && serving(to) != nullptr && network_.travel_both_ways(self, to))
      return serving(to) != nullptr ? ok() : Result<>(no_answer(to, "refuses the connection"));
    network_.travel(self, to);
    if (!network_.is_cut(self, to)) {
      if (serving(to) == nullptr) return no_answer(to, "refuses the connection");
      if (network_.breaks()) return broken(to);
      network_.travel(to, self);
      if (!network_.is_cut(to, self) && !network_.is_frozen(to)) return ok();
    }
    if (now() >= limit) return no_answer(to, "does not let this node in in time");
    sleep(200ms);
  }
}

/// As a connection of store/rpc: refused at once by a node that is not there, broken when it dies,
/// and given up when nothing is heard for a while.
Result<std::string> SimCluster::call(const Instance& from, unsigned to, const PeerRow& row,
                                     const std::string& request, Time deadline,
                                     const std::stop_token& stop) {
  struct Reply {
    bool done = false;
    Result<std::string> answer = std::string();
  };
  const unsigned self = from.node;
  const Time limit = now() + deadline;
  auto both_ways = [&, this] {
    return !network_.is_cut(self, to) && !network_.is_cut(to, self) && !network_.is_frozen(to);
  };
  if (from.life->dead) return no_answer(to, "cannot be reached any more");
  ++nodes_[self].costs.calls[static_cast<size_t>(row.method)];
  nodes_[self].costs.add_sent(row, request.size());
  network_.travel(self, to);
  auto reply = std::make_shared<Reply>();
  std::shared_ptr<Instance> target;
  if (!network_.is_cut(self, to)) {
    target = serving(to);
    if (target == nullptr) return no_answer(to, "refuses the connection");
    if (network_.breaks()) return broken(to);
    target->use();
    // Of large clusters, without a thread: there are n² of these, and they only connect.
    if (row.handler == PeerHandler::kMeetings && size() > kManyNodes && !network_.is_frozen(to)) {
      const int before = set_group(group_of(to));
      Result<std::string> answer =
          answer_peer(*target->store, *target->calls, row, request, name(self));
      target->leave();
      set_group(before);
      network_.travel(to, self);
      if (target->life->dead) return gone(to);
      return network_.is_cut(to, self) ? no_answer(to, "says nothing") : std::move(answer);
    }
    ++others_;
    std::thread([this, target, reply, self, to, &row, request] {
      name_thread(fmt::format("answer of {} to {}: {}", name(to), name(self), row.name));
      const int before = set_group(group_of(to));
      reply->answer = answer_peer(*target->store, *target->calls, row, request, name(self));
      target->leave();
      if (reply->answer.has_value()) nodes_[to].costs.add_sent(row, reply->answer.value().size());
      network_.travel(to, self);
      set_group(before);
      // Sent again until it arrives, or the connection is given up.
      for (const Time sent = now(); network_.is_cut(to, self) && now() - sent < kSilence;)
        sleep(200ms);
      if (network_.is_cut(to, self)) reply->answer = no_answer(to, "says nothing");
      if (network_.breaks()) reply->answer = broken(to);
      if (target->life->dead) reply->answer = gone(to);
      reply->done = true;
      wake_all(reply.get());
      --others_;
      wake_all(&others_);
    }).detach();
  }
  std::stop_callback stopped(stop, [&] { wake_all(reply.get()); });
  for (Time heard = now(); !reply->done;) {
    if (stop.stop_requested()) return Error(Code::kCancelled, "cancelled");
    if (from.life->dead) return no_answer(to, "cannot be reached any more");
    if (now() >= limit) return no_answer(to, "does not answer in time");
    if (target != nullptr && both_ways()) {
      if (target->life->dead) return gone(to);
      heard = now();
    } else if (now() - heard >= kSilence) {
      return no_answer(to, "says nothing");
    }
    wait_until(reply.get(), std::min(limit, now() + 300ms));
  }
  return reply->answer;
}

}  // namespace ptc::sim
