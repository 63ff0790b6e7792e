// What one node may ask another: each method and all that is said of it, in one row.
//
// Who asks says the method, and the row says the rest: how long it waits, whether it asks again
// when the connection broke before the answer came (Cluster::ask()), and how many it asks at a
// time. Who serves looks a method up here, and hands it to what answers it: the daemon registers
// every row, the clusters of the tests and the simulator hand it to answer_peer()
// (node/peer_service.h), and there is no other way in. A further method is a row here, and a case
// where the switch over its handler then lacks one.
//
// A request about a job begins with a line that says which: by its id, for another may have its
// name by now. That one is not touched: kNotFound, unless it is asked of what outlives its job
// (kUses). What else is in a request: job/job_peers.h.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "store/base/error.h"
#include "store/base/fan_out.h"
#include "store/rpc/frame.h"
#include "store/rpc/next_call.h"

namespace ptc {

enum class PeerMethod : uint8_t {
  kMeet,
  kChanged,
  kSpace,
  kNumbers,
  kWithout,
  kDataSetChanged,
  kHolds,
  kUses,
  kFile,
  kFiles,
  kPart,
  kDrop,
  kArrived,
  kExamine,
  kMend,
  kRefresh,
  kTake,
  kRead,
  kHash,
  kAdopt,
  kHide,
  kUntake,
  kRights,
  kCommit,
};

/// Who answers.
enum class PeerHandler : uint8_t {
  kMeetings,  // node/meeting.h
  kFollower,  // of the store: node/agreement_follower.h
  kStore,     // node/job_store.cc
  kListener,  // who shows jobs: JobListener in job/job.h
  kRemoved,   // job/removed_checkpoints.h, and the job
  kFiles,     // of the job: job/checkpoint_files.h, and so on
  kMaker,
  kShelf,
  kArrivals,
  kVerifier,
  kMender,
  kTaken,
  kCommits,
};

enum class PeerAbout : uint8_t { kNode, kJob };
/// kAgain: asked twice it does and answers what it does and answers once.
enum class PeerTimes : uint8_t { kOnce, kAgain };
/// kAtOnce: who answers waits for no other node, for nothing agreed on, for no lock that is held
/// over such a wait, and does no long work: some threads are enough for all that ask. Whatever is
/// asked of a job is kMayWait, for a job that is not known yet is asked of etcd.
enum class PeerPace : uint8_t { kAtOnce, kMayWait };

/// A node that lives is waited for.
inline constexpr std::chrono::milliseconds kWhileItLives = std::chrono::hours(12);

struct PeerRow {
  PeerMethod method;
  std::string_view name;  // on the wire
  PeerAbout about;
  PeerHandler handler;
  /// Who asks waits so long, and a millisecond more for each kBytesInMs of the request.
  std::chrono::milliseconds deadline;
  PeerTimes times;
  PeerPace pace;
  size_t max_request_bytes;  // an answer has kMaxCallBytes at most

  constexpr bool is_idempotent() const { return times == PeerTimes::kAgain; }
  /// How many of those that are asked the same wait for their answers at a time. What takes as long
  /// as it takes begins everywhere at once: a node whose turn came later would begin hours later,
  /// and those that take from it what it passes on would wait in vain.
  constexpr size_t at_once() const {
    return deadline == kWhileItLives ? kAllAtOnce : kAtWorkAtOnce;
  }
};

inline constexpr size_t kBytesInMs = 20'000;

namespace peer_rows {
using namespace std::chrono_literals;
using enum PeerMethod;
using enum PeerAbout;
using enum PeerTimes;
using enum PeerPace;
using H = PeerHandler;
/// Names and numbers.
inline constexpr size_t kFew = 64 << 10;
inline constexpr size_t kMany = kMaxCallBytes;

// clang-format off
inline constexpr std::array kAll{
    // Longer than the other takes to connect.
    PeerRow{kMeet,           "meet",                 kNode, H::kMeetings, 5s,            kAgain, kMayWait, kFew},
    // Who does not answer sees it a moment later.
    PeerRow{kChanged,        "job/changed",          kNode, H::kFollower, 2s,            kAgain, kMayWait, kFew},
    PeerRow{kSpace,          "store/space",          kNode, H::kStore,    5s,            kAgain, kAtOnce,  kFew},
    PeerRow{kNumbers,        "store/numbers",        kNode, H::kStore,    2s,            kAgain, kAtOnce,  kFew},
    // What was heard so far: who asks does so again in a moment.
    PeerRow{kWithout,        "job/without",          kNode, H::kRemoved,  2s,            kAgain, kAtOnce,  kFew},
    PeerRow{kDataSetChanged, "job/data_set_changed", kJob,  H::kListener, 2s,            kAgain, kMayWait, kFew},
    PeerRow{kHolds,          "job/holds",            kJob,  H::kStore,    10s,           kAgain, kMayWait, kFew},
    PeerRow{kUses,           "job/uses",             kJob,  H::kRemoved,  5s,            kAgain, kMayWait, kFew},
    PeerRow{kFile,           "job/file",             kJob,  H::kFiles,    30s,           kAgain, kMayWait, kFew},
    // Who asks says how long, by what there is to take.
    PeerRow{kFiles,          "job/files",            kJob,  H::kFiles,    kWhileItLives, kAgain, kMayWait, kMany},
    // A part that was made already is on the shelf.
    PeerRow{kPart,           "job/part",             kJob,  H::kMaker,    kWhileItLives, kAgain, kMayWait, kMany},
    PeerRow{kDrop,           "job/drop",             kJob,  H::kShelf,    30s,           kAgain, kMayWait, kFew},
    PeerRow{kArrived,        "job/arrived",          kJob,  H::kArrivals, 30s,           kAgain, kMayWait, kFew},
    PeerRow{kExamine,        "job/examine",          kJob,  H::kVerifier, kWhileItLives, kAgain, kMayWait, kMany},
    // It writes into files that are read, and reads them once more: not two at a time.
    PeerRow{kMend,           "job/mend",             kJob,  H::kMender,   kWhileItLives, kOnce,  kMayWait, kMany},
    PeerRow{kRefresh,        "job/refresh",          kJob,  H::kMender,   kWhileItLives, kAgain, kMayWait, kFew},
    // Then a node that lives is asked again, while the commit has time.
    PeerRow{kTake,           "job/take",             kJob,  H::kTaken,    5s,            kAgain, kMayWait, kFew},
    PeerRow{kRead,           "job/read",             kJob,  H::kTaken,    kWhileItLives, kAgain, kMayWait, kMany},
    PeerRow{kHash,           "job/hash",             kJob,  H::kTaken,    kWhileItLives, kAgain, kMayWait, kMany},
    // Each time the files become images of other names; those that nobody was told of would stay.
    PeerRow{kAdopt,          "job/adopt",            kJob,  H::kTaken,    kWhileItLives, kOnce,  kMayWait, kMany},
    // While a mv waits.
    PeerRow{kHide,           "job/hide",             kJob,  H::kTaken,    1s,            kAgain, kMayWait, kFew},
    // Who does not hear of it asks.
    PeerRow{kUntake,         "job/untake",           kJob,  H::kTaken,    2s,            kAgain, kMayWait, kFew},
    // While a mv waits to hear why it is refused.
    PeerRow{kRights,         "job/rights",           kJob,  H::kTaken,    1s,            kAgain, kMayWait, kFew},
    PeerRow{kCommit,         "job/commit",           kJob,  H::kCommits,  2s,            kAgain, kMayWait, kFew},
};
// clang-format on

constexpr bool are_in_order() {
  for (size_t i = 0; i < kAll.size(); ++i)
    if (static_cast<size_t>(kAll[i].method) != i) return false;
  return kAll.size() == static_cast<size_t>(kCommit) + 1;
}
static_assert(are_in_order());
}  // namespace peer_rows

inline constexpr const auto& kPeerTable = peer_rows::kAll;
constexpr const PeerRow& row_of(PeerMethod method) {
  return kPeerTable[static_cast<size_t>(method)];
}

/// kInvalidArgument: longer than the row says.
Result<> check_request(const PeerRow& row, size_t bytes);

/// Asks once, and waits no longer than that.
using AskOnce = std::function<Result<std::string>(std::chrono::milliseconds time)>;
/// Asks as the row says. Where the connection broke (is_broken_off() in store/rpc/peers.h), at once
/// a second time, unless what is asked may not be done twice; what is left of the time counts.
/// `at_most`: who asks waits no longer; 0: as the row says. Errors: of the node; kUnavailable: it
/// cannot be reached, or said nothing in that time, or the connection broke.
Result<std::string> ask_by(const PeerRow& row, size_t request_bytes,
                           std::chrono::milliseconds at_most, const std::stop_token& stop,
                           const AskOnce& once);

/// How long who asks several waits: for each from when that is asked, however long its turn was
/// waited for; and until when for all of them. Whose turn has not come by then is not asked.
struct AskManner {
  using Clock = std::chrono::steady_clock;
  std::chrono::milliseconds each;
  Clock::time_point until = Clock::time_point::max();
  AfterAnswer then = {};  // what each is asked next

  /// Of one that is asked now; zero, or less: it is not asked.
  std::chrono::milliseconds now() const;
};

/// The same of `count` at the same time. `ask_all` asks them all, as many at a time as the row
/// says, each again at once where it may be (ask_each() does), and answers in their order.
/// `request_bytes`: of the longest. `at_most`: of all together.
using AskAll = std::function<std::vector<Result<std::string>>(AskManner time)>;
std::vector<Result<std::string>> ask_all_by(const PeerRow& row, size_t count, size_t request_bytes,
                                            std::chrono::milliseconds at_most,
                                            const AskAll& ask_all);
/// As many as there are requests, each by a thread.
using AskOneOnce = std::function<Result<std::string>(size_t i, std::string_view request,
                                                     std::chrono::milliseconds time)>;
std::vector<Result<std::string>> ask_each(const PeerRow& row,
                                          const std::vector<std::string_view>& requests,
                                          const AskManner& manner, const std::stop_token& stop,
                                          const AskOneOnce& once);

/// A job, and no other that has its name before or after it.
struct WhichJob {
  std::string name, id;
};
std::string request_about(const WhichJob& job, std::string_view body);
/// `body` lies in `request`.
struct JobRequest {
  WhichJob job;
  std::string_view body;
  static Result<JobRequest> parse(std::string_view request);
};

}  // namespace ptc
