#include "tools/planner/profile/jobs_file.h"

#include <gmock/gmock.h>

#include <chrono>

namespace ptc::planner {
namespace {

std::string jobs_complaint(std::string_view text) {
  const auto file = parse_jobs_file(text, "jobs.json");
  return file.has_error() ? file.error().message() : "taken";
}

TEST(JobsFile, ReadsAllOfIt) {
  const auto file = parse_jobs_file(
      "\xef\xbb\xbf"
      R"({"cluster": {"nodes": [2, 8]}, "profiles": ["a.csv", "b.csv"], "jobs": [
        {"name": "a", "model": "gpt2", "samples": 1e6, "batch": 256},
        {"name": "b", "model": "bert", "samples": 5, "batch": [64, 1024], "technique": "ddp"},
        {"name": "c", "model": "bert", "samples": 1.5}]})",
      "jobs.json");
  ASSERT_TRUE(file.has_value()) << file.error().message();
  EXPECT_EQ(file.value().nodes[1].name, "w1");
  EXPECT_EQ(file.value().nodes[1].gpus, 8u);
  EXPECT_EQ(file.value().profiles.size(), 2u);
  EXPECT_EQ(file.value().jobs[0].samples, 1e6);
  EXPECT_EQ(file.value().jobs[0].most_batch, 256u);
  EXPECT_EQ(file.value().jobs[1].least_batch, 64u);
  EXPECT_EQ(file.value().jobs[1].technique, "ddp");
  EXPECT_EQ(file.value().jobs[2].most_batch, UINT64_MAX);
}

TEST(JobsFile, TimesHaveAZone) {
  const auto seconds = [](std::string_view text) -> int64_t {
    const auto time = parse_time(text);
    if (!time) return -1;
    return std::chrono::duration_cast<std::chrono::seconds>(time->time_since_epoch()).count();
  };
  EXPECT_EQ(seconds("1970-01-02T00:00Z"), 86400);
  EXPECT_EQ(seconds("2030-06-01T18:00:05Z"), 1906567205);
  EXPECT_EQ(seconds("2030-06-01T20:00:05+02:00"), 1906567205);
  EXPECT_EQ(seconds("2030-06-01T12:30:05-05:30"), 1906567205);
  for (const char* odd :
       {"", "2030-06-01", "2030-06-01T18:00", "2030-02-30T18:00Z", "2030-06-01T24:00Z",
        "2030-06-01T18:60Z", "2030-06-01T18:00:60Z", "2030-06-01 18:00Z", "2030-06-01T18:00ZZ",
        "2030-06-01T18:00+2:00", "2030-06-01T18:00+15:00", "9999-06-01T18:00Z", "30-06-01T18:00Z"})
    EXPECT_EQ(seconds(odd), -1) << odd;
}

TEST(JobsFile, ADeadlineThatIsPastIsTold) {
  const auto of_deadline = [](std::string_view deadline) {
    return parse_jobs_file(
        fmt::format("{{\"cluster\": {{\"nodes\": [8]}}, \"profiles\": \"p.csv\",\n \"jobs\": "
                    "[{{\"name\": \"a\", \"model\": \"m\", \"samples\": 1, \"deadline\": {}}}]}}",
                    deadline),
        "jobs.json");
  };
  const auto past = of_deadline("\"2020-01-01T00:00Z\"");
  EXPECT_EQ(past.value().jobs[0].deadline_is_past,
            "line 2, column 65: the deadline of 'a' is past already: give it a later one, or leave "
            "it out");
  const auto ahead = of_deadline("\"2199-01-01T00:00Z\"");
  EXPECT_EQ(ahead.value().jobs[0].deadline_is_past, "");
  EXPECT_TRUE(is_due_before(past.value().jobs[0], ahead.value().jobs[0]));
  EXPECT_TRUE(is_due_before(ahead.value().jobs[0], JobToTrain{}));
  EXPECT_FALSE(is_due_before(JobToTrain{}, ahead.value().jobs[0]));
  EXPECT_EQ(of_deadline("\"soon\"").error().message(),
            "jobs.json: line 2, column 65: 'deadline' is a time with its zone: "
            "\"2030-06-01T18:00Z\", \"2030-06-01T18:00+02:00\"");
  EXPECT_TRUE(of_deadline("7").has_error());
}

TEST(JobsFile, SaysWhereWhatIsWrong) {
  const auto with = [](std::string_view job) {
    return jobs_complaint(fmt::format(
        R"({{"cluster": {{"nodes": {{"w0": 8}}}}, "profiles": "p.csv", "jobs": [{}]}})", job));
  };
  const std::string at = "jobs.json: line 1, column 65: ";
  EXPECT_EQ(jobs_complaint("[]"),
            "jobs.json: it must be an object {\"cluster\": …, \"profiles\": …, \"jobs\": …}");
  EXPECT_EQ(jobs_complaint("{\"job\": 1}"),
            "jobs.json: line 1, column 2: unknown key 'job' (did you mean 'jobs'?); there are "
            "'cluster', 'format', 'jobs', 'profiles'");
  EXPECT_EQ(jobs_complaint("{}"),
            "jobs.json: line 1, column 1: 'cluster' is missing: {\"nodes\": {\"w0\": 8}}");
  EXPECT_EQ(jobs_complaint(R"({"cluster": {"nodes": {"w0": 0}}})"),
            "jobs.json: line 1, column 30: a node has 1 to 1024 GPUs");
  EXPECT_EQ(
      jobs_complaint(R"({"cluster": {"nodes": []}})"),
      "jobs.json: line 1, column 23: 'nodes' names 1 to 100000 nodes: {\"w0\": 8, …} or [8, …]");
  EXPECT_EQ(with(R"({"name": "a"})"), at + "'model' is missing: a model of the profiles");
  EXPECT_EQ(with(R"({"name": "a", "model": "m"})"),
            at + "'samples' is missing: how many are still to be read");
  EXPECT_EQ(with(R"({"nam": "a"})"),
            "jobs.json: line 1, column 66: unknown key 'nam' (did you mean 'name'?); there are "
            "'batch', 'deadline', 'model', 'name', 'now', 'run', 'samples', 'state' and 2 more");
  EXPECT_THAT(with(R"({"priority": 1})"),
              testing::HasSubstr("unknown key 'priority'; there are 'batch', 'deadline', 'model'"));
  EXPECT_THAT(with(R"({"name": "a", "model": "m", "samples": 0})"),
              testing::HasSubstr("a number from 1"));
  EXPECT_THAT(with(R"({"name": "a", "model": "m", "samples": 1, "batch": [4, 2]})"),
              testing::HasSubstr("[least, most]"));
  EXPECT_THAT(with(R"({"name": "a\u0000b", "model": "m", "samples": 1})"),
              testing::HasSubstr("'name' has control characters"));
  EXPECT_THAT(with(R"({"name": "a", "model": "m\u001b[2J", "samples": 1})"),
              testing::HasSubstr("'model' has control characters"));
  EXPECT_THAT(with(R"({"name": "a", "model": "m", "samples": 1,
                       "run": {"command": ["x"], "directory": "a\u0000b"}})"),
              testing::HasSubstr("'directory' has control characters"));
  EXPECT_THAT(
      with(
          R"({"name": "a", "model": "m", "samples": 1}, {"name": "a", "model": "m", "samples": 1})"),
      testing::HasSubstr("a second job 'a'"));
  EXPECT_THAT(with(R"({"name": "a", "model": "m", "samples": 1,})"),
              testing::HasSubstr("line 1, column"));
}

TEST(JobsFile, NobodyHasMoreGpusThanThereAre) {
  const auto of = [](uint32_t gpus) {
    return jobs_complaint(fmt::format(
        R"({{"cluster": {{"nodes": [1, 2]}}, "profiles": "p.csv", "jobs": [
  {{"name": "a", "model": "m", "samples": 1, "now": {{"gpus": {}}}}}]}})",
        gpus));
  };
  EXPECT_EQ(of(3), "taken");
  EXPECT_EQ(of(4), "jobs.json: line 2, column 61: job 'a': it has 4 GPUs, and the cluster has 3");
}

TEST(JobsFile, ErrorsThatComeLaterHaveTheirPlaces) {
  JobsFile file = parse_jobs_file(
                      R"({"cluster": {"nodes": [1], "device": "A100"}, "profiles": ["p.csv"],
 "jobs": [{"name": "a", "model": "m", "samples": 1},
          {"name": "b", "model": "n", "samples": 1, "batch": [2, 4]}]})",
                      "jobs.json")
                      .value();
  file.jobs.erase(file.jobs.begin());  // places stay
  const JobToTrain& job = file.jobs.front();
  EXPECT_EQ(file.error(job, "batch", "no").message(), "jobs.json: line 3, column 62: job 'b': no");
  EXPECT_EQ(file.error(job, "technique", "no").message(),
            "jobs.json: line 3, column 11: job 'b': no");
  EXPECT_EQ(file.place({"profiles", "0"}), "jobs.json: line 1, column 60");
  EXPECT_EQ(file.place({"cluster", "device"}), "jobs.json: line 1, column 38");
  JobsAndProfiles from{
      file, parse_profiles("model,batch,gpus,iteration_s,device\nn,4,1,1,A100\n", "p.csv").value()};
  EXPECT_TRUE(rows_of_jobs(from).has_value());
  from.file.choose_device("");
  EXPECT_TRUE(rows_of_jobs(from).has_value());
  from.file.choose_device("H100");
  EXPECT_EQ(
      rows_of_jobs(from).error().message(),
      "jobs.json: no profile of 'n' is of GPUs 'H100' (did you mean 'A100'?); there is 'A100'");
  from.read = {"jobs.json", "p.csv"};
  from.rows.front().file = 1;
  EXPECT_EQ(from.place(from.rows.front()), "p.csv: line 2, column 1");
  from.rows.front().model = "nm";
  EXPECT_EQ(rows_of_jobs(from).error().message(),
            "jobs.json: line 3, column 34: job 'b': no profile has a model 'n' (did you mean "
            "'nm'?); there is 'nm'");
}

TEST(JobsFile, SaysWhatIsWrongWithNodes) {
  const auto with = [](std::string_view cluster) {
    return jobs_complaint(fmt::format(R"({{"cluster": {}}})", cluster));
  };
  EXPECT_EQ(with(R"({"nodes": ["w0", "w1"]})"),
            "jobs.json: line 1, column 24: of 'w0' it must be said how many GPUs it has: "
            "{\"w0\": 8, …} or [8, …]");
  EXPECT_THAT(with(R"({"nodes": {"": 8}})"), testing::HasSubstr("'' is no name of a node"));
  EXPECT_THAT(with(R"({"nodes": {"a\nb": 8}})"), testing::HasSubstr("control characters"));
  EXPECT_THAT(with(R"({"nodes": [8], "device": 1})"), testing::HasSubstr("'device' is the kind"));
  EXPECT_THAT(with(R"({"nodes": [8], "devices": "A100"})"),
              testing::HasSubstr("'devices' (did you mean 'device'?)"));
  EXPECT_THAT(with(R"({"device": "A100"})"), testing::HasSubstr("'nodes' is missing"));
}

TEST(JobsFile, NamesOtherEncodings) {
  EXPECT_THAT(jobs_complaint("\xff\xfe{"), testing::HasSubstr("it is UTF-16"));
  EXPECT_THAT(jobs_complaint("{\n\"caf\xe9\": 1}"), testing::HasSubstr("line 2: it is not UTF-8"));
}

}  // namespace
}  // namespace ptc::planner
