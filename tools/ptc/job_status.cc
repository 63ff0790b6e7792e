#include "tools/ptc/job_status.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <boost/json/array.hpp>
#include <boost/json/serialize.hpp>
#include <chrono>
#include <cstring>
#include <thread>

#include "store/base/file.h"
#include "store/base/size_text.h"
#include "tools/planner/profile/input.h"
#include "tools/planner/run/processes.h"
#include "tools/planner/run/record.h"
#include "tools/ptc/fields.h"

namespace ptc::cli {

Result<JobStatus> read_status(const Target& target) {
  PTC_TRY(auto raw, read_json_file(target.job_dir() + "/status.json"));
  JobStatus status;
  status.job = target.job;
  status.state = text_field(raw, "state");
  status.revision = number_field(raw, "revision");
  status.in_force_revision = number_field(raw, "in_force_revision");
  status.layout = text_field(raw, "layout");
  status.wanted = text_field(raw, "wanted");
  status.checkpoint = text_field(raw, "checkpoint");
  status.last_error = text_field(object_field(raw, "last_error"), "what");
  status.layout_error = text_field(object_field(raw, "layout_error"), "what");
  status.raw = std::move(raw);
  return status;
}

Reason::Reason(Target target, std::string error_file)
    : target_(std::move(target)),
      error_file_(std::move(error_file)),
      file_before_(file_version()),
      error_before_(last_error(true)) {}

std::string Reason::text(int error) const {
  std::string said;
  // What was there before is the reason of something else.
  if (file_version() != file_before_) {
    if (auto text = read_text_file(AT_FDCWD, error_file_, 1 << 20)) said = std::move(text).value();
  }
  if (said.empty() && last_error(true) != error_before_) said = last_error(false);
  while (said.ends_with('\n')) said.pop_back();
  return said.empty() ? std::strerror(error) : said;
}

std::string Reason::file_version() const {
  struct stat file {};
  if (error_file_.empty() || ::stat(error_file_.c_str(), &file) != 0) return "";
  return fmt::format("{} {}.{}", file.st_ino, file.st_mtim.tv_sec, file.st_mtim.tv_nsec);
}

/// `whole`: with its time.
std::string Reason::last_error(bool whole) const {
  auto status = read_status(target_);
  if (!status) return "";
  return whole ? json::serialize(object_field(status.value().raw, "last_error"))
               : status.value().last_error;
}

Result<std::vector<JobStatus>> read_statuses(const std::string& mount, size_t* hidden) {
  PTC_TRY(auto names, list_jobs(mount));
  std::vector<JobStatus> jobs;
  *hidden = 0;
  for (std::string& name : names) {
    auto status = read_status(Target{mount, std::move(name), ""});
    if (status) {
      jobs.push_back(std::move(status).value());
    } else if (status.error().code() == Code::kPermissionDenied) {
      ++*hidden;
    } else if (status.error().code() != Code::kNotFound) {
      return std::move(status).error();
    }
  }
  return jobs;
}

void say_hidden(size_t hidden) {
  if (hidden == 0) return;
  fmt::print(stderr, "{} of other users {} not shown\n",
             hidden == 1 ? "1 job" : fmt::format("{} jobs", hidden), hidden == 1 ? "is" : "are");
}

std::string phase_text(const json::object& progress) {
  std::string phase = text_field(progress, "phase");
  std::string checkpoint = text_field(progress, "checkpoint");
  if (phase.empty()) phase = "resharding";
  return checkpoint.empty() ? phase : phase + " " + checkpoint;
}

std::optional<ProgressView> progress_of(const JobStatus& status) {
  if (!has_object(status.raw, "progress")) return std::nullopt;
  const json::object& progress = object_field(status.raw, "progress");
  ProgressView view{phase_text(progress), number_field(progress, "bytes_done"),
                    number_field(progress, "bytes_total"), 0};
  double seconds = real_field(progress, "seconds");
  if (seconds > 0) view.bytes_per_second = static_cast<double>(view.done) / seconds;
  return view;
}

bool is_unheard(const json::object& node) {
  constexpr double kQuietSeconds = 5;
  if (text_field(node, "state") != "up" || !node.contains("materialised_bytes")) return false;
  return !node.contains("heard_seconds_ago") ||
         real_field(node, "heard_seconds_ago") > kQuietSeconds;
}

std::string node_text(const json::object& node) {
  const std::string state = text_field(node, "state");
  std::string text = text_field(node, "name") + " " + state;
  const std::string age = format_age(node.if_contains("since"));
  if ((state == "away" || state == "fenced") && !age.empty())
    text += age == "just now" ? " since just now" : " for " + age;
  if (is_unheard(node)) {
    const double seconds = real_field(node, "heard_seconds_ago");
    text += seconds == 0 ? " (not heard of yet)"
                         : fmt::format(" (not heard of for {})", format_duration(seconds));
  }
  if (!has_object(node, "drain")) return text;
  const uint64_t left = number_field(object_field(node, "drain"), "bytes_left");
  return text + (left == 0 ? " (drained)" : fmt::format(" (draining, {} left)", format_size(left)));
}

std::string agreement_text(const json::object& nodes_json) {
  const json::object& agreement = object_field(nodes_json, "agreement");
  if (agreement.empty()) return "";
  constexpr const char* kMeanwhile =
      "what is there is read, but nothing is decided: no commit, layout or removal";
  const std::string state = text_field(agreement, "state"), why = text_field(agreement, "why");
  if (state != "away") return fmt::format("{}: {}; {}", state, why, kMeanwhile);
  const std::string age = format_age(agreement.if_contains("since"));
  return fmt::format("away{}: {}; {}",
                     age.empty()         ? ""
                     : age == "just now" ? " since just now"
                                         : " for " + age,
                     why, kMeanwhile);
}

std::string agreement_text(const std::string& mount) {
  const auto report = read_json_file(mount + "/.ptc/nodes.json");
  return report ? agreement_text(report.value()) : "";
}

Table job_table(const std::vector<JobStatus>& jobs) {
  using Align = Table::Align;
  Table table({{"JOB"},
               {"STATE"},
               {"LAYOUT"},
               {"CHECKPOINTS", Align::kRight},
               {"SIZE", Align::kRight},
               {"NEWEST", Align::kRight}});
  for (const JobStatus& job : jobs) {
    const json::array& checkpoints = array_field(job.raw, "checkpoints");
    uint64_t bytes = 0;
    std::string age = "-";
    for (const json::value& value : checkpoints) {
      if (!value.is_object()) continue;
      bytes += number_field(value.get_object(), "bytes");
      age = format_age(value.get_object().if_contains("time"));
    }
    const size_t unreadable = array_field(job.raw, "unreadable").size();
    table.add({job.job, job.state, job.layout,
               fmt::format("{}{}", checkpoints.size(),
                           unreadable == 0 ? "" : fmt::format(" ({} unreadable)", unreadable)),
               format_size(bytes), age});
  }
  return table;
}

Table checkpoint_table(const JobStatus& status) {
  using Align = Table::Align;
  Table table({{"CHECKPOINT"},
               {"AGE", Align::kRight},
               {"TENSORS", Align::kRight},
               {"SIZE", Align::kRight},
               {""},
               {"LAYOUTS"}});
  for (const json::value& value : array_field(status.raw, "checkpoints")) {
    if (!value.is_object()) continue;
    const json::object& checkpoint = value.get_object();
    const std::string name = text_field(checkpoint, "name");
    const bool current = name == status.checkpoint, pinned = bool_field(checkpoint, "pinned");
    table.add({name, format_age(checkpoint.if_contains("time")),
               fmt::format("{}", number_field(checkpoint, "tensors")),
               format_size(number_field(checkpoint, "bytes")),
               fmt::format("{}{}{}", current ? "current" : "", current && pinned ? ", " : "",
                           pinned ? "pinned" : ""),
               fmt::format("{}", fmt::join(text_list(array_field(checkpoint, "layouts")), ", "))});
  }
  return table;
}

std::optional<std::string> why_unreadable(const JobStatus& status, std::string_view checkpoint) {
  for (const json::value& value : array_field(status.raw, "unreadable"))
    if (value.is_object() && text_field(value.get_object(), "name") == checkpoint)
      return text_field(value.get_object(), "why");
  return std::nullopt;
}

Result<JobStatus> wait_until_settled(const Target& target, double timeout_seconds) {
  using Clock = std::chrono::steady_clock;
  auto start = Clock::now();
  auto pause = std::chrono::milliseconds(10);
  Progress bar(target.job);
  for (;;) {
    PTC_TRY(auto status, read_status(target));
    if (status.settled()) return status;
    double elapsed = std::chrono::duration<double>(Clock::now() - start).count();
    if (timeout_seconds > 0 && elapsed >= timeout_seconds) {
      bar.finish();
      return make_error(Code::kCancelled, "{}: not settled after {}: {} is in force, {} wanted",
                        target.job, format_duration(timeout_seconds), status.layout, status.wanted);
    }
    const json::object& progress = object_field(status.raw, "progress");
    bar.set_label(fmt::format("{}: {}", target.job, phase_text(progress)));
    bar.set(number_field(progress, "bytes_done"), number_field(progress, "bytes_total"));
    if (timeout_seconds > 0) {
      auto left = std::chrono::duration<double>(timeout_seconds - elapsed);
      std::this_thread::sleep_for(std::min(left, std::chrono::duration<double>(pause)));
    } else {
      std::this_thread::sleep_for(pause);
    }
    // A reshard of a small job is over at once; a long one need not be asked for so often.
    pause = std::min(pause * 2, std::chrono::milliseconds(160));
  }
}

std::string settled_text(const JobStatus& status) {
  if (status.state == "failed") {
    return fmt::format("{}: failed: {}. {} stays in force.", status.job,
                       status.last_error.empty() ? "no reason was given" : status.last_error,
                       status.layout);
  }
  std::string text =
      fmt::format("{}: {} in force (revision {})", status.job, status.layout, status.revision);
  const json::object& last = object_field(status.raw, "last_reshard");
  if (!last.empty() && text_field(last, "to") == status.layout) {
    text += fmt::format("; {}: {} kept, {} written in {}", text_field(last, "checkpoint"),
                        format_size(number_field(last, "bytes_kept")),
                        format_size(number_field(last, "bytes_written")),
                        format_duration(real_field(last, "seconds")));
  }
  return text;
}

std::string autoscale_text(const std::string& job_dir) {
  const auto record = planner::read_record(job_dir);
  if (!record) return "";
  using State = planner::LiveState;
  std::string line(planner::state_word(record->state));
  if (record->state == State::kByHand) line = "left alone";
  else if (record->state != State::kDone && record->state != State::kGivenUp) line = "it " + line;
  // Where they would be on this machine.
  if (record->has && record->state == State::kRuns &&
      record->worker.started_at.starts_with(planner::boot_id() + " ") &&
      !planner::Worker::find(record->worker))
    line = "its processes have ended, and no autoscaler has seen it yet; it ran";
  if (record->has)
    line += fmt::format(" on {} with batch {} ({})", planner::counted(record->has->gpus, "GPU"),
                        record->has->batch, record->has->way);
  const std::string waits = text_field(record->decision, "waits");
  const bool says_for_what = record->state == State::kWaits && !waits.empty();
  if (says_for_what) line += " for " + waits;
  if (!record->remark.empty()) line += (says_for_what ? "; " : ": ") + record->remark;
  const std::string why = text_field(record->decision, "why");
  if (!why.empty() && record->has)
    line += fmt::format(
        "; {} before, and now these because {}",
        planner::counted(number_field(object_field(record->decision, "from"), "gpus"), "GPU"), why);
  return line;
}

}  // namespace ptc::cli
