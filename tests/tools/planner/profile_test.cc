#include "tools/planner/profile/profile.h"

#include <gmock/gmock.h>

#include "tools/planner/profile/published.h"

namespace ptc::planner {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

std::string profile_complaint(std::string_view text) {
  const auto rows = parse_profiles(text, "p.csv");
  return rows.has_error() ? rows.error().message() : "taken";
}

TEST(Profile, ReadsAndWritesAllOfARow) {
  const std::string text =
      "model,technique,batch,tp,pp,dp,max_gpus_per_node,device,iteration_s,peak_bytes,origin\n"
      "gpt2,\"fsdp, offloaded\",256,2,1,4,4,A800,0.1,1000,measured\n"
      "gpt2,ddp,256,1,1,1,,A800,oom,,measured\n";
  const auto rows = parse_profiles(text, "p.csv");
  ASSERT_TRUE(rows.has_value()) << rows.error().message();
  EXPECT_EQ(rows.value()[0].gpus, 8u);
  EXPECT_EQ(rows.value()[0].way(), "fsdp, offloaded tp2-pp1-dp4");
  EXPECT_EQ(rows.value()[1].iteration_s, std::nullopt);
  EXPECT_EQ(profiles_csv(rows.value()), text);
}

TEST(Profile, WhereOnlyGpusAreSaidTheyAreReplicas) {
  const auto rows = parse_profiles("model,batch,gpus,tp,iteration_s\na,8,8,2,1\na,8,4,,1", "p.csv");
  ASSERT_TRUE(rows.has_value()) << rows.error().message();
  EXPECT_EQ(rows.value()[0].dp, 4u);
  EXPECT_EQ(rows.value()[1].dp, 4u);
}

TEST(Profile, SaysWhereWhatIsWrong) {
  EXPECT_EQ(profile_complaint("model,batch,iteration_s\n,8,1"),
            "p.csv: line 2, column 1 (model): the model's name is missing");
  EXPECT_EQ(profile_complaint("model,batch,iteration_s\na,8,0"),
            "p.csv: line 2, column 5 (iteration_s): an iteration takes 1e-9 to 1e9 s, "
            "or \"oom\", not '0'");
  EXPECT_THAT(profile_complaint("model,batch,iteration_s\na,8,-1"), HasSubstr("line 2"));
  EXPECT_EQ(profile_complaint("model,batch,iteration_s\na,0.5,1"),
            "p.csv: line 2, column 3 (batch): '0.5' is no whole number from 1 to 1099511627776");
  EXPECT_EQ(profile_complaint("model,batch,gpus,tp,dp,iteration_s\na,8,4,2,3,1"),
            "p.csv: line 2, column 5 (gpus): 4 is not tp 2 · pp 1 · dp 3");
  EXPECT_THAT(profile_complaint("model,batch,tp,pp,iteration_s\na,8,1000000,1000000,1"),
              HasSubstr("is more than"));
}

TEST(Profile, ColumnsThatAreMisspeltAreNamed) {
  EXPECT_EQ(profile_complaint("model,techniqe,batch,iteration_s\na,ddp,8,1"),
            "p.csv: line 1, column 7: unknown column 'techniqe' (did you mean 'technique'?)");
  EXPECT_THAT(profile_complaint("model,batch,max_gpu_per_node,iteration_s\n"),
              HasSubstr("'max_gpu_per_node' (did you mean 'max_gpus_per_node'?)"));
  EXPECT_THAT(profile_complaint("model,batch,pd,iteration_s\n"),
              HasSubstr("'pd' (did you mean 'dp'?)"));
  EXPECT_THAT(profile_complaint("Model,batch,iteration_s\n"), HasSubstr("(did you mean 'model'?)"));
  std::vector<std::string> remarks;
  const auto rows =
      parse_profiles("model,batch,iteration_s,note,ep,tp\na,8,1,x,2,1", "p.csv", &remarks);
  ASSERT_TRUE(rows.has_value()) << rows.error().message();
  EXPECT_THAT(remarks, ElementsAre("p.csv: columns that are not used: 'ep', 'note'"));
}

TEST(Profile, IsReadAndWrittenAsJson) {
  const std::string json =
      "[\n {\"model\": \"gpt2 \\\"é\\\"\", \"technique\": \"fsdp, offloaded\", \"batch\": 256, "
      "\"tp\": 2, \"pp\": 1, \"dp\": 4, \"max_gpus_per_node\": 4, \"device\": \"A800\", "
      "\"iteration_s\": 0.1, \"peak_bytes\": 1000, \"origin\": \"measured\", \"accumulation\": "
      "2},\n "
      "{\"model\": \"gpt2\", \"batch\": 256, \"tp\": 1, \"pp\": 1, \"dp\": 1, "
      "\"iteration_s\": \"oom\"}\n]\n";
  const auto rows = parse_profiles(json, "p.json");
  ASSERT_TRUE(rows.has_value()) << rows.error().message();
  EXPECT_EQ(rows.value()[0].model, "gpt2 \"é\"");
  EXPECT_EQ(rows.value()[0].gpus, 8u);
  EXPECT_EQ(rows.value()[1].line, 3u);
  EXPECT_EQ(rows.value()[1].column, 40u);
  EXPECT_EQ(profiles_json(rows.value()), json);
  const auto again = parse_profiles(profiles_csv(rows.value()), "p.csv");
  ASSERT_TRUE(again.has_value()) << again.error().message();
  EXPECT_EQ(profiles_text(again.value(), "x/p.json"), json);
  EXPECT_EQ(profiles_text(rows.value(), "p.csv"), profiles_csv(rows.value()));
  EXPECT_EQ(profiles_json({}), "[\n]\n");
  EXPECT_THAT(parse_profiles(" []", "p.json").value(), IsEmpty());
  EXPECT_EQ(parse_profiles("\xef\xbb\xbf[\r\n{\"iteration_s\": \"OOM\", \"model\": \"a\", "
                           "\"batch\": 8, \"dp\": null, \"gpus\": 4}]",
                           "p.json")
                .value()[0]
                .dp,
            4u);
}

TEST(Profile, SaysWhereWhatIsWrongInJson) {
  const auto complaint = [](std::string_view text) {
    const auto rows = parse_profiles(text, "p.json");
    return rows.has_error() ? rows.error().message() : "taken";
  };
  const std::string shape = "it must be an array of objects, one a row: [{\"model\": …}, …]";
  EXPECT_EQ(complaint("{\"model\": \"a\"}"), "p.json: line 1, column 1: " + shape);
  EXPECT_EQ(complaint("[\n 1]"), "p.json: line 2, column 2: " + shape);
  EXPECT_THAT(complaint("[\n{]"), HasSubstr("p.json: line 2, column 2: not valid JSON"));
  EXPECT_EQ(complaint("[{\"model\": \"a\",\n \"batch\": true}]"),
            "p.json: line 2, column 11: 'batch' must be a text or a number");
  EXPECT_EQ(complaint("[{\"model\": \"ä\", \"batch\": [8]}]"),
            "p.json: line 1, column 26: 'batch' must be a text or a number");
  EXPECT_EQ(complaint("[{\"model\": \"ä\", \"batch\": 8, \"iteration_s\": 1},\n"
                      " {\"iteration_s\": -1, \"model\": \"ä\", \"batch\": 8}]"),
            "p.json: line 2, column 18 (iteration_s): an iteration takes 1e-9 to 1e9 s, or "
            "\"oom\", not '-1'");
  EXPECT_EQ(complaint("[{\"model\": \"ä\", \"batch\": 8, \"iteration_s\": 1},\n"
                      " {\"model\": \"ä\", \"iteration_s\": 1}]"),
            "p.json: line 2, column 2 (batch): a number is missing");
  EXPECT_EQ(
      complaint("[{\"model\": \"ä\", \"techniqe\": \"ddp\", \"batch\": 8, \"iteration_s\": 1}]"),
      "p.json: line 1, column 17: unknown column 'techniqe' (did you mean 'technique'?)");
  EXPECT_EQ(complaint("[{\"model\": \"a\", \"iteration_s\": 1}]"),
            "p.json: line 1: there is no column 'batch'");
}

/// A row does not take what all columns would.
TEST(Profile, ShortRowsOfWideTablesAreShort) {
  std::string csv = "model,batch,iteration_s",
              json = "[{\"model\": \"a\", \"batch\": 1, \"iteration_s\": 1";
  for (int i = 0; i < 4000; ++i) {
    csv += fmt::format(",x{}", i);
    json += fmt::format(",\"x{}\": 1", i);
  }
  csv += "\n";
  json += "}";
  for (int i = 0; i < 50'000; ++i) {
    csv += "a,1,1\n";
    json += ",{\"model\": \"a\", \"x3999\": 1, \"batch\": 1, \"iteration_s\": 1}";
  }
  EXPECT_THAT(parse_profiles(csv, "p.csv").value(), SizeIs(50'000));  // 8 GB, if they were not
  EXPECT_THAT(parse_profiles(json + "]", "p.json").value(), SizeIs(50'001));
}

TEST(Profile, OutOfMemoryIsWrittenInManyWays) {
  const auto rows = parse_profiles("model,batch,iteration_s\na,8,OOM\na,8,Out of memory", "p.csv");
  ASSERT_TRUE(rows.has_value()) << rows.error().message();
  EXPECT_EQ(rows.value()[0].iteration_s, std::nullopt);
  EXPECT_EQ(rows.value()[1].iteration_s, std::nullopt);
  for (const std::string text : {"nan", "", "1,5"})
    EXPECT_THAT(profile_complaint("model,batch,iteration_s\na,8,\"" + text + "\""),
                HasSubstr("is no time: seconds, or \"oom\" where a trial had none"));
}

TEST(Profile, WhatWasTriedWinsOverWhatIsComputed) {
  const auto rows = parse_profiles(
      "model,technique,batch,tp,dp,max_gpus_per_node,iteration_s,origin\n"
      "m,ddp,8,1,1,1,4,modelled\n"
      "m,ddp,8,1,1,,5,measured\n"
      "m,ddp,8,1,4,2,1,modelled\n"
      "m,ddp,8,1,4,4,1,modelled\n"
      "m,ddp,8,1,4,4,2,measured\n"
      "m,tensor,8,1,2,2,oom,none: out of memory\n"  // of whatever it tried with two GPUs
      "m,tensor,8,2,1,2,1,modelled\n"
      "m,tensor,8,4,1,4,1,interpolated\n",
      "p.csv");
  ASSERT_TRUE(rows.has_value()) << rows.error().message();
  const auto taken = rows_of_device(rows.value(), {"m"}, "");
  ASSERT_TRUE(taken);
  std::vector<std::string> left;
  for (const ProfileRow* row : taken.value())
    left.push_back(row->way() + " " + std::to_string(row->gpus_per_node) + " " + row->origin);
  EXPECT_THAT(left,
              ElementsAre("ddp tp1-pp1-dp1 0 measured", "ddp tp1-pp1-dp4 2 modelled",
                          "ddp tp1-pp1-dp4 4 measured", "tensor tp1-pp1-dp2 2 none: out of memory",
                          "tensor tp4-pp1-dp1 4 interpolated"));
}

TEST(Profile, KindsOfGpuAreNotMixed) {
  const auto rows = parse_profiles(
      "model,batch,gpus,device,iteration_s\na,8,1,A100,1\na,8,2,V100,9\nb,8,1,,1\nc,8,1,A100,1\n"
      "c,8,2,,1\n",
      "p.csv");
  const auto count = [&](const std::set<std::string>& models, const std::string& device) {
    const auto taken = rows_of_device(rows.value(), models, device);
    return taken.has_error() ? taken.error().message() : std::to_string(taken.value().size());
  };
  EXPECT_EQ(count({"a", "b"}, "A100"), "2");  // nothing is said of b's
  EXPECT_EQ(count({"b"}, ""), "1");
  EXPECT_EQ(count({"c"}, "A100"), "1");
  EXPECT_EQ(count({"a"}, ""),
            "the profiles are of several kinds of GPU, 'A100', 'V100': --device says which, or "
            "\"device\" in 'cluster'");
  EXPECT_EQ(count({"a"}, "A10"),
            "no profile of 'a' is of GPUs 'A10' (did you mean 'A100'?); there are 'A100', 'V100'");
  EXPECT_THAT(count({"c"}, ""),
              HasSubstr("some rows of 'c' are of 'A100', and others do not name"));
}

TEST(Profile, TheFrontierIsWhatMoreGpusGain) {
  const auto rows = parse_profiles(
      "model,technique,batch,gpus,max_gpus_per_node,iteration_s\n"
      "a,ddp,8,1,,1\na,ddp,16,1,,1.5\na,ddp,16,2,2,1.6\na,ddp,16,4,4,0.5\na,ddp,16,4,1,0.2\n"
      "a,ddp,16,8,4,oom\na,ddp,64,4,4,0.1\nb,ddp,8,1,,0.001\n",
      "p.csv");
  const auto of = [&](const FrontierOf& what) {
    std::vector<std::pair<uint32_t, double>> points;
    for (const FrontierPoint& point : frontier(rows.value(), what))
      points.emplace_back(point.gpus, std::round(point.samples_per_s));
    return points;
  };
  using P = std::pair<uint32_t, double>;
  EXPECT_THAT(of({"a", 1, 16}), ElementsAre(P(1, 11), P(4, 80)));
  EXPECT_THAT(of({"a", 1, 16, "", 4}), ElementsAre(P(1, 11), P(4, 32)));  // packed
  EXPECT_THAT(of({"a", 8, 8}), ElementsAre(P(1, 8)));
  EXPECT_THAT(of({"a", 1, 16, "fsdp"}), IsEmpty());
}

TEST(Published, IsReadAsItStands) {
  const auto morphling = read_morphling(
      "\xef\xbb\xbf"
      "exec_plan,placement,iter_time\r\n421,44,0.5\r\nzero-dp,22,0.25\r\n111,1,0\r\ntp+ga,8,0."
      "1\r\n",
      "placements.csv", "gpt2", 16);
  ASSERT_TRUE(morphling.has_value()) << morphling.error().message();
  ASSERT_THAT(morphling.value().rows, SizeIs(3));
  EXPECT_EQ(morphling.value().rows[0].way(), "tp2-pp1-dp4");
  EXPECT_EQ(morphling.value().rows[0].gpus_per_node, 4u);
  EXPECT_EQ(morphling.value().rows[1].way(), "zero-dp tp1-pp1-dp4");
  EXPECT_EQ(morphling.value().rows[2].iteration_s, std::nullopt);
  EXPECT_EQ(morphling.value().rows[2].origin, "none: it failed");
  EXPECT_THAT(morphling.value().left_out, ElementsAre(HasSubstr("1 row of 'tp+ga'")));
  EXPECT_EQ(
      read_morphling("exec_plan,placement,iter_time\n222,4,1", "p.csv", "m", 1).error().message(),
      "p.csv: line 2, column 1 (exec_plan): '222' takes 8 GPUs, and its placement has 4");

  const auto pollux =
      read_pollux("placement,local_bsz,step_time,sync_time\n44,4,0.5,0.1", "p.csv", "bert");
  EXPECT_EQ(pollux.value().rows[0].batch, 32u);
  EXPECT_EQ(pollux.value().rows[0].gpus_per_node, 4u);

  const auto elastic =
      read_elasticflow("global_batch_size,1,2,64\n128,4,8,0\n256,2,,8", "t.csv", "m");
  ASSERT_THAT(elastic.value().rows, SizeIs(5));
  EXPECT_EQ(elastic.value().rows[0].iteration_s, 0.25);
  EXPECT_EQ(elastic.value().rows[2].iteration_s, std::nullopt);
  EXPECT_EQ(elastic.value().rows[4].gpus, 64u);
  // What is written can be read again.
  EXPECT_THAT(read_elasticflow("global_batch_size,1\n32,1e-10", "t.csv", "m").error().message(),
              HasSubstr("1e-9 to 1e9 iterations a second"));
  EXPECT_THAT(
      read_pollux("placement,local_bsz,step_time\n1,4,1e10", "p.csv", "m").error().message(),
      HasSubstr("1e-9 to 1e9 s"));
  EXPECT_THAT(read_elasticflow("global_batch_size,one\n1,2", "t.csv", "m").error().message(),
              HasSubstr("no number of GPUs"));
}

}  // namespace
}  // namespace ptc::planner
