#include "tools/planner/profile/jobs_file.h"

#include <algorithm>
#include <boost/json/serialize.hpp>
#include <cmath>
#include <filesystem>
#include <numeric>
#include <set>

#include "store/base/json_settings.h"
#include "tools/planner/profile/input.h"

namespace ptc::planner {
namespace {

constexpr size_t kMostJobsBytes = 16 << 20, kMostProfileBytes = 64 << 20;
constexpr size_t kMostNodes = 100'000, kMostJobs = 100'000;
constexpr uint64_t kMostGpusOfANode = 1024;
constexpr double kMostSamples = 1e18, kMostSeconds = 1e9;

using Path = std::vector<std::string>;

Error missing(std::string_view text, const Path& path, std::string_view key,
              std::string_view what) {
  return invalid_argument("{}: '{}' is missing: {}", json_place(text, path), key, what);
}

/// Names an unknown key of the object at `at`, and the known ones.
Result<> check_known(std::string_view text, const Path& at, const json::object& object,
                     const std::set<std::string>& known) {
  for (const auto& member : object) {
    const std::string key(member.key());
    if (known.contains(key)) continue;
    Path path = at;
    path.push_back(key);
    return invalid_argument("{}: unknown key {}{}", json_place(text, path, JsonPart::kKey),
                            ptc::quoted(key), what_there_is(key, known));
  }
  return ok();
}

/// Names stand in tables and pictures, a line each.
bool has_control_characters(std::string_view name) {
  return std::any_of(name.begin(), name.end(),
                     [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7F; });
}

class JobParser : JsonSettings {
 public:
  JobParser(std::string_view text, const json::object& object, Path at)
      : JsonSettings(text, object), at_(std::move(at)) {}

  Result<JobToTrain> parse() const {
    PTC_TRY(check_known(text_, at_, object_,
                        {"name", "model", "samples", "batch", "technique", "now", "run", "trial",
                         "deadline", "state"}));
    JobToTrain job;
    PTC_TRY(job.name, name("name"));
    if (job.name.empty()) return missing(text_, at_, "name", "what the job is called");
    PTC_TRY(job.model, name("model"));
    if (job.model.empty()) return missing(text_, at_, "model", "a model of the profiles");
    PTC_TRY(job.technique, name("technique"));
    const json::value* samples = object_.if_contains("samples");
    if (samples == nullptr) return missing(text_, at_, "samples", "how many are still to be read");
    const double number = samples->is_number() ? samples->to_number<double>() : 0;
    if (!(number >= 1) || number > kMostSamples)
      return error(below("samples"), "'samples' must be a number from 1 to 1e18");
    job.samples = number;
    PTC_TRY(batch(job));
    PTC_TRY(now(job));
    PTC_TRY(run(job));
    PTC_TRY(deadline(job));
    PTC_TRY(state(job));
    if (const json::value* trial = object_.if_contains("trial")) {
      if (!trial->is_object())
        return error(below("trial"), "'trial' must be an object, for techniques");
      job.trial = trial->get_object();
    }
    return job;
  }

 private:
  Path below(const std::string& key) const {
    Path path = at_;
    path.push_back(key);
    return path;
  }

  Result<std::string> text(const std::string& key) const {
    const json::value* value = object_.if_contains(key);
    if (value == nullptr) return std::string();
    if (!value->is_string()) return error(below(key), fmt::format("'{}' must be a text", key));
    return std::string(value->get_string());
  }

  Result<std::string> name(const std::string& key) const {
    PTC_TRY(std::string said, text(key));
    if (has_control_characters(said))
      return error(below(key), fmt::format("'{}' has control characters", key));
    return said;
  }

  Result<> batch(JobToTrain& job) const {
    const json::value* value = object_.if_contains("batch");
    if (value == nullptr) return ok();
    const auto wrong = [&] {
      return error(below("batch"), "'batch' must be a number of samples, or [least, most] of them");
    };
    if (const auto one = whole_number(*value)) {
      if (*one == 0 || *one > kMostBatch) return wrong();
      job.least_batch = job.most_batch = *one;
      return ok();
    }
    if (!value->is_array() || value->get_array().size() != 2) return wrong();
    const auto least = whole_number(value->get_array()[0]),
               most = whole_number(value->get_array()[1]);
    if (!least || !most || *least == 0 || *most < *least || *most > kMostBatch) return wrong();
    job.least_batch = *least;
    job.most_batch = *most;
    return ok();
  }

  Result<> state(JobToTrain& job) const {
    const json::value* value = object_.if_contains("state");
    if (value == nullptr) return ok();
    if (value->is_string() && !value->get_string().empty()) {
      job.state_directory = std::string(value->get_string());
      return ok();
    }
    job.state_bytes = value->is_number() ? value->to_number<double>() : -1;
    if (!(job.state_bytes >= 0) || job.state_bytes > kMostSamples)
      return error(below("state"), "'state' is a directory of its tensors, or a number of bytes");
    return ok();
  }

  Result<> now(JobToTrain& job) const {
    const json::value* value = object_.if_contains("now");
    if (value == nullptr) return ok();
    if (!value->is_object())
      return error(below("now"), "'now' is what the job has: {\"gpus\": 4, \"batch\": 256}");
    Path at = below("now");
    PTC_TRY(check_known(text_, at, value->get_object(), {"gpus", "batch"}));
    const auto number = [&](const char* key, uint64_t most) -> Result<uint64_t> {
      const json::value* found = value->get_object().if_contains(key);
      if (found == nullptr) return uint64_t{0};
      if (const auto count = whole_number(*found); count && *count >= 1 && *count <= most)
        return *count;
      Path place = at;
      place.push_back(key);
      return error(place, fmt::format("'{}' must be a whole number from 1 to {}", key, most));
    };
    JobToTrain::Now& now = job.now.emplace();
    PTC_TRY(const uint64_t gpus, number("gpus", kMostGpus));
    if (gpus == 0) return missing(text_, at, "gpus", "how many it has");
    now.gpus = static_cast<uint32_t>(gpus);
    PTC_TRY(now.batch, number("batch", kMostBatch));
    return ok();
  }

  Result<> deadline(JobToTrain& job) const {
    PTC_TRY(const std::string said, text("deadline"));
    if (object_.if_contains("deadline") == nullptr) return ok();
    job.deadline = parse_time(said);
    if (!job.deadline)
      return error(below("deadline"),
                   "'deadline' is a time with its zone: \"2030-06-01T18:00Z\", "
                   "\"2030-06-01T18:00+02:00\"");
    if (seconds_until(*job.deadline) <= 0)
      job.deadline_is_past = fmt::format(
          "{}: the deadline of {} is past already: give it a later one, or leave it out",
          json_place(text_, below("deadline")), ptc::quoted(job.name));
    return ok();
  }

  Result<> run(JobToTrain& job) const {
    const json::value* value = object_.if_contains("run");
    if (value == nullptr) return ok();
    const Path at = below("run");
    const auto place = [&](const char* key) {
      Path path = at;
      path.push_back(key);
      return path;
    };
    JobToTrain::Run& run = job.run.emplace();
    const json::value* command = value;
    if (value->is_object()) {
      const json::object& all = value->get_object();
      PTC_TRY(
          check_known(text_, at, all, {"command", "directory", "stops_within", "progress_within"}));
      command = all.if_contains("command");
      if (command == nullptr) return missing(text_, at, "command", "[\"./train.sh\", …]");
      if (const json::value* directory = all.if_contains("directory")) {
        if (!directory->is_string()) return error(place("directory"), "'directory' must be a text");
        run.directory = std::string(directory->get_string());
        if (has_control_characters(run.directory))
          return error(place("directory"), "'directory' has control characters");
      }
      const auto seconds = [&](const char* key) -> Result<std::optional<double>> {
        const json::value* found = all.if_contains(key);
        if (found == nullptr) return std::optional<double>();
        const double number = found->is_number() ? found->to_number<double>() : 0;
        if (!(number > 0) || number > kMostSeconds)
          return error(place(key), fmt::format("'{}' must be seconds, more than 0", key));
        return std::optional<double>(number);
      };
      PTC_TRY(const auto stops, seconds("stops_within"));
      if (stops) run.stops_within_s = *stops;
      PTC_TRY(run.progress_within_s, seconds("progress_within"));
    }
    const auto wrong = [&] {
      return error(at, "'run' is a program and its arguments: [\"./train.sh\", …]");
    };
    if (!command->is_array() || command->get_array().empty()) return wrong();
    for (const json::value& word : command->get_array()) {
      if (!word.is_string() || word.get_string().find('\0') != json::string::npos) return wrong();
      run.command.emplace_back(word.get_string());
    }
    if (run.command.front().empty()) return wrong();
    return ok();
  }

  const Path at_;
};

class FileParser : JsonSettings {
 public:
  FileParser(std::string_view text, const json::object& object) : JsonSettings(text, object) {}

  Result<JobsFile> parse() const {
    PTC_TRY(check_known(text_, {}, object_, {"format", "cluster", "profiles", "jobs"}));
    PTC_TRY(const auto format, word("format"));
    if (format && *format != "ptc-jobs/1")
      return error({"format"}, "'format' must be \"ptc-jobs/1\"");
    JobsFile file;
    PTC_TRY(cluster(file));
    PTC_TRY(profiles(file));
    PTC_TRY(jobs(file));
    return file;
  }

 private:
  Result<> cluster(JobsFile& file) const {
    const json::value* cluster = object_.if_contains("cluster");
    if (cluster == nullptr) return missing(text_, {}, "cluster", "{\"nodes\": {\"w0\": 8}}");
    if (!cluster->is_object()) return error({"cluster"}, "'cluster' must be {\"nodes\": …}");
    PTC_TRY(check_known(text_, {"cluster"}, cluster->get_object(), {"nodes", "device"}));
    const json::value* device = cluster->get_object().if_contains("device");
    if (device != nullptr && (!device->is_string() || device->get_string().empty()))
      return error({"cluster", "device"}, "'device' is the kind of the GPUs, as profiles name it");
    if (device != nullptr) file.device = std::string(device->get_string());
    const json::value* nodes = cluster->get_object().if_contains("nodes");
    if (nodes == nullptr)
      return error({"cluster"}, "'nodes' is missing: GPUs by node, {\"w0\": 8, …} or [8, …]");
    const auto add = [&](std::string name, const json::value& gpus) -> Result<> {
      const auto count = whole_number(gpus);
      if (nodes->is_array() && gpus.is_string())
        return error(
            {"cluster", "nodes", name},
            fmt::format("of {} it must be said how many GPUs it has: {{{}: 8, …}} or [8, …]",
                        ptc::quoted(gpus.get_string()), json::serialize(gpus)));
      if (name.empty() || has_control_characters(name))
        return error({"cluster", "nodes", name},
                     fmt::format("{} is no name of a node: {}", ptc::quoted(name),
                                 name.empty() ? "it is empty" : "it has control characters"));
      if (!count || *count == 0 || *count > kMostGpusOfANode)
        return error({"cluster", "nodes", name},
                     fmt::format("a node has 1 to {} GPUs", kMostGpusOfANode));
      file.nodes.push_back({std::move(name), static_cast<uint32_t>(*count)});
      return ok();
    };
    if (nodes->is_object()) {
      for (const auto& member : nodes->get_object()) {
        PTC_TRY(add(std::string(member.key()), member.value()));
      }
    } else if (nodes->is_array()) {
      size_t number = 0;
      for (const json::value& gpus : nodes->get_array()) {
        PTC_TRY(add(std::to_string(number), gpus));
        file.nodes.back().name = fmt::format("w{}", number++);
      }
    }
    if (file.nodes.empty() || file.nodes.size() > kMostNodes)
      return error(
          {"cluster", "nodes"},
          fmt::format("'nodes' names 1 to {} nodes: {{\"w0\": 8, …}} or [8, …]", kMostNodes));
    return ok();
  }

  Result<> profiles(JobsFile& file) const {
    const json::value* value = object_.if_contains("profiles");
    if (value != nullptr && value->is_string()) {
      file.profiles.emplace_back(value->get_string());
    } else if (value != nullptr && value->is_array()) {
      for (const json::value& one : value->get_array()) {
        if (!one.is_string()) return error({"profiles"}, "'profiles' are names of files");
        file.profiles.emplace_back(one.get_string());
      }
    }
    if (value != nullptr && file.profiles.empty())
      return error({"profiles"}, "'profiles' is the name of a file, or a list of such");
    if (file.profiles.empty())
      return missing(text_, {"profiles"}, "profiles", "a file of \"ptc profile\", or several");
    return ok();
  }

  Result<> jobs(JobsFile& file) const {
    const json::value* jobs = object_.if_contains("jobs");
    if (jobs == nullptr)
      return missing(text_, {}, "jobs", "[{\"name\": …, \"model\": …, \"samples\": …}]");
    if (!jobs->is_array() || jobs->get_array().empty() || jobs->get_array().size() > kMostJobs)
      return error({"jobs"}, fmt::format("'jobs' is an array of 1 to {} jobs", kMostJobs));
    std::set<std::string> names;
    for (size_t i = 0; i < jobs->get_array().size(); ++i) {
      const Path at = {"jobs", std::to_string(i)};
      const json::value& value = jobs->get_array()[i];
      if (!value.is_object())
        return error(at, "a job is {\"name\": …, \"model\": …, \"samples\": …}");
      PTC_TRY(auto job, JobParser(text_, value.get_object(), at).parse());
      if (!names.insert(job.name).second)
        return error({"jobs", std::to_string(i), "name"}, "a second job " + ptc::quoted(job.name));
      if (job.now && job.now->gpus > file.gpus())
        return error({"jobs", std::to_string(i), "now", "gpus"},
                     fmt::format("job {}: it has {}, and the cluster has {}", ptc::quoted(job.name),
                                 counted(job.now->gpus, "GPU"), file.gpus()));
      job.number = i;
      file.jobs.push_back(std::move(job));
    }
    return ok();
  }
};

/// What somebody who names a table that is not there may mean: those in its folder.
std::string tables_there_are(const std::filesystem::path& directory, const std::string& missing) {
  constexpr size_t kMostLookedAt = 10'000;
  const std::filesystem::path below = std::filesystem::path(missing).parent_path();
  std::filesystem::path folder = directory / below;
  if (folder.empty()) folder = ".";
  std::set<std::string> tables;
  std::error_code error;
  size_t looked_at = 0;
  const std::filesystem::directory_iterator end;
  for (std::filesystem::directory_iterator at(folder, error);
       !error && at != end && looked_at < kMostLookedAt; at.increment(error), ++looked_at)
    if (const auto kind = at->path().extension();
        kind == ".csv" || (kind == ".json" && std::filesystem::path(missing).extension() == kind))
      tables.insert((below / at->path().filename()).string());
  return what_there_is(missing, tables);
}

}  // namespace

Result<JobsFile> parse_jobs_file(std::string_view text, const std::string& name) {
  PTC_TRY(text, as_utf8(text, name));
  Result<json::value> value = parse_json(text, {kMostJobsBytes, 8});
  if (value.has_error()) return std::move(value).error().with_context(name);
  if (!value.value().is_object())
    return invalid_argument(
        "{}: it must be an object {{\"cluster\": …, \"profiles\": …, \"jobs\": …}}", name);
  Result<JobsFile> file = FileParser(text, value.value().get_object()).parse();
  if (file.has_error()) return std::move(file).error().with_context(name);
  file.value().name = name;
  file.value().text = std::string(text);
  return file;
}

uint32_t JobsFile::gpus() const {
  return std::accumulate(nodes.begin(), nodes.end(), 0u,
                         [](uint32_t sum, const NodeOfCluster& node) { return sum + node.gpus; });
}

void JobsFile::choose_device(const std::string& chosen) {
  if (chosen.empty()) return;
  device = chosen;
  device_is_chosen = true;
}

std::string JobsFile::place(const std::vector<std::string>& path) const {
  return fmt::format("{}: {}", name, json_place(text, path));
}

Error JobsFile::error(const JobToTrain& job, const std::string& key,
                      std::string_view message) const {
  return invalid_argument("{}: job {}: {}", place({"jobs", std::to_string(job.number), key}),
                          ptc::quoted(job.name), message);
}

std::string JobsAndProfiles::place(const ProfileRow& row) const {
  return fmt::format("{}: line {}, column {}", read[row.file], row.line, row.column);
}

Result<std::vector<const ProfileRow*>> rows_of_jobs(const JobsAndProfiles& from) {
  std::set<std::string> known, wanted;
  for (const ProfileRow& row : from.rows) known.insert(row.model);
  for (const JobToTrain& job : from.file.jobs) {
    if (!known.contains(job.model))
      return from.file.error(job, "model",
                             fmt::format("no profile has a model {}{}", ptc::quoted(job.model),
                                         what_there_is(job.model, known)));
    wanted.insert(job.model);
  }
  auto rows = rows_of_device(from.rows, wanted, from.file.device);
  if (rows.has_error())
    return std::move(rows).error().with_context(
        from.file.device_is_chosen ? from.file.name : from.file.place({"cluster", "device"}));
  return rows;
}

bool is_due_before(const JobToTrain& a, const JobToTrain& b) {
  return a.deadline && (!b.deadline || *a.deadline < *b.deadline);
}

double seconds_until(JobToTrain::Time time) {
  return std::chrono::duration<double>(time - std::chrono::system_clock::now()).count();
}

std::optional<JobToTrain::Time> parse_time(std::string_view text) {
  bool is_right = true;
  const auto take = [&](size_t digits) {
    int number = 0;
    for (size_t i = 0; i < digits; ++i) {
      is_right = is_right && i < text.size() && text[i] >= '0' && text[i] <= '9';
      if (is_right) number = 10 * number + (text[i] - '0');
    }
    if (is_right) text.remove_prefix(digits);
    return number;
  };
  const auto skip = [&](char c) {
    is_right = is_right && text.starts_with(c);
    if (is_right) text.remove_prefix(1);
  };
  const int year = take(4);
  skip('-');
  const int month = take(2);
  skip('-');
  const int day = take(2);
  skip('T');
  const int hour = take(2);
  skip(':');
  const int minute = take(2);
  int second = 0;
  if (text.starts_with(':')) {
    skip(':');
    second = take(2);
  }
  std::chrono::minutes zone{0};
  if (const bool east = text.starts_with('+'); east || text.starts_with('-')) {
    text.remove_prefix(1);
    const int hours = take(2);
    skip(':');
    const int minutes = take(2);
    is_right = is_right && hours <= 14 && minutes <= 59;
    zone = std::chrono::minutes((east ? 1 : -1) * (60 * hours + minutes));
  } else {
    skip('Z');
  }
  const std::chrono::year_month_day date{std::chrono::year(year),
                                         std::chrono::month(static_cast<unsigned>(month)),
                                         std::chrono::day(static_cast<unsigned>(day))};
  constexpr int kFirst = 1970, kLast = 2200;  // what the clock can tell
  if (!is_right || !text.empty() || year < kFirst || year > kLast || !date.ok() || hour > 23 ||
      minute > 59 || second > 59)
    return std::nullopt;
  return std::chrono::sys_days(date) + std::chrono::hours(hour) + std::chrono::minutes(minute) +
         std::chrono::seconds(second) - zone;
}

Result<JobsAndProfiles> read_jobs_file(const std::string& path, PastDeadlines past) {
  PTC_TRY(const std::string text, read_input(path, kMostJobsBytes));
  JobsAndProfiles all;
  PTC_TRY(all.file, parse_jobs_file(text, input_name(path)));
  all.read.push_back(path);
  for (const JobToTrain& job : all.file.jobs)
    if (past == PastDeadlines::kRefused && !job.deadline_is_past.empty())
      return invalid_argument("{}: {}", input_name(path), job.deadline_is_past);
  const std::filesystem::path directory =
      has_a_place(path) ? std::filesystem::path(path).parent_path() : std::filesystem::path();
  for (size_t i = 0; i < all.file.profiles.size(); ++i) {
    const std::string beside = (directory / all.file.profiles[i]).string();
    Result<std::string> table = read_input(beside, kMostProfileBytes);
    if (table.has_error())
      return make_error(table.error().code(), "{}: {}{}",
                        all.file.place({"profiles", std::to_string(i)}), table.error().message(),
                        table.error().code() == Code::kNotFound
                            ? tables_there_are(directory, all.file.profiles[i])
                            : std::string());
    PTC_TRY(auto rows, parse_profiles(table.value(), beside, &all.remarks));
    for (ProfileRow& row : rows) row.file = static_cast<uint32_t>(all.read.size());
    std::move(rows.begin(), rows.end(), std::back_inserter(all.rows));
    all.read.push_back(beside);
  }
  return all;
}

}  // namespace ptc::planner
