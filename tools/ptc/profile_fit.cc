#include "tools/ptc/profile_fit.h"

#include <fmt/core.h>

#include <charconv>
#include <set>

#include "tools/planner/profile/fit.h"
#include "tools/planner/profile/input.h"
#include "tools/planner/profile/profile.h"
#include "tools/ptc/command.h"
#include "tools/ptc/output_file.h"
#include "tools/ptc/text.h"

namespace ptc::cli {
namespace {

constexpr size_t kMostTableToFit = 64 << 20;

/// Of "gpt2=6e9" and others.
Result<std::map<std::string, double>> bytes_of(const std::vector<std::string>& said,
                                               const std::vector<planner::ProfileRow>& rows) {
  std::set<std::string> models;
  for (const planner::ProfileRow& row : rows) models.insert(row.model);
  std::map<std::string, double> bytes;
  for (const std::string& one : said) {
    const size_t place = one.rfind('=');
    double number = 0;
    const char* end = one.data() + one.size();
    if (place == std::string::npos ||
        std::from_chars(one.data() + place + 1, end, number).ptr != end || !(number >= 1) ||
        number > 1e18)
      return invalid_argument("--bytes {}: it is MODEL=N, the bytes that its replicas sum",
                              ptc::quoted(one));
    const std::string model = one.substr(0, place);
    if (!models.contains(model))
      return invalid_argument("--bytes: there is no model {}{}", ptc::quoted(model),
                              planner::what_there_is(model, models));
    bytes[model] = number;
  }
  return bytes;
}

}  // namespace

Result<int> run_profile_fit(const ProfileFitOptions& options) {
  const std::string name = planner::input_name(options.file);
  PTC_TRY(const std::string text, planner::read_input(options.file, kMostTableToFit));
  std::vector<std::string> remarks;
  PTC_TRY(auto rows, planner::parse_profiles(text, name, &remarks));
  for (const std::string& remark : remarks) fmt::print(stderr, "ptc: {}\n", printable(remark));
  planner::FitOptions how;
  if (options.gpus) how.most_gpus = static_cast<uint32_t>(std::stoul(*options.gpus));
  if (options.node) how.gpus_per_node = static_cast<uint32_t>(std::stoul(*options.node));
  if (options.bytes.empty() == options.sums.has_value())
    return invalid_argument("--sums and --bytes go together: what sums take, and of how much");
  std::vector<std::string> read = {options.file};
  if (options.sums) {
    PTC_TRY(const std::string table, planner::read_input(*options.sums, kMostTableToFit));
    PTC_TRY(how.cluster, planner::parse_communication(table, planner::input_name(*options.sums)));
    PTC_TRY(how.bytes, bytes_of(options.bytes, rows));
    read.push_back(*options.sums);
  }
  std::optional<OutputFile> output;
  if (options.output) {
    PTC_TRY(output, OutputFile::at(*options.output, read));
  }
  Result<planner::Fit> fitted = planner::fit(rows, how);
  if (fitted.has_error()) return std::move(fitted).error().with_context(name);
  planner::Fit made = std::move(fitted).value();
  for (const planner::FittedWay& way : made.ways) {
    if (!way.none.empty()) {
      fmt::print(stderr, "ptc: {}: not modelled: {}\n", printable(way.name), way.none);
      continue;
    }
    fmt::print(stderr, "ptc: {}: {} of {}{}\n", printable(way.name),
               planner::counted(way.modelled, "row"),
               planner::counted(way.single + way.others, "trial"),
               way.others == 0 ? std::string(", and the sums of the table")
                               : fmt::format("; of those with several replicas it is off by {:.1f} "
                                             "% in the median, {:.1f} % at most",
                                             100 * way.median_error, 100 * way.most_error));
  }
  std::erase_if(rows, [](const planner::ProfileRow& row) { return row.origin == "modelled"; });
  std::move(made.rows.begin(), made.rows.end(), std::back_inserter(rows));
  const std::string table = planner::profiles_text(rows, options.output.value_or(""));
  if (!output || output->is_standard_output()) {
    fmt::print("{}", table);
    return kDone;
  }
  PTC_TRY(output->write(table));
  fmt::print("{}: {}, {} of them modelled\n", printable(*options.output),
             planner::counted(rows.size(), "row"), made.rows.size());
  return kDone;
}

}  // namespace ptc::cli
