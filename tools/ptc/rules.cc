// ptc rules: the families that are built in, and how rules cut a model under a layout.
#include <fcntl.h>
#include <fmt/core.h>
#include <unistd.h>

#include <boost/json/array.hpp>
#include <boost/json/serialize.hpp>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "reshard/ptc/builtin_rules.h"
#include "reshard/ptc/cut_report.h"
#include "reshard/ptc/layout.h"
#include "reshard/ptc/rule_set.h"
#include "reshard/ptc/suggested_rules.h"
#include "store/base/file.h"
#include "tools/cli/numbers.h"
#include "tools/ptc/command.h"
#include "tools/ptc/fields.h"
#include "tools/ptc/layout_edit.h"
#include "tools/ptc/model_directory.h"
#include "tools/ptc/mount.h"
#include "tools/ptc/text.h"
#include "tools/ptc/transformers_plan.h"

namespace ptc::cli {
namespace {

constexpr uint64_t kMaxRulesBytes = 1 << 20;
constexpr uint64_t kMaxConfigBytes = 4 << 20;
constexpr const char* kDefaultPython = "python3";

struct RulesOptions {
  std::string target;
  std::vector<std::string> names;
  std::string layout;
  std::string family;
  std::string rules;
  std::string python = kDefaultPython;
  bool as_json = false;
};

Result<int> run_list(bool as_json) {
  json::array families;
  Table table({{"FAMILY"}, {"FOR MODEL TYPES"}, {"DESCRIPTION"}});
  for (const std::string& family : RuleSet::builtin_families()) {
    PTC_TRY(auto rules, RuleSet::builtin(family));
    const auto& types = rules->model_types();
    table.add({family, fmt::format("{}", fmt::join(types, ", ")), rules->description()});
    families.push_back(json::object{{"family", family},
                                    {"model_types", json::array(types.begin(), types.end())},
                                    {"rules", rules->written_rules()},
                                    {"description", rules->description()}});
  }
  fmt::print("{}", as_json ? pretty_json(families) : table.to_string(0, terminal_width(1)));
  return kDone;
}

Result<int> run_show(const std::string& family) {
  for (const BuiltinRules& rules : builtin_rules()) {
    if (rules.family != family) continue;
    fmt::print("{}", rules.text);
    return kDone;
  }
  PTC_TRY(auto none, RuleSet::builtin(family));  // fails, naming the nearest
  fmt::print("{}", none->text());
  return kDone;
}

/// A rules file, offline.
Result<int> check_file(const std::string& path) {
  PTC_TRY(auto text, read_text_file(AT_FDCWD, path, kMaxRulesBytes));
  auto rules = RuleSet::parse_new(text);
  if (!rules) return std::move(rules).error().with_context(path);
  const size_t count = rules.value()->written_rules();
  fmt::print("{}: {}: family {}, {} rule{}\n", path, coloured("good", Colour::kGreen),
             rules.value()->family(), count, count == 1 ? "" : "s");
  return kDone;
}

std::string shape_text(const json::object& object) {
  std::string text = "[";
  for (const json::value& extent : array_field(object, "shape")) {
    if (text.size() > 1) text += ", ";
    text += json::serialize(extent);
  }
  return text + "]";
}

/// "[64, 64] → [32, 64]", "[5, 4] → [3, 4] on dp 0, [2, 4] on dp 1".
std::string shapes_text(const json::object& tensor) {
  std::string text = shape_text(tensor);
  const json::array& ranks = array_field(tensor, "ranks");
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (!ranks[i].is_object()) continue;
    const json::object& part = ranks[i].get_object();
    text += (i > 0 ? ", " : utf8_terminal() ? " → " : " -> ") + shape_text(part);
    if (ranks.size() == 1) continue;
    const uint64_t first = number_field(part, "first_dp_rank");
    const uint64_t last = number_field(part, "last_dp_rank");
    text +=
        first == last ? fmt::format(" on dp {}", first) : fmt::format(" on dp {}-{}", first, last);
  }
  return text;
}

void print_tensor(const json::object& tensor, size_t width) {
  const std::string name = printable(text_field(tensor, "names"));
  const std::string shapes = shapes_text(tensor);
  if (2 + text_width(name) + 2 + text_width(shapes) <= width) {
    fmt::print("  {}{}{}\n", name,
               std::string(width - 2 - text_width(name) - text_width(shapes), ' '), shapes);
  } else {
    fmt::print("  {}\n      {}\n", name, wrapped(shapes, 6, width));
  }
  const std::string problem = text_field(tensor, "problem");
  if (!problem.empty())
    fmt::print("      {}\n", coloured(wrapped(problem, 6, width), Colour::kRed));
}

/// What config.json says and the tensors do not, and rules that hold for nothing.
void print_doubts(const json::object& report, size_t width) {
  for (const std::string& doubt : text_list(array_field(report, "contradictions")))
    fmt::print("\n{}\n", coloured(wrapped(doubt, 2, width), Colour::kYellow));
  for (const json::value& value : array_field(report, "unused_rules")) {
    if (!value.is_object()) continue;
    const json::object& rule = value.get_object();
    const std::string text =
        fmt::format("rule {}: {}", fmt::join(text_list(array_field(rule, "names")), ", "),
                    text_field(rule, "why"));
    fmt::print("\n{}\n", coloured(wrapped(printable(text), 2, width), Colour::kYellow));
  }
}

void print_report(const std::string& whose, const json::object& report) {
  const size_t width = terminal_width(1);
  fmt::print("{}\n",
             wrapped(fmt::format("{} under {}, with the rules of family {}", whose,
                                 text_field(report, "layout"), text_field(report, "family")),
                     2, width));
  std::string facts;
  for (const auto& fact : object_field(report, "facts"))
    facts += fmt::format("{}{} {}", facts.empty() ? "" : ", ", std::string(fact.key()),
                         json::serialize(fact.value()));
  if (bool_field(report, "tied")) facts += fmt::format("{}tied", facts.empty() ? "" : ", ");
  if (!facts.empty()) fmt::print("{}\n", wrapped("facts: " + facts, 2, width));

  std::vector<std::string> order;  // of the ways to cut, as they come
  std::map<std::string, std::vector<const json::object*>> by_way;
  for (const json::value& value : array_field(report, "tensors")) {
    if (!value.is_object()) continue;
    const json::object& tensor = value.get_object();
    std::string way = text_field(tensor, "how");
    const std::string rule = text_field(tensor, "rule");
    if (!rule.empty()) way += fmt::format("; rule {}", rule);
    auto& tensors = by_way[way];
    if (tensors.empty()) order.push_back(way);
    tensors.push_back(&tensor);
  }
  for (const std::string& way : order) {
    fmt::print("\n{}\n", coloured(wrapped(way, 2, width), Colour::kBold));
    for (const json::object* tensor : by_way[way]) print_tensor(*tensor, width);
  }
  print_doubts(report, width);
}

int finish_check(const std::string& whose, const json::object& report, bool as_json) {
  if (as_json) {
    fmt::print("{}", pretty_json(report));
  } else {
    print_report(whose, report);
  }
  const json::value* fits = report.if_contains("fits");
  if (fits == nullptr || !fits->is_string()) return kDone;
  fmt::print(stderr, "ptc: {} does not fit: {}\n", text_field(report, "layout"),
             text_field(report, "fits"));
  return kFailed;
}

Result<json::object> report_of_job(const Target& target, const RulesOptions& options) {
  json::object question{{"do", "rules"},
                        {"job", target.job},
                        {"checkpoint", target.checkpoint},
                        {"names", json::array(options.names.begin(), options.names.end())}};
  if (!options.layout.empty()) {
    PTC_TRY(auto layout, layout_of_file_or_name(options.layout));
    question["layout"] = std::move(layout);
  }
  return ask(target.mount, question);
}

/// Offline: by the rules that a commit of it would choose, or those of a file.
Result<json::object> report_of_directory(const RulesOptions& options) {
  std::optional<std::string> rules;
  if (!options.rules.empty()) {
    PTC_TRY(rules, read_text_file(AT_FDCWD, options.rules, kMaxRulesBytes));
  }
  PTC_TRY(auto model, model_of_directory(options.target, rules));
  PTC_TRY(auto wanted,
          layout_of_file_or_name(options.layout.empty() ? "tp2-pp1-dp1" : options.layout));
  PTC_TRY(auto layout, Layout::parse(json::serialize(wanted)));
  if (!layout.rules.empty())
    return invalid_argument(
        "the layout is cut by rules of a job's ({}): say them with --rules FILE", layout.rules);
  return cut_report(model, layout.spec, options.names);
}

/// Of a job or a model's directory, and what that is called.
Result<std::pair<std::string, json::object>> report_of(const Context& context,
                                                       const RulesOptions& options) {
  if (is_model_directory(options.target)) {
    PTC_TRY(auto report, report_of_directory(options));
    return std::pair(options.target, std::move(report));
  }
  PTC_TRY(auto found, find_target(context.mount_option, options.target));
  PTC_TRY(auto target, with_checkpoint(std::move(found)));
  PTC_TRY(auto report, report_of_job(target, options));
  return std::pair(target.name(), std::move(report));
}

Result<int> check_model(const Context& context, const RulesOptions& options) {
  PTC_TRY(auto report, report_of(context, options));
  return finish_check(report.first, report.second, options.as_json);
}

/// config.json of what the report is of; empty: it has none.
std::string config_path(const Context& context, const RulesOptions& options) {
  std::string directory = options.target;
  if (!is_model_directory(options.target)) {
    auto found = find_target(context.mount_option, options.target);
    if (!found) return {};
    const auto target = with_checkpoint(std::move(found).value());
    if (!target) return {};
    directory = target.value().checkpoint_dir() + "/hf";
  }
  const std::string path = directory + "/config.json";
  return ::access(path.c_str(), R_OK) == 0 ? path : std::string();
}

/// What may tell how a model is cut, beside its names; what is not there is said.
Result<ModelHints> hints_of(const Context& context, const RulesOptions& options) {
  ModelHints hints;
  const std::string path = config_path(context, options);
  if (path.empty()) {
    fmt::print(stderr, "ptc: there is no config.json: guessed by names alone\n");
    return hints;
  }
  PTC_TRY(hints.config, read_text_file(AT_FDCWD, path, kMaxConfigBytes));
  auto plan = transformers_plan(options.python, path);
  if (!plan) {
    // Asked for by name, it must be there.
    if (options.python != kDefaultPython) return std::move(plan).error();
    fmt::print(stderr, "ptc: transformers' plan was not asked: {}\n", plan.error().message());
    return hints;
  }
  if (plan.value()) {
    hints.plan = *std::move(plan).value();
  } else {
    fmt::print(stderr, "ptc: the transformers of {} do not know this type: guessed without them\n",
               options.python);
  }
  return hints;
}

Result<int> run_suggest(const Context& context, const RulesOptions& options) {
  PTC_TRY(auto report, report_of(context, options));
  std::vector<NamedShape> parameters;
  for (const json::value& value : array_field(report.second, "tensors")) {
    if (!value.is_object()) continue;
    const json::object& tensor = value.get_object();
    // What follows a parameter has its rule.
    if (text_field(tensor, "how").starts_with("follows ")) continue;
    NamedShape& parameter = parameters.emplace_back();
    parameter.names = text_field(tensor, "names");
    for (const json::value& extent : array_field(tensor, "shape"))
      parameter.shape.push_back(ptc::whole_number(extent).value_or(0));
  }
  PTC_TRY(const auto hints, hints_of(context, options));
  const SuggestedRules suggested = suggested_rules(parameters, hints);
  fmt::print("{}", pretty_json(suggested.text));
  if (suggested.guesses == 0) {
    fmt::print(stderr,
               "ptc: all names of {} are known; say what \"extends\" says, and nothing is "
               "guessed\n",
               report.first);
    return kDone;
  }
  fmt::print(stderr,
             "ptc: {} of this {} guessed: look at each \"guess\", then at what \"ptc rules check\" "
             "says\n",
             suggested.guesses, suggested.guesses == 1 ? "is" : "are");
  return kDone;
}

}  // namespace

void add_rules(CLI::App& app, Context& context) {
  auto options = std::make_shared<RulesOptions>();
  CLI::App* command = app.add_subcommand("rules", "Explain how slicing rules cut a model");
  command->footer(
      "The rules of a checkpoint are those of its job's rules.json when it was\n"
      "committed, else of the family that knows its names.\n"
      "\nExamples:\n  ptc rules list\n  ptc rules show llama\n"
      "  ptc rules check llama --layout tp8-pp1-dp1\n"
      "  ptc rules check llama/base q_proj embed\n  ptc rules check ./rules.json\n"
      "  ptc rules check ./Llama-3.1-8B --layout tp8-pp1-dp1");
  command->require_subcommand(1);
  CLI::App* list = command->add_subcommand("list", "List the families that are built in");
  CLI::App* show = command->add_subcommand("show", "Print the rules of a family");
  show->add_option("FAMILY", options->family, "a family of \"ptc rules list\"")->required();
  CLI::App* check = command->add_subcommand(
      "check", "Say how each tensor of a checkpoint is cut, or what is wrong with a rules file");
  check
      ->add_option("JOB", options->target,
                   "a job, JOB/CHECKPOINT, a file *.json of rules, or a model's directory (with a "
                   "slash in its name, as ./base)")
      ->required();
  check->add_option("NAME", options->names, "only tensors with one of these in their name");
  check
      ->add_option("--layout", options->layout,
                   "a layout.json, or a layout's name; else the job's, of a directory tp2-pp1-dp1")
      ->type_name("LAYOUT or FILE")
      ->check(cli::not_empty());
  check
      ->add_option("--rules", options->rules,
                   "of a directory: a rules.json instead of the family's")
      ->type_name("FILE");
  CLI::App* suggest = command->add_subcommand(
      "suggest", "Print a rules.json for a model of which not all names are known");
  suggest->add_option("JOB", options->target, "a job, JOB/CHECKPOINT, or a model's directory")
      ->required();
  suggest
      ->add_option("--python", options->python,
                   "a Python that has transformers, which is asked for its plan")
      ->type_name("PROGRAM")
      ->capture_default_str();
  suggest->footer(
      "It extends the set of rules that knows most of its names, if it knows half of\n"
      "them. What that does not know is guessed, and marked so with the reason: by\n"
      "transformers' plan of tensor parallelism, where a Python has it; by extents that\n"
      "config.json names (heads, experts, inner width, vocabulary); by how parameters\n"
      "are usually called. What no other weight of its module is cut to match is whole\n"
      "on each rank, as is all else. Of a model that is imported already the rules\n"
      "stay as they are: save these as the job's rules.json, then\n"
      "\"ptc layout JOB set --rules rules.json\".\n"
      "\nExample:\n  ptc rules suggest ./model > rules.json\n"
      "  ptc rules check ./model --rules rules.json");
  for (CLI::App* sub : {list, show, check, suggest}) sub->fallthrough();
  for (CLI::App* sub : {list, check}) sub->add_flag("--json", options->as_json, "print as JSON");
  check->footer("Exit status: 0 all can be cut so, 1 not, or the file is wrong.");
  command->callback([&context, options, list, show, suggest] {
    context.run = [&context, options, list, show, suggest]() -> Result<int> {
      if (list->parsed()) return run_list(options->as_json);
      if (show->parsed()) return run_show(options->family);
      if (suggest->parsed()) return run_suggest(context, *options);
      if (options->target.ends_with(".json")) return check_file(options->target);
      return check_model(context, *options);
    };
  });
}

}  // namespace ptc::cli
