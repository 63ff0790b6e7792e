// What ptcfs --http shows, by path:
//
//   /                                    a page for people; /style.css, /script.js, /icon.svg
//   /metrics                             .ptc/metrics
//   /healthz, /readyz                    health.h, not here
//   /api/jobs.json                       all of it in one document
//   /jobs/<job>/{status.json,plan.json,plan.svg}    as in the job's directory, to the byte
#pragma once

#include <boost/json/object.hpp>
#include <string_view>

#include "fs/http/http_server.h"
#include "fs/tree/tree.h"

namespace ptc {

/// Reads the tree only. Threads: any.
class HttpPages {
 public:
  /// `tree` outlives it.
  explicit HttpPages(Tree& tree) : tree_(tree) {}
  HttpReply answer(std::string_view path) const;

 private:
  HttpReply job_file(std::string_view job_and_file) const;
  Tree& tree_;
};

/// {"format", "node", "version", "started", "store", "gather_cache", "jobs": [{"status", "plan"}]}
boost::json::object jobs_document(Tree& tree);

}  // namespace ptc
