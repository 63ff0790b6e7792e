// ptc export: copies a checkpoint out of the mount, in any of its shapes.
#include <fcntl.h>
#include <fmt/core.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <filesystem>
#include <optional>

#include "reshard/ptc/parallel_config.h"
#include "reshard/serve/served_layout.h"
#include "store/base/file.h"
#include "store/base/shell_word.h"
#include "store/base/size_text.h"
#include "tools/cli/numbers.h"
#include "tools/ptc/command.h"
#include "tools/ptc/copy_tree.h"
#include "tools/ptc/fields.h"
#include "tools/ptc/interruptions.h"
#include "tools/ptc/job_status.h"
#include "tools/ptc/layout_edit.h"
#include "tools/ptc/mount.h"
#include "tools/ptc/output_file.h"
#include "tools/ptc/staged_dir.h"
#include "tools/ptc/text.h"

namespace ptc::cli {
namespace {

namespace fs = std::filesystem;

struct ExportOptions {
  std::string target;
  std::string destination;
  bool hf = false;
  bool model = false;
  std::string layout;
  std::optional<uint64_t> rank;
  bool force = false;
  bool partial = false;
};

bool is_nothing_skipped(const std::string&) { return false; }

/// The sub-tensors one by one are the same bytes again.
bool is_tensor_tree(const std::string& path) {
  return path == "tensors" || path.ends_with("/tensors");
}

/// Why the checkpoint has no directory of this layout.
Error why_no_layout(const Target& target, const std::string& name) {
  if (ServedLayout::is_name(name)) {
    const auto served = ServedLayout::parse(name);
    return make_error(Code::kNotFound, "{} cannot be laid out as {}: {}", target.name(), name,
                      served ? "it is not there" : served.error().message());
  }
  auto layout = layout_named(name);
  if (!layout) return std::move(layout).error();
  const auto report = ask(target.mount, {{"do", "rules"},
                                         {"job", target.job},
                                         {"checkpoint", target.checkpoint},
                                         {"layout", std::move(layout).value()}});
  if (!report) return report.error();
  const std::string fits = text_field(report.value(), "fits");
  return make_error(Code::kInvalidArgument, "layout {} does not fit {}: {}", name, target.name(),
                    fits.empty() ? "it is not there" : fits);
}

Result<CopyList> files_of(const Target& target, const ExportOptions& options) {
  std::string top = target.checkpoint_dir();
  if (options.model) return list_files(top + "/model", "", is_nothing_skipped);
  if (options.layout.empty()) return list_files(top + "/hf", "", is_nothing_skipped);
  std::string ranks = top + "/layouts/" + options.layout + "/rank";
  std::error_code error;
  if (!fs::is_directory(top + "/layouts/" + options.layout, error) &&
      (!error || error == std::errc::no_such_file_or_directory))
    return why_no_layout(target, options.layout);
  if (options.rank && fs::is_directory(ranks, error) &&
      !fs::is_directory(fmt::format("{}/{}", ranks, *options.rank), error))
    return make_error(Code::kNotFound, "layout {} has no rank {}: ls {} shows those that it has",
                      options.layout, *options.rank, shell_word(ranks));
  if (options.rank)
    return list_files(fmt::format("{}/{}", ranks, *options.rank), "", is_tensor_tree);
  return list_files(ranks, "rank", is_tensor_tree);
}

Result<> check_destination(const std::string& destination, uint64_t bytes, bool force) {
  std::error_code error;
  if (fs::exists(destination, error)) {
    if (!fs::is_directory(destination, error))
      return make_error(Code::kAlreadyExists, "{} is no directory", destination);
    bool empty = fs::is_empty(destination, error);
    if (error) return errno_error(error.value(), destination);
    if (!empty && !force)
      return make_error(Code::kAlreadyExists,
                        "{} is not empty; --force writes into it all the same", destination);
  }
  fs::path existing = fs::absolute(destination);
  while (!fs::exists(existing, error) && existing != existing.parent_path())
    existing = existing.parent_path();
  struct statvfs space {};
  if (::statvfs(existing.c_str(), &space) == 0) {
    uint64_t free_bytes = uint64_t{space.f_bavail} * space.f_frsize;
    if (free_bytes < bytes)
      return make_error(Code::kNoSpace, "{} has {} free, {} are needed", existing.string(),
                        format_size(free_bytes), format_size(bytes));
  }
  return ok();
}

/// Beside rank/, so that the copy can be imported again.
Result<> write_layout(const ExportOptions& options, const std::string& directory) {
  if (options.layout.empty() || options.rank) return ok();
  auto layout = layout_of_name(options.layout);
  if (!layout) return ok();
  PTC_TRY(const OutputFile file, OutputFile::at(directory + "/layout.json", {}));
  return file.write(pretty_json(layout.value()));
}

/// What hf/ is without. Optimizer state is expected to be missing there, tensors of names that
/// others have are not.
Result<> check_nothing_missing(const Target& target, const ExportOptions& options) {
  if (options.model || !options.layout.empty()) return ok();
  PTC_TRY(auto meta, read_json_file(target.checkpoint_dir() + "/meta.json"));
  std::vector<std::string> missing;
  for (const json::value& value : array_field(meta, "left_out_of_hf")) {
    if (!value.is_object()) continue;
    const json::object& one = value.get_object();
    std::string what =
        fmt::format("{} tensors of {}", number_field(one, "tensors"), text_field(one, "file"));
    if (text_field(one, "why") == "optimizer state") {
      fmt::print(stderr, "ptc: left out: {}, which are optimizer state (--layout has them)\n",
                 what);
    } else {
      missing.push_back(std::move(what));
    }
  }
  if (missing.empty()) return ok();
  if (!options.partial)
    return make_error(
        Code::kConflict,
        "{}: nothing is exported, for hf/ is without {}: others have their names, and other "
        "values. --model or --layout current exports all, --partial what is in hf/",
        target.name(), fmt::join(missing, ", "));
  fmt::print(stderr, "ptc: left out: {}, whose names others have\n", fmt::join(missing, ", "));
  return ok();
}

/// A tree of which nothing could be made is there all the same, with a file that says why.
Result<> check_something_made(const Target& target, const ExportOptions& options,
                              const CopyList& list) {
  constexpr std::string_view kLeftOut = "LEFT_OUT.txt", kNothing = "Nothing is here: ";
  constexpr size_t kMostRead = 1 << 20;
  if (options.layout.empty()) return ok();
  for (const CopyItem& item : list.items) {
    if (fs::path(item.target).filename() != kLeftOut) continue;
    PTC_TRY(std::string text, read_text_file(AT_FDCWD, item.source, kMostRead));
    if (!text.starts_with(kNothing)) continue;
    text.erase(0, kNothing.size());
    while (text.ends_with('\n')) text.pop_back();
    return invalid_argument("nothing is exported: {} cannot be laid out as {}: {}", target.name(),
                            options.layout, text);
  }
  return ok();
}

/// All or nothing; `left`: what the destination is where it failed.
Result<> write_all(const CopyList& list, const ExportOptions& options, Progress& progress,
                   const char*& left) {
  left = "is as it was before";
  const Interruptions noted;
  PTC_TRY(auto staged, StagedDirectory::make(options.destination));
  const auto give_up = [&] {
    staged.discard();
    fmt::print(stderr, "ptc: interrupted. {} {}\n", options.destination, left);
    ::_exit(kFailed);
  };
  PTC_TRY(copy_files(list, staged.path(), progress, true, {&interrupted, give_up}));
  PTC_TRY(write_layout(options, staged.path()));
  Result<> published = staged.publish();
  if (staged.is_published())
    left = "has all of the files, and whether its disk has them is not known";
  else if (staged.is_inside())
    left =
        "has some of the new files beside those that were there: export it again, or into an "
        "empty directory";
  return published;
}

std::string what_to_do(const Target& target, const Error& error) {
  if (error.code() != Code::kUnavailable && error.code() != Code::kCorrupt) return "";
  return fmt::format(
      "; ptc verify {} tells what is damaged or away, --repair mends what other copies have right",
      shell_word(target.name()));
}

Result<int> run_export(const Context& context, ExportOptions options) {
  PTC_TRY(auto found, find_target(context.mount_option, options.target));
  PTC_TRY(auto target, with_checkpoint(std::move(found)));
  if (options.layout == "current") {
    PTC_TRY(auto status, read_status(target));
    options.layout = status.layout;
  }
  PTC_TRY(check_nothing_missing(target, options));
  PTC_TRY(auto list, files_of(target, options));
  PTC_TRY(check_something_made(target, options, list));
  PTC_TRY(check_destination(options.destination, list.bytes, options.force));
  Progress progress("exporting " + target.name(), list.bytes);
  const char* left = nullptr;
  auto written = write_all(list, options, progress, left);
  progress.finish();
  if (!written)
    return make_error(written.error().code(), "{}. {} {}{}", written.error().message(),
                      options.destination, left, what_to_do(target, written.error()));
  double seconds = progress.seconds();
  fmt::print("{}: {} in {} file{} written to {} in {}\n", target.name(), format_size(list.bytes),
             list.items.size(), list.items.size() == 1 ? "" : "s", options.destination,
             format_duration(seconds));
  return kDone;
}

}  // namespace

void add_export(CLI::App& app, Context& context) {
  auto [command, options] = add_command<ExportOptions>(
      app, context, "export", "Copy a checkpoint out of the mount", run_export);
  command
      ->add_option("JOB[/CHECKPOINT]", options->target,
                   "without a checkpoint, the one that 'current' shows")
      ->required();
  command->add_option("DEST", options->destination, "a new or empty directory")->required();
  auto* hf = command->add_flag("--hf", options->hf, "as Hugging Face files (the default)");
  auto* model = command->add_flag("--model", options->model, "every tensor as one .npy");
  auto* layout = command
                     ->add_option("--layout", options->layout,
                                  "as the ranks' files of this layout, of 'current', or of an "
                                  "inference engine: vllm-tp8, sglang-tp8")
                     ->type_name("LAYOUT")
                     ->check(cli::not_empty());
  command->add_option("--rank", options->rank, "of that layout this rank only")
      ->type_name("R")
      ->check(whole_number(0, kMaxWorldSize - 1))
      ->needs(layout);
  hf->excludes(model)->excludes(layout);
  model->excludes(layout);
  command->add_flag("--force", options->force, "write into a directory that is not empty");
  command->add_flag("--partial", options->partial,
                    "as Hugging Face files also without tensors whose names others have");
  command->footer(
      "DEST appears when all is written and on its disk, or not at all; in one that was\n"
      "there, nothing is changed before.\n"
      "\nExamples:\n  ptc export llama /srv/models/llama\n"
      "  ptc export llama/step500 out --layout tp8-pp1-dp1\n"
      "  ptc export llama out --layout current --rank 3");
}

}  // namespace ptc::cli
