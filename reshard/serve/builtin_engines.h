// The engines that the program carries: reshard/serve/engines/*.json, embedded by ptc_embed.
#pragma once

#include <span>
#include <string_view>

namespace ptc {

struct BuiltinEngine {
  std::string_view name;  // the file's, without ".json"
  std::string_view text;
};

/// Sorted by name.
std::span<const BuiltinEngine> builtin_engines();

}  // namespace ptc
