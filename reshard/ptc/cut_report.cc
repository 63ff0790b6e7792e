#include "reshard/ptc/cut_report.h"

#include <algorithm>
#include <boost/json/array.hpp>
#include <boost/json/serialize.hpp>
#include <map>
#include <set>

#include "reshard/ptc/model_facts.h"

namespace ptc {
namespace {

namespace json = boost::json;

bool is_number(std::string_view text) {
  return !text.empty() && text.size() <= 9 &&
         std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
}

/// A name with "{}" for its numbers: components, and a last one's end where that is the expert.
struct Template {
  std::string text;
  std::vector<uint32_t> numbers;
};

Template template_of(std::string_view name, std::optional<uint32_t> expert) {
  Template result;
  for (size_t begin = 0; begin <= name.size();) {
    const size_t end = std::min(name.find('.', begin), name.size());
    const std::string_view component = name.substr(begin, end - begin);
    const std::string suffix = expert ? std::to_string(*expert) : std::string();
    if (is_number(component)) {
      result.text += "{}";
      result.numbers.push_back(static_cast<uint32_t>(std::stoul(std::string(component))));
    } else if (expert && end == name.size() && component.ends_with(suffix)) {
      result.text += component.substr(0, component.size() - suffix.size());
      result.text += "{}";
      result.numbers.push_back(*expert);
    } else {
      result.text += component;
    }
    if (end < name.size()) result.text += '.';
    begin = end + 1;
  }
  return result;
}

/// "0-3,7"
std::string ranges(const std::set<uint32_t>& numbers) {
  std::string text;
  for (auto it = numbers.begin(); it != numbers.end();) {
    const uint32_t first = *it;
    uint32_t last = first;
    while (++it != numbers.end() && *it == last + 1) ++last;
    text += fmt::format("{}{}", text.empty() ? "" : ",", first);
    if (last > first) text += fmt::format("-{}", last);
  }
  return text;
}

json::array shape_json(const Shape& shape) { return json::array(shape.begin(), shape.end()); }

/// What the ranks of a tensor's stage and expert group hold. All tp ranks hold the same shape.
Result<json::array> local_shapes(const Model& model, uint32_t tensor, const LayoutSpec& spec) {
  StateCoords state;
  while (state.pp + 1 < spec.sizes.pp && !model.on_stage(tensor, spec, state.pp)) ++state.pp;
  json::array shapes;
  std::optional<Shape> last;
  // Those of other experts have nothing; all that is cut over ep ranks is on each of them.
  const bool over_ep = spec.shard_ep && model.is_cut_over_dp(tensor, spec);
  const uint32_t parts = over_ep ? model.dp_parts(tensor, spec) : spec.dp_parts();
  for (uint32_t number = 0; number < parts; ++number) {
    state.ep = state.etp = 0;
    state = model.with_dp_part(tensor, spec, state, number);
    PTC_TRY(std::optional<SubTensor> part, model.slice(tensor, spec, state));
    for (state.ep = 1; state.ep < spec.sizes.ep && !part; ++state.ep) {
      PTC_TRY(part, model.slice(tensor, spec, state));
    }
    if (!part) continue;
    if (last == part->local_shape) {
      shapes.back().as_object()["last_dp_rank"] = number;
      continue;
    }
    last = part->local_shape;
    shapes.push_back(json::object{{"first_dp_rank", number},
                                  {"last_dp_rank", number},
                                  {"shape", shape_json(part->local_shape)}});
  }
  return shapes;
}

std::string pattern_of(const Model& model, const Rule& rule, std::string_view name) {
  for (const NamePattern& pattern : rule.names)
    if (model.rules().matches(pattern, name)) return pattern.text();
  return rule.names.front().text();
}

std::vector<std::string> patterns_of(const Rule& rule) {
  std::vector<std::string> patterns;
  for (const NamePattern& pattern : rule.names) patterns.push_back(pattern.text());
  return patterns;
}

/// Rules that a family has, by their names: it has them for all its models.
const std::set<std::vector<std::string>>& rules_of_families() {
  static const std::set<std::vector<std::string>> all = [] {
    std::set<std::vector<std::string>> found;
    for (const std::string& family : RuleSet::builtin_families())
      if (const auto rules = RuleSet::builtin(family))
        for (const Rule& rule : rules.value()->rules()) found.insert(patterns_of(rule));
    return found;
  }();
  return all;
}

/// A name of each kind: those of one kind have the same rule.
std::vector<std::string_view> kinds_of_names(const Model& model) {
  std::vector<std::string_view> names;
  std::set<std::string> known;
  for (const TensorInfo& info : model.tensors()) {
    if (model.rules().numbers_matter() ||
        known.insert(template_of(info.name, std::nullopt).text).second)
      names.push_back(info.name);
  }
  return names;
}

/// Rules of a job's own that hold for no tensor. `used`: by written rule.
json::array unused_rules(const Model& model, const std::vector<bool>& used) {
  json::array unused;
  const RuleSet& rules = model.rules();
  RuleFinder finder(rules);
  const std::vector<std::string_view> names = kinds_of_names(model);
  for (size_t i = 0; i < rules.written_rules(); ++i) {
    const Rule& rule = rules.rules()[i];
    const std::vector<std::string> patterns = patterns_of(rule);
    if (used[i] || rules_of_families().contains(patterns)) continue;
    std::string why = "no tensor has such a name";
    for (const std::string_view name : names) {
      if (std::none_of(rule.names.begin(), rule.names.end(),
                       [&](const auto& pattern) { return rules.matches(pattern, name); }))
        continue;
      const auto holds = finder.find(name);
      if (!holds) continue;
      why = fmt::format("a rule before it holds for {}: {}", name,
                        pattern_of(model, *holds->rule, name));
      break;
    }
    unused.push_back(json::object{{"names", json::array(patterns.begin(), patterns.end())},
                                  {"why", std::move(why)}});
  }
  return unused;
}

}  // namespace

Result<json::object> cut_report(const Model& model, const LayoutSpec& spec,
                                const std::vector<std::string>& names) {
  auto wanted = [&](const std::string& name) {
    return names.empty() || std::any_of(names.begin(), names.end(), [&](const std::string& part) {
             return name.find(part) != std::string::npos;
           });
  };
  RuleFinder finder(model.rules());
  std::vector<bool> used(model.rules().written_rules());
  json::array entries;
  std::map<std::string, size_t> entry_of;
  std::vector<Template> templates;                     // by entry
  std::vector<std::vector<std::set<uint32_t>>> found;  // by entry and number
  std::vector<uint64_t> counts;
  for (uint32_t t = 0; t < model.tensors().size(); ++t) {
    const TensorInfo& info = model.tensors()[t];
    const auto match = finder.find(info.name);
    if (match) used[model.rules().written_rule(*match->rule)] = true;
    if (!wanted(info.name)) continue;
    const Template name = template_of(info.name, match ? match->name.expert : std::nullopt);
    std::string how = model.describe(t);
    for (std::string_view word : {"follows ", "scales of "}) {
      const size_t end = how.find(": ");
      if (!how.starts_with(word) || end == std::string::npos) continue;
      const Template other = template_of(how.substr(word.size(), end - word.size()), std::nullopt);
      how = std::string(word) + other.text + how.substr(end);
    }
    json::object entry{{"names", name.text},
                       {"count", 0},
                       {"file", info.file},
                       {"dtype", dtype_name(info.dtype)},
                       {"shape", shape_json(info.shape_in_files())},
                       {"how", std::move(how)}};
    entry["rule"] = match ? json::value(pattern_of(model, *match->rule, info.name)) : json::value();
    auto shapes = local_shapes(model, t, spec);
    if (shapes) {
      entry["ranks"] = std::move(shapes).value();
    } else {
      std::string why = shapes.error().message();
      if (why.starts_with(info.name + ": ")) why.erase(0, info.name.size() + 2);
      entry["problem"] = std::move(why);
    }
    auto [known, is_new] = entry_of.try_emplace(json::serialize(entry), entries.size());
    if (is_new) {
      entries.push_back(std::move(entry));
      templates.push_back(name);
      found.emplace_back(name.numbers.size());
      counts.push_back(0);
    }
    ++counts[known->second];
    for (size_t i = 0; i < name.numbers.size(); ++i)
      found[known->second][i].insert(name.numbers[i]);
  }
  if (entries.empty() && !names.empty())
    return make_error(Code::kNotFound, "no tensor has '{}' in its name",
                      fmt::join(names, "' or '"));
  for (size_t e = 0; e < entries.size(); ++e) {
    std::string text = templates[e].text;
    for (const std::set<uint32_t>& numbers : found[e]) {
      const std::string range = ranges(numbers);
      text.replace(text.find("{}"), 2, numbers.size() == 1 ? range : "{" + range + "}");
    }
    entries[e].as_object()["names"] = text;
    entries[e].as_object()["count"] = counts[e];
  }
  json::object facts;
  for (const auto& [fact, value] : model.facts().numbers) facts[fact] = value;
  Result<> fits = model.check(spec);
  if (fits) fits = check_facts(model, spec);
  const std::vector<std::string> contradicted = contradictions(model);
  return json::object{
      {"format", "ptc-cuts/1"},
      {"family", model.rules().family()},
      {"layout", spec.name()},
      {"facts", std::move(facts)},
      {"tied", model.facts().tied ? json::value(*model.facts().tied) : json::value()},
      {"fits", fits ? json::value(true) : json::value(fits.error().message())},
      {"contradictions", json::array(contradicted.begin(), contradicted.end())},
      {"unused_rules", unused_rules(model, used)},
      {"tensors", std::move(entries)}};
}

}  // namespace ptc
