// The parts of one job on some nodes (reshard/job/), put together without a Job: so that each part
// can be tried alone, with what it uses being what it is in the daemon. Stores are directories,
// what is agreed on is a memory_meta, nodes ask each other by calls of functions, and nothing
// happens by itself.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "reshard/cluster/lone_node.h"
#include "reshard/job/checkpoint_files.h"
#include "reshard/job/commit_attempt.h"
#include "reshard/job/commits_led.h"
#include "reshard/job/decisions.h"
#include "reshard/job/mender.h"
#include "reshard/job/part_maker.h"
#include "reshard/job/resharder.h"
#include "reshard/job/staged_parts.h"
#include "reshard/job/taken_dirs.h"
#include "reshard/job/verifier.h"
#include "store/meta/meta_client.h"
#include "tests/support/job_fixture.h"
#include "tests/support/local_cluster.h"

namespace ptc::testing {

class JobNode;

/// "w0", "w1", … Of one alone the node is a LoneNode.
class JobNodes {
 public:
  enum class Kind { kAlone, kCluster };
  /// `images_of_first`: a directory for the images of w0; empty: one beside all else.
  explicit JobNodes(unsigned nodes, Kind kind = Kind::kCluster,
                    const std::string& images_of_first = "");
  ~JobNodes();

  static std::string name(unsigned node) { return "w" + std::to_string(node); }
  JobNode& operator[](unsigned node) { return *nodes_[node]; }
  unsigned size() const { return static_cast<unsigned>(nodes_.size()); }
  MetaClient& meta() { return *meta_; }  // past all nodes
  void follow();                         // each in turn; fails the test when one cannot

  /// Called before a question gets to another node, and before an item of a fetch does: with an
  /// error, that is the answer.
  Hook<std::optional<Error>(const std::string& node, PeerMethod method)> asks;
  Hook<std::optional<Error>(const std::string& node)> fetches;
  /// Called before a decision of a node: with an error, it is not made.
  Hook<std::optional<Error>(const std::string& node, const MetaTransaction& transaction)> decides;
  /// Asked when a node wants to know what became of those in doubt: with an error, it does not.
  Hook<std::optional<Error>()> settles;
  /// Called when the node would remove one of too many checkpoints: with an error, it cannot.
  Hook<std::optional<Error>(const std::string& node, const std::string& checkpoint)> removes;

 private:
  friend class JobNode;
  std::vector<std::string> names_;
  std::unique_ptr<MetaClient> meta_ = make_memory_meta();
  std::vector<std::unique_ptr<JobNode>> nodes_;
};

/// What one node has of the job. The members are those of Job::Impl (job_parts.h).
class JobNode final : public JobListener {
 public:
  JobNode(JobNodes& all, const std::string& name, JobNodes::Kind kind,
          const std::string& images_dir);
  ~JobNode() override;

  /// What others decided is known when it returns.
  Result<Followed> follow();
  /// From here on its resharder takes steps.
  void start_resharder() { resharder.start(pool_); }
  /// What was in doubt is looked at, as by the job's housekeeping.
  void settle_doubts();
  /// What another node asks of the job.
  Result<std::string> answer(PeerMethod method, std::string_view request);
  /// Job::save_layout(), without its checks.
  Result<> edit(const std::string& layout);
  /// What all ranks wrote is there, in incoming/<incoming>; what write_ranks() returns.
  std::map<std::string, std::string> write(const Sample& sample, const LayoutSpec& spec,
                                           const std::string& incoming = "base");
  /// The same, and it is a checkpoint of that name.
  void commit(const Sample& sample, const LayoutSpec& spec, const std::string& name = "base");

  std::string incoming(const std::string& name) const { return place.incoming_dir() + "/" + name; }
  CheckpointRecord record(const std::string& name = "base") const;  // there is one
  std::set<std::string> images() const;                             // in its store
  std::set<std::string> named_images() const;  // that are on this node as stored states say
  /// Files below checkpoints/ and committing/, relative to the job's directory.
  std::set<std::string> files_about() const;

  void names_changed() override {}
  void checkpoint_changed(const std::string&, const std::string&) override {}
  Result<std::unique_ptr<Seal>> seal(const std::string& job, const std::string& incoming,
                                     GivesWay gives_way) override;
  /// Called when an incoming directory is sealed: with an error, that is the answer.
  Hook<std::optional<Error>(const std::string& incoming)> seals;
  std::atomic<int> seals_now = 0;  // that have not ended

 private:
  class Peers;
  class Fetches;
  class Meta;
  class CountedSeal;
  JobNodes& all_;
  TempDir dir_;
  const std::unique_ptr<Meta> meta_;
  const std::unique_ptr<Cluster> cluster_;
  const std::unique_ptr<ImageStore> images_;
  Executor executor_;
  SharedResults results_;
  StepPool pool_{2};
  RemovedCheckpoints removed_;

 public:
  Cluster& cluster = *cluster_;
  ImageStore& store = *images_;
  JobPlace place;
  const JobPeers peers{place.which(), cluster};
  JobKnowledge knowledge{[this] { resharder.wake(); }};
  Activities activities;
  Doubts doubts;
  Arrivals arrivals;
  const CheckpointFiles files{place, peers, knowledge, activities};
  Decisions decisions{place, files, knowledge};
  std::atomic<int> syncs = 0;  // that a part has asked for
  const Verifier::SyncAbout about = [this](const std::string&) -> Result<> {
    ++syncs;
    PTC_TRY(follow());
    return ok();
  };
  const Verifier verifier{place, peers, knowledge, about};
  Mender mender{place, peers, knowledge, verifier, decisions, about};
  PartShelf shelf;
  HashQueue hashing{place.name, place.incoming_dir(), [] { return HashQueue::Expected(); }};
  StagedParts staged{place};
  TakenDirs taken;
  const PartMaker maker{
      {place, peers, knowledge, files, verifier, shelf, arrivals, taken, activities, about}};
  CommitsLed commits;
  std::atomic<int> looks_at_doubts = 0;  // that a part has asked for
  Resharder resharder;
};

}  // namespace ptc::testing
