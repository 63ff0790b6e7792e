#include "fs/nodes/ask_file.h"

#include <fcntl.h>
#include <pthread.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <boost/json/serialize.hpp>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <stop_token>
#include <thread>
#include <utility>

#include "reshard/ptc/cut_report.h"
#include "store/base/json.h"
#include "store/base/json_problem.h"
#include "store/base/mutex.h"

namespace ptc {
namespace {

constexpr size_t kMaxQuestion = 64 << 10;
constexpr unsigned kMostOfOne = 8,
                   kMostOfAll = 64;  // at once; of root: as if there was nobody else

/// Whether somebody owns a job's directory, and whether he may read what is in it.
struct Rights {
  bool owns = false, reads = false;
};
Rights rights_of(const Caller& caller, const JobView& job) {
  const struct stat directory = job.directory();
  return {caller.uid == 0 || caller.uid == ::geteuid() || caller.uid == directory.st_uid,
          caller.may(directory.st_uid, directory.st_gid, directory.st_mode, S_IROTH | S_IXOTH)};
}

/// Whether somebody may read the checkpoint's meta.json, which says what tensors there are.
Result<> may_read_facts(const Caller& caller, const Job& job, std::string_view name) {
  const CheckpointRef checkpoint = job.find_checkpoint(name);
  if (checkpoint == nullptr) return ok();  // which is said by who looks for it
  const Manifest& manifest = checkpoint->manifest();
  const ReadRights& rights = checkpoint->rights_of_all();
  if (caller.may(manifest.uid, manifest.gid, manifest.mode, S_IXOTH) &&
      caller.may(rights.uid, rights.gid, rights.mode, S_IROTH))
    return ok();
  return make_error(Code::kPermissionDenied, "you may not read checkpoint '{}' of job '{}'", name,
                    job.name());
}

Result<std::string> text_of(const json::object& question, std::string_view key) {
  const json::value* value = question.if_contains(key);
  if (value == nullptr || !value->is_string()) {
    return invalid_argument("the question needs a text '{}'", key);
  }
  return std::string(value->as_string());
}

Result<json::value> remove(Tree& tree, JobView& view, const json::object& question) {
  const json::value* force_value = question.if_contains("force");
  bool force = force_value != nullptr && force_value->is_bool() && force_value->as_bool();
  std::string job = view.job().name();
  if (question.contains("checkpoint")) {
    PTC_TRY(auto checkpoint, text_of(question, "checkpoint"));
    PTC_TRY(view.job().remove_checkpoint(checkpoint));
  } else {
    PTC_TRY(tree.store().remove_job(job, force, view.job().id()));
    tree.store().tell_jobs_changed();
    (void)tree.job(job);  // lets go of the view of it
  }
  return json::value(nullptr);
}

/// A question's layout is no text that somebody wrote, and no line of it is told.
template <class T>
Result<T> about_layout(Result<T> answer) {
  if (answer) return answer;
  const Error& error = answer.error();
  return Error(error.code(), std::string(without_json_place(error.message())), error.errno_value());
}

/// How a checkpoint's rules cut its tensors under a layout; without one under the job's.
Result<json::object> explain_rules(const Job& job, const json::object& question) {
  PTC_TRY(auto name, text_of(question, "checkpoint"));
  CheckpointRef checkpoint = job.find_checkpoint(name);
  if (checkpoint == nullptr)
    return make_error(Code::kNotFound, "job {} has no checkpoint '{}'", job.name(), name);
  const json::value* asked = question.if_contains("layout");
  PTC_TRY(auto layout,
          about_layout(job.read_layout(asked ? json::serialize(*asked) : job.layout_text())));
  PTC_TRY(const auto model, checkpoint->model_under(layout.spec));
  std::vector<std::string> names;
  if (const json::value* list = question.if_contains("names"); list && list->is_array()) {
    for (const json::value& part : list->get_array())
      if (part.is_string()) names.emplace_back(std::string_view(part.get_string()));
  }
  return cut_report(*model, layout.spec, names);
}

json::array texts(const std::vector<std::string>& all) {
  json::array array;
  for (const std::string& one : all) array.push_back(json::value(one));
  return array;
}

/// Of checkpoints that are not whole on the nodes that are there: nobody can move what is lost.
json::array lost_already(const JobStore& store) {
  json::array lost;
  for (const JobRef& job : store.jobs()) {
    for (const CheckpointRef& checkpoint : job->checkpoints())
      if (const std::optional<std::string> loss = checkpoint->loss())
        lost.push_back(
            json::object{{"job", job->name()}, {"checkpoint", checkpoint->name()}, {"why", *loss}});
  }
  return lost;
}

/// Begins to empty a node, or ends that; what stays on it that no checkpoint has; and what was lost
/// before.
Result<json::value> drain(Tree& tree, const Caller& caller, const json::object& question) {
  if (caller.uid != 0 && caller.uid != ::geteuid())
    return make_error(Code::kPermissionDenied,
                      "only root, or whoever runs ptcfs, may drain a node");
  PTC_TRY(auto node, text_of(question, "node"));
  const json::value* cancel = question.if_contains("cancel");
  JobStore::Uncommitted uncommitted;
  json::array lost;
  if (cancel != nullptr && cancel->is_bool() && cancel->as_bool()) {
    PTC_TRY(tree.store().cancel_drain(node));
  } else {
    PTC_TRY(tree.store().drain(node));
    uncommitted = tree.store().uncommitted_on(node);
    lost = lost_already(tree.store());
  }
  return json::value(json::object{{"bytes_left", tree.store().bytes_on(node)},
                                  {"uncommitted", texts(uncommitted.found)},
                                  {"uncommitted_names", uncommitted.names},
                                  {"not_asked", texts(uncommitted.not_asked)},
                                  {"lost", std::move(lost)}});
}

Result<json::value> carry_out(Tree& tree, const Caller& caller, const std::string& text,
                              std::stop_token stop) {
  PTC_TRY(auto parsed, parse_json(text, {.max_bytes = kMaxQuestion}));
  if (!parsed.is_object()) return invalid_argument("the question is not a JSON object");
  const json::object& question = parsed.as_object();
  PTC_TRY(auto what, text_of(question, "do"));
  if (what == "drain") return drain(tree, caller, question);
  PTC_TRY(auto name, text_of(question, "job"));
  PTC_TRY(auto view, tree.job(name));
  if (view == nullptr) return make_error(Code::kNotFound, "there is no job '{}'", name);
  Rights rights = rights_of(caller, *view);

  if (what == "remove") {
    if (!rights.owns) {
      return make_error(Code::kPermissionDenied, "job '{}' belongs to another user", name);
    }
    return remove(tree, *view, question);
  }
  if (what ==
      "unpin") {  // one that cannot be read: it has no directory, of which that is an attribute
    if (!rights.owns)
      return make_error(Code::kPermissionDenied, "job '{}' belongs to another user", name);
    PTC_TRY(auto checkpoint, text_of(question, "checkpoint"));
    PTC_TRY(view->job().pin_checkpoint(checkpoint, false));
    return json::value(nullptr);
  }
  if (!rights.reads) {
    return make_error(Code::kPermissionDenied, "you may not read the directory of job '{}'", name);
  }
  std::string answer;
  if (what == "rules" || what == "verify") {
    PTC_TRY(const auto checkpoint, text_of(question, "checkpoint"));
    PTC_TRY(may_read_facts(caller, view->job(), checkpoint));
  }
  if (what == "rules") {
    PTC_TRY(auto report, explain_rules(view->job(), question));
    return json::value(std::move(report));
  }
  if (what == "plan") {
    const json::value* layout = question.if_contains("layout");
    if (layout == nullptr) return invalid_argument("the question needs a 'layout'");
    PTC_TRY(answer, about_layout(view->job().dry_run(json::serialize(*layout))));
  } else if (what == "verify") {
    PTC_TRY(auto checkpoint, text_of(question, "checkpoint"));
    const json::value* repair = question.if_contains("repair");
    if (repair != nullptr && repair->is_bool() && repair->as_bool()) {
      if (!rights.owns)
        return make_error(Code::kPermissionDenied, "job '{}' belongs to another user", name);
      PTC_TRY(answer, view->job().repair(checkpoint));
    } else {
      PTC_TRY(answer, view->job().verify(checkpoint, std::move(stop)));
    }
  } else {
    return invalid_argument(
        "'{}' is not something to do; plan, rules, verify, remove, unpin and drain are", what);
  }
  // Answers that are JSON themselves are given as such.
  auto as_json = parse_json(answer, {.max_bytes = 64 << 20});
  return as_json ? std::move(as_json).value() : json::value(answer);
}

/// How many questions of whom are being answered. Threads: any.
class Askers {
 public:
  /// False: there are too many; else leave() follows.
  bool enter(uid_t user) {
    MutexLock lock(mutex_);
    if (of_user_[user] >= kMostOfOne || (user != 0 && all_ - of_user_[0] >= kMostOfAll)) {
      if (of_user_[user] == 0) of_user_.erase(user);
      return false;
    }
    ++of_user_[user], ++all_;
    return true;
  }
  void leave(uid_t user) {
    MutexLock lock(mutex_);
    --all_;
    if (--of_user_[user] == 0) of_user_.erase(user);
  }
  unsigned all() const {
    MutexLock lock(mutex_);
    return all_;
  }

 private:
  mutable Mutex mutex_;
  std::map<uid_t, unsigned> of_user_ PTC_GUARDED_BY(mutex_);
  unsigned all_ PTC_GUARDED_BY(mutex_) = 0;
};

/// A question being answered on a thread of its own, so that nothing else waits for it.
class Answer {
 public:
  static FsResult<std::shared_ptr<Answer>> begin(Tree& tree, Caller caller, std::string question) {
    auto answer = std::make_shared<Answer>();
    if (!askers().enter(caller.uid)) return Errno{EAGAIN};
    try {
      std::thread([answer, &tree, caller, question = std::move(question)] {
        ::pthread_setname_np(::pthread_self(), "ptcfs-answer");
        answer->finish(make_text(tree, caller, question, answer->stop_.get_token()));
        askers().leave(caller.uid);
      }).detach();
    } catch (const std::system_error&) {
      askers().leave(caller.uid);
      return Errno{EAGAIN};
    }
    return answer;
  }

  /// Nobody will read it: what only answers, and takes long, ends.
  void give_up() { stop_.request_stop(); }

  /// EINTR when the reader is interrupted first.
  FsResult<size_t> read(std::span<std::byte> out, uint64_t offset, const Interrupted& interrupted) {
    MutexLock lock(mutex_);
    while (!finished_.wait_for(mutex_, std::chrono::milliseconds(100),
                               [&]() PTC_REQUIRES(mutex_) { return text_.has_value(); })) {
      if (interrupted()) return Errno{EINTR};
    }
    if (offset >= text_->size()) return size_t{0};
    size_t size = std::min<size_t>(out.size(), text_->size() - offset);
    std::memcpy(out.data(), text_->data() + offset, size);
    return size;
  }

  static Askers& askers() {
    static Askers& all = *new Askers;  // threads may outlive main()
    return all;
  }

 private:
  static std::string make_text(Tree& tree, const Caller& caller, const std::string& question,
                               std::stop_token stop) {
    try {
      json::object reply{{"ok", true}};
      auto result = carry_out(tree, caller, question, std::move(stop));
      if (result) {
        reply["result"] = std::move(result).value();
      } else {
        reply = {{"ok", false},
                 {"code", code_name(result.error().code())},
                 {"error", result.error().message()}};
      }
      return json::serialize(reply) + "\n";
    } catch (const std::exception& error) {  // no memory for the answer, for one
      const json::object reply{
          {"ok", false}, {"code", code_name(Code::kInternal)}, {"error", error.what()}};
      return json::serialize(reply) + "\n";
    }
  }
  void finish(std::string text) {
    {
      MutexLock lock(mutex_);
      text_ = std::move(text);
    }
    finished_.notify_all();
  }

  Mutex mutex_;
  ConditionVariable finished_;
  std::optional<std::string> text_ PTC_GUARDED_BY(mutex_);
  std::stop_source stop_;
};

class AskHandle : public Handle {
 public:
  AskHandle(Tree& tree, Caller caller) : tree_(tree), caller_(caller) {}
  ~AskHandle() override {
    if (answer_ != nullptr) answer_->give_up();
  }
  bool can_reopen() const override { return false; }
  const Awaited* awaited() const override {
    static const Awaited answers{"answers to .ptc/ask", 64, true};
    return &answers;
  }

  FsResult<size_t> write(std::span<const std::byte> data, uint64_t) override {
    if (data.size() > kMaxQuestion) return Errno{EFBIG};
    MutexLock lock(mutex_);
    if (answer_ != nullptr) return Errno{EBUSY};  // one question an open
    std::string question(reinterpret_cast<const char*>(data.data()), data.size());
    PTC_TRY(answer_, Answer::begin(tree_, caller_, std::move(question)));
    answer_at_ = data.size();
    return data.size();
  }

  FsResult<size_t> read(std::span<std::byte> out, uint64_t offset,
                        const Interrupted& interrupted) override {
    std::shared_ptr<Answer> answer;
    {
      MutexLock lock(mutex_);
      answer = answer_;
    }
    if (answer == nullptr) return size_t{0};
    // write() has moved the file's position behind the question; who seeks to 0 first reads the
    // same. So the first read fixes where the answer begins.
    if (!first_read_) {
      MutexLock lock(mutex_);
      if (!first_read_) {
        if (offset < answer_at_) answer_at_ = 0;
        first_read_ = true;
      }
    }
    if (offset < answer_at_) return Errno{EINVAL};
    // One at a time: each that waits takes one of the threads that answer all else.
    if (reading_.exchange(true)) return Errno{EBUSY};
    auto read = answer->read(out, offset - answer_at_, interrupted);
    reading_ = false;
    return read;
  }

 private:
  Tree& tree_;
  const Caller caller_;
  Mutex mutex_;
  std::shared_ptr<Answer> answer_ PTC_GUARDED_BY(mutex_);
  std::atomic<uint64_t> answer_at_{0};
  std::atomic<bool> first_read_{false}, reading_{false};
};

class AskFile : public Node {
 public:
  explicit AskFile(Tree& tree) : Node(".ptc/ask"), tree_(tree) {}
  FsResult<struct stat> attributes() override {
    timespec now;
    ::clock_gettime(CLOCK_REALTIME, &now);
    return virtual_stat(S_IFREG | 0666, ::geteuid(), ::getegid(), now, inode_of(".ptc/ask"));
  }
  /// O_TRUNC, from a shell's redirection, means nothing here.
  FsResult<> set_attributes(const AttributeChange& change, Handle*) override {
    if (change.mode || change.uid || change.gid) return Errno{EPERM};
    return ok();
  }
  FsResult<Opened> open(const Caller& caller, int) override {
    return Opened{std::make_unique<AskHandle>(tree_, caller), IoMode::kDirect, 0};
  }

 private:
  Tree& tree_;
};

}  // namespace

bool wait_for_answers(std::chrono::milliseconds patience) {
  auto deadline = std::chrono::steady_clock::now() + patience;
  while (Answer::askers().all() != 0) {
    if (std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return true;
}

FsResult<NodeRef> make_ask_file(Tree& tree) {
  return tree.table().intern(std::make_shared<AskFile>(tree));
}

}  // namespace ptc
