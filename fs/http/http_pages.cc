#include "fs/http/http_pages.h"

#include <boost/json/array.hpp>
#include <boost/json/parse.hpp>
#include <boost/json/serialize.hpp>
#include <charconv>
#include <optional>
#include <string>
#include <utility>

#include "fs/http/web_page.h"
#include "fs/report/metrics.h"
#include "fs/report/reports.h"
#include "fs/report/version.h"

namespace ptc {
namespace {

namespace json = boost::json;

constexpr const char* kJson = "application/json";
// Nothing but what comes from here, and no script that stands in the page.
constexpr const char* kPagePolicy =
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

struct StaticFile {
  const char *path, *name, *type;
};
constexpr StaticFile kStaticFiles[] = {{"/style.css", "style", "text/css; charset=utf-8"},
                                       {"/script.js", "script", "text/javascript; charset=utf-8"},
                                       {"/icon.svg", "icon", "image/svg+xml"}};

HttpReply not_found() {
  HttpReply reply;
  reply.status = 404;
  reply.body =
      "404 Not Found: there are /, /metrics, /healthz, /readyz, /api/jobs.json and "
      "/jobs/<job>/{status.json,plan.json,plan.svg}\n";
  return reply;
}

/// "%41" → "A"; nullopt where two digits do not follow.
std::optional<std::string> percent_decoded(std::string_view text) {
  std::string decoded;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '%') {
      decoded += text[i];
      continue;
    }
    unsigned char byte = 0;
    const char* begin = text.data() + i + 1;
    if (text.size() - i < 3 || std::from_chars(begin, begin + 2, byte, 16).ptr != begin + 2)
      return std::nullopt;
    decoded += static_cast<char>(byte);
    i += 2;
  }
  return decoded;
}

}  // namespace

json::object jobs_document(Tree& tree) {
  const StoreSpace space = store_space(tree);
  const GatherCache::Numbers cache = tree.gathered().numbers();
  json::array jobs;
  json::parse_options lenient;
  lenient.allow_invalid_utf8 = true;  // file names are bytes
  for (const JobRef& job : tree.store().jobs())
    jobs.push_back(json::object{{"status", json::parse(job->status_json(), {}, lenient)},
                                {"plan", json::parse(job->plan_json(), {}, lenient)}});
  return {{"format", "ptc-jobs/1"},
          {"node", tree.store().node()},
          {"version", kVersion},
          {"store", json::object{{"limit_bytes", space.total_bytes},
                                 {"used_bytes", space.used_bytes},
                                 {"materialised_bytes", materialised_bytes(tree)}}},
          {"gather_cache", json::object{{"limit_bytes", tree.gathered().limit_bytes()},
                                        {"used_bytes", cache.bytes},
                                        {"hits", cache.hits},
                                        {"misses", cache.misses}}},
          {"cluster", nodes_document(tree)},
          {"jobs", std::move(jobs)}};
}

HttpReply HttpPages::answer(std::string_view path) const {
  constexpr std::string_view kJobs = "/jobs/";
  HttpReply reply;
  for (const StaticFile& file : kStaticFiles) {
    if (path != file.path) continue;
    reply.content_type = file.type;
    reply.body = web_file(file.name);
    return reply;
  }
  if (path == "/") {
    reply.content_type = "text/html; charset=utf-8";
    reply.content_security_policy = kPagePolicy;
    reply.body = web_page(jobs_document(tree_));
  } else if (path == "/metrics") {
    reply.content_type = "text/plain; version=0.0.4; charset=utf-8";
    reply.body = metrics_text(tree_);
  } else if (path == "/api/jobs.json") {
    reply.content_type = kJson;
    reply.body = json::serialize(jobs_document(tree_)) + "\n";
  } else if (path.starts_with(kJobs)) {
    reply = job_file(path.substr(kJobs.size()));
  } else {
    reply = not_found();
  }
  return reply;
}

HttpReply HttpPages::job_file(std::string_view job_and_file) const {
  const size_t slash = job_and_file.find('/');
  if (slash == std::string_view::npos) return not_found();
  const auto name = percent_decoded(job_and_file.substr(0, slash));
  const JobRef job = name ? tree_.store().find(*name) : nullptr;
  if (job == nullptr) return not_found();
  const std::string_view file = job_and_file.substr(slash + 1);
  HttpReply reply;
  reply.content_type = kJson;
  if (file == "status.json") {
    reply.body = job->status_json();
  } else if (file == "plan.json") {
    reply.body = job->plan_json();
  } else if (file == "plan.svg") {
    reply.content_type = "image/svg+xml";
    reply.content_security_policy += "; style-src 'unsafe-inline'";
    reply.body = job->plan_svg();
  } else {
    return not_found();
  }
  return reply;
}

}  // namespace ptc
