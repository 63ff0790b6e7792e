// What users do: write and commit, edit, remove, drain, make and remove jobs, read.
#include <boost/json/parse.hpp>
#include <boost/json/serialize.hpp>
#include <thread>

#include "dataset/run/data_set_state.h"
#include "tests/sim/world.h"

namespace ptc::sim {

constexpr const char* kSomeRules =
    R"({"format": "ptc-rules/1", "facts": {"layers": ["n"]}, "rules": [{"names": ["a.weight"], "stage": "all"}]})";

void World::operate() {
  const unsigned node = some_node();
  if (focus_ != nullptr && chance(60))
    return act(focus_->before[draw(focus_->before.size())], node);
  const uint64_t what = draw(100);
  if (what < 25 || checkpoints_.empty())
    in_background("commit", node, [this](unsigned n) { write_and_commit(n); });
  else if (what < 60) in_background("edit", node, [this](unsigned n) { edit(n); });
  else if (what < 64) in_background("remove", node, [this](unsigned n) { remove(n); });
  else if (what < 67) in_background("pin", node, [this](unsigned n) { pin(n); });
  else if (what < 69)
    in_background("attributes", node, [this](unsigned n) { change_attributes(n, "job"); });
  else if (what < 75) in_background("drain", node, [this](unsigned n) { drain(n, chance(50)); });
  else if (what < 79) in_background("job", node, [this](unsigned n) { make_and_remove_job(n); });
  else if (what < 87) in_background("read", node, [this](unsigned n) { read_something(n); });
  else if (what < 90) in_background("repair", node, [this](unsigned n) { repair(n); });
  else if (what < 94 || focus_ != nullptr)
    in_background("late read", node, [this](unsigned n) { read_late(n); });
  else in_background("names used again", node, [this](unsigned) { use_names_again(); });
}

void World::act(char what, unsigned node) {
  auto begin = [&](const char* name, const Op& op) { in_background(name, node, op); };
  if (what == 'k' || what == 'x') note_fault();
  switch (what) {
    case 'C':
      return begin("commit", [this](unsigned n) { write_and_commit(n); });
    case 'c':
      return begin("commit", [this](unsigned n) { write_and_commit(n, Write::kInForce); });
    case 'N':
      return begin("commit", [this](unsigned n) { write_and_commit(n, Write::kSameName); });
    case 'o':
      return begin("commit in another job", [this](unsigned n) { write_and_commit_elsewhere(n); });
    case 'e':
      return begin("edit", [this](unsigned n) { edit(n); });
    case 'E':
      return begin("edit of replicas", [this](unsigned n) { edit_replicas(n); });
    case 'r':
      return begin("remove", [this](unsigned n) { remove(n); });
    case 'p':
      return begin("pin", [this](unsigned n) { pin(n); });
    case 'a':
      return begin("attributes", [this](unsigned n) { change_attributes(n, "job"); });
    case 'A':
      return begin("attributes",
                   [this](unsigned n) { change_attributes(n, fmt::format("other{}", draw(2))); });
    case 'R':
      return begin("job removal",
                   [this](unsigned n) { remove_job(n, fmt::format("other{}", draw(2))); });
    case 't':
      return begin("data set", [this](unsigned n) { change_data_set(n, "job"); });
    case 'T':
      return begin("data set",
                   [this](unsigned n) { change_data_set(n, fmt::format("other{}", draw(2))); });
    case 'U':
      return begin("rules", [this](unsigned n) { save_rules(n, fmt::format("other{}", draw(2))); });
    case 'm':
      return begin("repair", [this](unsigned n) { repair(n); });
    case 'd':
      return begin("drain", [this](unsigned n) { drain(n, chance(50)); });
    case 'D':
      return begin("drain", [this](unsigned n) { drain(n, false); });
    case 'j':
      return begin("job", [this](unsigned n) { make_and_remove_job(n); });
    case 'k':
      if (!cluster_.is_wanted(node) || cluster_.network().is_frozen(node)) return;
      say("started anew, as if killed: " + SimCluster::name(node));
      cluster_.kill(node, true);
      return cluster_.start(node);
    case 'x':
      if (!cluster_.is_wanted(node) || cluster_.network().is_frozen(node)) return;
      cluster_.kill(node, true);
      return until(now() + std::chrono::milliseconds(draw(8000)), "kill " + SimCluster::name(node),
                   [this, node] { cluster_.start(node); });
    case 'S':
      return suspend(node);
    case 'L':
      return lose_a_directory();
    case 'M':
      return damage_an_image();
    default:
      broken(fmt::format("nobody knows how to do '{}'", what));
  }
}

void World::change_something(unsigned node) {
  const uint64_t what = draw(100);
  if (what < 40 || checkpoints_.empty())
    in_background("commit", node, [this](unsigned n) { write_and_commit(n); });
  else if (what < 75) in_background("edit", node, [this](unsigned n) { edit(n); });
  else in_background("remove", node, [this](unsigned n) { remove(n); });
}

void World::in_background(const std::string& what, unsigned node, const Op& op) {
  ++operating_;
  std::thread([this, what, node, op] {
    name_thread(fmt::format("{} on {}", what, SimCluster::name(node)));
    op(node);
    --operating_;
    wake_all(&operating_);
  }).detach();
}

std::optional<Result<>> World::ask(unsigned node, const std::function<Result<>(JobStore&)>& what) {
  std::optional<Result<>> answer;
  const uint64_t lives = cluster_.lives(node);
  const bool there = cluster_.on(node, [&](JobStore& store) { answer = what(store); });
  if (!there || cluster_.died_since(node, lives)) return std::nullopt;
  return answer;
}

void World::note_answer(const std::string& what, const std::optional<Result<>>& answer) {
  say(what + ": " +
      (!answer               ? "no answer"
       : answer->has_value() ? "ok"
                             : answer->error().message()));
  if (!answer || answer->has_value()) return;
  const Code code = answer->error().code();
  // Of what lies on nodes that are away, a plan says that.
  const bool away = answer->error().message().find("stored nowhere") != std::string::npos;
  if (code == Code::kInternal || (code == Code::kCorrupt && !away))
    broken(fmt::format("{}: {}: {}", what, code_name(code), answer->error().message()));
}

std::string World::random_layout() {
  constexpr uint32_t kTp[] = {1, 2, 4};
  const uint64_t most = 2 * options_.nodes;
  const uint64_t least = options_.nodes > 100 && chance(70)
                             ? 100
                             : 1;  // parts on more nodes than a transaction has keys
  LayoutSpec spec;
  do {
    spec.sizes.tp = kTp[draw(3)];
    spec.sizes.pp = static_cast<uint32_t>(1 + draw(options_.nodes > 8 ? 16 : 4));
    spec.sizes.dp = static_cast<uint32_t>(1 + draw(3));
  } while (spec.sizes.world_size() > most || spec.sizes.world_size() < least);
  std::string devices;
  if (chance(40))
    for (uint64_t rank = 0; rank < spec.sizes.world_size(); ++rank)
      devices += fmt::format(R"({}"w{}:{}")", rank == 0 ? "" : ", ", some_node(), rank);
  const char* optimizers[] = {"replicated", "zero1", "fsdp"};
  const char* optimizer = optimizers[chance(60) ? 0 : 1 + draw(2)];
  return fmt::format(R"({{"tp": {}, "pp": {}, "dp": {}, "optimizer": "{}", "replicas": {}{}}})",
                     spec.sizes.tp, spec.sizes.pp, spec.sizes.dp, optimizer,
                     chance(75) ? 1 : draw(3),
                     devices.empty() ? "" : fmt::format(R"(, "devices": [{}])", devices));
}

void World::write_and_commit(unsigned node, Write how) {
  const bool again =
      how == Write::kSameName && checkpoints_.contains(fmt::format("c{}", last_checkpoint_));
  const std::string name = fmt::format("c{}", again ? last_checkpoint_ : ++last_checkpoint_);
  std::string text = random_layout();
  if (how == Write::kInForce || chance(50))  // as a job that runs in the layout that it was told
    cluster_.on(node, [&](JobStore& store) {
      if (JobRef job = store.find("job")) text = job->layout_text();
    });
  const LayoutSpec spec = Layout::parse(text).value().spec;
  Known& known = checkpoints_[name];
  if (!again) known.sample = testing::make_sample(random_, testing::RandomModel(model_));
  const std::string incoming_name =
      fmt::format("{}{}", name, known.tries > 0 ? fmt::format("-{}", known.tries) : "");
  ++known.tries;
  // A node may have an incoming/ of its own for some of the ranks; the one that commits has rank 0.
  std::map<unsigned, std::vector<uint64_t>> ranks;
  const unsigned writers = static_cast<unsigned>(1 + draw(std::min(options_.nodes, 4u)));
  for (uint64_t rank = 0; rank < spec.sizes.world_size(); ++rank)
    ranks[rank == 0 ? node : (node + static_cast<unsigned>(draw(writers))) % options_.nodes]
        .push_back(rank);
  const std::filesystem::path scratch = options_.directory / ("written-" + incoming_name);
  testing::write_ranks(known.sample, spec, scratch);
  for (const auto& [writer, some] : ranks) {
    const std::optional<Result<>> written = ask(writer, [&](JobStore& store) -> Result<> {
      JobRef job = store.find("job");
      if (job == nullptr) return make_error(Code::kNotFound, "the job is not known here");
      const std::filesystem::path incoming =
          std::filesystem::path(job->files_dir()) / "incoming" / incoming_name;
      std::filesystem::create_directories(incoming / "rank");
      for (uint64_t rank : some) {
        const std::string of_rank = fmt::format("rank/{}", rank);
        std::filesystem::copy(scratch / of_rank, incoming / of_rank,
                              std::filesystem::copy_options::recursive);
      }
      if (writer == node) testing::write_file(incoming / "layout.json", text);
      return ok();
    });
    if (!written || written->has_error()) {
      std::filesystem::remove_all(scratch);
      return note_answer("writing " + incoming_name + " on " + SimCluster::name(writer), written);
    }
  }
  std::filesystem::remove_all(scratch);
  if (how == Write::kAny && chance(30)) sleep(std::chrono::milliseconds(draw(1000)));
  note_begin(node, Decision::kCommit);
  const std::optional<Result<>> answer = ask(node, [&](JobStore& store) -> Result<> {
    JobRef job = store.find("job");
    if (job == nullptr) return make_error(Code::kNotFound, "the job is not known here");
    PTC_TRY(job->commit(incoming_name, name));
    if (job->find_checkpoint(name) == nullptr && !known.removing)
      broken(name + " was committed, and the node does not show it");
    return ok();
  });
  if (answer && answer->has_value()) {
    if (known.acknowledged && !known.removing) broken(name + " was committed twice");
    known.acknowledged = true;
  }
  if (answer && answer->has_error() && answer->error().code() == Code::kAlreadyExists &&
      known.tries == 1)
    broken(name + " is said to exist, and nobody committed it");
  note_answer(
      fmt::format("commit of {} as {} on {}", incoming_name, spec.name(), SimCluster::name(node)),
      answer);
}

/// Into a job that others remove.
void World::write_and_commit_elsewhere(unsigned node) {
  const std::string job_name = fmt::format("other{}", draw(2)),
                    name = fmt::format("o{}", ++last_checkpoint_);
  const std::filesystem::path scratch = options_.directory / ("written-" + name);
  testing::write_ranks(testing::make_sample(random_, testing::RandomModel(model_)), LayoutSpec(),
                       scratch);
  const std::optional<Result<>> answer = ask(node, [&](JobStore& store) -> Result<> {
    (void)store.create_job(job_name);
    JobRef job = store.find(job_name);
    if (job == nullptr) return make_error(Code::kNotFound, "the job is not known here");
    const std::filesystem::path incoming =
        std::filesystem::path(job->files_dir()) / "incoming" / name;
    std::filesystem::create_directories(incoming);
    std::filesystem::copy(scratch / "rank", incoming / "rank",
                          std::filesystem::copy_options::recursive);
    return job->commit(name, name);
  });
  std::filesystem::remove_all(scratch);
  note_answer(fmt::format("commit of {} in {} on {}", name, job_name, SimCluster::name(node)),
              answer);
}

void World::pin(unsigned node) {
  if (checkpoints_.empty()) return;
  const auto known =
      std::next(checkpoints_.begin(), static_cast<ptrdiff_t>(draw(checkpoints_.size())));
  const bool pinned = chance(60);
  const std::optional<Result<>> answer = ask(node, [&](JobStore& store) -> Result<> {
    JobRef job = store.find("job");
    if (job == nullptr) return make_error(Code::kNotFound, "the job is not known here");
    return job->pin_checkpoint(known->first, pinned);
  });
  note_answer(
      fmt::format("{} {} on {}", pinned ? "pin" : "unpin", known->first, SimCluster::name(node)),
      answer);
}

void World::change_attributes(unsigned node, const std::string& job_name) {
  const std::string name = fmt::format("name{}", ++last_attribute_);
  FileAttributes change;
  change.mode = 0750;
  const std::optional<Result<>> answer = ask(node, [&](JobStore& store) -> Result<> {
    if (job_name != "job") (void)store.create_job(job_name);
    JobRef job = store.find(job_name);
    if (job == nullptr) return make_error(Code::kNotFound, "the job is not known here");
    return job->change_attributes(name, change);
  });
  note_answer(fmt::format("attributes of {} in {} on {}", name, job_name, SimCluster::name(node)),
              answer);
}

/// While others go on. Nothing is damaged: what may be missing is what lies on nodes that lost it,
/// or are away.
void World::repair(unsigned node) {
  if (checkpoints_.empty()) return;
  const std::string name =
      std::next(checkpoints_.begin(), static_cast<ptrdiff_t>(draw(checkpoints_.size())))->first;
  std::string report;
  const std::optional<Result<>> answer = ask(node, [&](JobStore& store) -> Result<> {
    JobRef job = store.find("job");
    if (job == nullptr) return make_error(Code::kNotFound, "the job is not known here");
    PTC_TRY(report, job->repair(name));
    return ok();
  });
  const std::string what = fmt::format("repair of {} on {}", name, SimCluster::name(node));
  const bool wrong =
      answer &&
      (answer->has_error() ? answer->error().code() == Code::kCorrupt
                           : !boost::json::parse(report).at("repaired").as_array().empty());
  if (wrong && !lost_a_directory_)
    broken(what + ": " + (answer->has_error() ? answer->error().message() : report));
  say(what + ": " +
      (!answer               ? "no answer"
       : answer->has_error() ? answer->error().message()
                             : "ok"));
}

/// Two keys of one decision: the number of the saving, and what was saved.
void World::change_data_set(unsigned node, const std::string& job_name) {
  const std::optional<Result<>> answer = ask(node, [&](JobStore& store) -> Result<> {
    if (job_name != "job") (void)store.create_job(job_name);
    JobRef job = store.find(job_name);
    if (job == nullptr) return make_error(Code::kNotFound, "the job is not known here");
    const DataSetRecord record(job->meta(), job_name, [&](MetaTransaction change) {
      return job->decide(std::move(change));
    });
    PTC_TRY(record.update([](DataSetState& state) -> Result<> {
      state.saved = DataSetState::Saved{state.saved ? state.saved->number + 1 : 1, User()};
      state.source = fmt::format("source {}", state.saved->number);
      return ok();
    }));
    return ok();
  });
  note_answer(fmt::format("data set of {} on {}", job_name, SimCluster::name(node)), answer);
}

void World::save_rules(unsigned node, const std::string& job_name) {
  const std::optional<Result<>> answer = ask(node, [&](JobStore& store) -> Result<> {
    (void)store.create_job(job_name);
    JobRef job = store.find(job_name);
    if (job == nullptr) return make_error(Code::kNotFound, "the job is not known here");
    return job->save_rules(kSomeRules);
  });
  note_answer(fmt::format("rules of {} on {}", job_name, SimCluster::name(node)), answer);
}

void World::edit(unsigned node) { edit(node, random_layout()); }

/// Then all checkpoints get copies, or lose some.
void World::edit_replicas(unsigned node) {
  std::string text = random_layout();
  cluster_.on(node, [&](JobStore& store) {
    JobRef job = store.find("job");
    if (job == nullptr) return;
    boost::json::object layout = boost::json::parse(job->layout_text()).as_object();
    layout["replicas"] = draw(3);
    text = boost::json::serialize(layout);
  });
  edit(node, text);
}

void World::edit(unsigned node, const std::string& text) {
  const Layout layout = Layout::parse(text).value();
  layouts_.emplace(layout.spec.name(), layout.spec);
  const uint32_t before = replicas_;
  replicas_ = std::min(before, layout.replicas);
  const std::optional<Result<>> answer = ask(node, [&](JobStore& store) -> Result<> {
    JobRef job = store.find("job");
    if (job == nullptr) return make_error(Code::kNotFound, "the job is not known here");
    return job->save_layout(text);
  });
  if (answer && answer->has_value()) replicas_ = layout.replicas;
  note_answer(fmt::format("edit {} on {}", text, SimCluster::name(node)), answer);
}

void World::remove(unsigned node) {
  if (checkpoints_.empty()) return;
  auto known = std::next(checkpoints_.begin(), static_cast<ptrdiff_t>(draw(checkpoints_.size())));
  const std::string name = known->first;
  if (!known->second.acknowledged) return;
  known->second.removing = true;
  const std::optional<Result<>> answer = ask(node, [&](JobStore& store) -> Result<> {
    JobRef job = store.find("job");
    if (job == nullptr) return make_error(Code::kNotFound, "the job is not known here");
    return job->remove_checkpoint(name);
  });
  if (answer && answer->has_value()) known->second.removed = true;
  note_answer(fmt::format("removal of {} on {}", name, SimCluster::name(node)), answer);
}

void World::drain(unsigned node, bool cancel) {
  const std::string drained = SimCluster::name(some_node());
  const std::optional<Result<>> answer = ask(node, [&](JobStore& store) -> Result<> {
    if (!cancel) return store.drain(drained);
    const std::vector<std::string> all = store.drained();
    if (all.empty()) return ok();
    return store.cancel_drain(all.front());
  });
  note_answer(fmt::format("{} {} on {}", cancel ? "end of a drain, not" : "drain of", drained,
                          SimCluster::name(node)),
              answer);
}

void World::make_and_remove_job(unsigned node) {
  const std::string name = fmt::format("other{}", draw(2));
  note_answer(fmt::format("mkdir {} on {}", name, SimCluster::name(node)),
              ask(node, [&](JobStore& store) -> Result<> {
                PTC_TRY(store.create_job(name));
                return ok();
              }));
  sleep(std::chrono::milliseconds(draw(500)));
  remove_job(some_node(), name);
}

void World::remove_job(unsigned node, const std::string& name) {
  const bool force = chance(50);
  note_answer(fmt::format("rmdir {} on {}", name, SimCluster::name(node)),
              ask(node, [&](JobStore& store) { return store.remove_job(name, force); }));
}

void World::read_something(unsigned node) {
  const std::optional<Result<>> answer = ask(node, [&](JobStore& store) -> Result<> {
    JobRef job = store.find("job");
    if (job == nullptr) return ok();
    const std::vector<CheckpointRef> all = job->checkpoints();
    if (all.empty()) return ok();
    const CheckpointRef checkpoint = all[draw(all.size())];
    const LayoutSpec spec = checkpoint->stored()->spec;
    check_rank(*checkpoint, spec, draw(spec.sizes.world_size()),
               fmt::format("{} on {}", checkpoint->name(), SimCluster::name(node)), false);
    return ok();
  });
  note_answer("read on " + SimCluster::name(node), answer);
}

/// Files that were open while others went on: moved, removed, or both.
void World::read_late(unsigned node) {
  const std::optional<Result<>> answer = ask(node, [&](JobStore& store) -> Result<> {
    JobRef job = store.find("job");
    if (job == nullptr) return ok();
    const std::vector<CheckpointRef> all = job->checkpoints();
    if (all.empty()) return ok();
    const CheckpointRef checkpoint = all[draw(all.size())];
    const LayoutSpec spec = chance(50) ? checkpoint->stored()->spec
                                       : std::next(layouts_.begin(), draw(layouts_.size()))->second;
    const uint64_t faults = faults_;
    const bool calm = is_calm() && checkpoint->lost_tensors().empty();
    bool in_calm = false;
    check_rank(
        *checkpoint, spec, draw(spec.sizes.world_size()),
        fmt::format("{} on {}, opened a while ago", checkpoint->name(), SimCluster::name(node)),
        [&] {
          sleep(std::chrono::milliseconds(draw(20'000)));
          return in_calm = calm && faults == faults_;
        });
    say(fmt::format("{} on {} was read late{}{}", checkpoint->name(), SimCluster::name(node),
                    in_calm ? ", nothing failed" : "",
                    checkpoint->removed() ? ", removed by then" : ""));
    return ok();
  });
  note_answer("late read on " + SimCluster::name(node), answer);
}

}  // namespace ptc::sim
