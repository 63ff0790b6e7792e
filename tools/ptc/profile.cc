// ptc profile: what is known of how fast models train.
#include "tools/planner/profile/profile.h"

#include <fcntl.h>
#include <fmt/core.h>

#include <filesystem>
#include <set>

#include "store/base/file.h"
#include "tools/cli/numbers.h"
#include "tools/planner/profile/published.h"
#include "tools/ptc/command.h"
#include "tools/ptc/text.h"

namespace ptc::cli {
namespace {

constexpr size_t kMostProfileBytes = 64 << 20;

struct ProfileOptions {
  std::string format, model, output, file;
  std::vector<std::string> files;
  std::string batch = "1";
  std::vector<std::string> models;
};

/// Who published the table of a model calls its file, or the directory it lies in, by its name.
std::string model_of(const std::string& file, const std::string& format) {
  const std::filesystem::path path = std::filesystem::absolute(file);
  return format == "elasticflow" ? path.stem().string() : path.parent_path().filename().string();
}

Result<int> run_import(const ProfileOptions& options) {
  if (!options.model.empty() && options.files.size() > 1)
    return invalid_argument("--model names the model of one file, and there are {}",
                            options.files.size());
  planner::Published all;
  for (const std::string& file : options.files) {
    PTC_TRY(const std::string text, read_text_file(AT_FDCWD, file, kMostProfileBytes));
    const std::string model =
        options.model.empty() ? model_of(file, options.format) : options.model;
    if (model.empty()) return invalid_argument("{}: --model says of which model it is", file);
    Result<planner::Published> read =
        options.format == "morphling"
            ? planner::read_morphling(text, file, model, std::stoull(options.batch))
        : options.format == "pollux" ? planner::read_pollux(text, file, model)
                                     : planner::read_elasticflow(text, file, model);
    PTC_TRY(auto published, std::move(read));
    std::move(published.rows.begin(), published.rows.end(), std::back_inserter(all.rows));
    std::move(published.left_out.begin(), published.left_out.end(),
              std::back_inserter(all.left_out));
  }
  for (const std::string& what : all.left_out)
    fmt::print(stderr, "ptc: left out: {}\n", printable(what));
  const std::string text = planner::profiles_csv(all.rows);
  if (options.output.empty()) {
    fmt::print("{}", text);
    return kDone;
  }
  PTC_TRY(write_file_atomically(AT_FDCWD, options.output, text));
  fmt::print("{}: {} trials\n", printable(options.output), all.rows.size());
  return kDone;
}

Result<int> run_show(const ProfileOptions& options) {
  PTC_TRY(const std::string text, read_text_file(AT_FDCWD, options.file, kMostProfileBytes));
  PTC_TRY(const auto rows, planner::parse_profiles(text, options.file));
  std::set<std::string> known;
  for (const planner::ProfileRow& row : rows) known.insert(row.model);
  for (const std::string& model : options.models) {
    if (known.contains(model)) continue;
    const auto like = nearest_name(model, {known.begin(), known.end()});
    return invalid_argument("{} has no model {}{}", options.file, ptc::quoted(model),
                            like ? fmt::format(" (did you mean {}?)", ptc::quoted(*like)) : "");
  }
  const std::set<std::string> models =
      options.models.empty() ? known
                             : std::set<std::string>(options.models.begin(), options.models.end());
  Table table({{"MODEL"},
               {"GPUS", Table::Align::kRight},
               {"SAMPLES/S", Table::Align::kRight},
               {"OF LINEAR", Table::Align::kRight},
               {"BATCH", Table::Align::kRight},
               {"HOW"}});
  for (const std::string& model : models) {
    const auto points = planner::frontier(rows, {model});
    for (const planner::FrontierPoint& point : points)
      table.add({printable(model), std::to_string(point.gpus),
                 fmt::format("{:.4g}", point.samples_per_s),
                 fmt::format("{:.0f} %", 100 * point.samples_per_s / point.gpus *
                                             points.front().gpus / points.front().samples_per_s),
                 std::to_string(point.row->batch), printable(point.row->way())});
    if (points.empty())
      table.add({printable(model), "-", "-", "-", "-", "out of memory in all trials"});
  }
  if (table.empty()) fmt::print("{} has no trial yet.\n", printable(options.file));
  else fmt::print("{}", table.to_string(0, terminal_width(1)));
  return kDone;
}

}  // namespace

void add_profile(CLI::App& app, Context& context) {
  auto options = std::make_shared<ProfileOptions>();
  CLI::App* command =
      app.add_subcommand("profile", "Tell how fast models train, by GPUs and layout");
  command->footer(
      "A profile is a table (CSV): model, technique, batch, tp, pp, dp, iteration_s …,\n"
      "a line for each trial; \"oom\" stands for a time where memory was too little.\n"
      "\nExamples:\n"
      "  ptc profile import elasticflow throughputs_A100/*.csv -o profiles.csv\n"
      "  ptc profile show profiles.csv gpt2");
  command->require_subcommand(1);
  CLI::App* import = command->add_subcommand("import", "Read tables that others have published");
  import->add_option("FORMAT", options->format, "whose they are")
      ->type_name("elasticflow|morphling|pollux")
      ->check(CLI::IsMember({"elasticflow", "morphling", "pollux"}))
      ->required();
  import->add_option("FILE", options->files, "tables, each of one model")->required();
  import->add_option("-o,--output", options->output, "write there; else to standard output")
      ->type_name("FILE");
  import
      ->add_option("--model", options->model,
                   "the model's name; else the file's (elasticflow), or its directory's")
      ->type_name("NAME");
  import
      ->add_option("--batch", options->batch,
                   "samples of an iteration, which morphling's tables do not say")
      ->type_name("N")
      ->check(whole_number(1, uint64_t{1} << 40))
      ->capture_default_str();
  CLI::App* show = command->add_subcommand("show", "Print the best throughput by number of GPUs");
  show->add_option("FILE", options->file, "a profile")->required();
  show->add_option("MODEL", options->models, "only these");
  for (CLI::App* sub : {import, show}) sub->fallthrough();
  command->callback([&context, options, import] {
    context.run = [options, import]() -> Result<int> {
      return import->parsed() ? run_import(*options) : run_show(*options);
    };
  });
}

}  // namespace ptc::cli
