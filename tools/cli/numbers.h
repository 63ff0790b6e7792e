// Values that options take, and what is said of others.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>

namespace ptc::cli {

/// For Option::check(): takes decimal digits alone, from `least` to `most`, and says so of anything
/// else.
CLI::Validator whole_number(uint64_t least, uint64_t most);
/// The same with fractions and exponents: "0.5", "1e3".
CLI::Validator number(double least, double most);

/// A text that is not empty, as one is where a script's variable is not set.
CLI::Validator not_empty();

/// Some 30 years: more is a mistake, and no clock can count it.
inline constexpr double kMostSeconds = 1e9;

}  // namespace ptc::cli
