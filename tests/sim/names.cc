// Names that are used again: a job is removed and made anew, and so are its checkpoint and the
// directory in incoming/ that it comes from. Each time other bytes are committed; who reads them by
// that name must get those of one time, whole.
#include <filesystem>

#include "tests/sim/world.h"

namespace ptc::sim {
namespace {

using namespace std::chrono_literals;
namespace fs = std::filesystem;

constexpr const char* kAgain = "again";  // the job
constexpr const char* kSame = "same";    // the checkpoint, and where it is written
constexpr auto kRename = 1700ms;         // as the mount's
constexpr unsigned kMostRenames = 8;

Result<JobRef> job_in(JobStore& store) {
  if (JobRef job = store.find(kAgain)) return job;
  return make_error(Code::kNotFound, "the job is not known here");
}

}  // namespace

void World::use_names_again() {
  if (again_.busy) return;
  again_.busy = true;
  for (uint64_t rounds = 3 + draw(3); rounds > 0 && !over_; --rounds) {
    const unsigned node = some_node();
    note_answer(fmt::format("mkdir {} on {}", kAgain, SimCluster::name(node)),
                ask(node, [&](JobStore& store) -> Result<> {
                  if (store.find(kAgain) != nullptr) return ok();
                  PTC_TRY(store.create_job(kAgain));
                  return ok();
                }));
    again_.times.push_back(testing::make_sample(random_, testing::RandomModel(model_)));
    if (write_again(node)) commit_again(node);
    sleep(std::chrono::milliseconds(draw(1500)));
    (void)read_again(some_node(), false);
    if (chance(50)) hear_late(some_node());
    remove_again(some_node());
  }
  again_.busy = false;
}

/// Of what was removed it may hear only when there is another of the name.
void World::hear_late(unsigned node) {
  if (over_) return;
  const std::string what = SimCluster::name(node) + " hears late";
  say(what);
  note_fault();
  cluster_.network().set_slow(node, true);
  until(now() + std::chrono::milliseconds(500 + draw(3000)), what,
        [this, node] { cluster_.network().set_slow(node, false); });
}

/// The last time's bytes, as a job does that knows nothing of what was there: away with it, and
/// written anew.
bool World::write_again(unsigned node) {
  const uint64_t tp = 1 + draw(2);
  const std::string layout = fmt::format(R"({{"tp": {}, "pp": 1, "dp": 1}})", tp);
  const fs::path scratch = options_.directory / "written-again";
  fs::remove_all(scratch);
  testing::write_ranks(again_.times.back(), Layout::parse(layout).value().spec, scratch);
  bool written = true;
  for (unsigned other = 0; other < options_.nodes; ++other) {
    const uint64_t rank = (other + options_.nodes - node) % options_.nodes;
    const std::optional<Result<>> answer = ask(other, [&](JobStore& store) -> Result<> {
      PTC_TRY(auto job, job_in(store));
      const fs::path incoming = fs::path(job->files_dir()) / "incoming" / kSame;
      std::error_code error;  // of a commit before it may come and go meanwhile
      fs::remove_all(incoming, error);
      if (rank >= tp) return ok();
      fs::create_directories(incoming / "rank", error);
      const std::string of_rank = fmt::format("rank/{}", rank);
      fs::copy(scratch / of_rank, incoming / of_rank, fs::copy_options::recursive, error);
      if (rank == 0 && !error) testing::write_file(incoming / "layout.json", layout);
      return error ? Result<>(make_error(Code::kBusy, "{}", error.message())) : ok();
    });
    written = written && answer && answer->has_value();
    if (rank < tp)
      note_answer(fmt::format("writing {} again on {}", kSame, SimCluster::name(other)), answer);
  }
  fs::remove_all(scratch);
  return written;
}

void World::commit_again(unsigned node) {
  const std::optional<size_t> shown_before = std::exchange(again_.shown, std::nullopt);
  const bool was_gone = std::exchange(again_.gone, false);
  const size_t time = again_.times.size() - 1;
  std::optional<Result<>> answer;
  for (unsigned tries = 0; tries < kMostRenames && !over_; ++tries) {
    answer = ask(node, [&](JobStore& store) -> Result<> {
      PTC_TRY(auto job, job_in(store));
      return job->commit(kSame, kSame, kRename);
    });
    if (!answer || answer->has_value() || answer->error().errno_value() != EAGAIN) break;
    sleep(std::chrono::milliseconds(100 + draw(500)));
  }
  note_answer(
      fmt::format("commit of {} again, time {}, on {}", kSame, time, SimCluster::name(node)),
      answer);
  if (answer && answer->has_value()) {
    again_.in_doubt = false;
    again_.shown = time;
    const uint64_t lives = cluster_.lives(node);
    const std::optional<size_t> here = read_again(node, false);
    if (here && *here != time && !cluster_.died_since(node, lives))
      broken(fmt::format("{} was committed, time {}, and {} shows time {}", kSame, time,
                         SimCluster::name(node), *here));
  } else if (answer && answer->error().code() == Code::kAlreadyExists) {
    again_.shown = shown_before;
    again_.gone = was_gone;
  } else {
    again_.in_doubt = true;
  }
}

void World::remove_again(unsigned node) {
  const uint64_t what = draw(6);
  if (what == 4) return;  // what is written next finds the name taken
  if (what == 5) {
    const std::string layout = random_layout();
    return note_answer(fmt::format("edit of {} {} on {}", kAgain, layout, SimCluster::name(node)),
                       ask(node, [&](JobStore& store) -> Result<> {
                         PTC_TRY(auto job, job_in(store));
                         return job->save_layout(layout);
                       }));
  }
  again_.shown.reset();
  again_.gone = false;
  const std::optional<Result<>> answer = ask(node, [&](JobStore& store) -> Result<> {
    if (what > 1) return store.remove_job(kAgain, true);
    PTC_TRY(auto job, job_in(store));
    return job->remove_checkpoint(kSame);
  });
  note_answer(fmt::format("removal of {} on {}", what > 1 ? kAgain : kSame, SimCluster::name(node)),
              answer);
  if (!answer || answer->has_error()) return;
  if (what > 1) again_.in_doubt = false;  // nothing comes into a job that is gone
  again_.gone = !again_.in_doubt;
}

/// Of which time the checkpoint is that the node shows; nullopt: it shows none, or nobody can read
/// it now.
std::optional<size_t> World::read_again(unsigned node, bool must_read) {
  std::optional<size_t> time;
  const std::string here = fmt::format("{} of {} on {}", kSame, kAgain, SimCluster::name(node));
  (void)ask(node, [&](JobStore& store) -> Result<> {
    const JobRef job = store.find(kAgain);
    const CheckpointRef checkpoint = job != nullptr ? job->find_checkpoint(kSame) : nullptr;
    if (checkpoint == nullptr) return ok();
    const LayoutSpec spec = checkpoint->stored()->spec;
    const uint64_t rank = draw(spec.sizes.world_size());
    const std::string id = checkpoint->manifest().id;
    auto content = [&]() -> Result<std::map<std::string, std::string>> {
      std::map<std::string, std::string> files;
      PTC_TRY(auto set, checkpoint->rank_files(spec, rank));
      for (size_t i = 0; i < set->entries().size(); ++i) {
        PTC_TRY(auto file, set->open(i));
        std::string& bytes = files[set->entries()[i].path];
        bytes.resize(file->bytes());
        PTC_TRY(file->read(0, std::as_writable_bytes(std::span(bytes))));
      }
      return files;
    }();
    if (content.has_error()) {
      if (must_read) broken(here + " cannot be read: " + content.error().message());
      return ok();
    }
    size_t tensors = 0;  // none of a stage without layers, which is the same at all times
    auto is_of = [&](const testing::Sample& sample) {
      for (const auto& [path, parts] : testing::slow_rank(sample, spec, rank)) {
        if (!content.value().contains(path) || difference(content.value().at(path), parts))
          return false;
        tensors += parts.size();
      }
      return true;
    };
    for (size_t i = 0; i < again_.times.size() && !time; ++i)
      if (is_of(again_.times[i])) time = i;
    if (!time) broken(here + " has the bytes of no time at which it was written");
    if (tensors == 0) time.reset();
    if (!time) return ok();
    for (const auto& [other, of] : again_.time_of)
      if ((other == id) != (of == *time))
        broken(fmt::format("{}: {} has time {}, and {} has time {}", here, id, *time, other, of));
    again_.time_of.emplace(id, *time);
    return ok();
  });
  return time;
}

/// When all is healed.
void World::check_again() {
  if (again_.times.empty()) return;
  for (unsigned node = 0; node < options_.nodes; ++node) {
    const std::optional<size_t> time = read_again(node, again_.shown && !lost_a_directory_);
    const std::string here = SimCluster::name(node);
    bool there = false;
    cluster_.on(node, [&](JobStore& store) {
      const JobRef job = store.find(kAgain);
      there = job != nullptr && job->find_checkpoint(kSame) != nullptr;
    });
    if (again_.gone && there)
      broken(fmt::format("{} still shows {}, which was removed", here, kSame));
    if (again_.shown && !there)
      broken(fmt::format("{} does not have {} any more, of time {}", here, kSame, *again_.shown));
    if (again_.shown && time && *time != *again_.shown)
      broken(fmt::format("{} shows {} of time {}, not {}", here, kSame, *time, *again_.shown));
  }
}

}  // namespace ptc::sim
