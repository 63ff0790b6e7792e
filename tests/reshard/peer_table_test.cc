// What nodes ask each other, by the one table of it.
#include "reshard/cluster/peer_table.h"

#include <atomic>
#include <filesystem>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "reshard/job/job_peers.h"
#include "reshard/node/peer_service.h"
#include "reshard/node/tcp_calls.h"
#include "store/net/address.h"
#include "store/rpc/messages.h"
#include "store/rpc/peers.h"
#include "tests/reshard/cluster_fixture.h"
#include "tests/reshard/peer_calls_conformance.h"
#include "tests/support/peer_walk.h"
#include "tests/support/relay.h"

namespace ptc::testing {
namespace {

using namespace std::chrono_literals;
using ::testing::Contains;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

TEST(PeerTable, EachMethodHasANameOfItsOwn) {
  std::set<std::string_view> names;
  for (const PeerRow& row : kPeerTable) {
    EXPECT_TRUE(names.insert(row.name).second) << row.name;
    EXPECT_FALSE(row.name.empty());
    EXPECT_LE(row.name.size(), kMaxNameBytes);
    EXPECT_LE(row.max_request_bytes, kMaxCallBytes) << row.name;
    EXPECT_GT(row.deadline, 0ms) << row.name;
    EXPECT_EQ(&row_of(row.method), &row);
  }
}

TEST(PeerTable, ARequestSaysWhichJobWhateverItsName) {
  const std::string body("{}\n\0bytes", 9);
  for (const std::string name : {"job", "a b", "line\nend", "\"quoted\"", "ü"}) {
    const std::string request = request_about({name, "0123"}, body);
    const auto parsed = JobRequest::parse(request);
    ASSERT_TRUE(parsed.has_value()) << parsed.error().message();
    EXPECT_EQ(parsed.value().job.name, name);
    EXPECT_EQ(parsed.value().job.id, "0123");
    EXPECT_EQ(parsed.value().body, body);
  }
  for (const char* request : {"", "job\n", "{}\n", "{\"job\": \"a\", \"job_id\": \"b\"}",
                              "{\"job\": \"a\"}\n", "{\"job\": 1, \"job_id\": 2}\n", "[]\n"})
    EXPECT_EQ(JobRequest::parse(request).error().code(), Code::kInvalidArgument) << request;
}

/// Says each time what `answer` says; counts.
struct Asked {
  std::vector<std::chrono::milliseconds> times;
  std::function<Result<std::string>(size_t time)> answer;
  Result<std::string> by(PeerMethod method, size_t bytes = 1,
                         std::chrono::milliseconds at_most = {}, const std::stop_token& stop = {}) {
    return ask_by(row_of(method), bytes, at_most, stop, [&](std::chrono::milliseconds time) {
      times.push_back(time);
      return answer(times.size());
    });
  }
};

TEST(PeerTable, OnlyWhatMayBeDoneTwiceIsAskedAgainAndOnlyWhereTheConnectionBroke) {
  for (const PeerRow& row : kPeerTable) {
    SCOPED_TRACE(row.name);
    Asked breaks_once{{}, [](size_t time) -> Result<std::string> {
                        if (time == 1) return broken_off("it broke");
                        return std::string("done");
                      }};
    Result<std::string> answer = breaks_once.by(row.method);
    EXPECT_EQ(answer.has_value(), row.is_idempotent());
    EXPECT_EQ(breaks_once.times.size(), row.is_idempotent() ? 2u : 1u);
    EXPECT_EQ(breaks_once.times.front(), row.deadline);
    EXPECT_LE(breaks_once.times.back(), row.deadline);

    Asked breaks{{}, [](size_t) -> Result<std::string> { return broken_off("it broke"); }};
    answer = breaks.by(row.method);
    EXPECT_EQ(breaks.times.size(), row.is_idempotent() ? 2u : 1u);
    EXPECT_EQ(answer.error().code(), Code::kUnavailable);
    EXPECT_EQ(answer.error().message(), "it broke");
    EXPECT_EQ(answer.error().errno_value(), 0) << "no file's error: " << row.name;

    for (const Code code : {Code::kUnavailable, Code::kBusy, Code::kNotFound}) {
      Asked refuses{{}, [&](size_t) -> Result<std::string> { return Error(code, "no"); }};
      EXPECT_EQ(refuses.by(row.method).error().code(), code);
      EXPECT_EQ(refuses.times.size(), 1u);
    }
  }
  Asked busy{{}, [](size_t) -> Result<std::string> { return too_busy("later"); }};
  EXPECT_FALSE(is_too_busy(busy.by(PeerMethod::kFile).error())) << "who passes it on has begun";
  std::stop_source stopped;
  stopped.request_stop();
  Asked breaks{{}, [](size_t) -> Result<std::string> { return broken_off("it broke"); }};
  EXPECT_TRUE(breaks.by(PeerMethod::kFile, 1, {}, stopped.get_token()).has_error());
  EXPECT_EQ(breaks.times.size(), 1u);
}

TEST(PeerTable, OfSeveralOnlyThoseAreAskedAgainWhoseConnectionBroke) {
  for (const PeerMethod method : {PeerMethod::kFiles, PeerMethod::kAdopt}) {
    const PeerRow& row = row_of(method);
    std::mutex mutex;
    std::vector<int> asked(4);
    const auto once = [&](size_t i, std::string_view,
                          std::chrono::milliseconds) -> Result<std::string> {
      std::lock_guard lock(mutex);
      ++asked[i];
      if (i == 3) return Error(Code::kBusy, "not now");
      if (i == 2 || (i == 1 && asked[i] == 1)) return broken_off("it broke");
      return std::to_string(i);
    };
    const std::vector<Result<std::string>> answers = ask_all_by(row, 4, 1, {}, [&](AskManner time) {
      return ask_each(row, std::vector<std::string_view>(4), time, {}, once);
    });
    const bool again = row.is_idempotent();
    EXPECT_THAT(asked, ElementsAreArray({1, again ? 2 : 1, again ? 2 : 1, 1}));
    EXPECT_EQ(answers[0].value(), "0");
    EXPECT_EQ(answers[1].has_value(), again);
    EXPECT_EQ(answers[2].error().message(), "it broke");
    EXPECT_EQ(answers[2].error().errno_value(), 0);
    EXPECT_EQ(answers[3].error().code(), Code::kBusy);
  }
  const auto nobody = [](const AskManner&) {
    ADD_FAILURE() << "asked";
    return std::vector<Result<std::string>>();
  };
  EXPECT_TRUE(ask_all_by(row_of(PeerMethod::kFile), 0, 1, {}, nobody).empty());
  for (const auto& answer : ask_all_by(row_of(PeerMethod::kFile), 2, 1 << 20, {}, nobody))
    EXPECT_EQ(answer.error().code(), Code::kInvalidArgument);
}

TEST(PeerTable, WhatTakesAsLongAsItTakesBeginsEverywhereAtOnce) {
  for (const PeerMethod method : {PeerMethod::kPart, PeerMethod::kExamine, PeerMethod::kMend})
    EXPECT_EQ(row_of(method).at_once(), kAllAtOnce) << row_of(method).name;
  for (const PeerRow& row : kPeerTable) {
    if (row.deadline <= 1min) {
      EXPECT_LT(row.at_once(), 1000u) << row.name;
    }
  }
}

/// Many are asked, and all but one answer when that one has: its connection breaks once.
class AllAsked {
 public:
  static constexpr int kOthers = 320;

  /// What node `node` answers.
  Result<std::string> answer(bool last) {
    if (last) {
      const int times = ++asked_last_;
      return fmt::format("asked {} times{}", times, std::string(100'000, '.'));
    }
    const int now = ++inside_;
    for (int seen = most_; seen < now && !most_.compare_exchange_weak(seen, now);) {
    }
    const bool came = comes([&] { return most_ >= kOthers && asked_last_ == 2; });
    --inside_;
    return std::string(came ? "done" : "alone");
  }
  static bool comes(const std::function<bool()>& what) {
    for (int i = 0; i < 20'000 && !what(); ++i) std::this_thread::sleep_for(1ms);
    return what();
  }
  std::vector<Cluster::Question> questions() const {
    std::vector<Cluster::Question> all(kOthers, {"w1", ""});
    all.push_back({"w2", ""});
    return all;
  }
  void expect(std::vector<Result<std::string>> answers) {
    ASSERT_EQ(answers.size(), kOthers + 1u);
    EXPECT_THAT(answers.back().value(), ::testing::StartsWith("asked 2 times"));
    answers.pop_back();
    for (const Result<std::string>& answer : answers) EXPECT_EQ(answer.value(), "done");
  }

 private:
  std::atomic<int> asked_last_ = 0, inside_ = 0, most_ = 0;
};

TEST(PeerTable, AllBeginBeforeAnyHasAnsweredAndABrokenOneComesBackMeanwhile) {
  class Calls final : public PeerCalls {
   public:
    void set(const std::string&, const std::string&) override {}
    void remove(const std::string&) override {}
    Result<> meet(const std::string&, const std::string&) override { return ok(); }
    Result<std::string> call(const std::string& node, const PeerRow&, const std::string&,
                             std::chrono::milliseconds, std::stop_token) override {
      Result<std::string> answer = asked.answer(node == "w2");
      if (node == "w2" && !std::exchange(broken, true)) return broken_off("it broke");
      return answer;
    }
    AllAsked asked;
    bool broken = false;
  } calls;
  calls.asked.expect(
      calls.call_all(calls.asked.questions(), row_of(PeerMethod::kPart), {60s}, std::stop_token()));
}

TEST(PeerTable, OverConnectionsToo) {
  const TempDir dir;
  const std::unique_ptr<ImageStore> images = ImageStore::open(dir.path()).value();
  AllAsked asked;
  const auto start = [&](const char* node, bool last) {
    PeerServerOptions options;
    options.listen = "127.0.0.1:0";
    options.node = node;
    options.cluster = "test";
    options.images = images.get();
    auto server = PeerServer::start(options).value();
    server->handle(
        std::string(row_of(PeerMethod::kPart).name),
        [&asked, last](std::string_view, const std::string&) { return asked.answer(last); });
    return server;
  };
  const std::unique_ptr<PeerServer> w1 = start("w1", false), w2 = start("w2", true);
  const std::unique_ptr<Peers> peers = Peers::create({.node = "w0", .cluster = "test"}).value();
  Relay relay(w2->address(), [](int connection) {
    return connection == 0 ? Relay::Plan{.cut_after = 20'000} : Relay::Plan{};
  });
  peers->set("w1", w1->address());
  peers->set("w2", relay.address());
  TcpCalls calls(*peers);
  asked.expect(
      calls.call_all(asked.questions(), row_of(PeerMethod::kPart), {60s}, std::stop_token()));
}

/// Which anybody answers at once, or never.
PeerRow brief_row() {
  PeerRow row = row_of(PeerMethod::kSpace);
  row.deadline = 1s;
  return row;
}

ManyAsked asked_by(PeerCalls& calls, const PeerRow& row) {
  return {[&](const std::vector<Cluster::Question>& questions, std::chrono::milliseconds at_most,
              AfterAnswer then) {
            return ask_all_by(row, questions.size(), 1, at_most, [&](AskManner manner) {
              manner.then = then;
              return calls.call_all(questions, row, manner, {});
            });
          },
          "w1", "w2", row.deadline};
}

TEST(PeerTable, OfManyTheTimeOfEachBeginsWhenItIsAsked) {
  class Calls final : public PeerCalls {
   public:
    void set(const std::string&, const std::string&) override {}
    void remove(const std::string&) override {}
    Result<> meet(const std::string&, const std::string&) override { return ok(); }
    Result<std::string> call(const std::string& node, const PeerRow&, const std::string&,
                             std::chrono::milliseconds time, std::stop_token) override {
      if (node == "w2") return std::string("well");
      std::this_thread::sleep_for(time);
      return make_error(Code::kUnavailable, "no answer in time");
    }
  } calls;
  const PeerRow row = brief_row();
  EXPECT_EQ(asked_by(calls, row).those_that_are_well_answer(), "");
  EXPECT_EQ(asked_by(calls, row).who_asks_waits_no_longer_than_he_said(), "");
  EXPECT_EQ(asked_by(calls, row).each_is_asked_on_by_itself(), "");
}

/// A node that serves, and one, w0, that asks.
struct OneServer {
  explicit OneServer(const std::string& node) {
    server = PeerServer::start(
                 {.listen = "127.0.0.1:0", .node = node, .cluster = "test", .images = images.get()})
                 .value();
  }
  const TempDir dir;
  const std::unique_ptr<ImageStore> images = ImageStore::open(dir.path()).value();
  std::unique_ptr<PeerServer> server;
  const std::unique_ptr<Peers> peers = Peers::create({.node = "w0", .cluster = "test"}).value();
};

TEST(PeerTable, OverConnectionsTheTimeOfEachBeginsWhenItIsAskedToo) {
  const OneServer one("w2");
  const std::unique_ptr<PeerServer>& server = one.server;
  const PeerRow row = brief_row();
  server->handle(
      std::string(row.name),
      [](std::string_view, const std::string&) { return Result<std::string>("well"); },
      PeerServer::Pace::kAtOnce);
  const Listener silent = listen_on(PeerAddress::parse("127.0.0.1:0").value()).value();
  const std::unique_ptr<Peers>& peers = one.peers;
  peers->set("w1", silent.address);
  peers->set("w2", server->address());
  TcpCalls calls(*peers);
  const auto threads = [] {
    return std::distance(fs::directory_iterator("/proc/self/task"), fs::directory_iterator());
  };
  const auto before = threads();
  std::atomic<std::ptrdiff_t> most = 0;
  std::jthread looks([&](const std::stop_token& stop) {
    for (; !stop.stop_requested(); std::this_thread::sleep_for(5ms))
      most = std::max(most.load(), threads());
  });
  EXPECT_EQ(asked_by(calls, row).those_that_are_well_answer(), "");
  EXPECT_EQ(asked_by(calls, row).who_asks_waits_no_longer_than_he_said(), "");
  EXPECT_EQ(asked_by(calls, row).each_is_asked_on_by_itself(), "");
  looks = {};
  EXPECT_LE(most, before + 10) << "one that waits takes no thread";
}

TEST(PeerTable, WhoAsksWaitsAsTheRowSaysOrLess) {
  Asked asked{{}, [](size_t) -> Result<std::string> { return std::string(); }};
  const PeerRow& row = row_of(PeerMethod::kFiles);
  EXPECT_TRUE(asked.by(row.method, 100 << 20).has_value());
  EXPECT_EQ(asked.times.back(), row.deadline + std::chrono::milliseconds((100 << 20) / kBytesInMs));
  EXPECT_TRUE(asked.by(row.method, 1, 200ms).has_value());
  EXPECT_EQ(asked.times.back(), 200ms);
  EXPECT_TRUE(asked.by(row.method, 1, 24h).has_value());
  EXPECT_EQ(asked.times.back(), row.deadline);
  const size_t count = asked.times.size();
  const PeerRow& small = row_of(PeerMethod::kCommit);
  EXPECT_EQ(asked.by(small.method, small.max_request_bytes + 1).error().code(),
            Code::kInvalidArgument);
  EXPECT_EQ(asked.times.size(), count);
}

TEST(PeerTable, OverAConnectionThatBreaksInAnAnswerToo) {
  const OneServer one("w1");
  const std::unique_ptr<PeerServer>& server = one.server;
  const std::unique_ptr<Peers>& peers = one.peers;
  constexpr uint64_t kInTheAnswer = 20'000;
  for (const PeerRow& row : kPeerTable) {
    SCOPED_TRACE(row.name);
    const auto times = std::make_shared<std::atomic<int>>(0);
    server->handle(std::string(row.name), [times](std::string_view, const std::string&) {
      ++*times;
      return Result<std::string>(std::string(100'000, 'x'));
    });
    Relay relay(server->address(), [&](int connection) {
      return connection == 0 ? Relay::Plan{.cut_after = kInTheAnswer} : Relay::Plan{};
    });
    peers->set("w1", relay.address());
    const Result<std::string> answer = ask_by(row, 0, 60s, {}, [&](std::chrono::milliseconds time) {
      return peers->call("w1", row.name, "", time);
    });
    EXPECT_EQ(answer.has_value(), row.is_idempotent());
    EXPECT_EQ(*times, row.is_idempotent() ? 2 : 1);
  }
}

class PeerTableTest : public ClusterTest {
 protected:
  PeerTableTest() : ClusterTest(2) {
    job_ = make_job();
    EXPECT_NE(cluster_.job(1, "job"), nullptr);
  }
  WhichJob make_job() {
    const JobRef job = cluster_.store(0).create_job("job").value();
    return {job->name(), job->id()};
  }
  AskPeer w1_as_w0() {
    return [this](const PeerRow& row, const std::string& request) {
      return cluster_.as_seen_by(0).ask("w1", row.method, request);
    };
  }
  WhichJob job_;
};

TEST_F(PeerTableTest, EveryRowIsAnswered) {
  EXPECT_THAT(answers_to_all(w1_as_w0(), job_), ElementsAreArray(expected_answers(true)));
  EXPECT_THAT(answers_to_all(w1_as_w0(), {"job", "another"}),
              ElementsAreArray(expected_answers(false)));
  EXPECT_THAT(answers_to_all(w1_as_w0(), {"none", "another"}),
              ElementsAreArray(expected_answers(false)));
}

/// w1 as a daemon serves it, and w0, which asks it over a connection.
TEST_F(PeerTableTest, ADaemonAnswersEveryRowLikeThat) {
  const auto start = [&](unsigned node) {
    PeerServerOptions options;
    options.listen = "127.0.0.1:0";
    options.node = LocalCluster::name(node);
    options.cluster = "test";
    options.images = &cluster_.store(node).images();
    return PeerServer::start(options).value();
  };
  const auto peers_of = [&](unsigned node) {
    PeersOptions options;
    options.node = LocalCluster::name(node);
    options.cluster = "test";
    return Peers::create(options).value();
  };
  const std::unique_ptr<Peers> w0 = peers_of(0), w1 = peers_of(1);
  const std::unique_ptr<PeerServer> own = start(0), server = start(1);
  w0->set("w1", server->address());
  const AskPeer ask = [&](const PeerRow& row, const std::string& request) {
    return w0->call("w1", row.name, request, row.deadline);
  };
  Result<std::string> answer = w0->call("w1", "job/no_such_method", "", 10s);
  EXPECT_EQ(answer.error().code(), Code::kUnavailable) << "not yet";
  TcpCalls calls(*w1);
  serve_peers(*server, cluster_.store(1), calls);
  EXPECT_THAT(answers_to_all(ask, job_), ElementsAreArray(expected_answers(true)));
  EXPECT_THAT(answers_to_all(ask, {"job", "another"}), ElementsAreArray(expected_answers(false)));
  const PeerRow& meet = row_of(PeerMethod::kMeet);
  for (int times = 0; times < 2; ++times) {
    answer = ask(meet, own->address());
    EXPECT_TRUE(answer.has_value()) << answer.error().message();
  }
  answer = w0->call("w1", "job/no_such_method", "", 10s);
  EXPECT_EQ(answer.error().code(), Code::kInvalidArgument);
  EXPECT_THAT(answer.error().message(), HasSubstr("knows no method 'job/no_such_method'"));
  for (const PeerRow& row : kPeerTable) {
    if (row.max_request_bytes == kMaxCallBytes) continue;  // that is not even sent
    answer = ask(row, std::string(row.max_request_bytes + 1, ' '));
    EXPECT_EQ(answer.error().code(), Code::kInvalidArgument) << row.name;
  }
}

/// The directory is that of the next job, whose id is another.
TEST_F(PeerTableTest, ARequestOfAJobThatWasRemovedDoesNotTouchTheNextOfItsName) {
  ASSERT_TRUE(cluster_.store(0).remove_job("job", false).has_value());
  const WhichJob next = make_job();
  ASSERT_NE(next.id, job_.id);
  const std::string incoming = cluster_.job(1, "job")->files_dir() + "/incoming/base";
  write_file(fs::path(incoming) / "rank/0/notes", "staged");
  EXPECT_THAT(answers_to_all(w1_as_w0(), job_), ElementsAreArray(expected_answers(false)));
  Result<std::string> refused =
      JobPeers(job_, cluster_.as_seen_by(0)).ask("w1", PeerMethod::kUntake, R"({"id": "4567"})");
  ASSERT_TRUE(refused.has_error());
  EXPECT_THAT(refused.error().message(), HasSubstr("another has its name by now"));
  EXPECT_FALSE(fs::exists(cluster_.job(1, "job")->files_dir() + "/../checkpoints/0123"));
  // The same of the next job is done.
  EXPECT_THAT(answers_to_all(w1_as_w0(), next), ::testing::Not(Contains("job/take: ''")));
  EXPECT_TRUE(fs::exists(cluster_.job(1, "job")->files_dir() + "/../checkpoints/0123"));
}

/// A list of files may be longer than what people edit.
TEST_F(PeerTableTest, ManyFilesAreOneRequest) {
  std::string files = R"({"id": "4567", "files": [)";
  for (int i = 0; i < 60'000; ++i)
    files += fmt::format("{}[\"rank/{}/model.safetensors\", 1]", i == 0 ? "" : ",", i);
  const PeerRow& adopt = row_of(PeerMethod::kAdopt);
  const Result<std::string> answer = w1_as_w0()(adopt, request_about(job_, files + "]}"));
  EXPECT_EQ(answer.error().code(), Code::kConflict) << answer.error().message();
}

/// Each time a node is asked, the connection breaks when it has done what it was asked.
class BreakingTest : public ClusterTest {
 protected:
  void break_all_but(std::set<std::string, std::less<>> spared) {
    cluster_.breaks = [calls = calls_, spared = std::move(spared)](
                          const std::string& asking, const std::string& node,
                          std::string_view method, const std::string& request) {
      std::lock_guard lock(calls->mutex);
      ++calls->asked[std::string(method)];
      if (calls->over || spared.contains(method)) return false;
      const auto [call, is_new] =
          calls->broken.insert(fmt::format("{} {} {} {}", asking, node, method, request));
      if (!is_new) calls->broken.erase(call);
      return is_new;
    };
  }
  void break_no_more() {
    std::lock_guard lock(calls_->mutex);
    calls_->over = true;
  }
  int asked(const std::string& method) {
    std::lock_guard lock(calls_->mutex);
    return calls_->asked[method];
  }
  void write_some_on_each_node(const LayoutSpec& spec) {
    for (unsigned node = 0; node < 3; ++node) {
      write(node, spec);
      for (uint64_t rank = 0; rank < 3; ++rank)
        if (rank != node) fs::remove_all(fmt::format("{}/rank/{}", incoming(node), rank));
    }
  }
  struct Calls {
    std::mutex mutex;
    bool over = false;                 // guarded
    std::map<std::string, int> asked;  // by method; guarded
    std::set<std::string> broken;      // and not asked again yet; guarded
  };
  const std::shared_ptr<Calls> calls_ = std::make_shared<Calls>();  // until the cluster has ended
};

TEST_F(BreakingTest, WhatMayBeAskedAgainComesOutTheSame) {
  break_all_but({"job/adopt", "job/mend"});
  ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
  const std::string text = R"({"tp": 1, "pp": 3, "dp": 1, "replicas": 1})";
  edit(0, text);
  cluster_.wait_settled();
  write_some_on_each_node(spec_of(text));
  commit(1);
  cluster_.wait_settled();
  expect_everywhere({0, 1, 2}, spec_of(text));
  const std::string other = R"({"tp": 2, "pp": 1, "dp": 1, "replicas": 1})";
  edit(2, other);
  cluster_.wait_settled();
  expect_everywhere({0, 1, 2}, spec_of(other));
  ASSERT_TRUE(cluster_.job(2, "job")->remove_checkpoint("base").has_value());
  Result<> removed = cluster_.store(1).remove_job("job", false);
  EXPECT_TRUE(removed.has_value()) << removed.error().message();
  for (const char* method : {"job/changed", "job/holds", "job/files", "job/part", "job/examine",
                             "job/take", "job/hash", "job/hide"})
    EXPECT_GT(asked(method), 1) << method;
}

TEST_F(BreakingTest, WhatMayNotBeDoneTwiceIsNotAskedAgain) {
  ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
  const std::string text = R"({"tp": 1, "pp": 3, "dp": 1})";
  edit(0, text);
  cluster_.wait_settled();
  write_some_on_each_node(spec_of(text));
  break_all_but({});
  const Result<> refused = cluster_.job(1, "job")->commit("base", "base");
  ASSERT_TRUE(refused.has_error());
  EXPECT_EQ(refused.error().errno_value(), EAGAIN) << refused.error().message();
  EXPECT_EQ(asked("job/adopt"), 2) << "w0 and w2, once each";
  break_no_more();
  commit(1);
  cluster_.wait_settled();
  expect_everywhere({0, 1, 2}, spec_of(text));
}

}  // namespace
}  // namespace ptc::testing
