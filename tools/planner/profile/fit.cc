#include "tools/planner/profile/fit.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <tuple>

#include "tools/planner/profile/analyser.h"
#include "tools/planner/profile/csv.h"
#include "tools/planner/profile/input.h"

namespace ptc::planner {
namespace {

constexpr size_t kFactors = 3;
using Features = std::array<double, kFactors>;

constexpr std::string_view kModelled = "modelled";
constexpr size_t kMostRows = 1'000'000;
constexpr uint64_t kMostTried = 100'000'000;  // GPUs and batches, of all ways

Features features_of(uint32_t replicas, uint32_t nodes) {
  const double r = replicas, n = nodes;
  return {2 * (r - 1) / r, r - 1, (n - 1) / n};
}

struct Sample {
  Features features;
  double seconds;  // that they are to give
  double weight;
};

/// The factors ≥ 0 of some of the features, the others 0, with the least sum of squares; none where
/// these are not determined.
std::optional<Features> solve_for(const std::vector<Sample>& samples, unsigned some) {
  std::array<std::array<double, kFactors + 1>, kFactors> rows = {};
  for (const Sample& sample : samples) {
    const double square = sample.weight * sample.weight;
    for (size_t i = 0; i < kFactors; ++i) {
      for (size_t j = 0; j < kFactors; ++j)
        rows[i][j] += square * sample.features[i] * sample.features[j];
      rows[i][kFactors] += square * sample.features[i] * sample.seconds;
    }
  }
  Features scale = {};
  for (size_t i = 0; i < kFactors; ++i) scale[i] = rows[i][i];
  Features found = {};
  std::vector<size_t> order;
  for (size_t i = 0; i < kFactors; ++i)
    if (some >> i & 1) order.push_back(i);
  for (const size_t i : order) {  // Gauss; what is left on the diagonal is > 0 or nothing
    if (rows[i][i] <= 1e-9 * scale[i]) return std::nullopt;
    for (const size_t j : order) {
      if (j == i) continue;
      const double part = rows[j][i] / rows[i][i];
      for (size_t k = 0; k <= kFactors; ++k) rows[j][k] -= part * rows[i][k];
    }
  }
  for (const size_t i : order) {
    found[i] = rows[i][kFactors] / rows[i][i];
    if (found[i] < 0) return std::nullopt;
  }
  return found;
}

double sum_of(const Features& features, const Features& factors) {
  double sum = 0;
  for (size_t i = 0; i < kFactors; ++i) sum += features[i] * factors[i];
  return sum;
}

/// Exactly, since there are but 2³ sets of factors that are not 0; of equal ones the first.
Features least_squares(const std::vector<Sample>& samples) {
  constexpr double kGain = 1e-9;  // that a set must bring, in parts of all
  Features best = {};
  double all = 0;
  for (const Sample& sample : samples) all += std::pow(sample.weight * sample.seconds, 2);
  double least = all;
  for (unsigned some = 1; some < 1u << kFactors; ++some) {
    const auto factors = solve_for(samples, some);
    if (!factors) continue;
    double error = 0;
    for (const Sample& sample : samples)
      error += std::pow(sample.weight * (sum_of(sample.features, *factors) - sample.seconds), 2);
    if (error < least - kGain * all) least = error, best = *factors;
  }
  return best;
}

uint32_t nodes_of(uint32_t gpus, uint32_t per_node) {
  return per_node == 0 ? 1 : (gpus + per_node - 1) / per_node;
}

/// One replica's; with fewer samples than any the line goes on, neither above the least nor below
/// what is in proportion.
std::optional<double> processing(const Tried& tried, double each) {
  const auto first = tried.begin(), second = std::next(first);
  if (each >= first->first) return seconds_between(tried, each);
  const double slope = (second->second - first->second) / (second->first - first->first);
  return std::clamp(first->second - slope * (first->first - each),
                    first->second * each / first->first, first->second);
}

class Fitter {
 public:
  Fitter(const std::vector<ProfileRow>& rows, const FitOptions& options) : options_(options) {
    for (const ProfileRow& row : rows) {
      most_gpus_ = std::max(most_gpus_, row.gpus);
      per_node_ = std::max(per_node_, row.gpus_per_node);
      if (!row.iteration_s || row.accumulation != 1 || row.is_computed()) continue;
      batches_[row.model].insert(row.batch);
      ways_[{row.model, row.technique, row.device, row.tp, row.pp}].push_back(&row);
    }
    if (options.most_gpus != 0) most_gpus_ = options.most_gpus;
    if (options.gpus_per_node != 0) per_node_ = options.gpus_per_node;
    // What was measured over more nodes than it needs says nothing of what is modelled.
    for (const ProfileRow& row : rows)
      if (row.origin != kModelled && (per_node_ == 0 || is_packed(row, per_node_)))
        known_.insert(place_of(row));
  }

  Result<Fit> run() {
    for (const auto& [way, rows] : ways_) {
      fit_way(rows);
      if (fit_.rows.size() <= kMostRows && tried_ <= kMostTried) continue;
      return invalid_argument(
          "more than {} rows would come of the trials, by {} of model, technique, tp and pp, up to "
          "{} and each model's batches: fewer GPUs (--gpus), or a table of fewer models, ways or "
          "batches, make them fewer",
          kMostRows, counted(ways_.size(), "way"), counted(most_gpus_, "GPU"));
    }
    return std::move(fit_);
  }

 private:
  using Way = std::tuple<std::string, std::string, std::string, uint32_t, uint32_t>;
  using Place = std::tuple<Way, uint32_t, uint64_t>;

  static Place place_of(const ProfileRow& row) {
    return {{row.model, row.technique, row.device, row.tp, row.pp}, row.dp, row.batch};
  }

  void fit_way(const std::vector<const ProfileRow*>& rows) {
    const ProfileRow& like = *rows.front();
    FittedWay way;
    way.name = fmt::format("{}{}{} tp{}-pp{}{}{}", like.model, like.technique.empty() ? "" : " ",
                           like.technique, like.tp, like.pp, like.device.empty() ? "" : " on ",
                           like.device);
    Tried tried;
    for (const ProfileRow* row : rows)
      if (row->dp == 1) {
        ++way.single;
        const auto [place, is_new] =
            tried.try_emplace(static_cast<double>(row->batch), *row->iteration_s);
        if (!is_new) place->second = std::min(place->second, *row->iteration_s);
      }
    way.others = rows.size() - way.single;
    const auto add = [&] { fit_.ways.push_back(std::move(way)); };
    if (tried.size() < 2) {
      way.none = "it takes two batches or more of one replica";
      return add();
    }
    std::vector<Sample> samples;
    for (const ProfileRow* row : rows) {
      const auto alone = processing(tried, static_cast<double>(row->batch) / row->dp);
      if (row->dp == 1 || !alone) continue;
      const uint32_t nodes = nodes_of(row->gpus, row->gpus_per_node);
      samples.push_back(
          {features_of(row->dp, nodes), *row->iteration_s - *alone, 1 / *row->iteration_s});
    }
    Communication communication;
    const auto bytes = options_.bytes.find(like.model);
    if (!samples.empty()) {
      communication.factors = least_squares(samples);
    } else if (options_.cluster && bytes != options_.bytes.end()) {
      communication = *options_.cluster;
      communication.factors[0] *= bytes->second;
      communication.factors[2] *= bytes->second;
    } else {
      way.none = "no trial has several replicas, and what sums take is not said";
      return add();
    }
    std::vector<double> errors;
    for (const Sample& sample : samples)
      errors.push_back(sample.weight *
                       std::abs(sum_of(sample.features, communication.factors) - sample.seconds));
    std::sort(errors.begin(), errors.end());
    if (!errors.empty()) {
      way.median_error = errors[errors.size() / 2];
      way.most_error = errors.back();
    }
    way.modelled = model(like, tried, communication);
    add();
  }

  /// How many rows it has made.
  size_t model(const ProfileRow& like, const Tried& tried, const Communication& communication) {
    const std::set<uint64_t>& of = batches_[like.model];
    std::set<uint64_t> batches = of;
    for (const uint64_t batch : batch_ladder(*of.begin(), *of.rbegin())) batches.insert(batch);
    std::set<uint32_t> counts = {most_gpus_};
    for (uint32_t gpus = 1; gpus < most_gpus_; gpus *= 2) counts.insert(gpus);
    tried_ += counts.size() * batches.size();
    size_t made = 0;
    for (const uint32_t gpus : counts) {
      if (fit_.rows.size() > kMostRows || tried_ > kMostTried) break;
      if (gpus % (like.tp * like.pp) != 0) continue;
      ProfileRow row = like;
      row.gpus = gpus;
      row.dp = gpus / (like.tp * like.pp);
      row.gpus_per_node = std::min(gpus, per_node_);
      row.peak_bytes = 0;
      row.origin = kModelled;
      for (const uint64_t batch : batches) {
        if (batch % row.dp != 0) continue;
        row.batch = batch;
        const auto alone = processing(tried, static_cast<double>(batch) / row.dp);
        if (!alone || known_.contains(place_of(row))) continue;
        row.iteration_s = *alone + communication.seconds(row.dp, nodes_of(gpus, per_node_));
        fit_.rows.push_back(row);
        ++made;
      }
    }
    return made;
  }

  const FitOptions& options_;
  uint32_t most_gpus_ = 1, per_node_ = 0;
  std::map<std::string, std::set<uint64_t>> batches_;  // by model
  std::map<Way, std::vector<const ProfileRow*>> ways_;
  std::set<Place> known_;
  uint64_t tried_ = 0;
  Fit fit_;
};

}  // namespace

double Communication::seconds(uint32_t replicas, uint32_t nodes) const {
  return sum_of(features_of(replicas, nodes), factors);
}

Result<Communication> parse_communication(std::string_view text, const std::string& name) {
  PTC_TRY(const Csv csv, Csv::parse(text, name));
  PTC_TRY(const size_t gpus, csv.needed("gpus"));
  PTC_TRY(const size_t bytes, csv.needed("bytes"));
  PTC_TRY(const size_t seconds, csv.needed("seconds"));
  const auto per_node = csv.column("max_gpus_per_node");
  std::vector<Sample> samples;
  for (size_t i = 0; i < csv.rows(); ++i) {
    PTC_TRY(const uint64_t count, csv.whole(i, gpus, 2, kMostGpus));
    PTC_TRY(const uint64_t size, csv.whole(i, bytes, 1, uint64_t{1} << 53));
    PTC_TRY(const double took, csv.number(i, seconds));
    if (took < kLeastIteration || took > kMostIteration)
      return csv.error(i, seconds, "a sum takes 1e-9 to 1e9 s");
    uint64_t on_one = 0;
    if (per_node && !csv.at(i, *per_node).empty()) {
      PTC_TRY(on_one, csv.whole(i, *per_node, 1, count));
    }
    const auto replicas = static_cast<uint32_t>(count);
    Features features = features_of(replicas, nodes_of(replicas, static_cast<uint32_t>(on_one)));
    features[0] *= static_cast<double>(size);
    features[2] *= static_cast<double>(size);
    samples.push_back({features, took, 1 / took});
  }
  if (samples.empty()) return invalid_argument("{}: it has no row", name);
  return Communication{least_squares(samples)};
}

Result<Fit> fit(const std::vector<ProfileRow>& rows, const FitOptions& options) {
  return Fitter(rows, options).run();
}

}  // namespace ptc::planner
