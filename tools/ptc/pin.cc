// ptc pin: protects a checkpoint from `keep` and from removal.
#include <fmt/core.h>
#include <sys/xattr.h>

#include <cerrno>
#include <memory>

#include "tools/ptc/command.h"
#include "tools/ptc/mount.h"

namespace ptc::cli {
namespace {

constexpr const char* kPin = "user.ptc.pin";

Result<int> run_pin(const Context& context, const std::string& text, bool remove) {
  PTC_TRY(auto target, find_target(context.mount_option, text));
  if (target.checkpoint.empty())
    return invalid_argument("'{}' names no checkpoint: ptc pin JOB/CHECKPOINT", text);
  PTC_TRY(target, with_checkpoint(std::move(target)));
  const std::string dir = target.checkpoint_dir();
  const int result = remove ? ::removexattr(dir.c_str(), kPin) : ::setxattr(dir.c_str(), kPin, "1", 1, 0);
  if (result != 0 && errno == EACCES)
    return make_error(Code::kPermissionDenied, "checkpoint {} belongs to another user", target.name());
  if (result != 0 && !(remove && errno == ENODATA)) return errno_error(errno, dir);
  fmt::print("{} {}\n", target.name(), remove ? "is not pinned" : "is pinned");
  return kDone;
}

}  // namespace

void add_pin(CLI::App& app, Context& context) {
  struct Options {
    std::string target;
    bool remove = false;
  };
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("pin", "Protect a checkpoint from removal and from \"keep\"");
  command->add_option("JOB/CHECKPOINT", options->target, "a checkpoint, or its path")->required();
  command->add_flag("--remove", options->remove, "take the pin off again");
  command->footer(
      "The pin is the extended attribute user.ptc.pin of the checkpoint's directory:\n"
      "  setfattr -n user.ptc.pin -v 1 /mnt/ptc/llama/checkpoints/best   pins it\n"
      "  setfattr -x user.ptc.pin /mnt/ptc/llama/checkpoints/best        takes that off\n"
      "\nExamples:\n  ptc pin llama/best\n  ptc pin llama/best --remove");
  command->callback([&context, options] {
    context.run = [&context, options] { return run_pin(context, options->target, options->remove); };
  });
}

}  // namespace ptc::cli
