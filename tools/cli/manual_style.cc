#include "tools/cli/manual_style.h"

#include <fmt/core.h>

#include <algorithm>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "store/base/json.h"

namespace ptc::cli {
namespace {

constexpr size_t kWidth = 80;

/// Characters, of UTF-8.
size_t width_of(const std::string& text) {
  size_t width = 0;
  for (char c : text) width += (static_cast<unsigned char>(c) & 0xC0) != 0x80;
  return width;
}

/// Words in lines that begin at column `indent`; the first line continues `out`.
void append_wrapped(std::string& out, const std::string& text, size_t indent) {
  std::istringstream words(text);
  size_t column = indent;
  for (std::string word; words >> word;) {
    if (column > indent && column + 1 + width_of(word) > kWidth) {
      out += "\n" + std::string(indent, ' ');
      column = indent;
    }
    if (column > indent) {
      out += ' ';
      ++column;
    }
    out += word;
    column += width_of(word);
  }
  out += '\n';
}

class ManualFormatter : public CLI::Formatter {
 public:
  ManualFormatter() { column_width(24); }

  std::string make_help(const CLI::App* app, std::string name, CLI::AppFormatMode) const override {
    std::string out = make_usage(app, name) + "\n";
    append_wrapped(out, app->get_description(), 0);
    std::string positionals;
    for (const CLI::Option* option : app->get_options(&is_positional)) {
      positionals += make_option(option, true);
    }
    if (!positionals.empty()) out += "\n" + positionals;
    for (const std::string& group : app->get_groups()) {
      if (group.empty()) continue;
      std::string options;
      for (const CLI::Option* option : app->get_options([&](const CLI::Option* each) {
             return each->get_group() == group && each->nonpositional();
           })) {
        options += make_option(option, false);
      }
      if (!options.empty()) out += "\n" + group + ":\n" + options;
    }
    std::string commands;
    for (const CLI::App* command : app->get_subcommands(&is_command)) {
      commands += item(command->get_name(), command->get_description());
    }
    if (!commands.empty()) out += "\nCommands:\n" + commands;
    if (!app->get_footer().empty()) out += "\n" + app->get_footer() + "\n";
    return out;
  }

  std::string make_usage(const CLI::App* app, std::string name) const override {
    std::string out = "Usage: " + name + " [OPTION]…";
    for (const CLI::Option* option : app->get_options(&is_positional)) {
      const std::string word = option->get_name(true);
      out += option->get_required() ? " " + word : " [" + word + "]";
    }
    if (!app->get_subcommands(&is_command).empty()) {
      out += app->get_require_subcommand_min() == 0 ? " [COMMAND …]" : " COMMAND …";
    }
    return out + "\n";
  }

  std::string make_option(const CLI::Option* option, bool positional) const override {
    if (positional) return item(option->get_name(true), option->get_description());
    std::string names, about = option->get_description();
    auto add_name = [&](const std::string& name) { names += (names.empty() ? "" : ", ") + name; };
    for (const std::string& name : option->get_snames()) add_name("-" + name);
    for (const std::string& name : option->get_lnames()) add_name("--" + name);
    if (option->get_items_expected_max() > 0) names += " " + option->get_type_name();
    const std::string standard = option->get_default_str();
    if (!standard.empty()) about += " (default: " + standard + ")";
    for (const CLI::Option* other : option->get_needs()) {
      about += " (with " + other->get_name() + ")";
    }
    std::string others;
    for (const CLI::Option* other : option->get_excludes()) {
      others += (others.empty() ? "" : ", ") + other->get_name();
    }
    if (!others.empty()) about += " (not with " + others + ")";
    return item(names, about);
  }

 private:
  static bool is_positional(const CLI::Option* option) {
    return option->get_positional() && !option->get_group().empty();
  }
  static bool is_command(const CLI::App* app) { return !app->get_name().empty(); }

  std::string item(const std::string& left, const std::string& about) const {
    std::string out = "  " + left;
    const size_t indent = get_column_width();
    const size_t used = width_of(out);
    out += used + 2 > indent ? "\n" + std::string(indent, ' ') : std::string(indent - used, ' ');
    append_wrapped(out, about, indent);
    return out;
  }
};

/// The subcommand that was named last, or `app` itself.
const CLI::App* innermost(const CLI::App* app) {
  while (!app->get_subcommands().empty()) app = app->get_subcommands().back();
  return app;
}

}  // namespace

void set_manual_style(CLI::App& app) {
  app.formatter(std::make_shared<ManualFormatter>());
  app.set_help_flag("-h,--help", "print this text and exit");
}

std::string usage_complaint(const CLI::App& app, const CLI::ParseError& error) {
  const std::vector<std::string> strangers = app.remaining(true);
  if (strangers.empty()) return error.what();
  const std::string& word = strangers.front();
  const CLI::App* command = innermost(&app);
  std::vector<std::string> known;
  std::string what;
  if (word.starts_with("-") && word.size() > 1) {
    what = "option";
    for (const CLI::App* each = command; each != nullptr; each = each->get_parent()) {
      for (const CLI::Option* option : each->get_options()) {
        for (const std::string& name : option->get_lnames()) known.push_back("--" + name);
      }
    }
  } else if (auto commands = command->get_subcommands({}); !commands.empty()) {
    what = "command";
    for (const CLI::App* each : commands) known.push_back(each->get_name());
    for (const CLI::Option* option : command->get_options()) {
      if (!option->get_positional() || option->count() == 0) continue;
      const std::string& given = option->results().front();
      if (std::find(known.begin(), known.end(), given) != known.end())
        return fmt::format("{} comes before '{}': ptc {} {} {} …", option->get_name(true), given,
                           command->get_name(), word, given);
    }
  } else {
    return fmt::format("{} is one argument too many", ptc::quoted(word));
  }
  const auto near = nearest_name(word.substr(0, word.find('=')), known);
  return fmt::format("unknown {} {}{}", what, ptc::quoted(word),
                     near ? fmt::format("; is it '{}'?", *near) : "");
}

std::string command_named(const CLI::App& app) {
  std::string words;
  const CLI::App* last = innermost(&app);
  for (const CLI::App* each = last; each != nullptr; each = each->get_parent()) {
    std::string own = each->get_name();
    for (const CLI::Option* option : each->get_options())
      if (each != last && option->get_positional() && option->get_required())
        own += " " + option->get_name(true);
    words = words.empty() ? own : own + " " + words;
  }
  return words;
}

}  // namespace ptc::cli
