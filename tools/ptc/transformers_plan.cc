#include "tools/ptc/transformers_plan.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <string_view>

#include "store/base/file.h"
#include "store/base/json.h"

namespace ptc::cli {
namespace {

constexpr std::chrono::seconds kPatience{60};  // a first import of it takes long
constexpr size_t kMaxAnswer = 1 << 20;

// The current directory is not looked for modules: it may be anybody's.
constexpr const char* kQuestion = R"PY(import sys
import os
sys.path = [path for path in sys.path if path not in ("", ".", os.getcwd())]
import json
try:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
except ImportError as error:
    sys.exit(print(json.dumps({"error": f"it cannot import transformers ({error})"
})))
with open(sys.argv[1], encoding="utf-8") as file:
    config = json.load(file)
plan, known = {}, False
for part in (config, *(value for value in config.values() if isinstance(value, dict))):
    if isinstance(part.get("model_type"), str) and part["model_type"] in CONFIG_MAPPING:
        known = True
        plan.update(getattr(CONFIG_MAPPING[part["model_type"]], "base_model_tp_plan", None) or {})
print(json.dumps({"plan": plan if known else None}))
)PY";

struct Child {
  pid_t pid = -1;
  ~Child() {
    if (pid < 0) return;
    ::kill(pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
  }
};

/// Output of `python -c kQuestion config_path`.
Result<std::string> answer_of(const std::string& python, const std::string& config_path) {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) return errno_error(errno, "cannot make a pipe");
  const UniqueFd output(ends[0]);
  UniqueFd input(ends[1]);
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  ::posix_spawn_file_actions_adddup2(&actions, input.get(), 1);
  ::posix_spawn_file_actions_addopen(&actions, 2, "/dev/null", O_WRONLY, 0);
  // The directory that ptc was started in may be anybody's, and empty entries of PYTHONPATH mean
  // it, also where Python looks for sitecustomize.py, before it runs a line of the question.
  ::posix_spawn_file_actions_addchdir_np(&actions, "/");
  const std::string program =
      python.find('/') == std::string::npos ? python : std::filesystem::absolute(python).string();
  std::array<std::string, 4> words{program, "-c", kQuestion,
                                   std::filesystem::absolute(config_path).string()};
  std::array<char*, 5> arguments{words[0].data(), words[1].data(), words[2].data(), words[3].data(),
                                 nullptr};
  Child child;
  const int failed =
      ::posix_spawnp(&child.pid, program.c_str(), &actions, nullptr, arguments.data(), environ);
  ::posix_spawn_file_actions_destroy(&actions);
  if (failed != 0) {
    child.pid = -1;
    return make_error(Code::kNotFound, "cannot run {}: {}", python, std::strerror(failed));
  }
  input.reset();
  std::string answer;
  const auto until = std::chrono::steady_clock::now() + kPatience;
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        until - std::chrono::steady_clock::now());
    pollfd ready{output.get(), POLLIN, 0};
    const int count = left.count() <= 0 ? 0 : ::poll(&ready, 1, static_cast<int>(left.count()));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return invalid_argument("{} did not answer in a minute", python);
    std::array<char, 4096> buffer;
    const ssize_t bytes = ::read(output.get(), buffer.data(), buffer.size());
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes < 0) return errno_error(errno, "cannot read what it says");
    if (bytes == 0) return answer;
    answer.append(buffer.data(), static_cast<size_t>(bytes));
    if (answer.size() > kMaxAnswer) return invalid_argument("{} answers too much", python);
  }
}

}  // namespace

Result<std::optional<json::object>> transformers_plan(const std::string& python,
                                                      const std::string& config_path) {
  PTC_TRY(const auto text, answer_of(python, config_path));
  const auto answer = parse_json(text);
  const json::object* said = answer ? answer.value().if_object() : nullptr;
  if (said == nullptr) return invalid_argument("{} is no Python 3, or failed", python);
  if (const std::string error = json_text(*said, "error"); !error.empty())
    return make_error(Code::kNotFound, "{}: {}", python, error);
  const json::value* plan = said->if_contains("plan");
  if (plan == nullptr || (!plan->is_object() && !plan->is_null()))
    return invalid_argument("{} did not say a plan", python);
  std::optional<json::object> told;
  if (plan->is_object()) told = plan->get_object();
  return told;
}

}  // namespace ptc::cli
