#include "reshard/ptc/parameter_names.h"

#include <algorithm>

namespace ptc {

void ParameterNames::add(std::string_view name, size_t prefix_length, uint32_t parameter) {
  insert(name, {parameter, 0});
  if (prefix_length > 0) insert(name.substr(prefix_length), {parameter, prefix_length});
}

void ParameterNames::insert(std::string_view name, Entry entry) {
  const size_t components = 1 + static_cast<size_t>(std::count(name.begin(), name.end(), '.'));
  if (components > kMaxComponents) return;
  component_counts_ |= uint64_t{1} << (components - 1);
  auto [found, is_new] = entries_.try_emplace(name, entry);
  if (!is_new && entry.dropped == 0 && found->second.dropped != 0) found->second = entry;
}

std::optional<uint32_t> ParameterNames::exact(std::string_view name) const {
  const auto found = entries_.find(name);
  if (found == entries_.end() || found->second.dropped != 0) return std::nullopt;
  return found->second.parameter;
}

}  // namespace ptc
