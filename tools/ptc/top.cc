// ptc top: what a mount is doing, again and again.
#include <fmt/core.h>
#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/signalfd.h>
#include <termios.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <optional>

#include "store/base/file.h"
#include "tools/cli/numbers.h"
#include "tools/ptc/command.h"
#include "tools/ptc/mount.h"
#include "tools/ptc/text.h"
#include "tools/ptc/top_view.h"

namespace ptc::cli {
namespace {

struct TopOptions {
  double delay_seconds = 1;
  uint64_t count = 0;  // 0: until it is ended
  bool once = false;
};

/// The terminal while `ptc top` has it: keys come one by one, and what was on it is back at the
/// end.
class Terminal {
 public:
  Terminal() : live_(is_live_terminal(STDOUT_FILENO)) {
    if (::tcgetattr(STDIN_FILENO, &before_) == 0 && ::isatty(STDOUT_FILENO) == 1) {
      termios keys = before_;
      keys.c_lflag &= ~static_cast<tcflag_t>(ICANON | ECHO);
      has_keys_ = ::tcsetattr(STDIN_FILENO, TCSANOW, &keys) == 0;
    }
    if (live_) put("\033[?1049h\033[?25l");  // another screen, no cursor
    sigset_t signals;
    ::sigemptyset(&signals);
    for (int signal : {SIGINT, SIGTERM, SIGHUP, SIGWINCH}) ::sigaddset(&signals, signal);
    ::sigprocmask(SIG_BLOCK, &signals, nullptr);
    signals_ = UniqueFd(::signalfd(-1, &signals, SFD_CLOEXEC));
  }
  ~Terminal() {
    if (live_) put("\033[?25h\033[?1049l");
    if (has_keys_) ::tcsetattr(STDIN_FILENO, TCSANOW, &before_);
  }
  Terminal(const Terminal&) = delete;
  Terminal& operator=(const Terminal&) = delete;

  void show(std::vector<std::string> lines) {
    std::string text;
    if (live_) {
      size_t rows = height();
      if (lines.size() > rows - 1) {
        const size_t hidden = lines.size() - (rows - 2);
        lines.resize(rows - 2);
        lines.push_back(fmt::format("({} more lines)", hidden));
      }
      lines.push_back("q quits");
      text = "\033[H";
      for (size_t i = 0; i < lines.size(); ++i)
        text += lines[i] + (i + 1 < lines.size() ? "\033[K\n" : "\033[K");
      text += "\033[J";
    } else {
      for (const std::string& line : lines) text += line + "\n";
      text += "\n";
    }
    put(text);
  }

  /// Until it is time to draw again; false when the user has had enough.
  bool wait(double seconds) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    for (;;) {
      const auto left = until - std::chrono::steady_clock::now();
      const auto ms = std::chrono::ceil<std::chrono::milliseconds>(left).count();
      if (ms <= 0) return true;
      pollfd polled[2] = {{signals_.get(), POLLIN, 0}, {has_keys_ ? STDIN_FILENO : -1, POLLIN, 0}};
      if (::poll(polled, 2, static_cast<int>(ms)) <= 0) continue;
      if (polled[0].revents != 0) {
        signalfd_siginfo signal{};
        if (::read(signals_.get(), &signal, sizeof signal) == sizeof signal)
          return signal.ssi_signo == SIGWINCH;
      }
      char key = 0;
      if (polled[1].revents != 0 &&
          (::read(STDIN_FILENO, &key, 1) <= 0 || key == 'q' || key == 'Q'))
        return false;
    }
  }

 private:
  static void put(const std::string& text) {
    std::fwrite(text.data(), 1, text.size(), stdout);
    std::fflush(stdout);
  }
  static size_t height() {
    winsize size{};
    return ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_row >= 4 ? size.ws_row : 24;
  }

  const bool live_;
  bool has_keys_ = false;
  termios before_{};
  UniqueFd signals_;
};

Result<int> run_top(const Context& context, const TopOptions& options) {
  PTC_TRY(auto mount, find_mount(context.mount_option));
  auto lines = [](const TopSample& now, const TopSample* before) {
    return top_lines(now, before, terminal_width(STDOUT_FILENO), utf8_terminal());
  };
  PTC_TRY(auto now, read_top_sample(mount));
  if (options.once) {
    for (const std::string& line : lines(now, nullptr)) fmt::print("{}\n", line);
    return kDone;
  }
  Terminal terminal;
  terminal.show(lines(now, nullptr));
  for (uint64_t shown = 1; options.count == 0 || shown < options.count; ++shown) {
    if (!terminal.wait(options.delay_seconds)) break;
    TopSample before = std::move(now);
    PTC_TRY(now, read_top_sample(mount));
    terminal.show(lines(now, &before));
  }
  return kDone;
}

}  // namespace

void add_top(CLI::App& app, Context& context) {
  auto [command, options] = add_command<TopOptions>(
      app, context, "top", "Watch jobs, progress, throughput and memory", run_top);
  command
      ->add_option("-d,--delay", options->delay_seconds, "seconds between two looks (default: 1)")
      ->type_name("S")
      ->check(number(0.05, 86400));
  command->add_option("-n,--count", options->count, "end after this many looks")
      ->type_name("N")
      ->check(whole_number(1, UINT32_MAX));
  command->add_flag("--once", options->once, "one look, no rates; for scripts");
  command->footer(
      "Ends with q. Where there is no terminal, or a dumb one, each look is a block of\n"
      "plain lines.\n"
      "\nExamples:\n  ptc top\n  ptc top --once\n  ptc top -d 60 >>top.log");
}

}  // namespace ptc::cli
