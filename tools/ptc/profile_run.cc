#include "tools/ptc/profile_run.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <set>
#include <utility>

#include "store/base/file.h"
#include "tools/planner/library/trials.h"
#include "tools/planner/profile/input.h"
#include "tools/planner/spase/gantt.h"
#include "tools/ptc/command.h"
#include "tools/ptc/interruptions.h"
#include "tools/ptc/text.h"

namespace ptc::cli {
namespace {

constexpr size_t kMostJobsFile = 16 << 20, kMostTable = 64 << 20;

/// Where it was installed, or in the tree that it was built of.
Result<std::string> usual_library() {
  std::error_code error;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", error);
  for (const char* place :
       {"../share/ptcfs/techniques", "../../tools/planner/library/techniques"}) {
    const std::filesystem::path library = (program.parent_path() / place).lexically_normal();
    if (std::filesystem::is_directory(library, error)) return library.string();
  }
  return invalid_argument("the techniques that come along are not beside {}: --library DIR",
                          program.string());
}

/// A directory that goes with it.
class ScratchDirectory {
 public:
  static Result<ScratchDirectory> make() {
    const char* parent = std::getenv("TMPDIR");
    std::string path =
        std::string(parent != nullptr && *parent != '\0' ? parent : "/tmp") + "/ptc-profile-XXXXXX";
    if (::mkdtemp(path.data()) == nullptr) return errno_error(errno, path);
    return ScratchDirectory(path);
  }
  ScratchDirectory(ScratchDirectory&& other) noexcept : path_(std::exchange(other.path_, "")) {}
  ~ScratchDirectory() {
    if (!path_.empty()) (void)remove_tree(AT_FDCWD, path_);
  }
  const std::string& path() const { return path_; }

 private:
  explicit ScratchDirectory(std::string path) : path_(std::move(path)) {}
  std::string path_;
};

Result<std::vector<std::string>> chosen(const ProfileRunOptions& options,
                                        const std::string& library) {
  PTC_TRY(auto names, planner::techniques_in(library));
  const std::set<std::string> known(names.begin(), names.end());
  for (const std::string& name : options.techniques)
    if (!known.contains(name))
      return invalid_argument("{} has no technique {}{}", library, ptc::quoted(name),
                              planner::what_there_is(name, known));
  return options.techniques.empty() ? names : options.techniques;
}

}  // namespace

Result<int> run_profile_run(const ProfileRunOptions& options) {
  PTC_TRY(const std::string text, planner::read_input(options.file, kMostJobsFile));
  PTC_TRY(const auto file, planner::parse_jobs_file(text, planner::input_name(options.file)));
  const std::filesystem::path base = planner::has_a_place(options.file)
                                         ? std::filesystem::absolute(options.file).parent_path()
                                         : std::filesystem::current_path();
  if (!options.output && file.profiles.size() != 1)
    return invalid_argument("{}: {} profiles: -o says which is written", file.place({"profiles"}),
                            file.profiles.size());
  const std::string output = options.output ? *options.output : (base / file.profiles[0]).string();
  std::vector<planner::ProfileRow> rows;
  if (::access(output.c_str(), F_OK) == 0) {
    PTC_TRY(const std::string table, planner::read_input(output, kMostTable));
    PTC_TRY(rows, planner::parse_profiles(table, output));
  }
  if (options.again)
    std::erase_if(rows, [](const planner::ProfileRow& row) { return !row.iteration_s; });
  const std::string device = options.device.empty() ? file.device : options.device;
  uint32_t gpus = 1;
  for (const planner::NodeOfCluster& node : file.nodes) gpus = std::max(gpus, node.gpus);
  if (options.gpus) gpus = static_cast<uint32_t>(std::stoul(*options.gpus));

  planner::TrialSettings settings;
  if (options.library) {
    settings.library = std::filesystem::absolute(*options.library).string();
  } else {
    PTC_TRY(settings.library, usual_library());
  }
  PTC_TRY(const auto techniques, chosen(options, settings.library));
  std::vector<planner::ProfileRow> of_device;
  for (const planner::ProfileRow& row : rows)
    if (row.device == device) of_device.push_back(row);
  PTC_TRY(const auto trials, planner::trials_of(file, techniques, gpus, of_device));
  PTC_TRY(const auto scratch, ScratchDirectory::make());
  settings.scratch = scratch.path();
  settings.directory = base.string();
  settings.gpus = gpus;
  settings.within_s = std::stod(options.within);
  settings.one_at_a_time = options.one_at_a_time;

  const Interruptions interruptions(Interruptions::kFirst);
  size_t done = 0, had_none = 0;
  const auto on_trial = [&](const planner::Trial& trial, planner::ProfileRow row,
                            const std::string& none) -> Result<> {
    row.device = device;
    if (row.iteration_s)
      std::erase_if(rows, [&](const planner::ProfileRow& computed) {
        return computed.is_computed() && computed.model == row.model &&
               computed.technique == row.technique && computed.device == row.device &&
               computed.batch == row.batch && computed.tp == row.tp && computed.pp == row.pp &&
               computed.dp == row.dp && computed.accumulation == row.accumulation;
      });
    rows.push_back(row);
    PTC_TRY(write_file_atomically(AT_FDCWD, output, planner::profiles_text(rows, output)));
    had_none += !none.empty();
    fmt::print("{}/{} {} {} on {}, batch {}: {}\n", ++done, trials.size(), printable(trial.model),
               printable(trial.technique), planner::counted(trial.gpus, "GPU"), trial.batch,
               none.empty()
                   ? fmt::format("{} ({:.4g} samples/s)", planner::time_text(*row.iteration_s),
                                 static_cast<double>(row.batch) / *row.iteration_s)
                   : "none: " + printable(none));
    std::fflush(stdout);
    return ok();
  };
  PTC_TRY(planner::run_trials(trials, settings, on_trial, [] { return interrupted.load(); }));
  fmt::print("{}: {} now, {} of them without a time; {} in all\n", printable(output),
             planner::counted(done, "trial"), had_none, rows.size());
  if (!interrupted) return kDone;
  fmt::print(stderr, "ptc: interrupted: the same again goes on with the {} that are left\n",
             trials.size() - done);
  constexpr int kInterrupted = 130;
  return kInterrupted;
}

}  // namespace ptc::cli
