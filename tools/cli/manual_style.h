// How the programs of this folder describe themselves, and what they say of a wrong command line.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace ptc::cli {

/// Lets --help of `app`, and of the subcommands that are added to it later, read like the synopsis
/// and options of a manual page, 80 columns wide. Descriptions are wrapped; footers stand as they
/// are. A type name "a|b" means these words and no others (and is completed: tools/cli/complete.h).
void set_manual_style(CLI::App& app);

/// Why `app` did not take its command line, in one line: the first word that nobody knows, with the
/// nearest one that would have been taken; else what the parser says.
std::string usage_complaint(const CLI::App& app, const CLI::ParseError& error);

/// The command that was named, as one types it before --help: "ptc layout JOB set".
std::string command_named(const CLI::App& app);

}  // namespace ptc::cli
