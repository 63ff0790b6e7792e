#include "tools/ptc/top_view.h"

#include <boost/json/array.hpp>
#include <optional>

#include "store/base/size_text.h"
#include "tools/ptc/fields.h"
#include "tools/ptc/progress.h"
#include "tools/ptc/text.h"

namespace ptc::cli {
namespace {

constexpr size_t kLabelWidth = 10;

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  for (size_t begin = 0; begin < text.size();) {
    size_t end = std::min(text.find('\n', begin), text.size());
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

struct Traffic {
  uint64_t requests = 0, read = 0, written = 0;
};
Traffic traffic_of(const TopSample& sample) {
  Traffic traffic;
  const json::object& operations = object_field(sample.stats, "operations");
  for (const auto& [name, value] : operations)
    if (value.is_object()) traffic.requests += number_field(value.get_object(), "requests");
  traffic.read = number_field(object_field(operations, "read"), "bytes");
  traffic.written = number_field(object_field(operations, "write"), "bytes");
  return traffic;
}

/// What has come since `before`, a second.
std::optional<uint64_t> rate(uint64_t now, uint64_t before, double seconds) {
  if (seconds <= 0 || now < before) return std::nullopt;
  return static_cast<uint64_t>(static_cast<double>(now - before) / seconds);
}

class View {
 public:
  View(const TopSample& now, const TopSample* before, size_t width, bool utf8)
      : now_(now), before_(before), width_(width), utf8_(utf8) {}

  std::vector<std::string> lines() {
    mount_line();
    memory_lines();
    request_lines();
    add("");
    job_lines();
    return std::move(lines_);
  }

 private:
  void add(const std::string& line) { lines_.push_back(shortened(printable(line), width_)); }
  void add_labelled(std::string_view label, const std::string& text) {
    for (const std::string& line :
         lines_of(padded(label, kLabelWidth) + wrapped(text, kLabelWidth, width_)))
      add(line);
  }

  void mount_line() {
    add_labelled("mount", fmt::format("{}, up {}, passthrough {}", now_.mount,
                                      format_duration(real_field(now_.stats, "uptime_seconds")),
                                      bool_field(now_.stats, "passthrough") ? "on" : "off"));
  }
  void memory_lines() {
    for (const json::value& value : array_field(now_.nodes, "nodes")) {
      if (!value.is_object()) continue;
      add_labelled("node", node_line(value.get_object()));
    }
    if (const std::string text = agreement_text(now_.nodes); !text.empty())
      add_labelled("etcd", text);
    const uint64_t missing = number_field(object_field(now_.nodes, "missing_copies"), "bytes");
    if (missing > 0) add_labelled("copies", format_size(missing) + " are missing");
  }
  std::string node_line(const json::object& node) const {
    std::string line = node_text(node);
    if (node.contains("memory_total_bytes"))
      line += fmt::format(", {} of {} used", format_size(number_field(node, "memory_used_bytes")),
                          format_size(number_field(node, "memory_total_bytes")));
    line +=
        fmt::format(", {} in checkpoints", format_size(number_field(node, "materialised_bytes")));
    const json::object& traffic = object_field(node, "traffic");
    const uint64_t sent = number_field(traffic, "sent_bytes"),
                   received = number_field(traffic, "received_bytes");
    if (sent + received > 0)
      line += fmt::format(", {} sent, {} received", format_size(sent), format_size(received));
    if (const uint64_t bad = number_field(traffic, "checksum_failures"))
      line += fmt::format(", {} frames damaged", bad);
    if (const uint64_t again = number_field(traffic, "retries"))
      line += fmt::format(", {} tried again", again);
    return line;
  }
  void request_lines() {
    const Traffic now = traffic_of(now_);
    const Traffic before = before_ != nullptr ? traffic_of(*before_) : Traffic{};
    const double seconds =
        before_ != nullptr ? std::chrono::duration<double>(now_.taken - before_->taken).count() : 0;
    auto bytes = [&](uint64_t value, uint64_t earlier) {
      auto each = rate(value, earlier, seconds);
      return format_size(value) + (each ? fmt::format(" ({}/s)", format_size(*each)) : "");
    };
    auto each = rate(now.requests, before.requests, seconds);
    add_labelled("requests", fmt::format("{}{}, {} in flight", now.requests,
                                         each ? fmt::format(" ({}/s)", *each) : "",
                                         array_field(now_.requests, "requests").size()));
    add_labelled("bytes", fmt::format("{} read, {} written", bytes(now.read, before.read),
                                      bytes(now.written, before.written)));
  }

  void job_lines() {
    if (now_.jobs.empty()) return add("No jobs yet; mkdir makes one.");
    const std::vector<std::string> rows = lines_of(job_table(now_.jobs).to_string(0, width_));
    add(rows[0]);
    for (size_t i = 0; i < now_.jobs.size(); ++i) {
      const JobStatus& job = now_.jobs[i];
      add(rows[i + 1]);
      if (auto progress = progress_of(job)) {
        if (job.wanted != job.layout)
          progress->label = fmt::format("to {}: {}", job.wanted, progress->label);
        add("  " + progress_bar(*progress, width_ - 2, utf8_));
      } else if (job.state == "resharding") {
        add(fmt::format("  to {}: waiting", job.wanted));
      }
      if (i < now_.autoscale.size())
        for (const std::string& line : lines_of(wrapped(now_.autoscale[i], 2, width_)))
          if (!line.empty()) add((line.starts_with(' ') ? "" : "  ") + line);
      if (!job.last_error.empty()) add("  " + job.last_error);
      for (const std::string& warning : text_list(array_field(job.raw, "warnings")))
        add("  " + warning);
    }
  }

  const TopSample& now_;
  const TopSample* before_;
  const size_t width_;
  const bool utf8_;
  std::vector<std::string> lines_;
};

}  // namespace

Result<TopSample> read_top_sample(const std::string& mount) {
  TopSample sample{.mount = mount};
  PTC_TRY(sample.stats, read_json_file(mount + "/.ptc/stats"));
  PTC_TRY(sample.nodes, read_json_file(mount + "/.ptc/nodes.json"));
  PTC_TRY(sample.requests, read_json_file(mount + "/.ptc/requests"));
  sample.taken = std::chrono::steady_clock::now();
  PTC_TRY(auto names, list_jobs(mount));
  for (std::string& name : names) {
    auto status = read_status({mount, std::move(name), ""});
    // Removed meanwhile, or another user's: not shown.
    if (!status && (status.error().code() == Code::kNotFound ||
                    status.error().code() == Code::kPermissionDenied))
      continue;
    PTC_TRY(auto read, std::move(status));
    const std::string autoscale = autoscale_text(mount + "/" + read.job);
    sample.autoscale.push_back(autoscale.empty() ? "" : "autoscale: " + autoscale);
    sample.jobs.push_back(std::move(read));
  }
  return sample;
}

std::vector<std::string> top_lines(const TopSample& now, const TopSample* before, size_t width,
                                   bool utf8) {
  return View(now, before, width, utf8).lines();
}

}  // namespace ptc::cli
