// Checkpoints that were removed while a file of them was open.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "reshard/cluster/cluster.h"
#include "store/base/mutex.h"
#include "store/base/step_pool.h"
#include "store/image/image_store.h"

namespace ptc {

class Checkpoint;
struct RemoteFiles;

/// What is open keeps the bytes of its images on this node by itself; those on others it knows by
/// name. So each node keeps its images of a removed checkpoint until every other node that was
/// there within the last minute has said that no file of it is open there that needs them, or has
/// been away for a minute. A node that starts anew keeps nothing. Threads: any.
///
/// Where there are many nodes, one of them asks all, and the others ask that one who has said no: a
/// thousand that each ask a thousand would be a million questions for each checkpoint that goes.
/// Which one follows from the checkpoint's id. Where that one is away they ask by themselves.
class RemovedCheckpoints {
 public:
  /// `cluster` and the pool, on whose threads others are asked, outlive this. `gone`: a node that
  /// is away for so long does not come back with its files still open.
  RemovedCheckpoints(Cluster& cluster, StepPool& pool,
                     std::chrono::milliseconds gone = std::chrono::minutes(1));

  /// `images` lie on this node, and have no names any more (ImageStore::remove).
  void keep(const WhichJob& job, const std::string& id, std::vector<ImageRef> images);

  /// To be said before the checkpoint is known no more, and let go.
  void note(const std::string& id, const std::shared_ptr<const Checkpoint>& checkpoint);
  /// Whether a file of it is open here that needs other nodes.
  bool is_open_here(std::string_view id);
  /// What is open is read from copies on nodes that are there.
  void nodes_changed();
  /// For another node: which of the others have said that no file of that checkpoint is open there,
  /// as a JSON array; "": they are being asked. The request: survey_request().
  Result<std::string> answer_without(std::string_view request);

 private:
  using Clock = std::chrono::steady_clock;
  /// Before who has not said no is asked again; it grows.
  struct Pause {
    Clock::duration length = {};
    Clock::time_point until = {};
    void begin();
  };
  struct Kept {
    WhichJob job;
    std::string id;
    std::vector<ImageRef> images;
    std::map<std::string, Clock::time_point>
        asked;  // nodes that have not said no; when they were there last
    Pause pause = {};
    Clock::time_point unheard_since = {};  // who asks all
  };
  struct Noted {
    std::string id;
    std::weak_ptr<const Checkpoint> checkpoint;
    std::weak_ptr<RemoteFiles> files;  // as long as one is open
  };
  /// What all others say of one checkpoint; while somebody asks for it, who has not said no is
  /// asked again.
  struct Survey {
    WhichJob job;
    std::set<std::string> without;
    bool begun = false, ended = false;  // all have been asked; all have said no
    Clock::time_point wanted;           // for the last time
    Pause pause = {};
  };
  using Answers = std::vector<std::pair<std::string, Result<std::string>>>;
  std::optional<StepPool::Time> look_after(const std::stop_token& stop);
  void look_for_copies();
  void ask(Kept& kept, const std::stop_token& stop);
  bool hear_who_asks_all(Kept& kept, const std::vector<std::string>& alive,
                         const std::stop_token& stop);
  std::optional<StepPool::Time> survey(const std::stop_token& stop);
  std::optional<std::set<std::string>> surveyed(const WhichJob& job, const std::string& id);
  Answers ask_each(const std::vector<std::string>& nodes, const WhichJob& job,
                   const std::string& id, const std::stop_token& stop);

  Cluster& cluster_;
  const Clock::duration gone_;
  Mutex mutex_;
  std::vector<Kept> new_ PTC_GUARDED_BY(mutex_);
  std::vector<Noted> noted_ PTC_GUARDED_BY(mutex_);
  bool nodes_changed_ PTC_GUARDED_BY(mutex_) = false;
  std::map<std::string, Survey> surveys_ PTC_GUARDED_BY(mutex_);  // by id
  std::vector<Kept> kept_;                                        // of the loop
  Loop loop_;                                                     // last: uses all of the above
};

/// Asks other nodes of a checkpoint "is a file of it open there?": "yes", "no", in their order.
std::vector<Result<std::string>> ask_whether_open(Cluster& cluster,
                                                  const std::vector<std::string>& nodes,
                                                  const WhichJob& job, const std::string& id,
                                                  std::stop_token stop = {});
/// The id of the checkpoint that such a request is about.
Result<std::string> checkpoint_asked_of(std::string_view request);

}  // namespace ptc
