// ptc profile: what is known of how fast models train.
#include "tools/planner/profile/profile.h"

#include <fmt/core.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <filesystem>
#include <map>
#include <optional>
#include <set>

#include "tools/cli/numbers.h"
#include "tools/planner/profile/input.h"
#include "tools/planner/profile/published.h"
#include "tools/ptc/command.h"
#include "tools/ptc/output_file.h"
#include "tools/ptc/profile_fit.h"
#include "tools/ptc/profile_run.h"
#include "tools/ptc/text.h"

namespace ptc::cli {
namespace {

constexpr size_t kMostProfileBytes = 64 << 20;

struct ProfileOptions {
  std::string format, model, device, file;
  std::optional<std::string> output;
  std::vector<std::string> files;
  std::string batch = "1";
  bool says_batch = false, as_json = false;
  std::vector<std::string> models;
};

/// Who published the table of a model calls its file, or the directory it lies in, by its name.
std::string model_of(const std::string& file, const std::string& format) {
  if (!planner::has_a_place(file)) return "";
  const std::filesystem::path path = std::filesystem::absolute(file);
  return format == "elasticflow" ? path.stem().string() : path.parent_path().filename().string();
}

/// elasticflow's directories are throughputs_DEVICE.
std::string device_of(const std::string& file, const std::string& format) {
  constexpr std::string_view kBefore = "throughputs_";
  if (format != "elasticflow" || !planner::has_a_place(file)) return "";
  const std::string directory = std::filesystem::absolute(file).parent_path().filename().string();
  return directory.starts_with(kBefore) ? directory.substr(kBefore.size()) : "";
}

Result<int> run_import(const ProfileOptions& options) {
  if (!options.model.empty() && options.files.size() > 1)
    return invalid_argument("--model names the model of one file, and there are {}",
                            options.files.size());
  std::optional<OutputFile> output;
  if (options.output) {
    PTC_TRY(output, OutputFile::at(*options.output, options.files));
  }
  planner::Published all;
  for (const std::string& file : options.files) {
    const std::string name = planner::input_name(file);
    PTC_TRY(const std::string text, planner::read_input(file, kMostProfileBytes));
    const std::string model =
        options.model.empty() ? model_of(file, options.format) : options.model;
    if (model.empty()) return invalid_argument("{}: --model says of which model it is", name);
    Result<planner::Published> read =
        options.format == "morphling"
            ? planner::read_morphling(text, name, model, std::stoull(options.batch))
        : options.format == "pollux" ? planner::read_pollux(text, name, model)
                                     : planner::read_elasticflow(text, name, model);
    PTC_TRY(auto published, std::move(read));
    const std::string device =
        options.device.empty() ? device_of(file, options.format) : options.device;
    for (planner::ProfileRow& row : published.rows) row.device = device;
    std::move(published.rows.begin(), published.rows.end(), std::back_inserter(all.rows));
    std::move(published.left_out.begin(), published.left_out.end(),
              std::back_inserter(all.left_out));
  }
  for (const std::string& what : all.left_out)
    fmt::print(stderr, "ptc: left out: {}\n", printable(what));
  if (options.format == "morphling" && !options.says_batch)
    fmt::print(stderr,
               "ptc: these tables do not say the batch: without --batch it is 1, and samples are "
               "iterations\n");
  const std::string text = planner::profiles_text(all.rows, options.output.value_or(""));
  if (!output || output->is_standard_output()) {
    fmt::print("{}", text);
    return kDone;
  }
  PTC_TRY(output->write(text));
  fmt::print("{}: {}\n", printable(*options.output), planner::counted(all.rows.size(), "trial"));
  return kDone;
}

Result<int> run_show(const ProfileOptions& options) {
  const std::string name = planner::input_name(options.file);
  std::vector<std::string> remarks;
  PTC_TRY(const std::string text, planner::read_input(options.file, kMostProfileBytes));
  PTC_TRY(const auto rows, planner::parse_profiles(text, name, &remarks));
  for (const std::string& remark : remarks) fmt::print(stderr, "ptc: {}\n", printable(remark));
  std::map<std::string, std::set<std::string>> known;  // models, and the kinds of GPU of each
  std::set<std::string> names, devices;
  std::map<std::pair<std::string, std::string>, std::vector<const planner::ProfileRow*>> parts;
  for (const planner::ProfileRow& row : rows) {
    known[row.model].insert(row.device);
    names.insert(row.model);
    devices.insert(row.device);
    parts[{row.model, row.device}].push_back(&row);
  }
  for (const std::string& model : options.models)
    if (!names.contains(model))
      return invalid_argument("{} has no model {}{}", name, ptc::quoted(model),
                              planner::what_there_is(model, names));
  const bool names_devices = devices != std::set<std::string>{""};
  devices.erase("");
  if (!options.device.empty() && !devices.contains(options.device))
    return invalid_argument("{} has no trial on GPUs {}{}", name, ptc::quoted(options.device),
                            devices.empty() ? std::string(": it does not name them")
                                            : planner::what_there_is(options.device, devices));
  const std::set<std::string> models =
      options.models.empty() ? names
                             : std::set<std::string>(options.models.begin(), options.models.end());
  // Kinds of GPU are never mixed: each has lines of its own.
  Table table({{"MODEL"},
               {"DEVICE"},
               {"GPUS", Table::Align::kRight},
               {"SAMPLES/S", Table::Align::kRight},
               {"OF LINEAR", Table::Align::kRight, 2},
               {"BATCH", Table::Align::kRight, 1},
               {"HOW"}});
  std::vector<planner::ProfileRow> shown;
  for (const std::string& model : models) {
    for (const std::string& device : known[model]) {
      if (!options.device.empty() && device != options.device) continue;
      const auto add = [&](std::vector<std::string> cells) {
        cells.insert(cells.begin(), {model, device.empty() ? "-" : device});
        table.add(std::move(cells));
      };
      const auto points = planner::frontier(parts[{model, device}], {model});
      for (const planner::FrontierPoint& point : points) {
        shown.push_back(*point.row);
        add({std::to_string(point.gpus), fmt::format("{:.4g}", point.samples_per_s),
             fmt::format("{:.0f} %", 100 * point.samples_per_s / point.gpus * points.front().gpus /
                                         points.front().samples_per_s),
             std::to_string(point.row->batch),
             point.row->way() + (point.row->origin == "modelled" ? " (modelled)" : "")});
      }
      if (!points.empty()) continue;
      for (const planner::ProfileRow* row : parts[{model, device}]) shown.push_back(*row);
      const std::string why = planner::why_no_time(parts[{model, device}]);
      add({"-", "-", "-", "-",
           why == "out of memory" ? why + " in all trials" : "no time in any trial: " + why});
    }
  }
  if (options.as_json) {
    fmt::print("{}", planner::profiles_json(shown));
    return kDone;
  }
  if (table.empty()) {
    fmt::print("{} has no trial {}.\n", printable(name),
               options.device.empty() ? "yet" : "of these models on these GPUs");
    return kDone;
  }
  if (!names_devices) table.remove("DEVICE");
  const size_t width = ::isatty(STDOUT_FILENO) ? terminal_width(STDOUT_FILENO) : SIZE_MAX / 2;
  const std::vector<std::string> gone = table.narrow(width);
  fmt::print("{}", table.to_string(0, width));
  if (!gone.empty())
    fmt::print("(No room in {} columns for {}; a pipe and a file have all.)\n", width,
               fmt::join(gone, ", "));
  return kDone;
}

}  // namespace

void add_profile(CLI::App& app, Context& context) {
  auto options = std::make_shared<ProfileOptions>();
  CLI::App* command =
      app.add_subcommand("profile", "Tell how fast models train, by GPUs and layout");
  command->footer(
      "A profile is a table (CSV): model, technique, batch, tp, pp, dp, iteration_s …,\n"
      "a line for each trial; \"oom\" stands for a time where there was none. Or JSON, an\n"
      "array of objects with these keys; what is written to a FILE.json is that.\n"
      "\nExamples:\n"
      "  ptc profile import elasticflow throughputs_A100/*.csv -o profiles.csv\n"
      "  ptc profile run jobs.json -o profiles.csv\n"
      "  ptc profile fit profiles.csv --gpus 64 -o modelled.csv\n"
      "  ptc profile show profiles.csv gpt2");
  command->require_subcommand(1);
  CLI::App* import = command->add_subcommand("import", "Read tables that others have published");
  import->add_option("FORMAT", options->format, "whose they are")
      ->type_name("elasticflow|morphling|pollux")
      ->check(CLI::IsMember({"elasticflow", "morphling", "pollux"}).description(""))
      ->required();
  import->add_option("FILE", options->files, "tables, each of one model; -: standard input")
      ->required();
  import
      ->add_option("-o,--output", options->output,
                   "write there; -, or left out: to standard output")
      ->type_name("FILE");
  import
      ->add_option("--model", options->model,
                   "the model's name; else the file's (elasticflow), or its directory's")
      ->type_name("NAME");
  import
      ->add_option("--device", options->device,
                   "the kind of GPU that was measured; else what elasticflow's directory says")
      ->type_name("NAME");
  CLI::Option* batch =
      import
          ->add_option("--batch", options->batch,
                       "samples of an iteration, which morphling's tables do not say")
          ->type_name("N")
          ->check(whole_number(1, uint64_t{1} << 40))
          ->capture_default_str();
  auto trials = std::make_shared<ProfileRunOptions>();
  CLI::App* run = command->add_subcommand("run", "Try how fast the models of jobs train here");
  run->add_option("FILE", trials->file, "jobs.json; -: standard input")->required();
  run->add_option("-o,--output", trials->output, "the table; else the profile that FILE names")
      ->type_name("FILE");
  run->add_option("--library", trials->library,
                  "a folder of techniques; else those that come along")
      ->type_name("DIR");
  run->add_option("--technique", trials->techniques, "only these, with commas between them")
      ->type_name("NAMES")
      ->delimiter(',');
  run->add_option("--gpus", trials->gpus, "of this machine; else those of FILE's largest node")
      ->type_name("N")
      ->check(whole_number(1, 1024));
  run->add_option("--device", trials->device, "what kind they are; else as FILE says")
      ->type_name("NAME");
  run->add_option("--within", trials->within, "a trial that takes longer is killed")
      ->type_name("S")
      ->check(number(0.1, kMostSeconds))
      ->capture_default_str();
  run->add_flag("--one-at-a-time", trials->one_at_a_time, "not side by side, as GPUs allow");
  run->add_flag("--again", trials->again, "also those that had no time");
  run->footer(
      "A technique is a program that is told what to try and prints its time (man ptc).\n"
      "Each trial is in the table as soon as it has ended. What is there already is not\n"
      "tried again. Jobs with one model share its trials.\n"
      "\nExit status: 0 all were tried, 130 interrupted: the same again goes on.");
  auto model = std::make_shared<ProfileFitOptions>();
  CLI::App* fit = command->add_subcommand("fit", "Model the GPUs and batches that nobody tried");
  fit->add_option("FILE", model->file, "a profile; -: standard input")->required();
  fit->add_option("-o,--output", model->output,
                  "all trials, and what is modelled; -, or left out: to standard output")
      ->type_name("FILE");
  fit->add_option("--gpus", model->gpus, "1, 2, 4 ... and N of them; else as many as were tried")
      ->type_name("N")
      ->check(whole_number(1, planner::kMostGpus));
  fit->add_option("--node", model->node, "GPUs of a node; else the most that a trial had on one")
      ->type_name("N")
      ->check(whole_number(1, planner::kMostGpus));
  fit->add_option("--sums", model->sums,
                  "a table (gpus, bytes, seconds) of what sums take, for models that were tried "
                  "on one GPU alone")
      ->type_name("TABLE");
  fit->add_option("--bytes", model->bytes, "what the replicas of a model sum, for --sums")
      ->type_name("MODEL=N")
      ->delimiter(',');
  fit->footer(
      "A replica's time is what one takes alone with its samples, on the line between\n"
      "batches that were tried; what sums over replicas take is fitted to the trials\n"
      "that have several. Nothing is modelled with more samples a replica than one was\n"
      "tried with. Trials stay as they are: what was tried is not modelled.");
  CLI::App* show = command->add_subcommand("show", "Print the best throughput by number of GPUs");
  show->add_option("FILE", options->file, "a profile; -: standard input")->required();
  show->add_option("MODEL", options->models, "only these");
  show->add_option("--device", options->device, "only this kind of GPU")->type_name("NAME");
  show->add_flag("--json", options->as_json, "print these trials as a profile in JSON");
  for (CLI::App* sub : {import, run, fit, show}) sub->fallthrough();
  command->callback([&context, options, trials, model, import, run, fit, batch] {
    options->says_batch = batch->count() > 0;
    context.run = [options, trials, model, import, run, fit]() -> Result<int> {
      if (fit->parsed()) return run_profile_fit(*model);
      if (run->parsed()) return run_profile_run(*trials);
      return import->parsed() ? run_import(*options) : run_show(*options);
    };
  });
}

}  // namespace ptc::cli
