#include "reshard/ptc/model_facts.h"

#include <algorithm>

namespace ptc {
std::string rules_with(const RuleSet& rules, std::string_view member) {
  const bool none = rules.family() == RuleSet::none()->family();
  if (!none && !RuleSet::builtin(rules.family())) return std::string(member);
  const std::string extends = none ? "" : fmt::format("\"extends\": \"{}\", ", rules.family());
  return fmt::format("{{\"format\": \"ptc-rules/1\", {}{}}}", extends, member);
}

}  // namespace ptc
