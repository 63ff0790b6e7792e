// The rule sets that the program carries: reshard/rules/*.json, embedded by ptc_embed.
#pragma once

#include <span>
#include <string_view>

namespace ptc {

struct BuiltinRules {
  std::string_view family;  // the file's name without ".json"
  std::string_view text;
};

/// Sorted by family.
std::span<const BuiltinRules> builtin_rules();

}  // namespace ptc
