// What people write or publish for the planner: profiles in both forms, jobs, traces, others'
// tables. The first byte says which.
#include "fuzz.h"
#include "tools/planner/profile/jobs_file.h"
#include "tools/planner/profile/profile.h"
#include "tools/planner/profile/published.h"

namespace ptc::fuzz {
namespace {

using planner::ProfileRow;

void check_profiles(std::string_view input) {
  auto parsed = planner::parse_profiles(input, "p");
  if (!parsed) return check_error(parsed.error());
  const std::string csv = planner::profiles_csv(parsed.value());
  auto again = planner::parse_profiles(csv, "p");
  PTC_CHECK(again.has_value() && planner::profiles_csv(again.value()) == csv);
  const std::string json = planner::profiles_json(parsed.value());
  auto of_json = planner::parse_profiles(json, "p");
  PTC_CHECK(of_json.has_value() && planner::profiles_csv(of_json.value()) == csv);
  PTC_CHECK(planner::profiles_json(again.value()) == json);
  for (const ProfileRow& row : parsed.value())
    PTC_CHECK(row.gpus == row.tp * row.pp * row.dp && row.line > 0 && row.column > 0);
}

void check_jobs(std::string_view input) {
  auto parsed = planner::parse_jobs_file(input, "j");
  if (!parsed) return check_error(parsed.error());
  for (const planner::JobToTrain& job : parsed.value().jobs) {
    PTC_CHECK(job.samples >= 1 && job.least_batch >= 1 && job.least_batch <= job.most_batch);
    PTC_CHECK(!job.now || job.now->gpus <= parsed.value().gpus());
  }
  check_error(parsed.value().error(parsed.value().jobs.front(), "batch", "it is wrong"));
}

void check_published(const Result<planner::Published>& parsed) {
  if (!parsed) return check_error(parsed.error());
  const std::string csv = planner::profiles_csv(parsed.value().rows);
  PTC_CHECK(planner::parse_profiles(csv, "p").has_value());
}

}  // namespace

void run(std::string_view input) {
  const char which = input.empty() ? 'p' : input.front();
  if (!input.empty()) input.remove_prefix(1);
  if (which == 'j') return check_jobs(input);
  if (which == 'e') return check_published(planner::read_elasticflow(input, "t", "m"));
  if (which == 'm') return check_published(planner::read_morphling(input, "t", "m", 8));
  if (which == 'x') return check_published(planner::read_pollux(input, "t", "m"));
  check_profiles(input);
}

std::vector<std::string> large_inputs() {
  constexpr size_t kRows = kMegabyte / 24;  // each is written and read again in both forms
  const std::string wide = repeated("pmodel,batch,iteration_s", ",", 4000, "\n");
  const std::string row = "{\"model\":\"a\",\"batch\":1,\"iteration_s\":1}";
  return {
      repeated("p[", "[", kMegabyte),
      repeated("p[" + row, "," + row, kRows, "]"),
      repeated("p[{\"a\":1", ",\"a\":1", kMegabyte / 6, "}]"),
      repeated("pmodel,batch,iteration_s\n", "a,1,1\n", kRows),
      repeated(wide, "1\n", kMegabyte / 2),
      repeated("p", ",", kMegabyte),
      repeated("p", "\"", kMegabyte),
      repeated("p", "\n", kMegabyte),
      repeated("j", "[", kMegabyte),
      repeated("j{\"cluster\":{\"nodes\":[1", ",1", kMegabyte / 2, "]}}"),
  };
}

}  // namespace ptc::fuzz
