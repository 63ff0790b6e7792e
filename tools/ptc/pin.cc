// ptc pin: protects a checkpoint from `keep` and from removal.
#include <fmt/core.h>
#include <sys/xattr.h>

#include <cerrno>

#include "tools/ptc/command.h"
#include "tools/ptc/job_status.h"
#include "tools/ptc/mount.h"

namespace ptc::cli {
namespace {

constexpr const char* kPin = "user.ptc.pin";

struct PinOptions {
  std::string target;
  bool remove = false;
};

Result<int> run_pin(const Context& context, const PinOptions& options) {
  PTC_TRY(auto target, find_target(context.mount_option, options.target));
  if (target.checkpoint.empty())
    return invalid_argument("'{}' names no checkpoint: ptc pin JOB/CHECKPOINT", options.target);
  if (options.remove) {
    PTC_TRY(auto status, read_status(target));
    if (why_unreadable(status, target.checkpoint)) {
      PTC_TRY(ask(target.mount,
                  {{"do", "unpin"}, {"job", target.job}, {"checkpoint", target.checkpoint}}));
      fmt::print("{} is not pinned\n", target.name());
      return kDone;
    }
  }
  PTC_TRY(target, with_checkpoint(std::move(target)));
  const std::string dir = target.checkpoint_dir();
  const int result =
      options.remove ? ::removexattr(dir.c_str(), kPin) : ::setxattr(dir.c_str(), kPin, "1", 1, 0);
  if (result != 0 && errno == EACCES)
    return make_error(Code::kPermissionDenied, "checkpoint {} belongs to another user",
                      target.name());
  if (result != 0 && (errno == EBUSY || errno == EAGAIN))
    return make_error(
        Code::kUnavailable,
        "{}: what the nodes agree through does not answer, or not soon; the same again "
        "says how it ended",
        target.name());
  if (result != 0 && !(options.remove && errno == ENODATA)) return errno_error(errno, dir);
  fmt::print("{} {}\n", target.name(), options.remove ? "is not pinned" : "is pinned");
  return kDone;
}

}  // namespace

void add_pin(CLI::App& app, Context& context) {
  auto [command, options] = add_command<PinOptions>(
      app, context, "pin", "Protect a checkpoint from removal and from \"keep\"", run_pin);
  command->add_option("JOB/CHECKPOINT", options->target, "a checkpoint, or its path")->required();
  command->add_flag("--remove", options->remove, "take the pin off again");
  command->footer(
      "The pin is the extended attribute user.ptc.pin of the checkpoint's directory:\n"
      "  setfattr -n user.ptc.pin -v 1 /mnt/ptc/llama/checkpoints/best   pins it\n"
      "  setfattr -x user.ptc.pin /mnt/ptc/llama/checkpoints/best        takes that off\n"
      "\nExamples:\n  ptc pin llama/best\n  ptc pin llama/best --remove");
}

}  // namespace ptc::cli
