#include "tools/ptc/values.h"

#include <algorithm>
#include <set>

#include "reshard/serve/served_layout.h"
#include "tools/planner/profile/input.h"
#include "tools/planner/profile/profile.h"
#include "tools/ptc/fields.h"
#include "tools/ptc/mount.h"

namespace ptc::cli {
namespace {

std::vector<std::string> names_in(const std::string& directory) {
  auto names = list_directory(directory);
  return names ? std::move(names).value() : std::vector<std::string>();
}

std::vector<std::string> checkpoints(const std::string& mount,
                                     const std::vector<std::string>& jobs) {
  std::vector<std::string> found;
  for (const std::string& job : jobs) {
    for (const std::string& name : names_in(mount + "/" + job + "/checkpoints")) {
      found.push_back(job + "/" + name);
    }
  }
  return found;
}

std::vector<std::string> nodes(const std::string& mount) {
  auto report = read_json_file(mount + "/.ptc/nodes.json");
  std::vector<std::string> found;
  if (!report) return found;
  for (const json::value& node : array_field(report.value(), "nodes"))
    if (node.is_object()) found.push_back(text_field(node.get_object(), "name"));
  return found;
}

/// Of all checkpoints of the job that was named.
std::vector<std::string> layouts(const std::string& mount_option,
                                 const std::vector<std::string>& before) {
  if (before.empty()) return {};
  auto target = find_target(mount_option, before.front());
  if (!target) return {};
  std::set<std::string> found;
  const std::string directory = target.value().job_dir() + "/checkpoints/";
  for (const std::string& checkpoint : names_in(directory)) {
    for (std::string& name : names_in(directory + checkpoint + "/layouts")) {
      found.insert(std::move(name));
    }
  }
  return {found.begin(), found.end()};
}

/// What the workers of inference engines load: any number would do.
std::vector<std::string> served_layouts() {
  std::vector<std::string> found;
  for (const Engine& engine : Engine::all())
    for (const uint32_t tp : {1, 2, 4, 8})
      found.push_back(ServedLayout{.engine = &engine, .tp = tp}.name());
  return found;
}

/// Of the profile that was named.
std::vector<std::string> models(const std::vector<std::string>& before) {
  if (before.empty() || !planner::has_a_place(before.front())) return {};
  const auto text = planner::read_input(before.front(), 64 << 20);
  if (!text) return {};
  const auto rows = planner::parse_profiles(text.value(), before.front());
  std::set<std::string> found;
  if (rows)
    for (const planner::ProfileRow& row : rows.value()) found.insert(row.model);
  return {found.begin(), found.end()};
}

}  // namespace

Values values_in_mount(const std::string& type, const Typed& typed) {
  using enum Values::Else;
  const auto option = typed.options.find("mount");
  const std::string mount_option = option == typed.options.end() ? "" : option->second;
  if (type == "MODEL") return {models(typed.positionals), kNothing};
  if (type == "FILE") return {{}, kFiles};
  if (type == "DIR" || type == "DEST" || type == "MOUNTPOINT") return {{}, kDirectories};
  if (type == "LAYOUT") {
    std::vector<std::string> found = layouts(mount_option, typed.positionals);
    const std::vector<std::string> served = served_layouts();
    found.insert(found.end(), served.begin(), served.end());
    return {std::move(found), kNothing};
  }
  if (type == "LAYOUT or FILE") return {layouts(mount_option, typed.positionals), kFiles};
  if (type != "NODE" && !type.starts_with("JOB")) return {};
  auto mount = find_mount(mount_option);
  if (!mount) return {};
  Values values;
  if (type == "NODE") return {nodes(mount.value()), kNothing};
  if (auto jobs = list_jobs(mount.value())) values.words = std::move(jobs).value();
  if (type == "JOB") return values;
  auto also = checkpoints(mount.value(), values.words);
  if (type == "JOB/CHECKPOINT") return {std::move(also), kNothing};
  values.words.insert(values.words.end(), also.begin(), also.end());
  return values;
}

}  // namespace ptc::cli
