#include "fs/http/health.h"

#include <fmt/format.h>

#include <utility>

namespace ptc {
namespace {

void add_line(HttpReply& reply, std::string_view name, std::string_view trouble) {
  reply.body += fmt::format("{}: {}\n", name, trouble.empty() ? "ok" : trouble);
  if (!trouble.empty()) reply.status = 503;
}

}  // namespace

void Health::mounted(Checks checks) {
  MutexLock lock(mutex_);
  checks_ = std::move(checks);
}

void Health::leaves() {
  MutexLock lock(mutex_);
  leaves_ = true;
}

void Health::ended() {
  MutexLock lock(mutex_);
  checks_.reset();
  leaves_ = true;
}

std::optional<HttpReply> Health::answer(std::string_view path) const {
  const bool ready = path == "/readyz";
  if (!ready && path != "/healthz") return std::nullopt;
  HttpReply reply;
  reply.may_be_kept = false;
  MutexLock lock(mutex_);
  if (!checks_) {
    add_line(reply, "mount", leaves_ ? "unmounted" : "not yet: ptcfs starts");
    return reply;
  }
  add_line(reply, "mount", checks_->mount());
  add_line(reply, "requests", checks_->requests());
  if (!ready) return reply;
  if (const std::optional<NodeService> service = checks_->service()) {
    add_line(reply, "lease", service->lease);
    add_line(reply, "agreement", service->agreement);
    add_line(reply, "drain", service->drain);
  }
  add_line(reply, "leaving", leaves_ ? "ptcfs is about to end" : "");
  return reply;
}

}  // namespace ptc
