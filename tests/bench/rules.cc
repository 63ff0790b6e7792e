// How long it takes to find out which rules a model's tensors have, and what a rank of a layout
// holds: DeepSeek-V3 with each expert by itself and Adam's moments, and a quarter of its layers.
// Ratios to reading the same names as a JSON object from memory, which is what an index of
// Hugging Face's is, in the same round; the least of seven rounds.
#include <fmt/format.h>

#include <algorithm>
#include <boost/json/parse.hpp>
#include <boost/json/serialize.hpp>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "reshard/ptc/model.h"
#include "reshard/ptc/rule_set.h"
#include "tests/bench/models.h"
#include "tests/support/synthetic_model.h"

namespace ptc {
namespace {

constexpr int kRounds = 7;

double seconds(const std::function<void()>& work) {
  const auto begun = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
}

void measure(int layers) {
  const std::string config = bench::deepseek_v3(layers);
  const std::vector<TensorInfo> parameters = testing::synthetic_tensors(config);
  std::vector<TensorInfo> tensors = parameters;
  for (TensorInfo& state : testing::optimizer_tensors(parameters))
    tensors.push_back(std::move(state));
  std::vector<std::string> names;
  boost::json::object weight_map;
  for (const TensorInfo& tensor : tensors) {
    names.push_back(tensor.name);
    weight_map[tensor.name] = "model-00001-of-00163.safetensors";
  }
  const std::string index = boost::json::serialize(weight_map);

  const LayoutSpec spec = LayoutSpec::from_name("tp8-pp4-dp8-ep16").value();
  std::vector<double> parse, by_type, by_names, bind, hold;
  for (int round = 0; round < kRounds; ++round) {
    parse.push_back(seconds([&] { PTC_CHECK(boost::json::parse(index).is_object()); }));
    std::shared_ptr<const RuleSet> rules;
    by_type.push_back(seconds([&] { rules = RuleSet::choose("deepseek_v3", names); }));
    by_names.push_back(seconds([&] { PTC_CHECK(RuleSet::choose({}, names) != nullptr); }));
    auto facts = rules->facts(config).value();
    std::vector<TensorInfo> copy = tensors;
    std::optional<Model> model;
    bind.push_back(seconds([&] { model = Model::bind(rules, facts, std::move(copy)).value(); }));
    hold.push_back(seconds([&] { PTC_CHECK(!model->hold(spec, {}).value().empty()); }));
  }
  const auto least = [](const std::vector<double>& all) { return *std::ranges::min_element(all); };
  const auto line = [&](const char* what, double took) {
    fmt::print("  {:52} {:6.0f} ms {:7.2f}\n", what, took * 1000, took / least(parse));
  };
  fmt::print("{} layers, {} tensors\n", layers, tensors.size());
  line("an index of these names parsed", least(parse));
  line("rules chosen by model_type", least(by_type));
  line("rules chosen by names alone", least(by_names));
  line("tensors bound to them", least(bind));
  line("chosen by type and bound", least(by_type) + least(bind));
  line("chosen by names and bound", least(by_names) + least(bind));
  line("what one rank of tp8-pp4-dp8-ep16 holds", least(hold));
}

}  // namespace
}  // namespace ptc

int main() {
  for (const int layers : {15, 61}) ptc::measure(layers);
}
