// The other nodes: where they are, calls to them, and connections for a transport.
#pragma once

#include <chrono>
#include <memory>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "store/base/error.h"
#include "store/net/io_threads.h"
#include "store/rpc/credentials.h"
#include "store/rpc/next_call.h"
#include "store/rpc/peer_numbers.h"

namespace ptc {

class Connection;

/// Of a connection that broke before the answer came: whether the node has done what was asked is
/// not known. One that is silent is none: it may be at it.
Error broken_off(std::string message);
bool is_broken_off(const Error& error);

struct PeersOptions {
  std::string node;  // this node's name
  std::string cluster;
  PeerAuth auth;
  std::shared_ptr<IoThreads> io = nullptr;   // null: threads of its own
  std::chrono::milliseconds connect{3'000};  // until a peer has let us in
  std::chrono::milliseconds silence{5'000};  // until a peer that says nothing counts as dead
};

/// Threads: any. Whoever calls waits for the network itself; only streams of several nodes at once
/// use the shared threads. Connections are made when needed, used by one call or stream at a time,
/// and kept for the next for a minute.
class Peers {
 public:
  static Result<std::unique_ptr<Peers>> create(PeersOptions options);
  ~Peers();

  /// Where a node listens, "host:port". Another address than before: kept connections are closed.
  void set(const std::string& node, const std::string& address);
  void remove(const std::string& node);

  /// Asks a node and waits for the answer. It does what is asked once at most: after kUnavailable
  /// of a connection that broke in the middle (broken_off()) or is silent, whether it did so is not
  /// known, and the message says so. One that is too busy to begin is asked again while there is
  /// time.
  ///
  /// Cancellation: at once, kCancelled; the node goes on with what it does.
  /// Errors: what the handler said, as it said it; kUnavailable (no address, nobody listens, silent
  /// for `silence`, deadline over, broken); kPermissionDenied (another cluster, or a secret that
  /// differs); kInvalidArgument (larger than kMaxCallBytes).
  Result<std::string> call(const std::string& node, std::string_view method, std::string_view body,
                           std::chrono::milliseconds timeout, std::stop_token stop = {});

  /// Asks nodes at the same time, and waits for all answers, which are in their order. One that
  /// waits costs a coroutine and its connection, no thread. However many they are, only some
  /// connect at a time: each has but a moment for that. Each has `timeout` from when it is asked,
  /// however long its turn was waited for. Method and body outlive the call.
  struct Call {
    std::string node;
    std::string_view method, body;
  };
  struct Manner {
    size_t at_once = 256;  // wait for their answers; the others follow, each when one has its own
    /// A call whose connection broke (broken_off()) is asked a second time, at once, whatever the
    /// others do; what is left of the time counts. For what may be done twice.
    bool again = false;
    /// Then nobody waits any longer, and none is asked any more (kUnavailable).
    std::chrono::steady_clock::time_point until = std::chrono::steady_clock::time_point::max();
    /// What each is asked next, of the same method and with a time of its own; the last answer is
    /// the one that comes back.
    AfterAnswer then = {};
  };
  std::vector<Result<std::string>> call_all(const std::vector<Call>& calls, Manner manner,
                                            std::chrono::milliseconds timeout,
                                            std::stop_token stop = {});

  /// Connects anew to `address`, where `node` shall be, and both prove who they are. Nothing is
  /// kept. A node that cuts off who is not let in yet, as too many come at once, is tried again in
  /// the same time. Errors: kPermissionDenied (another cluster, secret, authority, or name in the
  /// certificate); kUnavailable.
  Result<> meet(const std::string& node, const std::string& address);
  /// The same of many, some at a time, without a thread for each; and each that has let this node
  /// in is asked `method`, which must be one that may be done twice, over the same connection where
  /// its address was set(). Each half has `timeout`. Results in their order.
  struct Place {
    std::string node, address;
  };
  struct Met {
    Result<> let_in;
    Result<std::string> answer;  // where it was let in
  };
  std::vector<Met> meet_all(const std::vector<Place>& places, std::string_view method,
                            std::string_view body, std::chrono::milliseconds timeout);

  /// For a transport: a connection that was let in and has nothing under way, kept or new, attached
  /// to the executor of the coroutine that asks.
  Task<std::unique_ptr<Connection>> take(const std::string& node,
                                         std::chrono::steady_clock::time_point deadline,
                                         std::stop_token stop);
  /// Keeps it for the next; only with nothing under way.
  void give_back(const std::string& node, std::unique_ptr<Connection> connection);
  std::shared_ptr<PeerCounters> counters(const std::string& node);
  std::chrono::milliseconds silence() const;
  IoThreads& io() const;

  /// Of the connections that this node made.
  std::vector<PeerNumbers> numbers() const;

 private:
  struct Impl;
  class Turns;  // to connect
  struct Turn;
  using Deadline = std::chrono::steady_clock::time_point;
  Task<std::string> ask(const std::string& node, std::string_view method, std::string_view body,
                        Deadline deadline, std::stop_token stop, Turn* turn = nullptr);
  Task<std::string> ask_once(const std::string& node, std::string_view method,
                             std::string_view body, Deadline deadline, std::stop_token stop,
                             Turn* turn);
  /// `said`: whether the node has answered, if only with an error.
  Task<std::string> ask_over_one(const std::string& node, std::string_view method,
                                 std::string_view body, Deadline deadline, std::stop_token stop,
                                 Turn* turn, bool& said);
  Task<std::string> ask_in_turn(const Call& call, const Manner& manner,
                                std::chrono::milliseconds timeout, std::stop_token stop,
                                Turns& turns);
  Task<> meet_until(const std::string& node, const std::string& address, Deadline last_try,
                    bool keep);
  explicit Peers(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ptc
