#include "tools/cli/complete.h"

#include <cstdio>
#include <string_view>

namespace ptc::cli {
namespace {

/// Finds "--name" or "-n" in a command, or in those it stands in.
const CLI::Option* find_option(const CLI::App* app, const std::string& word) {
  for (; app != nullptr; app = app->get_parent()) {
    if (const CLI::Option* option = app->get_option_no_throw(word)) return option;
  }
  return nullptr;
}

const CLI::App* find_command(const CLI::App* app, const std::string& word) {
  for (const CLI::App* command : app->get_subcommands({})) {
    if (command->get_name() == word) return command;
  }
  return nullptr;
}

bool takes_value(const CLI::Option* option) { return option->get_items_expected_max() > 0; }

class Completer {
 public:
  Completer(const CLI::App& app, const ValuesOf& values_of) : app_(&app), values_of_(values_of) {}

  std::string run(const std::vector<std::string>& words) {
    for (size_t i = 0; i + 1 < words.size(); ++i) pass(words[i]);
    const std::string last = words.empty() || words.back() == "=" ? "" : words.back();
    const size_t equals = last.find('=');
    if (value_of_ != nullptr) {
      offer_values(value_of_->get_type_name(), last, "");
    } else if (last.starts_with("-") && equals != std::string::npos) {
      const CLI::Option* option = find_option(app_, last.substr(0, equals));
      if (option != nullptr) {
        offer_values(option->get_type_name(), last.substr(equals + 1), last.substr(0, equals + 1));
      }
    } else if (last.starts_with("-") && !only_positionals_) {
      offer_options(last);
    } else {
      offer_commands(last);
      offer_positional(last);
    }
    return kind_ + "\n" + lines_;
  }

 private:
  /// A word that stands before the one being typed.
  void pass(const std::string& word) {
    if (word == "=") return;  // bash splits --name=value there
    if (value_of_ != nullptr) {
      typed_.options[value_of_->get_single_name()] = word;
      value_of_ = nullptr;
    } else if (only_positionals_ || !word.starts_with("-") || word == "-") {
      const CLI::App* command = find_command(app_, word);
      if (command != nullptr && !only_positionals_) {
        app_ = command;
      } else {
        typed_.positionals.push_back(word);
      }
    } else if (word == "--") {
      only_positionals_ = true;
    } else if (word.find('=') == std::string::npos) {
      const CLI::Option* option = find_option(app_, word);
      if (option != nullptr && takes_value(option)) value_of_ = option;
    }
  }

  void offer(const std::string& word, std::string_view typed, std::string about) {
    if (!word.starts_with(typed)) return;
    about.resize(std::min(about.size(), about.find('\n')));
    lines_ += word + "\t" + about + "\n";
  }

  void offer_options(const std::string& typed) {
    for (const CLI::App* app = app_; app != nullptr; app = app->get_parent()) {
      for (const CLI::Option* option : app->get_options()) {
        if (app != app_ && option == app->get_help_ptr()) continue;
        for (const std::string& name : option->get_lnames()) {
          offer("--" + name, typed, option->get_description());
        }
        if (typed == "-") {
          for (const std::string& name : option->get_snames()) {
            offer("-" + name, typed, option->get_description());
          }
        }
      }
    }
  }

  void offer_commands(const std::string& typed) {
    for (const CLI::App* command : app_->get_subcommands({})) {
      const std::string& name = command->get_name();
      if (!name.empty()) offer(name, typed, command->get_description());
    }
  }

  void offer_positional(const std::string& typed) {
    auto is_positional = [](const CLI::Option* option) { return option->get_positional(); };
    size_t place = 0;
    for (const CLI::Option* option : app_->get_options(is_positional)) {
      place += static_cast<size_t>(option->get_expected_max());
      if (typed_.positionals.size() >= place) continue;
      const std::string words = option->get_type_name();  // "a|b": these
      const bool are_said = words.find('|') != std::string::npos;
      return offer_values(are_said ? words : option->get_name(true), typed, "");
    }
  }

  void offer_values(const std::string& type, std::string typed, std::string prefix) {
    const size_t comma = typed.rfind(',');
    // Of a list, its last one.
    if (type.find(',') != std::string::npos && comma != std::string::npos) {
      prefix += typed.substr(0, comma + 1);
      typed.erase(0, comma + 1);
    }
    Values values;
    if (type.find('|') != std::string::npos) {
      values.words = CLI::detail::split(type, '|');
    } else {
      values = values_of_(type, typed_);
    }
    for (const std::string& word : values.words) offer(prefix + word, prefix + typed, "");
    if (values.otherwise == Values::Else::kFiles) kind_ = "files";
    if (values.otherwise == Values::Else::kDirectories) kind_ = "directories";
  }

  const CLI::App* app_;
  const ValuesOf& values_of_;
  const CLI::Option* value_of_ = nullptr;  // whose value comes next
  bool only_positionals_ = false;          // after "--"
  Typed typed_;
  std::string kind_ = "words", lines_;
};

}  // namespace

std::string complete(const CLI::App& app, const std::vector<std::string>& words,
                     const ValuesOf& values_of) {
  return Completer(app, values_of).run(words);
}

bool answer_completion(const CLI::App& app, int argc, char** argv, const ValuesOf& values_of) {
  if (argc < 2 || std::string_view(argv[1]) != "--complete") return false;
  const std::string answer = complete(app, {argv + 2, argv + argc}, values_of);
  std::fwrite(answer.data(), 1, answer.size(), stdout);
  return true;
}

}  // namespace ptc::cli
