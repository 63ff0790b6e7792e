// ptc import: copies a directory into incoming/ and commits it.
#include <fcntl.h>
#include <fmt/core.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <set>
#include <thread>

#include "reshard/checkpoint/deepspeed_name.h"
#include "reshard/checkpoint/megatron_names.h"
#include "reshard/intake/dcp_files.h"
#include "reshard/intake/megatron_tree.h"
#include "reshard/ptc/parallel_config.h"
#include "store/base/file.h"
#include "store/base/shell_word.h"
#include "store/base/size_text.h"
#include "tools/cli/numbers.h"
#include "tools/ptc/command.h"
#include "tools/ptc/copy_tree.h"
#include "tools/ptc/fields.h"
#include "tools/ptc/incoming_dir.h"
#include "tools/ptc/interruptions.h"
#include "tools/ptc/job_status.h"
#include "tools/ptc/layout_edit.h"
#include "tools/ptc/leftovers.h"
#include "tools/ptc/mount.h"
#include "tools/ptc/text.h"

namespace ptc::cli {
namespace {

namespace fs = std::filesystem;

constexpr const char* kWholeModel = "tp1-pp1-dp1";  // the layout of a model's directory

struct ImportOptions {
  std::string job;
  std::string directory;
  std::string name = "base";
  std::optional<uint32_t> rank;
  std::string layout;
  bool move = false;
  bool force = false;
};

bool is_directory(const std::string& path) {
  std::error_code error;
  return fs::is_directory(path, error);
}

bool is_file(const std::string& path) {
  std::error_code error;
  return fs::is_regular_file(path, error);
}

std::string base_name(const std::string& path) { return path.substr(path.rfind('/') + 1); }

bool exists(const std::string& path) {
  struct stat info {};
  return ::lstat(path.c_str(), &info) == 0;
}

/// A model's folder in a Hugging Face cache holds its files under snapshots/<what refs/main says>.
std::string inside_hub_cache(const std::string& directory) {
  auto reference = read_text_file(AT_FDCWD, directory + "/refs/main", 256);
  if (!reference) return directory;
  std::string commit = reference.value().substr(0, reference.value().find('\n'));
  std::string snapshot = directory + "/snapshots/" + commit;
  return !commit.empty() && is_directory(snapshot) ? snapshot : directory;
}

bool has_ranks(const std::string& directory) {
  auto names = list_directory(directory + "/rank");
  if (!names) return false;
  return std::any_of(names.value().begin(), names.value().end(), [](const std::string& name) {
    return name.find_first_not_of("0123456789") == std::string::npos;
  });
}

/// What Megatron-LM saved (`--ckpt-format torch`): iter_0000100/mp_rank_00/…, or one such
/// iteration.
bool is_megatron_tree(const std::string& directory) {
  const auto names = list_directory(directory);
  return names && std::any_of(names.value().begin(), names.value().end(), [&](auto& name) {
           if (!is_directory(directory + "/" + name)) return false;
           return megatron_place(name + "/.") ||
                  (is_megatron_iteration(name) && is_megatron_tree(directory + "/" + name));
         });
}

/// What Megatron-LM saved with its distributed checkpointing (`--ckpt-format torch_dist`), and
/// what else has iterations of dcp.save's: iter_0000100/.metadata.
bool is_distributed_run(const std::string& directory) {
  const auto names = list_directory(directory);
  return names && std::any_of(names.value().begin(), names.value().end(), [&](auto& name) {
           return is_megatron_iteration(name) &&
                  exists(fmt::format("{}/{}/{}", directory, name, kDcpMetadata));
         });
}

/// Of several iterations the one that latest_checkpointed_iteration.txt names.
Result<std::string> iteration_of(const std::string& directory) {
  PTC_TRY(const auto names, list_directory(directory));
  std::vector<std::string> iterations;
  for (const std::string& name : names)
    if (is_megatron_iteration(name)) iterations.push_back(name);
  if (iterations.size() < 2) return iterations.empty() ? std::string() : iterations[0];
  if (auto text = read_text_file(AT_FDCWD, directory + "/latest_checkpointed_iteration.txt", 64)) {
    std::string latest = text.value().substr(0, text.value().find_first_of(" \r\n"));
    if (latest != "release" && latest.size() < 7) latest.insert(0, 7 - latest.size(), '0');
    if (latest != "release") latest.insert(0, "iter_");
    if (std::find(iterations.begin(), iterations.end(), latest) != iterations.end()) return latest;
  }
  return invalid_argument(
      "{} has {} iterations, and no latest_checkpointed_iteration.txt that "
      "names one: say which, as {}/{}",
      directory, iterations.size(), directory, iterations.back());
}

bool is_rubbish(const std::string& path) {
  size_t slash = path.find_last_of('/');
  std::string_view name = std::string_view(path).substr(slash == std::string::npos ? 0 : slash + 1);
  return name == ".git" || name == ".cache";
}

/// `into`: where they are put, below what is committed.
Result<CopyList> files_of_iteration(const std::string& directory, const std::string& into) {
  PTC_TRY(const std::string iteration, iteration_of(directory));
  std::set<std::string> others;
  auto list = list_files(directory, into, [&](const std::string& path) {
    const std::string top = path.substr(0, path.find('/'));
    const bool other = is_megatron_iteration(top) && top != iteration;
    if (other) others.insert(top);
    return is_rubbish(path) || other;
  });
  if (list && !others.empty())
    fmt::print(stderr, "ptc: {} is what latest_checkpointed_iteration.txt names; left out: {}\n",
               iteration, fmt::join(others, ", "));
  return list;
}

/// Directories of DeepSpeed's: global_step100, global_step200, ….
std::vector<std::string> deepspeed_tags(const std::string& directory) {
  std::vector<std::string> tags;
  const auto names = list_directory(directory);
  if (!names) return tags;
  for (const std::string& name : names.value()) {
    const auto files = list_directory(directory + "/" + name);
    if (files && std::any_of(files.value().begin(), files.value().end(), [&](auto& file) {
          return deepspeed_name(name + "/" + file).has_value();
        }))
      tags.push_back(name);
  }
  return tags;
}

/// Of several the one that `latest` names, as DeepSpeed loads; what is in the others is left out.
Result<CopyList> files_of_deepspeed_tags(const std::string& directory,
                                         const std::vector<std::string>& tags) {
  std::string tag;
  if (auto text = read_text_file(AT_FDCWD, directory + "/latest", 4096))
    tag = text.value().substr(0, text.value().find_first_of("\r\n"));
  if (std::find(tags.begin(), tags.end(), tag) == tags.end())
    return invalid_argument(
        "{} has {} checkpoints of DeepSpeed's, and no file 'latest' that names one: say which, as "
        "{}/{}",
        directory, tags.size(), directory, tags.back());
  std::vector<std::string> others;
  std::copy_if(tags.begin(), tags.end(), std::back_inserter(others),
               [&](const std::string& one) { return one != tag; });
  fmt::print(stderr, "ptc: {} is what 'latest' names; left out: {}\n", tag,
             fmt::join(others, ", "));
  return list_files(directory, "rank/0", [&](const std::string& path) {
    return is_rubbish(path) ||
           std::find(others.begin(), others.end(), path.substr(0, path.find('/'))) != others.end();
  });
}

/// A checkpoint that is one file, of torch.save's or of safetensors.
Result<CopyList> file_alone(const ImportOptions& options) {
  struct stat info {};
  if (::stat(options.directory.c_str(), &info) != 0) return errno_error(errno, options.directory);
  const auto bytes = static_cast<uint64_t>(info.st_size);
  CopyList list;
  list.items.push_back(
      {options.directory,
       fmt::format("rank/{}/{}", options.rank.value_or(0), base_name(options.directory)), bytes,
       readers_of(info.st_mode, info.st_gid)});
  list.bytes = bytes;
  return list;
}

Result<CopyList> files_of(const ImportOptions& options) {
  if (is_file(options.directory)) return file_alone(options);
  std::string directory = inside_hub_cache(options.directory);
  if (options.rank) return list_files(directory, fmt::format("rank/{}", *options.rank), is_rubbish);
  if (!has_ranks(directory) && is_megatron_tree(directory))
    return files_of_iteration(directory, "");
  if (!has_ranks(directory) && is_distributed_run(directory))
    return files_of_iteration(directory, "rank/0");
  if (!has_ranks(directory)) {
    if (const auto tags = deepspeed_tags(directory); tags.size() > 1)
      return files_of_deepspeed_tags(directory, tags);
    return list_files(directory, "rank/0", is_rubbish);
  }
  std::vector<std::string> others;
  auto list = list_files(directory, "", [&](const std::string& path) {
    bool ours = path == "rank" || path.starts_with("rank/") || path == "layout.json";
    if (!ours) others.push_back(path);
    return !ours || is_rubbish(path);
  });
  if (list && !others.empty())
    fmt::print(stderr, "ptc: not under rank/, left out: {}\n", fmt::join(others, ", "));
  return list;
}

Result<> check_not_committed(const Target& target) {
  if (!exists(target.checkpoint_dir())) return ok();
  return make_error(Code::kAlreadyExists, "{} is already committed; another name: --name NAME",
                    target.name());
}

/// Whether the job was made now.
Result<bool> make_job(const Target& target) {
  constexpr auto kPatience = std::chrono::seconds(20);  // with etcd, as others have it
  constexpr auto kKnownToBeAway = std::chrono::seconds(2);
  constexpr auto kPause = std::chrono::milliseconds(100);
  using Clock = std::chrono::steady_clock;
  if (exists(target.job_dir())) return false;
  const auto deadline = Clock::now() + kPatience;
  std::optional<Clock::time_point> away_since;
  while (::mkdir(target.job_dir().c_str(), 0777) != 0) {
    const int error = errno;
    if (error == EEXIST) return false;
    if (error == EINVAL)
      return invalid_argument(
          "{} cannot be the name of a job: at most 255 bytes of UTF-8, and no '.' in front",
          ptc::quoted(target.job));
    if (error != EAGAIN) return errno_error(error, "making job " + target.job);
    const std::string away = agreement_text(target.mount);
    if (away.empty()) away_since.reset();
    else if (!away_since) away_since = Clock::now();
    if (away_since && Clock::now() - *away_since >= kKnownToBeAway)
      return make_error(
          Code::kUnavailable,
          "job {} cannot be made: agreement is {}: import again when it is back, or on "
          "another node",
          target.job, away);
    if (Clock::now() > deadline)
      return make_error(Code::kUnavailable,
                        "job {} is not made: what the nodes agree through does not answer, or not "
                        "soon; ptc status says more, and the same import again goes on",
                        target.job);
    std::this_thread::sleep_for(kPause);
  }
  fmt::print("{}: new job\n", target.job);
  return true;
}

/// What this import has made of the job, as long as nothing is in it: a failure takes it back.
class NewJob {
 public:
  NewJob(const Target& target, bool is_new) : target_(target), is_new_(is_new) {}
  NewJob(const NewJob&) = delete;
  ~NewJob() { remove(); }
  bool is_new() const { return is_new_; }
  void keep() { kept_ = true; }
  /// It stays where somebody else has put something in it.
  void remove() {
    if (is_new_ && !kept_ && ::rmdir(target_.job_dir().c_str()) == 0)
      fmt::print(stderr, "ptc: job {} is removed again: nothing is in it\n", target_.job);
    kept_ = true;
  }

 private:
  const Target& target_;
  bool is_new_, kept_ = false;
};

/// A fresh incoming/<name>.
Result<IncomingDir> prepare(const Target& target, const ImportOptions& options) {
  PTC_TRY(check_not_committed(target));
  const std::string incoming = target.job_dir() + "/incoming/" + target.checkpoint;
  auto staging = IncomingDir::make(incoming, options.force);
  if (!staging && staging.error().code() == Code::kAlreadyExists)
    return make_error(
        Code::kAlreadyExists,
        "{} is already there: {}. Replace it with --force; or, if you know that it is whole, "
        "commit it:\n  mv {} {}/checkpoints/",
        incoming,
        exists(incoming + ".error")
            ? fmt::format("it was refused, and {}.error says why", incoming)
            : "another import is under way, or an earlier attempt was ended halfway",
        shell_word(incoming), shell_word(target.job_dir()));
  PTC_TRY(auto made, std::move(staging));
  auto still_free = check_not_committed(target);  // by whoever had the directory before
  if (still_free) return made;
  made.remove();
  return std::move(still_free).error();
}

Result<> save_layout(const std::string& directory, const json::object& layout) {
  const std::string path = directory + "/layout.json";
  std::string text = pretty_json(layout);
  PTC_TRY(auto fd, open_file(AT_FDCWD, path, O_WRONLY | O_CREAT | O_TRUNC, 0666));
  PTC_TRY(write_exactly(fd.get(), std::as_bytes(std::span(text)), 0));
  if (::close(fd.release()) != 0) return errno_error(errno, path);
  return ok();
}

Result<> write_layout(const std::string& incoming, const std::string& layout) {
  if (layout.empty()) return ok();
  PTC_TRY(auto object, layout_of_file_or_name(layout));
  return save_layout(incoming, object);
}

/// The layout that the checkpoint was written in: that which was given, or lay beside rank/, or
/// what the daemon found. kInvalidArgument: it cannot be said in one.
Result<json::object> layout_written(const Target& target, const ImportOptions& options) {
  if (!options.layout.empty()) return layout_of_file_or_name(options.layout);
  const std::string beside = options.directory + "/layout.json";
  if (has_ranks(options.directory) && exists(beside)) return layout_of_file_or_name(beside);
  PTC_TRY(const auto meta, read_json_file(target.checkpoint_dir() + "/meta.json"));
  return layout_of_name(text_field(meta, "written_as"));
}

/// A job that was made for this checkpoint is in the layout of those who wrote it: nothing is moved
/// before somebody asks for it.
void take_layout(const Target& target, const ImportOptions& options) {
  auto layout = layout_written(target, options);
  auto status = read_status(target);
  if (!status || status.value().wanted != kWholeModel) return;
  if (!layout) {
    fmt::print(stderr, "ptc: {} stays in layout {}, not in that it was written in: {}\n",
               target.job, kWholeModel, layout.error().message());
    return;
  }
  if (layout.value() == layout_of_name(kWholeModel).value()) return;
  if (auto saved = save_layout(target.job_dir(), layout.value()); !saved) {
    fmt::print(stderr, "ptc: {} stays in layout {}: {}\n", target.job, kWholeModel,
               saved.error().message());
    return;
  }
  auto now = read_status(target);
  if (now && now.value().wanted != kWholeModel)
    fmt::print("{}: in layout {}, as it was written\n", target.job, now.value().wanted);
}

/// Whether the commit goes on in the daemon, and how far it is, as status.json has it.
bool goes_on(const Target& target, Progress& progress) {
  auto status = read_json_file(target.job_dir() + "/status.json");
  if (!status) return false;
  for (const json::value& value : array_field(status.value(), "commits")) {
    if (!value.is_object()) continue;
    const json::object& commit = value.get_object();
    if (text_field(commit, "checkpoint") != target.checkpoint) continue;
    progress.set_label(
        fmt::format("committing {}: {}", target.name(), text_field(commit, "phase")));
    progress.set(number_field(commit, "bytes_done"), number_field(commit, "bytes_total"));
    return true;
  }
  return false;
}

/// What became of a copy that has not its name any more.
Error taken_meanwhile(const Target& target, const IncomingDir& staging) {
  if (exists(staging.path()))
    return make_error(
        Code::kConflict,
        "{} was not committed: another import with --force has replaced what was copied",
        target.name());
  return make_error(Code::kNotFound,
                    "{} was not committed: {} was removed meanwhile, with what was copied",
                    target.name(), exists(target.job_dir()) ? staging.path() : "job " + target.job);
}

/// A directory in this one that holds a tree of Megatron-LM's, and is called as none of Megatron's
/// is: a renamed iteration; empty: there is none.
std::string tree_inside(const std::string& directory) {
  const auto names = list_directory(directory);
  if (!names) return "";
  for (const std::string& name : names.value())
    if (is_megatron_tree(directory + "/" + name)) return directory + "/" + name;
  return "";
}

/// For whoever brings a whole model into a job of several ranks, or a tree of Megatron-LM's by a
/// directory above it; empty: that was not why.
std::string layout_hint(const Target& target, const ImportOptions& options) {
  const std::string directory = inside_hub_cache(options.directory);
  if (options.rank || !options.layout.empty() || has_ranks(directory) ||
      is_megatron_tree(directory))
    return "";
  if (const std::string tree = tree_inside(directory); !tree.empty())
    return fmt::format("\n{} is a tree of Megatron-LM's: import that\n  ptc import --force {} {}",
                       tree, shell_word(target.name()), shell_word(tree));
  auto status = read_status(target);
  if (!status || status.value().wanted == kWholeModel) return "";
  return fmt::format(
      "\nIf {} is a whole model, and not what rank 0 of {} wrote, say so:\n  ptc import --force "
      "--layout {} {} {}",
      options.directory, status.value().wanted, kWholeModel, shell_word(target.name()),
      shell_word(options.directory));
}

/// What was copied has its name again: at once, or when what goes on in the daemon has been given
/// up.
void end_commit(IncomingDir& staging, const std::string& own) {
  constexpr int kTries = 50;
  constexpr auto kPause = std::chrono::milliseconds(100);
  staging.end_commit();
  for (int tries = 1; interrupted && staging.path() == own && tries < kTries; ++tries) {
    std::this_thread::sleep_for(kPause);
    staging.end_commit();
  }
}

/// A rename waits for a moment only (EAGAIN); what takes longer goes on, and the same rename again
/// completes it. Signals are noted.
Result<> commit(const Target& target, IncomingDir& staging, const ImportOptions& options) {
  if (auto taken = staging.begin_commit(); !taken)
    return staging.is_at_its_name() ? taken : taken_meanwhile(target, staging);
  const std::string own = staging.path();
  constexpr auto kPause = std::chrono::milliseconds(100);
  constexpr int kTries = 3;  // when none goes on: it may have ended at just that moment
  const Reason reason(target, own + ".error");
  Progress progress("committing " + target.name());
  int error = EAGAIN;
  bool gave_up = false;  // a rename, which goes on all the same
  for (int in_vain = 0; error == EAGAIN && in_vain < kTries && !interrupted;) {
    const auto asked = std::chrono::steady_clock::now();
    const bool done = ::rename(own.c_str(), target.checkpoint_dir().c_str()) == 0;
    error = done ? 0 : errno;
    // Where others stand in a queue, too, it is answered at once.
    if (error == EAGAIN && std::chrono::steady_clock::now() - asked < kPause)
      std::this_thread::sleep_for(kPause);
    in_vain = goes_on(target, progress) ? 0 : in_vain + 1;
    // Decided at the moment at which the last rename gave up.
    if (done || (error == ENOENT && gave_up && is_directory(target.checkpoint_dir()))) {
      staging.end_commit();
      return ok();
    }
    gave_up = gave_up || error == EAGAIN;
  }
  progress.finish();
  std::string why = reason.text(error);
  // A job that is being removed refuses the commit, and goes a moment later.
  constexpr int kGoesWithin = 30;
  bool gone = error == ENOENT && !exists(own);
  for (int tries = 0; error == ENOENT && !gone && tries < kGoesWithin && !interrupted; ++tries) {
    std::this_thread::sleep_for(kPause);
    gone = !exists(own);
  }
  end_commit(staging, own);
  if (gone) return taken_meanwhile(target, staging);
  const std::string& incoming = staging.path();
  if (interrupted)
    return make_error(Code::kCancelled,
                      "{} was not committed: interrupted\nNothing is lost: {} is whole, commit it "
                      "with\n  mv {} {}/checkpoints/{}",
                      target.name(), incoming, shell_word(incoming), shell_word(target.job_dir()),
                      target.checkpoint);
  for (size_t at; own != incoming && (at = why.find(base_name(own))) != std::string::npos;)
    why.replace(at, base_name(own).size(), base_name(incoming));
  if (error == EEXIST && exists(target.checkpoint_dir()))
    return make_error(Code::kAlreadyExists,
                      "{} is already committed, by somebody else meanwhile: remove {}, or commit "
                      "it under another name\n  mv {} {}/checkpoints/NAME",
                      target.name(), incoming, shell_word(incoming), shell_word(target.job_dir()));
  return make_error(error == EAGAIN ? Code::kUnavailable : Code::kInvalidArgument,
                    "{} was not committed: {}\nNothing is lost: {} {} and commit it with\n  mv {} "
                    "{}/checkpoints/{}",
                    target.name(), why, error == EAGAIN ? "keep" : "mend", incoming,
                    shell_word(incoming), shell_word(target.job_dir()),
                    error == EAGAIN ? "" : layout_hint(target, options));
}

void remove_sources(const CopyList& list) {
  for (const CopyItem& item : list.items) {
    if (::unlink(item.source.c_str()) != 0)
      fmt::print(stderr, "ptc: {} stays: {}\n", item.source, std::strerror(errno));
  }
}

Result<> refuse_special_files(const CopyList& list, const std::string& directory) {
  for (const std::string& path : list.skipped)
    fmt::print(stderr, "ptc: neither file nor directory, left out: {}\n", path);
  if (list.items.empty()) return invalid_argument("{} holds no files", directory);
  return ok();
}

/// The largest of what lies in incoming/ and nobody writes; empty: nothing does.
std::string advice_on_leftovers(const Target& target, bool of_this_job) {
  constexpr size_t kNamed = 3;
  const std::vector<Leftover> all =
      of_this_job ? leftovers_of_job(target.mount, target.job) : leftovers_of_mount(target.mount);
  std::string text;
  for (size_t i = 0; i < std::min(kNamed, all.size()); ++i)
    text += fmt::format(
        "\n  rm -r {}   # {}, not committed",
        shell_word(fmt::format("{}/{}/incoming/{}", target.mount, all[i].job, all[i].name)),
        format_size(all[i].bytes));
  if (text.empty()) return "";
  return fmt::format(
      "\nSo does removing what was left in incoming/, if nobody wants it:{}{}", text,
      all.size() > kNamed ? fmt::format("\n  and {} more", all.size() - kNamed) : "");
}

/// What to do when there is no room for a copy.
Error with_advice(const Target& target, Error error) {
  const int value = error.errno_value();
  if (value != ENOSPC && value != EDQUOT) return error;
  const char* advice =
      value == ENOSPC ? "The store is full: ptc rm JOB/CHECKPOINT makes room (ptc ls), and so does "
                        "ptcfs with a larger --memory"
                      : "That is the limit of this job or user: ptc rm JOB/CHECKPOINT makes room";
  return Error(error.code(),
               fmt::format("{}\n{}{}", error.message(), advice,
                           advice_on_leftovers(target, value == EDQUOT)),
               value);
}

/// Copies it all; signals are noted. kCancelled: somebody ended it, and what was copied is gone.
Result<> copy_in(const Target& target, const CopyList& list, IncomingDir& staging, NewJob& job,
                 Progress& progress) {
  const auto say = [&] {
    return fmt::format("{} was not imported: interrupted; what was copied is removed",
                       target.name());
  };
  const auto give_up = [&] {
    staging.remove();
    job.remove();
    fmt::print(stderr, "\nptc: {}\n", say());
    ::_exit(kFailed);
  };
  auto copied = copy_files(list, staging.inside(), progress, false, {&interrupted, give_up});
  if (copied || !interrupted) return copied;
  staging.remove();
  return make_error(Code::kCancelled, "{}", say());
}

Result<int> run_import(const Context& context, const ImportOptions& options) {
  PTC_TRY(auto target, find_target(context.mount_option, options.job, true));
  if (target.checkpoint.empty()) target.checkpoint = options.name;
  if (target.checkpoint.empty() || target.checkpoint.starts_with('.') ||
      target.checkpoint.find('/') != std::string::npos)
    return invalid_argument(
        "'{}' is no name of a checkpoint: it is one word without '/', and no '.' in front",
        target.checkpoint);
  if (!is_directory(options.directory) && !is_file(options.directory))
    return make_error(Code::kNotFound, "{} is neither a directory nor a file", options.directory);
  PTC_TRY(auto list, files_of(options));
  PTC_TRY(refuse_special_files(list, options.directory));

  PTC_TRY(const bool is_new, make_job(target));
  // Until it is committed, or it would stay there half, or under a name that nobody knows.
  std::optional<Interruptions> noted(std::in_place);
  NewJob job(target, is_new);
  PTC_TRY(auto staging, prepare(target, options));
  Progress progress("importing " + target.name(), list.bytes);
  auto copied = copy_in(target, list, staging, job, progress);
  progress.finish();
  if (!copied && copied.error().code() == Code::kCancelled) return std::move(copied).error();
  if (copied) copied = write_layout(staging.inside(), options.layout);
  if (!copied) {
    if (!staging.is_at_its_name()) return taken_meanwhile(target, staging);
    // Half a copy is of no use, and may be what fills the store.
    staging.remove();
    return with_advice(target, staging.named(std::move(copied).error()));
  }
  job.keep();  // from here on what was copied stays in it
  double copy_seconds = progress.seconds();
  Progress commit_time("");
  PTC_TRY(commit(target, staging, options));
  noted.reset();
  double commit_seconds = commit_time.seconds();
  if (options.move) remove_sources(list);

  fmt::print("{}: {} in {} file{} copied in {}, committed in {}\n", target.name(),
             format_size(list.bytes), list.items.size(), list.items.size() == 1 ? "" : "s",
             format_duration(copy_seconds), format_duration(commit_seconds));
  if (job.is_new()) take_layout(target, options);
  return kDone;
}

}  // namespace

void add_import(CLI::App& app, Context& context) {
  auto [command, options] = add_command<ImportOptions>(
      app, context, "import", "Copy a checkpoint in and commit it", run_import);
  command->add_option("JOB", options->job, "a job (made if need be), or JOB/NAME")->required();
  command
      ->add_option("DIR", options->directory,
                   "a model's directory, or its only file; one with a rank/R/ for each rank, one "
                   "with Megatron's iter_*/, or one of DeepSpeed's; of several "
                   "iterations or tags the one that the framework's own file names as the latest")
      ->required();
  command->add_option("--name", options->name, "name of the checkpoint")
      ->type_name("NAME")
      ->capture_default_str();
  command->add_option("--rank", options->rank, "DIR holds what this rank wrote")
      ->type_name("R")
      ->check(whole_number(0, kMaxWorldSize - 1));
  command
      ->add_option("--layout", options->layout,
                   "layout it was written in, when not the job's: a file or a name")
      ->type_name("LAYOUT or FILE")
      ->check(cli::not_empty());
  command->add_flag("--move", options->move, "remove the files from DIR once they are committed");
  command->add_flag("--force", options->force, "replace what an earlier attempt left in incoming/");
  command->footer(
      "Symbolic links are followed, so that a snapshot of a Hugging Face cache can be\n"
      "given.\n"
      "Refused checkpoints stay in incoming/ with the reason beside them.\n"
      "\nExamples:\n  ptc import llama ~/models/Llama-3.1-8B\n"
      "  ptc import llama run7/step500 --name step500 --layout tp4-pp2-dp1");
}

}  // namespace ptc::cli
