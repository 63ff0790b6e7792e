// ptc doctor: what is wrong on this machine for ptcfs, and what to do about it.
#include <fmt/core.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <cstdlib>
#include <filesystem>
#include <system_error>

#include "fs/mount/mount_point.h"
#include "fs/mount/store_place.h"
#include "store/base/size_text.h"
#include "store/base/wall_time.h"
#include "tools/ptc/command.h"
#include "tools/ptc/doctor_checks.h"
#include "tools/ptc/doctor_gather.h"
#include "tools/ptc/text.h"

#ifndef PTC_VERSION
#define PTC_VERSION "unknown"
#endif

namespace ptc::cli {
namespace {

using namespace std::chrono_literals;

struct DoctorOptions {
  std::string mount_point, memory, tls_ca, tls_certificate;
  EtcdOptions etcd;
  bool as_json = false;
};

/// Before the texts of findings, which are to stand in one column.
constexpr const char* kLevels[] = {"ok", "warn", "FAIL"};
constexpr Colour kColours[] = {Colour::kGreen, Colour::kYellow, Colour::kRed};

/// What `path` is or lies in; itself where that is no ptcfs.
Result<std::string> mount_of(const std::string& path) {
  PTC_TRY(auto resolved, resolve_mount_point(path));
  const auto around = mounted_around(resolved);
  return around && around->type == "fuse.ptcfs" ? around->mount_point : resolved;
}

/// "": none was. A daemon that does not answer is not waited for.
Result<std::string> mount_named(const Context& context, const DoctorOptions& options) {
  std::string path = options.mount_point.empty() ? context.mount_option : options.mount_point;
  const char* variable = std::getenv("PTC_MOUNT");
  if (path.empty() && variable != nullptr) path = variable;
  if (path.empty()) return path;
  if (auto found = within(3s, [path] { return mount_of(path); })) return *std::move(found);
  std::error_code error;
  return std::filesystem::absolute(path, error).lexically_normal().string();
}

/// Given, or the only one of this machine.
Result<std::string> choose_mount(const Context& context, const DoctorOptions& options,
                                 Facts* facts) {
  PTC_TRY(auto named, mount_named(context, options));
  if (!named.empty()) return named;
  facts->mounts = mount_points();
  std::vector<std::string> alive = facts->mounts;
  if (alive.size() > 1)
    std::erase_if(alive, [dead = dead_mounts()](const std::string& point) {
      return std::find(dead.begin(), dead.end(), point) != dead.end();
    });
  return alive.size() == 1 ? alive.front() : std::string();
}

/// What was given here goes before what the daemon was started with.
DaemonOptions joined(DaemonOptions options, const DoctorOptions& given) {
  if (!given.etcd.endpoints.empty()) {
    const std::string cluster = options.etcd.cluster;
    options.etcd = given.etcd;
    if (!cluster.empty()) options.etcd.cluster = cluster;
  }
  if (!given.tls_ca.empty()) options.tls_ca = given.tls_ca;
  if (!given.tls_certificate.empty()) options.tls_certificate = given.tls_certificate;
  return options;
}

void look_at_certificates(const DaemonOptions& options, uint64_t pid, Facts* facts) {
  const auto add = [&](const char* option, const std::string& path, bool is_authority) {
    if (!path.empty())
      facts->certificates.push_back(read_certificates(option, path, is_authority, pid));
  };
  add("--tls-ca", options.tls_ca, true);
  add("--tls-cert", options.tls_certificate, false);
  add("--etcd-ca", options.etcd.ca_file, true);
  add("--etcd-cert", options.etcd.certificate_file, false);
  for (const EtcdFacts& etcd : facts->etcd)
    if (etcd.endpoint.starts_with("https://"))
      facts->certificates.push_back(shown_certificate(etcd.endpoint));
  // One that cannot be reached is said once.
  std::erase_if(facts->certificates, [&](const CertificateFacts& one) {
    return one.path.empty() && !one.trouble.empty();
  });
}

/// Where files of the options cannot be used, that is what there is to say of etcd.
void look_at_etcd(const EtcdOptions& options, Facts* facts) {
  if (options.endpoints.empty()) return;
  auto etcd = gather_etcd(options);
  if (etcd) {
    facts->etcd = std::move(etcd).value();
    return;
  }
  for (const std::string& endpoint : options.endpoints)
    facts->etcd.push_back({.endpoint = endpoint, .trouble = etcd.error().message()});
}

Result<Facts> gather(const Context& context, const DoctorOptions& options) {
  Facts facts;
  facts.now = now_ns() / 1'000'000'000;
  facts.own_version = PTC_VERSION;
  facts.machine = gather_machine();
  PTC_TRY(const std::string mount_point, choose_mount(context, options, &facts));
  facts.planned_memory = facts.machine.is_root ? memory_of_machine() / 2 : 0;
  if (!options.memory.empty()) {
    PTC_TRY(facts.planned_memory, parse_size(options.memory));
  }
  DaemonOptions started;
  if (!mount_point.empty()) {
    MountReport mounted = gather_mount(mount_point);
    started = std::move(mounted.options);
    facts.daemon = std::move(mounted.daemon);
    facts.agreement = std::move(mounted.agreement);
    facts.nodes = std::move(mounted.nodes);
  }
  started = joined(std::move(started), options);
  facts.in_cluster = !started.etcd.endpoints.empty();
  look_at_etcd(started.etcd, &facts);
  look_at_certificates(started, facts.daemon ? facts.daemon->pid : 0, &facts);
  facts.dead_mounts = dead_mounts();
  std::erase(facts.dead_mounts, mount_point);  // the daemon's line says it
  facts.unused_stores = unused_stores();
  return facts;
}

void print_findings(const std::vector<Finding>& findings) {
  size_t width = 0;
  for (const Finding& finding : findings) width = std::max(width, text_width(finding.name));
  for (const Finding& finding : findings) {
    const auto level = static_cast<size_t>(finding.level);
    std::string text = finding.found;
    if (!finding.advice.empty()) text += "; " + finding.advice;
    const size_t indent = 4 + 2 + width + 1 + 1;
    fmt::print("{}  {} {}\n", coloured(padded(kLevels[level], 4), kColours[level]),
               padded(printable(finding.name) + ":", width + 1),
               is_live_terminal(1) ? wrapped(text, indent, std::max(terminal_width(1), indent + 20))
                                   : printable(text));
  }
}

void print_findings_json(const std::vector<Finding>& findings) {
  constexpr const char* kWords[] = {"ok", "warn", "fail"};
  json::array all;
  for (const Finding& finding : findings) {
    json::object one{{"check", finding.name},
                     {"level", kWords[static_cast<size_t>(finding.level)]},
                     {"found", finding.found}};
    if (!finding.advice.empty()) one["advice"] = finding.advice;
    all.emplace_back(std::move(one));
  }
  fmt::print("{}", pretty_json(all));
}

Result<int> run_doctor(const Context& context, const DoctorOptions& options) {
  spdlog::set_level(spdlog::level::off);  // what cannot be reached is said once, as a finding
  PTC_TRY(const Facts facts, gather(context, options));
  const std::vector<Finding> findings = check_all(facts);
  if (options.as_json) print_findings_json(findings);
  else print_findings(findings);
  Level worst = Level::kOk;
  for (const Finding& finding : findings) worst = std::max(worst, finding.level);
  return worst == Level::kFail ? kFailed : worst == Level::kWarn ? kWarned : kDone;
}

}  // namespace

void add_doctor(CLI::App& app, Context& context) {
  auto [command, options] = add_command<DoctorOptions>(
      app, context, "doctor", "Look for what is wrong on this machine, and say what to do",
      run_doctor);
  command->add_option("MOUNTPOINT", options->mount_point,
                      "a mount of ptcfs; left out: the only one; where there is none, the machine "
                      "alone is looked at");
  command->add_flag("--json", options->as_json, "print the findings as JSON");
  command
      ->add_option("--memory", options->memory,
                   "of a mount to come, as ptcfs has it (default: half of memory)")
      ->type_name("SIZE");
  command
      ->add_option("--etcd", options->etcd.endpoints,
                   "as ptcfs has it (this and all below: as the daemon was started)")
      ->type_name("URL,…")
      ->delimiter(',')
      ->allow_extra_args(false);
  const auto add_file = [command = command](const char* name, std::string& file) {
    command->add_option(name, file, "as ptcfs has it")->type_name("FILE");
  };
  add_file("--etcd-credentials", options->etcd.credentials_file);
  add_file("--etcd-ca", options->etcd.ca_file);
  add_file("--etcd-cert", options->etcd.certificate_file);
  add_file("--etcd-key", options->etcd.key_file);
  add_file("--tls-ca", options->tls_ca);
  add_file("--tls-cert", options->tls_certificate);
  command->footer(
      "Each line is one check: ok, warn (it works, but slower, or not for long) or\n"
      "FAIL, what was found, and what to do. Nothing is changed.\n"
      "\nExit status: 0 all is well, 5 there are warnings, 1 something fails.\n"
      "\nExamples:\n"
      "  ptc doctor                                this machine, and its mount\n"
      "  ptc doctor --etcd http://10.0.0.9:2379    before a first mount");
}

}  // namespace ptc::cli
