#include "tests/sim/meta_server.h"

#include <algorithm>
#include <set>

#include "store/meta/backend.h"

namespace ptc::sim {
namespace {

using namespace std::chrono_literals;
constexpr Time kPatience = 10s;
constexpr Time kHouseTurn = 200ms;

MetaLease::Clock::time_point clock_time(Time time) {
  return MetaLease::Clock::time_point(std::chrono::duration_cast<MetaLease::Clock::duration>(time));
}

}  // namespace

class MetaServer::Lease final : public MetaLease {
 public:
  explicit Lease(MetaServer& server, std::shared_ptr<const Life> life)
      : server_(server), life_(std::move(life)) {}
  ~Lease() override {
    auto known = server_.leases_.find(id_);
    const unsigned node =
        known != server_.leases_.end() ? known->second.node : server_.network_.store();
    for (auto& [id, state] : server_.leases_)  // of requests whose answer was lost, too
      if (state.lease == this) state.lease = nullptr;
    if (known != server_.leases_.end() && !life_->dead &&
        !server_.network_.is_cut(node, server_.network_.store()))
      server_.end_lease(id_);
  }
  int64_t id() const override { return id_; }
  Clock::time_point deadline() const override { return clock_time(deadline_); }

  int64_t id_ = 0;
  Time deadline_{};  // 0: it has ended

 private:
  MetaServer& server_;
  std::shared_ptr<const Life> life_;
};

class MetaServer::Client final : public MetaClient {
 public:
  Client(MetaServer& server, unsigned node, std::shared_ptr<const Life> life)
      : server_(server), node_(node), life_(std::move(life)), teller_([this] { tell(); }) {
    server_.clients_.push_back(this);
  }
  ~Client() override {
    std::erase(server_.clients_, this);
    stopping_ = true;
    wake_all(this);
    teller_.join();
  }

  Result<std::optional<MetaEntry>> get(std::string_view key) override {
    note_get(key);
    auto answer = ask([&]() -> std::optional<MetaEntry> {
      note_read();
      auto found = server_.entries_.find(key);
      if (found == server_.entries_.end()) return std::nullopt;
      note_entry(found->second);
      return found->second;
    });
    if (!answer) return away();
    return *std::move(answer);
  }

  Result<std::vector<MetaEntry>> list(std::string_view prefix) override {
    auto answer = ask([&] {
      std::vector<MetaEntry> found;
      note_read();
      for (auto it = server_.entries_.lower_bound(prefix);
           it != server_.entries_.end() && it->first.starts_with(prefix); ++it) {
        note_entry(it->second);
        found.push_back(it->second);
      }
      return found;
    });
    if (!answer) return away();
    look_away(server_.planted_, prefix, "w" + std::to_string(node_), *answer);
    return *std::move(answer);
  }

  Result<int64_t> commit(const MetaTransaction& transaction) override {
    PTC_TRY(check_transaction(transaction));
    if (life_->dead) return away();  // it was never sent
    Request request{transaction, transaction.lease != nullptr ? transaction.lease->id() : 0,
                    server_.decision_of(transaction), node_};
    request.transaction.lease = nullptr;
    if (!may_be_decided(server_.planted_, request.decision))
      return make_error(Code::kConflict, "a node is not what it was");
    if (server_.holds_back_)
      if (const Time held = server_.holds_back_(node_, request.decision); held > Time())
        sleep(held);
    // On its way for as long as the node hears late of others.
    if (const Time lag = server_.watch_lag_[node_];
        lag > Time() && !transaction.compares.empty() && !transaction.puts.empty())
      sleep(std::chrono::milliseconds(
          server_.network_.random() %
          std::chrono::duration_cast<std::chrono::milliseconds>(lag).count()));
    std::optional<Result<int64_t>> done;  // on the server, whether or not that is known here
    auto answer = ask([&] {
      settle_doubts();
      if (!done) {
        done = server_.commit(request);
        note_commit(transaction, done->has_value());
      }
      return *done;
    });
    if (answer) return *std::move(answer);
    auto doubt = std::make_shared<Doubt>();
    doubt->done = done && done->has_value();
    doubts_.push_back(doubt);
    if (!done && server_.network_.random() % 2 == 0)
      server_.late_.push_back(
          {now() + std::chrono::milliseconds(server_.network_.random() % 10'000), request, doubt});
    return make_error(Code::kInDoubt, "node {} does not know whether a transaction was done",
                      node_);
  }

  Result<> settle() override {
    if (!ask([&] {
          settle_doubts();
          return true;
        }))
      return away();
    return ok();
  }

  Result<std::unique_ptr<MetaLease>> lease(std::chrono::seconds ttl) override {
    PTC_TRY(check_ttl(ttl));
    auto lease = std::make_unique<Lease>(server_, life_);
    Time asked{};
    auto granted = ask([&] {
      asked = now();
      return server_.grant(node_, ttl, lease.get(), life_);
    });
    if (!granted) return away();
    lease->id_ = *granted;
    lease->deadline_ = asked + ttl;
    return std::unique_ptr<MetaLease>(std::move(lease));
  }

  Result<std::shared_ptr<void>> watch(std::string prefix, OnEvent on_event) override {
    auto before = ask([&] { return server_.revision_; });
    if (!before) return away();
    watched_.push_back(prefix);
    return hub_.watch(std::move(prefix),
                      [before = *before, call = std::move(on_event)](const MetaEvent& event) {
                        if (event.revision > before) call(event);
                      });
  }

  void published(const std::vector<MetaEvent>& events) {
    bool any = false;
    for (const MetaEvent& event : events)
      if (std::any_of(watched_.begin(), watched_.end(),
                      [&](const std::string& prefix) { return event.key.starts_with(prefix); })) {
        pending_.push_back(event);
        numbers().bytes += event.key.size() + (event.value ? event.value->size() : 0);
        server_.turn_ += server_.costs_.event;
        any = true;
      }
    if (any) wake_all(this);
  }

 private:
  unsigned store() const { return server_.network_.store(); }
  Error away() const {
    return make_error(Code::kUnavailable, "the agreement store does not answer node {}", node_);
  }

  /// Over the network and back, again and again while that does not succeed; nothing: the store was
  /// away too long.
  template <class OnServer>
  auto ask(OnServer on_server) -> std::optional<decltype(on_server())> {
    Network& network = server_.network_;
    for (const Time give_up = now() + kPatience;;) {
      network.travel(node_, store());
      if (life_->dead) return std::nullopt;
      if (!network.is_cut(node_, store()) && !network.breaks()) {
        auto answer = on_server();
        server_.finish_turn();
        network.travel(store(), node_);
        if (life_->dead) return std::nullopt;
        if (!network.is_cut(store(), node_) && !network.breaks()) return answer;
      }
      if (now() >= give_up) return std::nullopt;
      sleep(100ms);
    }
  }

  void note_read() {
    ++numbers().reads;
    server_.turn_ += server_.costs_.read;
  }
  void note_entry(const MetaEntry& entry) {
    numbers().bytes += entry.key.size() + entry.value.size();
    server_.turn_ += server_.costs_.entry;
  }
  void note_commit(const MetaTransaction& transaction, bool done) {
    const bool writes = !transaction.puts.empty() || !transaction.leased_puts.empty() ||
                        !transaction.deletes.empty();
    if (!done) ++numbers().conflicts;
    else if (writes) ++numbers().writes;
    for (const auto* puts : {&transaction.puts, &transaction.leased_puts})
      for (const auto& [key, value] : *puts) numbers().bytes += key.size() + value.size();
    server_.turn_ += server_.costs_.write;
    server_.answered_later_ = server_.costs_.sync;
  }
  AgreementNumbers& numbers() { return server_.numbers_[node_]; }

  void settle_doubts() {
    for (const auto& doubt : doubts_) doubt->forbidden = true;
    doubts_.clear();
  }

  void tell() {
    name_thread("watch of node " + std::to_string(node_));
    Network& network = server_.network_;
    while (!stopping_) {
      if (pending_.empty()) {
        wait(this, std::nullopt, "for events");
        continue;
      }
      network.travel(store(), node_);
      const Time told = now() + server_.watch_lag_[node_];
      while (!stopping_ && now() < told) wait_until(this, told);
      bool cut = false;
      while (!stopping_ && (life_->dead || network.is_cut(store(), node_))) {
        cut = true;
        wait_until(this, now() + 300ms);
      }
      std::vector<MetaEvent> events(pending_.begin(), pending_.end());
      pending_.clear();
      if (cut) {  // compacted meanwhile: only the last of each key is told
        std::set<std::string> keys;
        std::vector<MetaEvent> last;
        for (auto event = events.rbegin(); event != events.rend(); ++event)
          if (keys.insert(event->key).second) last.push_back(*event);
        events.assign(last.rbegin(), last.rend());
      }
      hub_.publish(std::move(events));
    }
  }

  MetaServer& server_;
  const unsigned node_;
  const std::shared_ptr<const Life> life_;
  std::vector<std::shared_ptr<Doubt>> doubts_;
  std::vector<std::string> watched_;  // prefixes
  bool stopping_ = false;
  std::deque<MetaEvent> pending_;
  WatchHub hub_;
  std::thread teller_;
};

MetaServer::MetaServer(Network& network) : network_(network), house_([this] { keep_house(); }) {}

MetaServer::~MetaServer() {
  stopping_ = true;
  wake_all(this);
  house_.join();
}

std::unique_ptr<MetaClient> MetaServer::connect(unsigned node, std::shared_ptr<const Life> life) {
  return std::make_unique<Client>(*this, node, std::move(life));
}

Result<int64_t> MetaServer::commit(const Request& request) {
  const MetaTransaction& transaction = request.transaction;
  for (const auto& compare : transaction.compares) {
    auto found = entries_.find(compare.key);
    const int64_t revision = found == entries_.end() ? 0 : found->second.revision;
    if (revision != compare.revision && !takes_out(planted_, request.decision, compare.key))
      return compare_failed(compare.key, compare.revision, revision);
  }
  if (!transaction.leased_puts.empty() && !leases_.contains(request.lease))
    return lease_ended(transaction.leased_puts[0].first);
  const int64_t revision = revision_ + 1;
  std::vector<MetaEvent> events;
  std::vector<std::optional<MetaEntry>> before;  // by event
  auto note_before = [&](const std::string& key) {
    const auto known = entries_.find(key);
    before.push_back(known != entries_.end() ? std::optional(known->second) : std::nullopt);
  };
  for (const auto* puts : {&transaction.puts, &transaction.leased_puts})
    for (const auto& [key, value] : *puts) {
      note_before(key);
      entries_[key] = {key, value, revision};
      if (is_checkpoint_key(key)) records_[{key, revision}] = value;
      lease_of_.erase(key);
      events.push_back({key, value, revision});
    }
  for (const auto& [key, value] : transaction.leased_puts) lease_of_[key] = request.lease;
  for (const std::string& key : transaction.deletes) {
    lease_of_.erase(key);
    if (!entries_.contains(key)) continue;
    note_before(key);
    entries_.erase(key);
    events.push_back({key, std::nullopt, revision});
  }
  for (size_t i = 0; i < events.size() && on_decision_; ++i)
    on_decision_(events[i], before[i], request.by);
  if (!events.empty()) revision_ = revision;
  publish(events);
  return revision_;
}

Decision MetaServer::decision_of(const MetaTransaction& transaction) const {
  return sim::decision_of(transaction, [this](const std::string& key, int64_t revision) {
    const auto found = records_.find({key, revision});
    return found == records_.end() ? std::string() : found->second;
  });
}

void MetaServer::publish(const std::vector<MetaEvent>& events) {
  for (const MetaEvent& event : events) note(event.key);
  for (Client* client : clients_) client->published(events);
}

int64_t MetaServer::grant(unsigned node, Time ttl, Lease* lease, std::shared_ptr<const Life> life) {
  leases_[++last_lease_] = {node, ttl, now() + ttl, now() + ttl / 3, lease, std::move(life)};
  return last_lease_;
}

void MetaServer::end_lease(int64_t id) {
  auto ended = leases_.extract(id);
  if (ended.empty()) return;
  if (Lease* lease = ended.mapped().lease) lease->deadline_ = Time();
  Request request;
  for (const auto& [key, lease] : lease_of_)
    if (lease == id) request.transaction.deletes.push_back(key);
  (void)commit(request);
}

void MetaServer::end_lease_of(unsigned node) {
  std::vector<int64_t> all;
  for (const auto& [id, lease] : leases_)
    if (lease.node == node) all.push_back(id);
  for (const int64_t id : all) end_lease(id);
}

/// Waits until the server has done what was asked, after all that was asked before.
void MetaServer::finish_turn() {
  const Time later = std::exchange(answered_later_, Time());
  const Time turn = std::exchange(turn_, Time());
  if (turn == Time()) return;
  busy_until_ = std::max(busy_until_, now()) + turn;
  sleep(busy_until_ + later - now());
}

/// Renews leases in the name of the clients that can reach the store, ends others, and lets late
/// requests arrive.
void MetaServer::keep_house() {
  name_thread("agreement store");
  while (!stopping_) {
    wait_until(this, now() + kHouseTurn);
    std::vector<int64_t> over;
    for (auto& [id, lease] : leases_) {
      const bool reaches = !lease.life->dead && lease.lease != nullptr &&
                           !network_.is_frozen(lease.node) &&
                           !network_.is_cut(lease.node, network_.store()) &&
                           !network_.is_cut(network_.store(), lease.node);
      if (now() >= lease.ends) {
        over.push_back(id);
      } else if (reaches && now() >= lease.renew_at) {
        lease.ends = lease.lease->deadline_ = now() + lease.ttl;
        lease.renew_at = now() + lease.ttl / 3;
      }
    }
    for (int64_t id : over) end_lease(id);
    std::vector<Late> arrived;
    std::erase_if(late_, [&](Late& late) {
      if (now() < late.at) return false;
      if (!late.doubt->forbidden) arrived.push_back(std::move(late));
      return true;
    });
    for (const Late& late : arrived) late.doubt->done = commit(late.request).has_value();
  }
}

}  // namespace ptc::sim
