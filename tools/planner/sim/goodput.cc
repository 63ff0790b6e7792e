#include "tools/planner/sim/goodput.h"

#include <algorithm>
#include <set>
#include <utility>

#include "store/base/json.h"
#include "tools/planner/profile/csv.h"
#include "tools/planner/profile/profile.h"

namespace ptc::planner {

class EfficiencyReader {
 public:
  explicit EfficiencyReader(const Csv& csv) : csv_(csv) {}

  Result<std::map<std::string, Efficiency>> read() {
    PTC_TRY(const size_t model, csv_.needed("model"));
    PTC_TRY(const size_t batch, csv_.needed("batch"));
    PTC_TRY(const size_t epoch, csv_.needed("epoch"));
    PTC_TRY(const size_t steps, csv_.needed("steps"));
    PTC_TRY(const size_t sqr, csv_.needed("grad_sqr"));
    PTC_TRY(const size_t var, csv_.needed("grad_var"));
    constexpr uint64_t kMostEpochs = 100'000;
    constexpr double kMostOfGradient = 1e100;  // whose sums and ratios are numbers yet
    for (size_t i = 0; i < csv_.rows(); ++i) {
      std::vector<Efficiency::Epoch>& epochs = models_[csv_.at(i, model)].epochs_;
      PTC_TRY(const uint64_t number, csv_.whole(i, epoch, 1, kMostEpochs));
      if (number > epochs.size() + 1)
        return csv_.error(i, epoch, fmt::format("epoch {} is missing before it", number - 1));
      if (number > epochs.size()) epochs.emplace_back();
      PTC_TRY(const uint64_t samples, csv_.whole(i, batch, 1, kMostBatch));
      Efficiency::Epoch& of = epochs[number - 1];
      PTC_TRY(const double ends_at, at_least(i, steps, 1));
      of.ends_at = of.ends_at == 0 ? ends_at : std::min(of.ends_at, ends_at);
      Efficiency::Gradient gradient;
      PTC_TRY(gradient.sqr, at_least(i, sqr, 0));
      PTC_TRY(gradient.var, at_least(i, var, 1e-300));
      for (const auto& [column, value] : {std::pair(sqr, gradient.sqr), {var, gradient.var}})
        if (value > kMostOfGradient)
          return csv_.error(i, column,
                            fmt::format("{} is too much: at most {}", value, kMostOfGradient));
      if (!of.of_batch.emplace(samples, gradient).second)
        return csv_.error(i, batch, "a second line of this model, batch and epoch");
    }
    for (auto& [name, one] : models_) {
      PTC_TRY(finish(name, one));
    }
    return std::move(models_);
  }

 private:
  Result<double> at_least(size_t row, size_t column, double least) const {
    PTC_TRY(const double value, csv_.number(row, column));
    if (value < least) return csv_.error(row, column, fmt::format("{} is too little", value));
    return value;
  }

  Result<> finish(const std::string& model, Efficiency& of) const {
    const auto least = static_cast<double>(of.epochs_.front().of_batch.begin()->first);
    double before = 0;
    for (size_t i = 0; i < of.epochs_.size(); ++i) {
      Efficiency::Epoch& epoch = of.epochs_[i];
      if (epoch.of_batch.size() != of.epochs_.front().of_batch.size())
        return invalid_argument("{}: model {}: epoch {} has other batches than the first",
                                csv_.name(), ptc::quoted(model), i + 1);
      epoch.ends_at *= least;
      if (epoch.ends_at <= before)
        return invalid_argument("{}: model {}: epoch {} ends before it begins", csv_.name(),
                                ptc::quoted(model), i + 1);
      before = epoch.ends_at;
    }
    return ok();
  }

  const Csv& csv_;
  std::map<std::string, Efficiency> models_;
};

double Efficiency::of(size_t epoch, uint64_t batch) const {
  const std::map<uint64_t, Gradient>& tried = epochs_[epoch].of_batch;
  const auto samples = static_cast<double>(batch);
  // Below the smallest nobody has tried what a sample is worth: no more than there.
  const double scale = std::max(1.0, samples / static_cast<double>(tried.begin()->first));
  const auto above = tried.lower_bound(batch);
  Gradient gradient = above == tried.end() ? tried.rbegin()->second : above->second;
  if (above != tried.end() && above != tried.begin()) {
    const auto below = std::prev(above);
    const double part = (samples - static_cast<double>(below->first)) /
                        static_cast<double>(above->first - below->first);
    gradient.sqr = below->second.sqr + part * (above->second.sqr - below->second.sqr);
    gradient.var = below->second.var + part * (above->second.var - below->second.var);
  }
  return (gradient.var + gradient.sqr) / (gradient.var / scale + gradient.sqr) / scale;
}

Result<std::map<std::string, Efficiency>> read_efficiency(std::string_view text,
                                                          const std::string& name) {
  PTC_TRY(const Csv csv, Csv::parse(text, name));
  return EfficiencyReader(csv).read();
}

}  // namespace ptc::planner
