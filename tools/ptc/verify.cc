// ptc verify: reads a whole checkpoint through the mount and compares checksums.
#include <fcntl.h>
#include <fmt/core.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <boost/json/array.hpp>
#include <thread>

#include "store/base/file.h"
#include "store/base/mutex.h"
#include "store/base/size_text.h"
#include "store/codec/safetensors.h"
#include "store/tensor/checksum.h"
#include "tools/ptc/command.h"
#include "tools/ptc/fields.h"
#include "tools/ptc/job_memories.h"
#include "tools/ptc/mount.h"
#include "tools/ptc/progress.h"
#include "tools/ptc/text.h"

namespace ptc::cli {
namespace {

constexpr uint64_t kPieceBytes = 64 << 20;  // of one file, for one thread
constexpr uint64_t kBufferBytes = 4 << 20;

/// One file to read, and what its content must sum up to.
struct Subject {
  std::string name;  // for people
  std::string path;
  bool is_npy = false;  // with a header in front of the bytes
  uint64_t bytes = 0;
  Checksum expected;
  Checksum sum;         // guarded by Verifier's mutex, as are the next two
  std::string problem;  // empty: none yet
  std::string unread;   // why it could not be read to its end; empty: it could
};

/// Whether a read failed because a file is not what it was, and not only because nobody could look.
bool is_damage(const Error& error) { return error.code() == Code::kCorrupt; }

/// A name is not there when somebody removes it, or all of the checkpoint; damage does not show so.
std::string why_unread(const Error& error) {
  const bool gone = error.code() == Code::kNotFound;
  return error.message() + (gone ? ": it was removed, or is being removed" : "");
}

Result<uint64_t> npy_data_offset(int fd) {
  std::byte start[12];
  PTC_TRY(read_exactly(fd, start, 0));
  auto byte = [&](int i) { return static_cast<uint64_t>(start[i]); };
  if (byte(0) != 0x93 || byte(1) != 'N' || byte(5) != 'Y')
    return make_error(Code::kCorrupt, "not a .npy file");
  if (byte(6) == 1) return 10 + (byte(8) | byte(9) << 8);
  return 12 + (byte(8) | byte(9) << 8 | byte(10) << 16 | byte(11) << 24);
}

Result<uint64_t> tensor_bytes(const json::object& tensor) {
  PTC_TRY(auto dtype, parse_dtype(text_field(tensor, "dtype")));
  Shape shape;
  for (const json::value& extent : array_field(tensor, "shape")) {
    if (shape.size() == kMaxAxes || !(extent.is_int64() || extent.is_uint64()))
      return invalid_argument("odd shape");
    shape.push_back(extent.to_number<uint64_t>());
  }
  return array_bytes(shape, dtype);
}

Result<uint64_t> file_bytes(int fd) {
  struct stat info {};
  if (::fstat(fd, &info) != 0) return errno_error(errno, "fstat");
  return static_cast<uint64_t>(info.st_size);
}

/// Reads all subjects in pieces, by several threads.
class Verifier {
 public:
  explicit Verifier(std::vector<Subject>& subjects, Progress& progress)
      : subjects_(subjects), progress_(progress) {
    for (size_t i = 0; i < subjects_.size(); ++i) {
      uint64_t offset = 0;
      do {
        pieces_.push_back({i, offset, std::min(kPieceBytes, subjects_[i].bytes - offset)});
        offset += kPieceBytes;
      } while (offset < subjects_[i].bytes);
    }
  }

  void run() {
    size_t count = std::clamp<size_t>(std::thread::hardware_concurrency(), 1, 16);
    std::vector<std::thread> threads;
    for (size_t i = 0; i < count; ++i) threads.emplace_back([this] { work(); });
    for (std::thread& thread : threads) thread.join();
    for (Subject& subject : subjects_) {
      if (subject.problem.empty() && subject.unread.empty() && subject.sum != subject.expected)
        subject.problem = "the bytes differ from their checksum";
    }
  }

 private:
  struct Piece {
    size_t subject;
    uint64_t offset;
    uint64_t bytes;
  };

  void work() {
    auto buffer = std::make_unique<std::byte[]>(kBufferBytes);
    for (;;) {
      size_t next = next_++;
      if (next >= pieces_.size()) return;
      const Piece& piece = pieces_[next];
      auto sum = read_piece(piece, {buffer.get(), kBufferBytes});
      MutexLock lock(mutex_);
      Subject& subject = subjects_[piece.subject];
      if (sum) {
        subject.sum += sum.value();
      } else {
        if (is_damage(sum.error())) subject.problem = sum.error().message();
        else subject.unread = why_unread(sum.error());
      }
    }
  }

  Result<Checksum> read_piece(const Piece& piece, std::span<std::byte> buffer) {
    const Subject& subject = subjects_[piece.subject];
    PTC_TRY(auto fd, open_file(AT_FDCWD, subject.path, O_RDONLY));
    PTC_TRY(auto size, file_bytes(fd.get()));
    uint64_t data_offset = 0;
    if (subject.is_npy) {
      PTC_TRY(data_offset, npy_data_offset(fd.get()));
    }
    if (size != data_offset + subject.bytes)
      return make_error(Code::kCorrupt, "{} bytes, but {} were expected", size,
                        data_offset + subject.bytes);
    Checksum sum;
    for (uint64_t done = 0; done < piece.bytes;) {
      auto part = buffer.first(std::min<uint64_t>(buffer.size(), piece.bytes - done));
      PTC_TRY(read_exactly(fd.get(), part, data_offset + piece.offset + done));
      sum += checksum_of_run(part, piece.offset + done);
      done += part.size();
      progress_.add(part.size());
    }
    return sum;
  }

  std::vector<Subject>& subjects_;
  Progress& progress_;
  std::vector<Piece> pieces_;
  std::atomic<size_t> next_{0};
  Mutex mutex_;  // held by who writes what was found of a subject
};

Result<std::vector<Subject>> subjects_of(const Target& target, const json::object& meta) {
  std::vector<Subject> subjects;
  std::string top = target.checkpoint_dir();
  for (const json::value& value : array_field(meta, "tensors")) {
    if (!value.is_object()) return make_error(Code::kCorrupt, "meta.json: odd entry in tensors");
    const json::object& tensor = value.get_object();
    Subject subject;
    subject.name = text_field(tensor, "name");
    subject.path = top + "/" + text_field(tensor, "path");
    subject.is_npy = true;
    auto bytes = tensor_bytes(tensor);
    if (!bytes) return std::move(bytes).error().with_context("meta.json: " + subject.name);
    subject.bytes = bytes.value();
    PTC_TRY(subject.expected, Checksum::from_hex(text_field(tensor, "checksum")));
    subjects.push_back(std::move(subject));
  }
  for (const json::value& value : array_field(meta, "files")) {
    if (!value.is_object()) return make_error(Code::kCorrupt, "meta.json: odd entry in files");
    const json::object& file = value.get_object();
    if (!file.contains("checksum")) continue;  // made of tensors, which have one each
    Subject subject;
    subject.name = fmt::format("rank/{}/{}", number_field(file, "rank"), text_field(file, "path"));
    subject.path =
        fmt::format("{}/layouts/{}/{}", top, text_field(meta, "written_as"), subject.name);
    subject.bytes = number_field(file, "bytes");
    PTC_TRY(subject.expected, Checksum::from_hex(text_field(file, "checksum")));
    subjects.push_back(std::move(subject));
  }
  return subjects;
}

enum class Verdict { kGood, kBad, kNotChecked };

struct Outcome {
  uint64_t tensors = 0, files = 0, bytes = 0;
  double seconds = 0;
  std::vector<const Subject*> bad, unread;
  std::string damage;      // of the stored bytes, as the daemons found it
  std::string not_looked;  // why they did not look at all of them
  std::string not_mended;  // --repair: why
  std::vector<std::string> repaired, away;

  Verdict verdict() const {
    if (!bad.empty() || !damage.empty()) return Verdict::kBad;
    const bool all = unread.empty() && not_looked.empty() && not_mended.empty() && away.empty();
    return all ? Verdict::kGood : Verdict::kNotChecked;
  }
  int exit_code() const {
    switch (verdict()) {
      case Verdict::kGood:
        return kDone;
      case Verdict::kBad:
        return kFailed;
      case Verdict::kNotChecked:
        return kNotChecked;
    }
    return kFailed;
  }
};

std::string verdict_text(Verdict verdict) {
  switch (verdict) {
    case Verdict::kGood:
      return coloured("good", Colour::kGreen);
    case Verdict::kBad:
      return coloured("BAD", Colour::kRed);
    case Verdict::kNotChecked:
      return coloured("NOT CHECKED", Colour::kYellow);
  }
  return "";
}

/// A node that is away has many tensors, which all say the same.
void print_unread(const std::vector<const Subject*>& unread) {
  constexpr size_t kMost = 20;
  for (const Subject* subject : std::span(unread).first(std::min(kMost, unread.size())))
    say_line("{}: not checked: {}", subject->name, subject->unread);
  if (unread.size() > kMost)
    fmt::print("and {} more that could not be read (--json names all)\n", unread.size() - kMost);
}

void print_outcome(const Target& target, const Outcome& outcome) {
  for (const Subject* subject : outcome.bad) say_line("{}: {}", subject->name, subject->problem);
  print_unread(outcome.unread);
  for (const std::string& what : outcome.repaired)
    say_line("{}: made anew from another copy", what);
  for (const std::string& node : outcome.away)
    fmt::print("node {} is away: the copies on it were not looked at\n", node);
  if (!outcome.not_mended.empty()) say_line("nothing was mended: {}", outcome.not_mended);
  if (!outcome.damage.empty()) say_line("stored bytes: {}", outcome.damage);
  if (!outcome.not_looked.empty()) say_line("stored bytes: not checked: {}", outcome.not_looked);
  const size_t unread = outcome.unread.size();
  fmt::print("{}: {}: {} tensors, {} other files, {} {}read in {}\n", printable(target.name()),
             verdict_text(outcome.verdict()), outcome.tensors, outcome.files,
             format_size(outcome.bytes),
             unread == 0 ? "" : fmt::format("without the {} that could not be ", unread),
             format_duration(outcome.seconds));
  const auto status = read_json_file(target.job_dir() + "/status.json");
  if (!status) return;
  for (const json::value& checkpoint : array_field(status.value(), "checkpoints"))
    if (checkpoint.is_object() && text_field(checkpoint.get_object(), "name") == target.checkpoint)
      if (const auto text = memories_text(checkpoint.get_object()); !text.empty())
        say_line("stored in the memory of devices: {}", text);
}

json::array named(const std::vector<const Subject*>& subjects, std::string Subject::*what) {
  json::array list;
  for (const Subject* subject : subjects)
    list.emplace_back(json::object{{"name", subject->name}, {"what", subject->*what}});
  return list;
}

void print_outcome_json(const Target& target, const Outcome& outcome) {
  const Verdict verdict = outcome.verdict();
  json::object report{{"format", "ptc-verify/1"},
                      {"job", target.job},
                      {"checkpoint", target.checkpoint},
                      {"good", verdict == Verdict::kGood},
                      {"checked", verdict != Verdict::kNotChecked},
                      {"tensors", outcome.tensors},
                      {"files", outcome.files},
                      {"bytes", outcome.bytes},
                      {"seconds", outcome.seconds},
                      {"bad", named(outcome.bad, &Subject::problem)},
                      {"unread", named(outcome.unread, &Subject::unread)}};
  report["stored"] = outcome.damage.empty() && outcome.not_looked.empty() ? "good"
                     : outcome.damage.empty() ? "not checked: " + outcome.not_looked
                                              : outcome.damage;
  report["away"] = json::array(outcome.away.begin(), outcome.away.end());
  report["repaired"] = json::array(outcome.repaired.begin(), outcome.repaired.end());
  if (!outcome.not_mended.empty()) report["not_mended"] = outcome.not_mended;
  fmt::print("{}", pretty_json(report));
}

struct VerifyOptions {
  std::string target;
  bool as_json = false, repair = false;
};

/// What the daemon finds in what it stores; with `repair`, damaged copies are replaced first.
void ask_daemon(const Target& target, bool repair, Outcome& outcome) {
  const json::object request{
      {"do", "verify"}, {"job", target.job}, {"checkpoint", target.checkpoint}};
  if (repair) {
    json::object mend = request;
    mend["repair"] = true;
    auto answer = ask(target.mount, mend);
    if (answer) {
      outcome.repaired = text_list(array_field(answer.value(), "repaired"));
    } else if (answer.error().code() == Code::kCorrupt) {
      outcome.damage = answer.error().message();
      return;
    } else {
      outcome.not_mended = answer.error().message();
    }
  }
  auto answer = ask(target.mount, request);
  if (answer) outcome.away = text_list(array_field(answer.value(), "away"));
  else if (answer.error().code() == Code::kCorrupt) outcome.damage = answer.error().message();
  else outcome.not_looked = answer.error().message();
}

Result<Target> target_of(const Context& context, const std::string& text) {
  PTC_TRY(auto found, find_target(context.mount_option, text));
  return with_checkpoint(std::move(found));
}

/// Nothing could be looked at, not even what there should be.
Result<int> not_even_begun(const VerifyOptions& options, Error error) {
  const bool unread = error.code() == Code::kPermissionDenied ||
                      error.code() == Code::kUnavailable || error.code() == Code::kBusy ||
                      error.code() == Code::kConflict;
  if (!unread) return error;
  if (options.as_json)
    fmt::print("{}", pretty_json(json::object{{"format", "ptc-verify/1"},
                                              {"good", false},
                                              {"checked", false},
                                              {"why", error.message()}}));
  else
    fmt::print("{}: {}: {}\n", printable(options.target), verdict_text(Verdict::kNotChecked),
               printable(error.message()));
  return kNotChecked;
}

Result<int> run_verify(const Context& context, const VerifyOptions& options) {
  auto there = target_of(context, options.target);
  if (!there) return not_even_begun(options, std::move(there).error());
  const Target target = std::move(there).value();
  auto meta = read_json_file(target.checkpoint_dir() + "/meta.json");
  if (!meta) return not_even_begun(options, std::move(meta).error());
  PTC_TRY(auto subjects, subjects_of(target, meta.value()));

  Outcome outcome;
  if (options.repair) ask_daemon(target, true, outcome);
  for (const Subject& subject : subjects) outcome.bytes += subject.bytes;
  outcome.tensors = array_field(meta.value(), "tensors").size();
  outcome.files = subjects.size() - outcome.tensors;
  Progress progress("verifying " + target.name(), outcome.bytes);
  Verifier(subjects, progress).run();
  progress.finish();
  for (const Subject& subject : subjects) {
    if (!subject.problem.empty()) outcome.bad.push_back(&subject);
    else if (!subject.unread.empty()) outcome.unread.push_back(&subject);
  }
  if (!options.repair) ask_daemon(target, false, outcome);
  outcome.seconds = progress.seconds();
  if (options.as_json) {
    print_outcome_json(target, outcome);
  } else {
    print_outcome(target, outcome);
  }
  return outcome.exit_code();
}

}  // namespace

void add_verify(CLI::App& app, Context& context) {
  auto [command, options] = add_command<VerifyOptions>(
      app, context, "verify", "Read a checkpoint and compare its checksums", run_verify);
  command
      ->add_option("JOB[/CHECKPOINT]", options->target,
                   "without a checkpoint, the one that 'current' shows")
      ->required();
  command->add_flag("--repair", options->repair,
                    "first replace damaged copies by what others hold");
  command->add_flag("--json", options->as_json, "print the outcome as JSON");
  command->footer(
      "Every tensor is read through the mount; then the daemons of all nodes read every\n"
      "byte they store. A copy that is damaged or cut is named; --repair makes it anew\n"
      "from another copy ('replicas' in layout.json), if there is one that is right.\n"
      "What could not be read, or lies on a node that is away, is NOT CHECKED, and why.\n"
      "Exit status: 0 all good (now), 1 something differs (named), 3 not all could be\n"
      "checked (nothing that was differs).\n"
      "\nExamples:\n  ptc verify llama/step500\n  ptc verify --repair llama");
}

}  // namespace ptc::cli
