#include "store/transport/nccl.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <deque>
#include <exception>
#include <functional>
#include <latch>
#include <map>
#include <optional>
#include <tuple>
#include <utility>

#include "store/base/mutex.h"
#include "store/base/spare_threads.h"
#include "store/rpc/connection.h"
#include "store/transport/device_landing.h"

namespace ptc {
namespace {

using LinkClock = std::chrono::steady_clock;

/// A device of another node and one of this.
struct DevicePair {
  std::string node;
  NodeMemory there, here;
  friend auto operator<=>(const DevicePair&, const DevicePair&) = default;
};

/// What the connection announces, for the thread that receives it over the link. Threads: one that
/// puts, one that takes.
class ChunkQueue {
 public:
  void put(const DeviceChunk& chunk) {
    MutexLock lock(mutex_);
    chunks_.push_back(chunk);
    changed_.notify_one();
  }
  void end() {
    MutexLock lock(mutex_);
    ended_ = true;
    changed_.notify_one();
  }
  /// Nothing: that was the last.
  std::optional<DeviceChunk> take() {
    MutexLock lock(mutex_);
    changed_.wait(mutex_, [&]() PTC_REQUIRES(mutex_) { return ended_ || !chunks_.empty(); });
    if (chunks_.empty()) return std::nullopt;
    const DeviceChunk chunk = chunks_.front();
    chunks_.pop_front();
    return chunk;
  }

 private:
  Mutex mutex_;
  ConditionVariable changed_;
  std::deque<DeviceChunk> chunks_ PTC_GUARDED_BY(mutex_);
  bool ended_ PTC_GUARDED_BY(mutex_) = false;
};

/// All items of a pair of devices, until they are there or the link is given up. The thread that
/// asks listens to the connection, another one to the link.
class PairFetch {
 public:
  PairFetch(Peers& peers, DeviceLinks& links, SpareThreads& threads, const DevicePair& pair,
            std::vector<FetchItem*> items, std::stop_token stop, std::chrono::milliseconds silence)
      : peers_(peers),
        links_(links),
        threads_(threads),
        pair_(pair),
        counters_(peers.counters(pair.node)),
        landing_(std::move(items)),
        stop_(std::move(stop)),
        silence_(std::min(silence, peers.silence())) {}

  /// kCancelled; all other errors: it is to be tried in another way.
  Result<> run() {
    if (landing_.bytes_left() == 0) return ok();
    PTC_TRY(DeviceLinks::Held link, links_.ask(pair_.node, pair_.there, pair_.here,
                                               LinkClock::now() + links_.options().connect, stop_));
    while (landing_.bytes_left() > 0) {
      Result<> streamed = ok();
      {
        const std::stop_callback give_up(stop_, [&link] {
          if (link->link != nullptr) link->link->abort();
        });
        streamed = run_here([&](IoExecutor) { return stream(*link); });
      }
      if (stop_.stop_requested()) return Error(Code::kCancelled, "cancelled");
      if (streamed) continue;
      const bool is_not_there = said_ && streamed.error().code() == Code::kConflict;
      if (!is_not_there || !link->id.empty()) {
        if (link_is_good_) links_.keep(std::move(link));
        return std::move(streamed).error().with_context("node " + pair_.node);
      }
      PTC_TRY(links_.make(*link));
    }
    links_.keep(std::move(link));
    return ok();
  }
  /// Whether the node takes no part in this, or no link to it can be made.
  bool is_refused() const { return refused_; }
  const std::shared_ptr<PeerCounters>& counters() const { return counters_; }

 private:
  /// One request and what comes of it.
  Task<> stream(StagedLink& link) {
    link_is_good_ = said_ = false;
    PTC_CO_TRY(auto connection,
               co_await peers_.take(pair_.node, LinkClock::now() + silence_, stop_));
    auto received = co_await receive(*connection, link);
    if (received || said_) {
      peers_.give_back(pair_.node, std::move(connection));
    } else if (!stop_.stop_requested()) {
      ++counters_->broken_connections;
    }
    co_return received;
  }

  Task<> receive(Connection& connection, StagedLink& link) {
    constexpr uint64_t kRequest = 0;  // the only one of the connection that is under way
    constexpr std::chrono::milliseconds kLeastSilence{2'500};  // the node pings each second
    connection.set_patience({std::max(silence_ / 2, kLeastSilence), Deadline::max(), stop_});
    auto [fetch, bytes] = landing_.ask(kMaxFetchItems);
    PTC_CO_TRY(DeviceLinkMaker* const maker, links_.maker());
    const DeviceFetchRequest request{maker->name(), pair_.there.device(),         link.number,
                                     link.id,       links_.options().chunk_bytes, std::move(fetch)};
    PTC_CO_TRY(co_await connection.send(FrameType::kDeviceFetch, kRequest, encode(request)));
    auto begun = co_await expect_reply(connection, kRequest, bytes);
    if (!begun) {
      refused_ = said_ && begun.error().code() == Code::kInvalidArgument;
      co_return begun;
    }
    if (link.link == nullptr) co_return make_error(Code::kCorrupt, "a link that was never made");
    ChunkQueue queue;
    std::optional<Result<>> landed;  // written on this executor
    asio::steady_timer woken(co_await asio::this_coro::executor, LinkClock::time_point::max());
    std::function<void()> land_and_wake = [&] {
      auto result = std::make_shared<Result<>>(land_all(link, queue));
      if (result->has_error()) connection.cut();  // nobody waits any longer for what it says
      asio::post(woken.get_executor(), [&landed, &woken, result] {
        landed.emplace(std::move(*result));
        woken.cancel();
      });
    };
    try {
      threads_.run(std::move(land_and_wake));
    } catch (const std::exception& error) {  // no thread, no memory
      co_return Error(Code::kUnavailable, error.what());
    }
    auto listened = co_await listen(connection, kRequest, bytes, queue);
    queue.end();
    // An error about an image comes behind what was sent before; after any other nothing comes.
    const bool all_comes = listened || (said_ && (listened.error().code() == Code::kNotFound ||
                                                  listened.error().code() == Code::kCorrupt));
    if (!all_comes) link.link->abort();
    while (!landed) co_await woken.async_wait(kTuple);
    link_is_good_ = all_comes && *landed;
    if (said_ && !link.id.empty()) refused_ = true;  // it could not be made there
    if (*landed || (!listened && landed->error().code() == Code::kCancelled)) co_return listened;
    said_ = false;
    co_return *std::move(landed);
  }

  Task<> expect_reply(Connection& connection, uint64_t request, uint64_t bytes) {
    auto body = co_await connection.expect(FrameType::kReply, request);
    said_ = connection.error_was_said();
    if (!body) co_return std::move(body).error();
    PTC_CO_TRY(const CallHeader reply, decode_call(body.value()));
    if (reply.body_bytes == bytes) co_return ok();
    co_return make_error(Code::kCorrupt, "{} bytes come, {} are wanted", reply.body_bytes, bytes);
  }

  /// Until the node says that it has sent all.
  Task<> listen(Connection& connection, uint64_t request, uint64_t bytes, ChunkQueue& queue) {
    for (bool was_short = false; bytes > 0;) {
      auto body = co_await connection.expect(FrameType::kDeviceChunk, request);
      said_ = connection.error_was_said();
      if (!body) co_return std::move(body).error();
      PTC_CO_TRY(const DeviceChunk chunk, decode_device_chunk(body.value()));
      // Only the last before an error is short: a node cannot fill this one's memory with small
      // ones.
      if (was_short || chunk.bytes > std::min(bytes, links_.options().chunk_bytes))
        co_return make_error(Code::kCorrupt, "a chunk of {} bytes where {} are to come",
                             chunk.bytes, bytes);
      was_short = chunk.bytes < kLeastChunkBytes;
      bytes -= chunk.bytes;
      queue.put(chunk);
    }
    co_return co_await expect_reply(connection, request, 0);
  }

  /// On the thread of the link: what comes is scattered while the next one comes.
  Result<> land_all(StagedLink& link, ChunkQueue& queue) {
    Result<> landed = ok();
    try {
      landed = land_chunks(link, queue);
    } catch (const std::exception& error) {  // no memory
      landed = make_error(Code::kUnavailable, "{}", error.what());
    }
    const Result<> waited = link.stream->wait();  // the target is the caller's again
    if (!landed) return landed;
    return waited;
  }

  Result<> land_chunks(StagedLink& link, ChunkQueue& queue) {
    if (!link.id.empty()) {
      const Result<> made = link.link->connect(LinkClock::now() + links_.options().connect);
      refused_ = made.has_error() && made.error().code() != Code::kCancelled;
      PTC_TRY(made);
      link.id.clear();
    }
    std::optional<DeviceChunk> before;  // is being scattered
    Checksum sum;                       // of that
    const auto accept = [&]() -> Result<> {
      if (!before) return ok();
      PTC_TRY(link.stream->wait());
      if (sum != before->sum) {
        ++counters_->checksum_failures;
        return make_error(Code::kCorrupt, "{} bytes were damaged on their way", before->bytes);
      }
      landing_.accept();
      return ok();
    };
    for (size_t buffer = 0;; buffer = (buffer + 1) % StagedLink::kBuffers) {
      const std::optional<DeviceChunk> chunk = queue.take();
      if (!chunk) return accept();
      const MemoryPointer staging = link.staging->at(buffer).begin();
      const ConstMemoryPointer from(staging.memory(), staging.address());
      Result<> came = link.link->receive(staging, chunk->bytes);
      if (came) came = link.link->wait(LinkClock::now() + links_.options().silence);
      PTC_TRY(accept());  // of the one before, also where this one does not come
      PTC_TRY(std::move(came));
      before = chunk;
      sum = {};
      const DeviceRun run{from, chunk->bytes, 0, 0};
      PTC_TRY(link.stream->add_checksums({&run, 1}, {&sum, 1}));
      PTC_TRY(const auto copies, landing_.place(chunk->bytes, from));
      PTC_TRY(link.stream->copy_strided(copies));
    }
  }

  Peers& peers_;
  DeviceLinks& links_;
  SpareThreads& threads_;
  const DevicePair pair_;
  const std::shared_ptr<PeerCounters> counters_;
  DeviceLanding landing_;
  const std::stop_token stop_;
  const std::chrono::milliseconds silence_;
  bool link_is_good_ = false;  // after the last stream()
  bool said_ = false;          // the error of the last stream(), by the node
  bool refused_ = false;
};

class NcclTransport final : public Transport {
 public:
  NcclTransport(Peers& peers, DeviceLinks& links, std::unique_ptr<Transport> next,
                const NcclTransportOptions& options)
      : peers_(peers), links_(links), next_(std::move(next)), options_(options) {}

  Result<> fetch(std::span<FetchItem> items, std::stop_token stop,
                 std::chrono::milliseconds silence) override {
    std::map<DevicePair, std::vector<FetchItem*>> pairs;
    std::vector<FetchItem*> others;
    for (FetchItem& item : items) {
      if (item.begin == item.end) continue;
      const MemoryPlace& place = item.source->place();
      const NodeMemory here = item.target_at_begin.memory();
      if (place.node.empty() || place.memory.is_host() || here.is_host() ||
          links_.devices().find(here) == nullptr || refuses(place.node) ||
          links_.maker().has_error())
        others.push_back(&item);
      else pairs[{place.node, place.memory, here}].push_back(&item);
    }
    if (pairs.empty()) return by_next(others, stop, silence);

    std::vector<std::function<Result<>()>> work;
    for (auto& [pair, wanted] : pairs)
      work.emplace_back([&] { return over_link(pair, wanted, stop, silence); });
    if (!others.empty()) work.emplace_back([&] { return by_next(others, stop, silence); });
    return run_all(work);
  }

 private:
  /// At the same time; this thread takes the last. The first error of any.
  Result<> run_all(const std::vector<std::function<Result<>()>>& work) {
    std::vector<Result<>> results(work.size(), ok());
    std::latch done(static_cast<ptrdiff_t>(work.size()));
    const auto run = [&](size_t i) {
      try {
        results[i] = work[i]();
      } catch (const std::exception& error) {  // no memory
        results[i] = make_error(Code::kNoSpace, "fetching: {}", error.what());
      }
      done.count_down();
    };
    for (size_t i = 0; i + 1 < work.size(); ++i) {
      try {
        threads_.run([&run, i] { run(i); });
      } catch (const std::exception&) {  // no thread
        run(i);
      }
    }
    run(work.size() - 1);
    done.wait();
    for (Result<>& result : results)
      if (!result) return std::move(result);
    return ok();
  }

  Result<> over_link(const DevicePair& pair, const std::vector<FetchItem*>& wanted,
                     const std::stop_token& stop, std::chrono::milliseconds silence) {
    PairFetch one(peers_, links_, threads_, pair, wanted, stop, silence);
    const Result<> fetched = one.run();
    if (fetched || fetched.error().code() == Code::kCancelled) return fetched;
    ++one.counters()->retries;
    if (one.is_refused()) refuse(pair.node);
    spdlog::log(one.is_refused() ? spdlog::level::info : spdlog::level::debug,
                "fetch: {}; what is still to come comes without {}", fetched.error().message(),
                links_.maker().value()->name());
    return by_next(wanted, stop, silence);
  }

  /// What of them is still to come.
  Result<> by_next(const std::vector<FetchItem*>& wanted, const std::stop_token& stop,
                   std::chrono::milliseconds silence) {
    std::vector<FetchItem> items;
    std::vector<size_t> of;
    for (size_t i = 0; i < wanted.size(); ++i)
      if (wanted[i]->begin < wanted[i]->end) {
        items.push_back(*wanted[i]);
        of.push_back(i);
      }
    Result<> fetched = next_->fetch(items, stop, silence);
    for (size_t i = 0; i < items.size(); ++i) *wanted[of[i]] = items[i];
    return fetched;
  }

  bool refuses(const std::string& node) {
    MutexLock lock(mutex_);
    const auto found = refused_until_.find(node);
    if (found == refused_until_.end()) return false;
    if (found->second > LinkClock::now()) return true;
    refused_until_.erase(found);
    return false;
  }
  void refuse(const std::string& node) {
    MutexLock lock(mutex_);
    refused_until_[node] = LinkClock::now() + options_.refusal;
  }

  Peers& peers_;
  DeviceLinks& links_;
  const std::unique_ptr<Transport> next_;
  const NcclTransportOptions options_;
  Mutex mutex_;
  std::map<std::string, LinkClock::time_point> refused_until_ PTC_GUARDED_BY(mutex_);
  SpareThreads threads_{"ptcfs-link"};  // last: they end first
};

}  // namespace

std::unique_ptr<Transport> make_nccl_transport(Peers& peers, DeviceLinks& links,
                                               std::unique_ptr<Transport> next,
                                               const NcclTransportOptions& options) {
  return std::make_unique<NcclTransport>(peers, links, std::move(next), options);
}

}  // namespace ptc
