// What users do: write and commit, edit, remove, drain, make and remove jobs, read.
#include <thread>

#include "tests/sim/world.h"

namespace ptc::sim {

void World::operate() {
  const unsigned node = some_node();
  const uint64_t what = draw(100);
  if (what < 25 || checkpoints_.empty()) in_background("commit", node, [this](unsigned n) { write_and_commit(n); });
  else if (what < 60) in_background("edit", node, [this](unsigned n) { edit(n); });
  else if (what < 66) in_background("remove", node, [this](unsigned n) { remove(n); });
  else if (what < 74) in_background("drain", node, [this](unsigned n) { drain(n); });
  else if (what < 79) in_background("job", node, [this](unsigned n) { make_and_remove_job(n); });
  else if (what < 90) in_background("read", node, [this](unsigned n) { read_something(n); });
  else in_background("late read", node, [this](unsigned n) { read_late(n); });
}

void World::change_something(unsigned node) {
  const uint64_t what = draw(100);
  if (what < 40 || checkpoints_.empty()) in_background("commit", node, [this](unsigned n) { write_and_commit(n); });
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
  say(what + ": " + (!answer ? "no answer" : answer->has_value() ? "ok" : answer->error().message()));
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
  const uint64_t least = options_.nodes > 100 && chance(70) ? 100 : 1;  // parts on more nodes than a transaction has keys
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
  return fmt::format(R"({{"tp": {}, "pp": {}, "dp": {}, "optimizer": "{}", "replicas": {}{}}})", spec.sizes.tp,
                     spec.sizes.pp, spec.sizes.dp, optimizer, chance(75) ? 1 : draw(3),
                     devices.empty() ? "" : fmt::format(R"(, "devices": [{}])", devices));
}

void World::write_and_commit(unsigned node) {
  const std::string name = fmt::format("c{}", ++last_checkpoint_);
  std::string text = random_layout();
  if (chance(50))  // as a job that runs in the layout that it was told
    cluster_.on(node, [&](JobStore& store) {
      if (JobRef job = store.find("job")) text = job->layout_text();
    });
  const LayoutSpec spec = Layout::parse(text).value().spec;
  Known& known = checkpoints_[name];
  known.sample = testing::make_sample(random_, testing::RandomModel(model_));
  // A node may have an incoming/ of its own for some of the ranks; the one that commits has rank 0.
  std::map<unsigned, std::vector<uint64_t>> ranks;
  const unsigned writers = static_cast<unsigned>(1 + draw(std::min(options_.nodes, 4u)));
  for (uint64_t rank = 0; rank < spec.sizes.world_size(); ++rank)
    ranks[rank == 0 ? node : (node + static_cast<unsigned>(draw(writers))) % options_.nodes].push_back(rank);
  const std::filesystem::path scratch = options_.directory / ("written-" + name);
  testing::write_ranks(known.sample, spec, scratch);
  for (const auto& [writer, some] : ranks) {
    const std::optional<Result<>> written = ask(writer, [&](JobStore& store) -> Result<> {
      JobRef job = store.find("job");
      if (job == nullptr) return make_error(Code::kNotFound, "the job is not known here");
      const std::filesystem::path incoming = std::filesystem::path(job->files_dir()) / "incoming" / name;
      std::filesystem::create_directories(incoming / "rank");
      for (uint64_t rank : some) {
        const std::string of_rank = fmt::format("rank/{}", rank);
        std::filesystem::copy(scratch / of_rank, incoming / of_rank, std::filesystem::copy_options::recursive);
      }
      if (writer == node) testing::write_file(incoming / "layout.json", text);
      return ok();
    });
    if (!written || written->has_error()) {
      std::filesystem::remove_all(scratch);
      return note_answer("writing " + name + " on " + SimCluster::name(writer), written);
    }
  }
  std::filesystem::remove_all(scratch);
  if (chance(30)) sleep(std::chrono::milliseconds(draw(1000)));
  const std::optional<Result<>> answer = ask(node, [&](JobStore& store) -> Result<> {
    JobRef job = store.find("job");
    if (job == nullptr) return make_error(Code::kNotFound, "the job is not known here");
    PTC_TRY(job->commit(name, name));
    if (job->find_checkpoint(name) == nullptr && !known.removing)
      broken(name + " was committed, and the node does not show it");
    return ok();
  });
  if (answer && answer->has_value()) known.acknowledged = true;
  if (answer && answer->has_error() && answer->error().code() == Code::kAlreadyExists)
    broken(name + " is said to exist, and nobody committed it");
  note_answer(fmt::format("commit of {} as {} on {}", name, spec.name(), SimCluster::name(node)), answer);
}

void World::edit(unsigned node) {
  const std::string text = random_layout();
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

void World::drain(unsigned node) {
  const std::string drained = SimCluster::name(some_node());
  const bool cancel = chance(50);
  const std::optional<Result<>> answer = ask(node, [&](JobStore& store) -> Result<> {
    if (!cancel) return store.drain(drained);
    const std::vector<std::string> all = store.drained();
    if (all.empty()) return ok();
    return store.cancel_drain(all.front());
  });
  note_answer(fmt::format("{} {} on {}", cancel ? "end of a drain, not" : "drain of", drained, SimCluster::name(node)),
              answer);
}

void World::make_and_remove_job(unsigned node) {
  const std::string name = fmt::format("other{}", draw(2));
  const unsigned elsewhere = some_node();
  note_answer(fmt::format("mkdir {} on {}", name, SimCluster::name(node)),
              ask(node, [&](JobStore& store) -> Result<> {
                PTC_TRY(store.create_job(name));
                return ok();
              }));
  sleep(std::chrono::milliseconds(draw(500)));
  note_answer(fmt::format("rmdir {} on {}", name, SimCluster::name(elsewhere)),
              ask(elsewhere, [&](JobStore& store) { return store.remove_job(name, chance(50)); }));
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
    const LayoutSpec spec = chance(50) ? checkpoint->stored()->spec : std::next(layouts_.begin(), draw(layouts_.size()))->second;
    const uint64_t faults = faults_;
    const bool calm = is_calm() && checkpoint->lost_tensors().empty();
    bool in_calm = false;
    check_rank(*checkpoint, spec, draw(spec.sizes.world_size()),
               fmt::format("{} on {}, opened a while ago", checkpoint->name(), SimCluster::name(node)), [&] {
                 sleep(std::chrono::milliseconds(draw(20'000)));
                 return in_calm = calm && faults == faults_;
               });
    say(fmt::format("{} on {} was read late{}{}", checkpoint->name(), SimCluster::name(node), in_calm ? ", nothing failed" : "",
                    checkpoint->removed() ? ", removed by then" : ""));
    return ok();
  });
  note_answer("late read on " + SimCluster::name(node), answer);
}

}  // namespace ptc::sim
