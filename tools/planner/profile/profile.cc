#include "tools/planner/profile/profile.h"

#include <algorithm>
#include <map>

#include "store/base/json.h"
#include "tools/planner/profile/csv.h"

namespace ptc::planner {
namespace {

/// Words that stand where there is no time.
bool is_none(std::string_view text) {
  return text == "oom" || text == "none" || text == "failed" || text == "out of memory";
}

class Reader {
 public:
  explicit Reader(const Csv& csv) : csv_(csv) {}

  Result<std::vector<ProfileRow>> read() {
    PTC_TRY(model_, csv_.needed("model"));
    PTC_TRY(batch_, csv_.needed("batch"));
    PTC_TRY(seconds_, csv_.needed("iteration_s"));
    std::vector<ProfileRow> rows;
    rows.reserve(csv_.rows());
    for (size_t i = 0; i < csv_.rows(); ++i) {
      PTC_TRY(auto row, read_row(i));
      rows.push_back(std::move(row));
    }
    return rows;
  }

 private:
  std::string text(size_t row, std::string_view title) const {
    const auto column = csv_.column(title);
    return column ? csv_.at(row, *column) : std::string();
  }

  /// Absent or empty: `target` stays.
  template <class Number>
  Result<> number(size_t row, std::string_view title, uint64_t least, uint64_t most,
                  Number& target) const {
    const auto column = csv_.column(title);
    if (!column || csv_.at(row, *column).empty()) return ok();
    PTC_TRY(const uint64_t value, csv_.whole(row, *column, least, most));
    target = static_cast<Number>(value);
    return ok();
  }

  Result<ProfileRow> read_row(size_t i) const {
    ProfileRow row;
    row.model = csv_.at(i, model_);
    if (row.model.empty()) return csv_.error(i, model_, "the model's name is missing");
    row.technique = text(i, "technique");
    row.device = text(i, "device");
    row.origin = text(i, "origin");
    PTC_TRY(row.batch, csv_.whole(i, batch_, 1, kMostBatch));
    PTC_TRY(number(i, "tp", 1, kMostGpus, row.tp));
    PTC_TRY(number(i, "pp", 1, kMostGpus, row.pp));
    PTC_TRY(number(i, "dp", 1, kMostGpus, row.dp));
    PTC_TRY(number(i, "max_gpus_per_node", 1, kMostGpus, row.gpus_per_node));
    PTC_TRY(number(i, "peak_bytes", 0, uint64_t{1} << 53, row.peak_bytes));
    const uint64_t product = uint64_t{row.tp} * row.pp * row.dp;  // each ≤ 2^20
    uint64_t gpus = product;
    PTC_TRY(number(i, "gpus", 1, kMostGpus, gpus));
    if (gpus != product) {
      // Where only the number is known, replicas are what is left.
      const bool says_dp = !text(i, "dp").empty();
      const uint64_t others = uint64_t{row.tp} * row.pp;
      if (says_dp || gpus % others != 0)
        return csv_.error(
            i, *csv_.column("gpus"),
            fmt::format("{} is not tp {} · pp {} · dp {}", gpus, row.tp, row.pp, row.dp));
      row.dp = static_cast<uint32_t>(gpus / others);
    }
    if (gpus > kMostGpus)
      return csv_.error(
          i, model_,
          fmt::format("tp {} · pp {} · dp {} is more than {}", row.tp, row.pp, row.dp, kMostGpus));
    row.gpus = static_cast<uint32_t>(gpus);
    if (row.gpus_per_node > row.gpus)
      return csv_.error(i, *csv_.column("max_gpus_per_node"),
                        fmt::format("{} of {} GPUs on one node", row.gpus_per_node, row.gpus));
    if (is_none(csv_.at(i, seconds_))) return row;
    PTC_TRY(const double seconds, csv_.number(i, seconds_));
    if (seconds < kLeastIteration || seconds > kMostIteration)
      return csv_.error(i, seconds_,
                        fmt::format("an iteration takes 1e-9 to 1e9 s, or \"oom\", not {}",
                                    ptc::quoted(csv_.at(i, seconds_))));
    row.iteration_s = seconds;
    return row;
  }

  const Csv& csv_;
  size_t model_ = 0, batch_ = 0, seconds_ = 0;
};

}  // namespace

std::string ProfileRow::way() const {
  return fmt::format("{}{}tp{}-pp{}-dp{}", technique, technique.empty() ? "" : " ", tp, pp, dp);
}

Result<std::vector<ProfileRow>> parse_profiles(std::string_view text, const std::string& name) {
  PTC_TRY(const Csv csv, Csv::parse(text, name));
  return Reader(csv).read();
}

std::string profiles_csv(const std::vector<ProfileRow>& rows) {
  std::string out =
      "model,technique,batch,tp,pp,dp,max_gpus_per_node,device,iteration_s,peak_bytes,origin\n";
  const auto number = [](uint64_t value) { return value == 0 ? "" : std::to_string(value); };
  for (const ProfileRow& row : rows)
    out += fmt::format("{},{},{},{},{},{},{},{},{},{},{}\n", csv_field(row.model),
                       csv_field(row.technique), row.batch, row.tp, row.pp, row.dp,
                       number(row.gpus_per_node), csv_field(row.device),
                       row.iteration_s ? fmt::format("{}", *row.iteration_s) : "oom",
                       number(row.peak_bytes), csv_field(row.origin));
  return out;
}

std::vector<FrontierPoint> frontier(const std::vector<ProfileRow>& rows, const FrontierOf& of) {
  std::map<uint32_t, FrontierPoint> best;  // by GPUs
  for (const ProfileRow& row : rows) {
    if (row.model != of.model || !row.iteration_s || row.batch < of.least_batch ||
        row.batch > of.most_batch || (!of.technique.empty() && row.technique != of.technique))
      continue;
    if (of.gpus_per_node != 0 && row.gpus_per_node != 0 &&
        row.gpus_per_node != std::min(row.gpus, of.gpus_per_node))
      continue;
    if (of.can_be_had && !of.can_be_had(row.gpus)) continue;
    const double samples_per_s = static_cast<double>(row.batch) / *row.iteration_s;
    FrontierPoint& point = best[row.gpus];
    if (point.row == nullptr || samples_per_s > point.samples_per_s)
      point = {row.gpus, samples_per_s, &row};
  }
  std::vector<FrontierPoint> points;
  for (const auto& [gpus, point] : best)
    if (points.empty() || point.samples_per_s > points.back().samples_per_s)
      points.push_back(point);
  return points;
}

}  // namespace ptc::planner
