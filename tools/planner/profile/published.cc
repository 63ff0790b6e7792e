#include "tools/planner/profile/published.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>

#include "store/base/json.h"
#include "tools/planner/profile/csv.h"
#include "tools/planner/profile/input.h"

namespace ptc::planner {
namespace {

/// Of a row without a time; whether it was for want of memory is not said.
constexpr const char* kFailed = "none: it failed";

/// A digit each: 1 to 9 where `text` is nothing else.
std::optional<std::vector<uint32_t>> digits(std::string_view text) {
  std::vector<uint32_t> found;
  for (const char c : text) {
    if (c < '1' || c > '9') return std::nullopt;
    found.push_back(static_cast<uint32_t>(c - '0'));
  }
  return found.empty() ? std::nullopt : std::optional(std::move(found));
}

struct Placed {
  uint32_t gpus, most_on_a_node;
};
Result<Placed> placed(const Csv& csv, size_t row, size_t column) {
  const auto nodes = digits(csv.at(row, column));
  if (!nodes)
    return csv.error(row, column,
                     fmt::format("{} is no placement: a digit for each node, the GPUs there",
                                 ptc::quoted(csv.at(row, column))));
  return Placed{std::accumulate(nodes->begin(), nodes->end(), 0u),
                *std::max_element(nodes->begin(), nodes->end())};
}

Result<std::optional<double>> seconds(const Csv& csv, size_t row, size_t column) {
  PTC_TRY(const double value, csv.number(row, column));
  if (value != 0 && (value < kLeastIteration || value > kMostIteration))
    return csv.error(row, column, "an iteration takes 1e-9 to 1e9 s, or 0 where it failed");
  return value == 0 ? std::nullopt : std::optional(value);
}

}  // namespace

Result<Published> read_morphling(std::string_view text, const std::string& file,
                                 const std::string& model, uint64_t batch) {
  PTC_TRY(const Csv csv, Csv::parse(text, file));
  PTC_TRY(const size_t plan, csv.needed("exec_plan"));
  PTC_TRY(const size_t placement, csv.needed("placement"));
  PTC_TRY(const size_t time, csv.needed("iter_time"));
  Published published;
  std::map<std::string, size_t> no_numbers;
  for (size_t i = 0; i < csv.rows(); ++i) {
    PTC_TRY(const Placed on, placed(csv, i, placement));
    ProfileRow row;
    row.model = model;
    row.batch = batch;
    row.gpus = on.gpus;
    row.gpus_per_node = on.most_on_a_node;
    row.origin = "measured";
    const std::string& what = csv.at(i, plan);
    if (const auto sizes = digits(what); sizes && sizes->size() == 3) {
      row.dp = (*sizes)[0], row.tp = (*sizes)[1], row.pp = (*sizes)[2];
      if (uint64_t{row.dp} * row.tp * row.pp != on.gpus)
        return csv.error(i, plan,
                         fmt::format("{} takes {}, and its placement has {}", ptc::quoted(what),
                                     counted(row.dp * row.tp * row.pp, "GPU"), on.gpus));
    } else if (what.starts_with("tp") || what.starts_with("pp")) {
      ++no_numbers[what];  // how wide is not said
      continue;
    } else {
      row.technique = what;
      row.dp = on.gpus;
    }
    PTC_TRY(row.iteration_s, seconds(csv, i, time));
    if (!row.iteration_s) row.origin = kFailed;
    published.rows.push_back(std::move(row));
  }
  for (const auto& [what, count] : no_numbers)
    published.left_out.push_back(fmt::format("{}: {} of {}, whose split is not said", file,
                                             counted(count, "row"), ptc::quoted(what)));
  return published;
}

Result<Published> read_pollux(std::string_view text, const std::string& file,
                              const std::string& model) {
  PTC_TRY(const Csv csv, Csv::parse(text, file));
  PTC_TRY(const size_t placement, csv.needed("placement"));
  PTC_TRY(const size_t local, csv.needed("local_bsz"));
  PTC_TRY(const size_t time, csv.needed("step_time"));
  Published published;
  for (size_t i = 0; i < csv.rows(); ++i) {
    PTC_TRY(const Placed on, placed(csv, i, placement));
    PTC_TRY(const uint64_t each, csv.whole(i, local, 1, kMostBatch / on.gpus));
    ProfileRow row;
    row.model = model;
    row.technique = "ddp";
    row.batch = each * on.gpus;
    row.dp = row.gpus = on.gpus;
    row.gpus_per_node = on.most_on_a_node;
    row.origin = "measured";
    PTC_TRY(row.iteration_s, seconds(csv, i, time));
    if (!row.iteration_s) row.origin = kFailed;
    published.rows.push_back(std::move(row));
  }
  return published;
}

Result<Published> read_elasticflow(std::string_view text, const std::string& file,
                                   const std::string& model) {
  PTC_TRY(const Csv csv, Csv::parse(text, file));
  PTC_TRY(const size_t batch, csv.needed("global_batch_size"));
  Published published;
  for (size_t i = 0; i < csv.rows(); ++i) {
    PTC_TRY(const uint64_t samples, csv.whole(i, batch, 1, kMostBatch));
    for (size_t column = 0; column < csv.columns().size(); ++column) {
      if (column == batch || csv.at(i, column).empty()) continue;
      const std::string& title = csv.columns()[column];
      uint64_t gpus = 0;
      for (const char c : title)
        gpus = c >= '0' && c <= '9' && gpus < 1'000'000 ? gpus * 10 + static_cast<uint64_t>(c - '0')
                                                        : 10'000'000;
      if (gpus == 0 || gpus > kMostGpus)
        return csv.error(i, column, "the column's name is no number of GPUs");
      PTC_TRY(const double per_s, csv.number(i, column));
      if (per_s != 0 && (per_s < 1 / kMostIteration || per_s > 1 / kLeastIteration))
        return csv.error(i, column, "1e-9 to 1e9 iterations a second, or 0 where it failed");
      ProfileRow row;
      row.model = model;
      row.technique = "ddp";
      row.batch = samples;
      row.dp = row.gpus = static_cast<uint32_t>(gpus);
      row.origin = "measured";
      if (per_s > 0) row.iteration_s = 1 / per_s;
      else row.origin = kFailed;
      published.rows.push_back(std::move(row));
    }
  }
  return published;
}

}  // namespace ptc::planner
