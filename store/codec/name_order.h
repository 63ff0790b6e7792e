// The order of many names that have long beginnings in common, as those of a model's tensors.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace ptc {

/// The place of each name in the order of their bytes, from 0 on; equal names have the same one.
/// Names are not compared as a whole: seven bytes at a time are a number, and only those with equal
/// ones are looked at further on.
std::vector<uint32_t> places_by_name(std::span<const std::string_view> names);

}  // namespace ptc
