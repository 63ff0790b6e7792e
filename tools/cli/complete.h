// Completion of a command line that is being typed. The shells' scripts (tools/completion) ask the
// program itself, `PROGRAM --complete WORD…`, so that what they offer is what it takes.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace ptc::cli {

/// What may stand in one place.
struct Values {
  std::vector<std::string> words;
  enum class Else { kNothing, kFiles, kDirectories } otherwise = Else::kNothing;
};

/// What was typed already: positionals, and the last value of each option, by its long name.
struct Typed {
  std::vector<std::string> positionals;
  std::map<std::string, std::string> options;
};

/// The values of an option or positional, by its type or name ("JOB", "DIR").
using ValuesOf = std::function<Values(const std::string& type, const Typed& typed)>;

/// Prints what could stand at the end of `words` (those behind the program's name; the last one is
/// being typed, and may be empty): first a line "words", "files" or "directories" (which to offer
/// besides), then "word<TAB>description" each.
std::string complete(const CLI::App& app, const std::vector<std::string>& words,
                     const ValuesOf& values_of);

/// Answers if that is what was asked: `argv` is PROGRAM --complete WORD….
bool answer_completion(const CLI::App& app, int argc, char** argv, const ValuesOf& values_of);

}  // namespace ptc::cli
