// rules.json; and config.json, which the facts of a rule set are read from.
#include "fuzz.h"
#include "reshard/ptc/rule_set.h"

namespace ptc::fuzz {

void run(std::string_view input) {
  static const auto llama = RuleSet::builtin("llama").value();
  if (auto facts = llama->facts(input); !facts) check_error(facts.error());
  (void)model_type_of(input);

  auto parsed = RuleSet::parse(input);
  if (!parsed) return check_error(parsed.error());
  const RuleSet& rules = *parsed.value();
  auto again = RuleSet::parse(rules.text());
  PTC_CHECK(again.has_value());
  PTC_CHECK(again.value()->rules().size() == rules.rules().size());
  PTC_CHECK(again.value()->family() == rules.family());
  RuleFinder finder(rules), finder_again(*again.value());
  for (std::string_view name : {"model.layers.17.self_attn.q_proj.weight", "lm_head.weight", "a.b",
                                "", "model.layers.3.mlp.experts.5.w1.weight"}) {
    const auto match = finder.find(name), match_again = finder_again.find(name);
    const auto slow = rules.find(name);
    PTC_CHECK(match.has_value() == slow.has_value());
    PTC_CHECK(match.has_value() == match_again.has_value());
    if (match) PTC_CHECK(match->rule == slow->rule);
  }
}

std::vector<std::string> large_inputs() {
  const std::string begin = R"({"format":"ptc-rules/1",)";
  const std::string rules = begin + R"("prefixes":["model.layers."],"rules":[)";
  std::string facts = begin + "\"facts\":{";
  for (size_t i = 0; i < 40'000; ++i) facts += fmt::format("\"f{}\":1,", i);
  facts += "\"z\":1},\"rules\":[{\"names\":[\"{layer}\"],\"cut\":{\"axis\":0,\"heads\":\"";
  return {
      repeated("", "[", kMegabyte),
      repeated(begin + "\"prefixes\":[\"\"", ",\"\"", kMegabyte / 3 - 100, "]}"),
      repeated(rules, R"({"names":["**{layer}"]},)", kMegabyte / 25 - 10,
               R"({"names":["{layer}"]}]})"),
      repeated(rules + "{\"names\":[\"{layer}\"", ",\"**{layer}\"", kMegabyte / 12 - 20, "]}]}"),
      repeated(facts, "z*", (kMegabyte - facts.size()) / 2 - 20, "z\"}}]}"),
      repeated(rules + "{\"names\":[\"", "a", kMegabyte - 200, "{layer}\"]}]}"),
      repeated(begin + R"("extends":"llama","rules":[)", R"({"names":["a.{layer}"]},)",
               kMegabyte / 25 - 10, R"({"names":["{layer}"]}]})"),
      repeated(begin + "\"facts\":{\"a\":[\"\"", ",\"\"", kMegabyte / 3 - 50, "]}}"),
  };
}

}  // namespace ptc::fuzz
