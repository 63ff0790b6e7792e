#include "tools/planner/profile/profile.h"

#include <algorithm>
#include <boost/json/serialize.hpp>
#include <map>
#include <set>
#include <tuple>

#include "store/base/json.h"
#include "tools/planner/profile/csv.h"
#include "tools/planner/profile/input.h"

namespace ptc::planner {
namespace {

/// Words that stand where there is no time.
bool is_none(std::string_view text) {
  const std::string plain = plain_title(text);  // "OOM", "out of memory"
  return plain == "oom" || plain == "none" || plain == "failed" || plain == "out_of_memory";
}

const std::vector<std::string> kTitles = {
    "model",       "technique",         "batch",  "tp",          "pp",         "dp",
    "gpus",        "max_gpus_per_node", "device", "iteration_s", "peak_bytes", "origin",
    "accumulation"};

/// Of our titles the one that is meant. Of short ones, which are all alike, only that with the same
/// letters: "ep" is none of ours.
std::optional<std::string> meant_title(std::string_view title) {
  constexpr size_t kShort = 3;
  const auto sorted = [](std::string word) {
    std::sort(word.begin(), word.end());
    return word;
  };
  const std::string plain = plain_title(title);
  for (const std::string& one : kTitles)
    if (one == plain || (plain.size() <= kShort && sorted(plain) == sorted(one))) return one;
  return plain.size() <= kShort ? std::nullopt : nearest_name(plain, kTitles);
}

class Reader {
 public:
  explicit Reader(const Csv& csv) : csv_(csv) {}

  Result<std::vector<ProfileRow>> read(std::vector<std::string>* remarks) {
    PTC_TRY(check_titles(remarks));
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
  Result<> check_titles(std::vector<std::string>* remarks) const {
    std::set<std::string> unused;
    for (const std::string& title : csv_.columns()) {
      if (title.empty() || std::find(kTitles.begin(), kTitles.end(), title) != kTitles.end())
        continue;
      const auto like = meant_title(title);
      if (like && !csv_.column(*like)) {
        const Csv::Place place = csv_.title_place(*csv_.column(title));
        return invalid_argument("{}: line {}, column {}: unknown column {} (did you mean '{}'?)",
                                csv_.name(), place.line, place.column, ptc::quoted(title), *like);
      }
      unused.insert(title);
    }
    if (remarks != nullptr && !unused.empty())
      remarks->push_back(
          fmt::format("{}: columns that are not used: {}", csv_.name(), some_of(unused)));
    return ok();
  }

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
    const Csv::Place place = csv_.place(i, csv_.column("tp").value_or(model_));
    row.line = place.line;
    row.column = place.column;
    row.technique = text(i, "technique");
    row.device = text(i, "device");
    row.origin = text(i, "origin");
    PTC_TRY(row.batch, csv_.whole(i, batch_, 1, kMostBatch));
    PTC_TRY(number(i, "tp", 1, kMostGpus, row.tp));
    PTC_TRY(number(i, "pp", 1, kMostGpus, row.pp));
    PTC_TRY(number(i, "dp", 1, kMostGpus, row.dp));
    PTC_TRY(number(i, "max_gpus_per_node", 1, kMostGpus, row.gpus_per_node));
    PTC_TRY(number(i, "peak_bytes", 0, uint64_t{1} << 53, row.peak_bytes));
    PTC_TRY(number(i, "accumulation", 1, kMostAccumulation, row.accumulation));
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
      return csv_.error(
          i, *csv_.column("max_gpus_per_node"),
          fmt::format("{} on one node, of {} in all", counted(row.gpus_per_node, "GPU"), row.gpus));
    if (is_none(csv_.at(i, seconds_))) return row;
    const Result<double> time = csv_.number(i, seconds_);
    if (time.has_error())
      return csv_.error(i, seconds_,
                        fmt::format("{} is no time: seconds, or \"oom\" where a trial had none",
                                    ptc::quoted(csv_.at(i, seconds_))));
    const double seconds = time.value();
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

bool ProfileRow::is_computed() const { return origin == "modelled" || origin == "interpolated"; }

std::string ProfileRow::way() const {
  return fmt::format("{}{}tp{}-pp{}-dp{}{}", technique, technique.empty() ? "" : " ", tp, pp, dp,
                     accumulation == 1 ? "" : fmt::format(", {} steps", accumulation));
}

Result<std::vector<ProfileRow>> parse_profiles(std::string_view text, const std::string& name,
                                               std::vector<std::string>* remarks) {
  if (!Csv::is_json(text)) {
    PTC_TRY(const Csv csv, Csv::parse(text, name));
    return Reader(csv).read(remarks);
  }
  PTC_TRY(const Csv csv, Csv::of_json(text, name));
  if (csv.rows() == 0) return std::vector<ProfileRow>();  // then it names no columns
  return Reader(csv).read(remarks);
}

std::string profiles_csv(const std::vector<ProfileRow>& rows) {
  const bool some_accumulate = std::any_of(
      rows.begin(), rows.end(), [](const ProfileRow& row) { return row.accumulation != 1; });
  std::string out =
      "model,technique,batch,tp,pp,dp,max_gpus_per_node,device,iteration_s,peak_bytes,origin";
  out += some_accumulate ? ",accumulation\n" : "\n";
  const auto number = [](uint64_t value) { return value == 0 ? "" : std::to_string(value); };
  for (const ProfileRow& row : rows)
    out += fmt::format(
        "{},{},{},{},{},{},{},{},{},{},{}{}\n", csv_field(row.model), csv_field(row.technique),
        row.batch, row.tp, row.pp, row.dp, number(row.gpus_per_node), csv_field(row.device),
        row.iteration_s ? fmt::format("{}", *row.iteration_s) : "oom", number(row.peak_bytes),
        csv_field(row.origin), some_accumulate ? fmt::format(",{}", row.accumulation) : "");
  return out;
}

std::string profiles_json(const std::vector<ProfileRow>& rows) {
  std::string out = "[";
  for (const ProfileRow& row : rows) {
    const auto text = [](const char* key, const std::string& value) {
      return value.empty() ? ""
                           : fmt::format(", \"{}\": {}", key, json::serialize(json::value(value)));
    };
    const auto number = [](const char* key, uint64_t value, uint64_t otherwise) {
      return value == otherwise ? "" : fmt::format(", \"{}\": {}", key, value);
    };
    out += fmt::format(
        "{}\n {{\"model\": {}{}, \"batch\": {}, \"tp\": {}, \"pp\": {}, \"dp\": {}{}{}, "
        "\"iteration_s\": {}{}{}{}}}",
        out.size() == 1 ? "" : ",", json::serialize(json::value(row.model)),
        text("technique", row.technique), row.batch, row.tp, row.pp, row.dp,
        number("max_gpus_per_node", row.gpus_per_node, 0), text("device", row.device),
        row.iteration_s ? fmt::format("{}", *row.iteration_s) : "\"oom\"",
        number("peak_bytes", row.peak_bytes, 0), text("origin", row.origin),
        number("accumulation", row.accumulation, 1));
  }
  return out + "\n]\n";
}

std::string profiles_text(const std::vector<ProfileRow>& rows, const std::string& file) {
  return file.ends_with(".json") ? profiles_json(rows) : profiles_csv(rows);
}

std::string why_no_time(std::span<const ProfileRow* const> rows) {
  constexpr std::string_view kNone = "none: ", kMemory = "out of memory";
  std::map<std::string, size_t> reasons;  // and of how many trials
  for (const ProfileRow* row : rows)
    if (!row->iteration_s)
      ++reasons[row->origin.starts_with(kNone) ? row->origin.substr(kNone.size())
                                               : std::string(kMemory)];
  if (reasons.empty() || (reasons.size() == 1 && reasons.begin()->first == kMemory))
    return std::string(kMemory);
  const auto first =
      std::max_element(reasons.begin(), reasons.end(),
                       [](const auto& a, const auto& b) { return a.second < b.second; });
  std::string text = first->first;
  if (const size_t others = reasons.size() - 1; others != 0)
    text += fmt::format(" (and {})", counted(others, "other reason"));
  const bool is_late = std::any_of(reasons.begin(), reasons.end(), [](const auto& one) {
    return one.first.starts_with("it took more than ");
  });
  if (is_late) text += "; \"ptc profile run --again --within S\" gives it longer";
  return text;
}

bool is_packed(const ProfileRow& row, uint32_t gpus_per_node) {
  return row.gpus_per_node == 0 || row.gpus_per_node == std::min(row.gpus, gpus_per_node);
}

std::vector<FrontierPoint> frontier(std::span<const ProfileRow* const> rows, const FrontierOf& of) {
  std::map<uint32_t, FrontierPoint> best;  // by GPUs
  for (const ProfileRow* row : rows) {
    if (row->model != of.model || !row->iteration_s || row->batch < of.least_batch ||
        row->batch > of.most_batch || (!of.technique.empty() && row->technique != of.technique) ||
        (of.device && row->device != *of.device))
      continue;
    if (of.gpus_per_node != 0 && !is_packed(*row, of.gpus_per_node)) continue;
    if (of.can_be_had && !of.can_be_had(row->gpus)) continue;
    const double samples_per_s =
        static_cast<double>(row->batch) / *row->iteration_s * (of.worth ? of.worth(row->batch) : 1);
    FrontierPoint& point = best[row->gpus];
    if (point.row == nullptr || samples_per_s > point.samples_per_s)
      point = {row->gpus, samples_per_s, row};
  }
  std::vector<FrontierPoint> points;
  for (const auto& [gpus, point] : best)
    if (of.keeps_all || points.empty() || point.samples_per_s > points.back().samples_per_s)
      points.push_back(point);
  return points;
}

std::vector<FrontierPoint> frontier(const std::vector<ProfileRow>& rows, const FrontierOf& of) {
  std::vector<const ProfileRow*> all;
  all.reserve(rows.size());
  for (const ProfileRow& row : rows) all.push_back(&row);
  return frontier(all, of);
}

Result<std::vector<const ProfileRow*>> rows_of_device(const std::vector<ProfileRow>& rows,
                                                      const std::set<std::string>& models,
                                                      const std::string& device) {
  std::map<std::string, std::set<std::string>> of_model;
  std::set<std::string> all;
  for (const ProfileRow& row : rows) {
    if (!models.contains(row.model)) continue;
    of_model[row.model].insert(row.device);
    if (!row.device.empty()) all.insert(row.device);
  }
  if (device.empty() && all.size() > 1)
    return invalid_argument(
        "the profiles are of several kinds of GPU, {}: --device says which, or \"device\" in "
        "'cluster'",
        some_of(all));
  for (const auto& [model, devices] : of_model) {
    if (device.empty() && devices.size() > 1)
      return invalid_argument(
          "some rows of {} are of {}, and others do not name their GPUs: --device {} takes only "
          "those that do",
          ptc::quoted(model), some_of(all), *all.begin());
    if (device.empty() || devices.contains(device) || devices == std::set<std::string>{""})
      continue;
    std::set<std::string> named = devices;
    named.erase("");
    return invalid_argument("no profile of {} is of GPUs {}{}", ptc::quoted(model),
                            ptc::quoted(device), what_there_is(device, named));
  }
  // Of what was tried nothing else counts. A trial without a time does not know how it was cut.
  struct TrialsOf {
    std::set<uint32_t> per_node;  // 0: not known
    bool has(const ProfileRow& row) const {
      return !per_node.empty() && (row.gpus_per_node == 0 || per_node.contains(0) ||
                                   per_node.contains(row.gpus_per_node));
    }
  };
  const auto place_of = [](const ProfileRow& row, bool has_time) {
    return std::tuple(row.model, row.technique, row.device, row.batch, row.gpus, has_time,
                      has_time ? row.tp : 0, has_time ? row.pp : 0,
                      has_time ? row.accumulation : 0);
  };
  std::map<decltype(place_of(rows.front(), true)), TrialsOf> tried;
  for (const ProfileRow& row : rows)
    if (!row.is_computed())
      tried[place_of(row, row.iteration_s.has_value())].per_node.insert(row.gpus_per_node);
  const auto was_tried = [&](const ProfileRow& row) {
    for (const bool has_time : {true, false})
      if (const auto found = tried.find(place_of(row, has_time));
          found != tried.end() && found->second.has(row))
        return true;
    return false;
  };
  std::vector<const ProfileRow*> taken;
  for (const ProfileRow& row : rows) {
    if (!models.contains(row.model)) continue;
    if (row.is_computed() && was_tried(row)) continue;
    const std::set<std::string>& devices = of_model[row.model];
    if (devices.size() == 1 || row.device == device) taken.push_back(&row);
  }
  return taken;
}

}  // namespace ptc::planner
