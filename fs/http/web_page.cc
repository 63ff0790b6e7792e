#include "fs/http/web_page.h"

#include <fmt/format.h>

#include <algorithm>
#include <boost/json/array.hpp>
#include <boost/json/serialize.hpp>
#include <boost/json/value.hpp>
#include <functional>

#include "fs/http/web_matrix.h"
#include "store/base/error.h"
#include "store/base/size_text.h"

namespace ptc {
namespace {

namespace json = boost::json;

constexpr size_t kShownCheckpoints = 8;  // further ones are folded away

uint64_t number(const json::object& object, std::string_view key) {
  return object.at(key).to_number<uint64_t>();
}
std::string size(const json::object& object, std::string_view key) {
  return format_size(number(object, key));
}
std::string text(const json::object& object, std::string_view key) {
  const json::value& value = object.at(key);
  return value.is_string() ? html_escaped(value.as_string()) : "";
}

/// "2026-11-21T16:13:39.259Z" as people read it.
std::string time_text(const json::object& object) {
  std::string time = text(object, "time").substr(0, 19);
  std::replace(time.begin(), time.end(), 'T', ' ');
  return time;
}

std::string seconds_text(double seconds) {
  return seconds < 1 ? fmt::format("{:.0f} ms", seconds * 1000) : fmt::format("{:.1f} s", seconds);
}

/// For one part of a path.
std::string url_escaped(std::string_view text) {
  std::string escaped;
  for (unsigned char c : text)
    if (std::isalnum(c) != 0 || c == '-' || c == '_' || c == '.') escaped += static_cast<char>(c);
    else escaped += fmt::format("%{:02X}", c);
  return escaped;
}

void replace(std::string& text, std::string_view what, std::string_view with) {
  const size_t at = text.find(what);
  PTC_CHECK(at != std::string::npos);
  text.replace(at, what.size(), with);
}

std::string fact(std::string_view name, std::string_view html) {
  return fmt::format("<div><dt>{}</dt><dd>{}</dd></div>\n", name, html);
}

std::string use(std::string_view name, const json::object& object, std::string_view more) {
  const uint64_t used = number(object, "used_bytes"), limit = number(object, "limit_bytes");
  return fact(name, fmt::format(R"(<meter min="0" max="{}" value="{}"></meter><br>{} of {}{})",
                                std::max<uint64_t>(limit, 1), used, format_size(used),
                                format_size(limit), more));
}

std::string mount_part(const json::object& document) {
  const json::object& store = document.at("store").as_object();
  const json::object& cache = document.at("gather_cache").as_object();
  return fmt::format(
      R"(<header id="mount">
<div class="head"><h1>ptcfs on {}</h1><span class="weak">version {}</span></div>
<dl class="facts">
{}{}{}</dl>
</header>
)",
      text(document, "node"), text(document, "version"),
      use("Store", store, fmt::format(", {} of checkpoints", size(store, "materialised_bytes"))),
      use("Files computed on read", cache,
          fmt::format(", {} found there, {} computed", number(cache, "hits"),
                      number(cache, "misses"))),
      fact("Jobs", fmt::format("{}", document.at("jobs").as_array().size())));
}

/// Of a member that may be missing.
uint64_t number_or_0(const json::object& object, std::string_view key) {
  const json::value* value = object.if_contains(key);
  return value != nullptr && value->is_number() ? value->to_number<uint64_t>() : 0;
}

std::string traffic_text(const json::object& traffic) {
  std::string html =
      fmt::format("{} out, {} in", size(traffic, "sent_bytes"), size(traffic, "received_bytes"));
  if (const uint64_t bad = number_or_0(traffic, "checksum_failures"))
    html += fmt::format(", {} damaged", bad);
  if (const uint64_t again = number_or_0(traffic, "retries"))
    html += fmt::format(", {} tried again", again);
  return html;
}

std::string node_row(const json::object& node) {
  std::string state = text(node, "state");
  if (const json::value* since = node.if_contains("since"); since != nullptr && state != "up")
    state += " since " + html_escaped(since->as_string().subview(0, 19)) + " UTC";
  if (const json::value* drain = node.if_contains("drain")) {
    const uint64_t left = number(drain->as_object(), "bytes_left");
    state += left == 0 ? ", drained" : ", draining";
  }
  std::string memory = "not known", traffic = memory;
  if (node.contains("memory_total_bytes"))
    memory = fmt::format(R"(<meter min="0" max="{}" value="{}"></meter> {} of {})",
                         std::max<uint64_t>(number(node, "memory_total_bytes"), 1),
                         number(node, "memory_used_bytes"), size(node, "memory_used_bytes"),
                         size(node, "memory_total_bytes"));
  if (const json::value* with_others = node.if_contains("traffic"))
    traffic = traffic_text(with_others->as_object());
  return fmt::format(
      R"(<tr><td class="name">{}</td><td>{}</td><td>{}</td><td class="number">{}</td><td>{}</td></tr>
)",
      text(node, "name"), state, memory, size(node, "materialised_bytes"), traffic);
}

/// Why nothing is decided here, while that is so.
std::string agreement_part(const json::object& cluster) {
  const json::value* trouble = cluster.if_contains("agreement");
  if (trouble == nullptr) return "";
  const json::object& why = trouble->as_object();
  std::string since;
  if (const json::value* time = why.if_contains("since"))
    since = " since " + html_escaped(time->as_string().subview(0, 19)) + " UTC";
  return fmt::format(
      R"(<p class="warning" id="agreement">Agreement {}{}: {}. Nothing is decided here until it is back: no commit, no reshard.</p>
)",
      text(why, "state"), since, text(why, "why"));
}

/// Where there are several.
std::string nodes_part(const json::object& cluster) {
  const json::array& nodes = cluster.at("nodes").as_array();
  if (nodes.size() < 2) return "";
  const json::object& all = cluster.at("cluster").as_object();
  std::string html = fmt::format(R"(<section id="nodes">
<div class="head"><h2>Nodes</h2><span class="weak">{} of {} used, {} of checkpoints</span></div>
)",
                                 size(all, "memory_used_bytes"), size(all, "memory_total_bytes"),
                                 size(all, "materialised_bytes"));
  const json::object& missing = cluster.at("missing_copies").as_object();
  if (number(missing, "bytes") > 0)
    html += fmt::format(R"(<p class="warning">Copies of {} are missing.</p>)"
                        "\n",
                        size(missing, "bytes"));
  html += R"(<div class="scroll"><table class="list">
<thead><tr><th>Node</th><th>state</th><th>memory</th><th class="number">checkpoints</th><th>traffic with others</th></tr></thead>
<tbody>
)";
  for (const json::value& node : nodes) html += node_row(node.as_object());
  return html + "</tbody></table></div>\n</section>\n";
}

std::string progress_part(const json::object& progress) {
  const uint64_t done = number(progress, "bytes_done"), total = number(progress, "bytes_total");
  const double share = total == 0 ? 0 : static_cast<double>(done) / static_cast<double>(total);
  const double seconds = progress.at("seconds").to_number<double>();
  const std::string left = share > 0 && share < 1
                               ? fmt::format(", {} left", seconds_text(seconds / share - seconds))
                               : "";
  return fmt::format(
      R"(<h3>{} {}</h3>
<p>{} → {}</p>
<progress max="{}" value="{}" aria-label="progress"></progress>
<p>{:.0f} %, {} of {}, {}{}</p>
)",
      text(progress, "phase"), text(progress, "checkpoint"), text(progress, "from"),
      text(progress, "to"), std::max<uint64_t>(total, 1), done, 100 * share, format_size(done),
      format_size(total), seconds_text(seconds), left);
}

std::string checkpoint_rows(const json::array& checkpoints, size_t first, size_t last) {
  std::string html = R"(<div class="scroll"><table class="list">
<thead><tr><th>Checkpoint</th><th>stored as</th><th class="number">bytes</th>
<th class="number wide">tensors</th><th class="wide">committed (UTC)</th></tr></thead>
<tbody>
)";
  for (size_t i = first; i < last; ++i) {  // the newest first
    const json::object& checkpoint = checkpoints[checkpoints.size() - 1 - i].as_object();
    const bool pinned = checkpoint.at("pinned").as_bool();
    html += fmt::format(
        R"(<tr><td class="name">{}{}</td><td>{}</td><td class="number">{}</td>
<td class="number wide">{}</td><td class="wide">{}</td></tr>
)",
        text(checkpoint, "name"), pinned ? R"( <span class="tag">pinned</span>)" : "",
        html_escaped(checkpoint.at("layouts").as_array().at(0).as_string()),
        size(checkpoint, "bytes"), number(checkpoint, "tensors"), time_text(checkpoint));
  }
  return html + "</tbody></table></div>\n";
}

std::string checkpoints_part(const json::array& checkpoints) {
  if (checkpoints.empty()) return "<p>No checkpoint is committed yet.</p>\n";
  const size_t shown = std::min(checkpoints.size(), kShownCheckpoints);
  std::string html = "<h3>Checkpoints</h3>\n" + checkpoint_rows(checkpoints, 0, shown);
  if (shown < checkpoints.size())
    html += fmt::format("<details><summary>{} older</summary>\n{}</details>\n",
                        checkpoints.size() - shown,
                        checkpoint_rows(checkpoints, shown, checkpoints.size()));
  return html;
}

/// Between nodes, where there is more than one: plan.json's pairs.
std::string nodes_matrix(const json::array& pairs) {
  json::array flows;
  bool several = false;
  for (const json::value& value : pairs) {
    json::object flow = value.as_object();
    const bool local = flow.at("source") == flow.at("target");
    flow["kind"] = local ? "local" : "moved";
    several = several || !local;
    flows.push_back(std::move(flow));
  }
  return several ? "<h3>Between nodes</h3>\n" + html_matrix(flows) : "";
}

std::string traffic_part(const json::object& plan, const std::string& url) {
  if (!plan.contains("flows")) return "";
  const json::object& bytes = plan.at("bytes").as_object();
  const double seconds = plan.at("seconds").to_number<double>();
  return fmt::format(
      R"(<h3>Traffic of {}</h3>
<p>{} → {}, {}{}</p>
<p><span class="key kept">{} kept as they were</span><span class="key local">{} copied on a node</span>
<span class="key moved">{} moved between nodes (least possible: {})</span></p>
{}{}<details><summary>as a picture</summary><div class="scroll">
<img loading="lazy" alt="which rank's bytes went where" src="{}plan.svg?{:x}">
</div></details>
)",
      text(plan, "checkpoint"), text(plan, "from"), text(plan, "to"), text(plan, "state"),
      text(plan, "state") == "done" ? " in " + seconds_text(seconds) : "", size(bytes, "kept"),
      size(bytes, "local"), size(bytes, "moved"), size(bytes, "minimum"),
      html_matrix(plan.at("flows").as_array()), nodes_matrix(plan.at("pairs").as_array()), url,
      std::hash<std::string>()(json::serialize(plan)));
}

std::string last_reshard_text(const json::object& last) {
  return fmt::format("{} → {}: {} kept, {} written, {}", text(last, "from"), text(last, "to"),
                     size(last, "bytes_kept"), size(last, "bytes_written"),
                     seconds_text(last.at("seconds").to_number<double>()));
}

std::string job_part(const json::object& job) {
  const json::object& status = job.at("status").as_object();
  const std::string state = text(status, "state");
  const std::string part = url_escaped(std::string(status.at("job").as_string()));
  const std::string url = fmt::format("/jobs/{}/", part);
  std::string html = fmt::format(
      R"(<section id="job-{0}">
<div class="head"><h2>{1}</h2><span class="state {2}">{2}</span>
<span class="weak"><a href="{3}status.json">status.json</a> <a href="{3}plan.json">plan.json</a></span></div>
<dl class="facts">
)",
      part, text(status, "job"), state, url);
  html += fact("Layout in force", fmt::format("{}, revision {}", text(status, "layout"),
                                              number(status, "in_force_revision")));
  if (status.at("wanted") != status.at("layout") ||
      status.at("revision") != status.at("in_force_revision"))
    html += fact("Layout wanted", fmt::format("{}, revision {}", text(status, "wanted"),
                                              number(status, "revision")));
  const std::string current = text(status, "checkpoint");
  html += fact("Current checkpoint", current.empty() ? "none" : current);
  if (const json::value& last = status.at("last_reshard"); last.is_object())
    html += fact("Last reshard", last_reshard_text(last.as_object()));
  html += "</dl>\n";
  if (const json::value& error = status.at("last_error"); error.is_object())
    html += fmt::format(R"(<p class="error">{} UTC: {}</p>)"
                        "\n",
                        time_text(error.as_object()), text(error.as_object(), "what"));
  for (const json::value& warning : status.at("warnings").as_array())
    html += fmt::format(R"(<p class="warning">{}</p>)"
                        "\n",
                        html_escaped(warning.as_string()));
  if (const json::value& progress = status.at("progress"); progress.is_object())
    html += progress_part(progress.as_object());
  html += checkpoints_part(status.at("checkpoints").as_array());
  html += traffic_part(job.at("plan").as_object(), url);
  return html + "</section>\n";
}

}  // namespace

std::string_view web_file(std::string_view name) {
  const auto files = web_files();
  const auto found = std::find_if(files.begin(), files.end(),
                                  [&](const WebFile& file) { return file.name == name; });
  PTC_CHECK(found != files.end());
  return found->text;
}

std::string html_escaped(std::string_view text) {
  std::string escaped;
  for (char c : text) {
    switch (c) {
      case '&':
        escaped += "&amp;";
        break;
      case '<':
        escaped += "&lt;";
        break;
      case '>':
        escaped += "&gt;";
        break;
      case '"':
        escaped += "&quot;";
        break;
      case '\'':
        escaped += "&#39;";
        break;
      default:
        escaped += c;
    }
  }
  return escaped;
}

std::string web_page(const json::object& document) {
  const json::object& cluster = document.at("cluster").as_object();
  std::string content = mount_part(document) + agreement_part(cluster) + nodes_part(cluster);
  const json::array& jobs = document.at("jobs").as_array();
  for (const json::value& job : jobs) content += job_part(job.as_object());
  if (jobs.empty())
    content += R"(<section id="nothing">
<p>There is no job yet: <code>mkdir</code> in the mount makes one.</p></section>
)";
  std::string page(web_file("page"));
  replace(page, "@title@", "ptcfs on " + text(document, "node"));
  replace(page, "@content@", content);
  return page;
}

}  // namespace ptc
