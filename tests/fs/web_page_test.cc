#include "fs/http/web_page.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <boost/json/array.hpp>
#include <boost/json/parse.hpp>
#include <string>

#include "fs/http/web_matrix.h"

namespace ptc {
namespace {

namespace json = boost::json;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

std::string matrix(const char* flows) { return html_matrix(json::parse(flows).as_array()); }

TEST(WebMatrix, IsEmptyWithoutFlows) { EXPECT_EQ(matrix("[]"), ""); }

TEST(WebMatrix, AddsUpFlowsWithTheSameEndsAndOrdersByNumber) {
  const std::string html = matrix(R"([
      {"source": "rank 10", "target": "rank 0", "kind": "local", "bytes": 1024},
      {"source": "rank 2", "target": "rank 1", "kind": "moved", "bytes": 3072},
      {"source": "rank 2", "target": "rank 1", "kind": "kept", "bytes": 1024}])");
  EXPECT_LT(html.find(">rank 2<"), html.find(">rank 10<"));
  EXPECT_LT(html.find(">rank 0<"), html.find(">rank 1<"));
  EXPECT_THAT(html, HasSubstr("<td class=\"moved heat4\" title=\"rank 2 → rank 1: 1.0 KiB kept "
                              "3.0 KiB moved\">4.0 KiB</td>"));
  EXPECT_THAT(html, HasSubstr("<td class=\"local heat1\""));
  EXPECT_THAT(html, HasSubstr("<td></td>"));
}

TEST(WebMatrix, IsDenseWithManyColumns) {
  json::array flows;
  for (int i = 0; i < 64; ++i)
    flows.push_back({{"source", "rank 0"},
                     {"target", "rank " + std::to_string(i)},
                     {"kind", "local"},
                     {"bytes", i == 0   ? 7
                               : i == 1 ? 1536
                                        : 400000}});
  EXPECT_THAT(html_matrix(flows), AllOf(HasSubstr("matrix dense"), HasSubstr(">7</td>"),
                                        HasSubstr(">1.5K</td>"), HasSubstr(">390K</td>")));
}

TEST(WebMatrix, EscapesNames) {
  EXPECT_THAT(matrix(R"([{"source": "<a\"'&>", "target": "t", "kind": "kept", "bytes": 1}])"),
              AllOf(HasSubstr("&lt;a&quot;&#39;&amp;&gt;"), Not(HasSubstr("<a\""))));
}

constexpr const char* kDocument = R"({
  "node": "w1", "version": "1",
  "store": {"limit_bytes": 1073741824, "used_bytes": 1024, "materialised_bytes": 512},
  "gather_cache": {"limit_bytes": 0, "used_bytes": 0, "hits": 7, "misses": 2},
  "cluster": {"nodes": [
      {"name": "w1", "state": "up", "since": "2026-11-21T16:13:39.259Z", "memory_total_bytes": 1024, "memory_used_bytes": 512,
       "materialised_bytes": 512,
       "traffic": {"sent_bytes": 1024, "received_bytes": 2048, "checksum_failures": 3, "retries": 4}},
      {"name": "<b>w2", "state": "away", "since": "2026-11-21T16:13:39.259Z", "materialised_bytes": 256,
       "drain": {"bytes_left": 256}}],
    "cluster": {"memory_total_bytes": 1024, "memory_used_bytes": 512, "materialised_bytes": 768},
    "missing_copies": {"bytes": 128, "jobs": []}},
  "jobs": [{"status": {
      "job": "a/<b>\"&'", "state": "resharding", "revision": 3, "layout": "tp1-pp1-dp1",
      "in_force_revision": 2, "wanted": "tp2-pp1-dp1", "checkpoint": "<i>c</i>",
      "progress": {"phase": "moving", "checkpoint": "c", "from": "tp1-pp1-dp1", "to": "tp2-pp1-dp1",
                   "bytes_done": 25, "bytes_total": 100, "seconds": 1.5},
      "last_reshard": null, "last_error": {"what": "<script>alert(1)</script>",
      "time": "2026-11-21T16:13:39.259Z"}, "warnings": ["<b>"],
      "checkpoints": [{"name": "<i>c</i>", "time": "2026-11-21T16:13:39.259Z", "tensors": 1, "bytes": 9,
                       "pinned": true, "layouts": ["tp1-pp1-dp1"]}], "nodes": []},
    "plan": {"checkpoint": "<u>", "from": "x", "to": "y", "state": "running", "seconds": 0,
      "bytes": {"total": 9, "kept": 1, "local": 2, "moved": 6, "minimum": 5},
      "pairs": [{"source": "w1", "target": "w2", "bytes": 6}, {"source": "w1", "target": "w1", "bytes": 2}],
      "flows": [{"source": "rank 0", "target": "rank 1", "kind": "local", "bytes": 2}]}}]})";

TEST(WebPage, ShowsAJobThatReshards) {
  const std::string html = web_page(json::parse(kDocument).as_object());
  for (const char* seen :
       {"ptcfs on w1", "resharding", "tp2-pp1-dp1, revision 3",
        "25 %, 25 B of 100 B, 1.5 s, 4.5 s left", "<progress max=\"100\" value=\"25\"",
        "7 found there, 2 computed", "pinned", "2026-11-21 16:13:39 UTC", "Between nodes",
        "least possible: 5 B"})
    EXPECT_THAT(html, HasSubstr(seen));
}

TEST(WebPage, ShowsAllNodes) {
  json::object document = json::parse(kDocument).as_object();
  const std::string html = web_page(document);
  for (const char* seen :
       {"512 B of 1.0 KiB used, 768 B of checkpoints", "Copies of 128 B are missing.",
        "1.0 KiB out, 2.0 KiB in, 3 damaged, 4 tried again", "<td>up</td>",
        "away since 2026-11-21T16:13:39 UTC, draining", "&lt;b&gt;w2"})
    EXPECT_THAT(html, HasSubstr(seen));
  EXPECT_THAT(html, Not(HasSubstr("Nothing is decided here")));
  document["cluster"].as_object()["agreement"] = {
      {"state", "away"}, {"why", "no <etcd>"}, {"since", "2026-11-21T16:13:39.259Z"}};
  EXPECT_THAT(web_page(document),
              HasSubstr("Agreement away since 2026-11-21T16:13:39 UTC: no &lt;etcd&gt;. Nothing is "
                        "decided here"));
  document["cluster"].as_object()["nodes"].as_array().resize(1);
  EXPECT_THAT(web_page(document), Not(HasSubstr("<h2>Nodes")));
}

TEST(WebPage, WhateverUsersNameIsEscaped) {
  const std::string html = web_page(json::parse(kDocument).as_object());
  for (const char* raw : {"<b>", "<i>", "<u>", "<script>alert", "\"&'"})
    EXPECT_THAT(html, Not(HasSubstr(raw)));
  EXPECT_THAT(html, HasSubstr("<h2>a/&lt;b&gt;&quot;&amp;&#39;</h2>"));
  EXPECT_THAT(html, HasSubstr("href=\"/jobs/a%2F%3Cb%3E%22%26%27/status.json\""));
}

TEST(WebPage, SaysWhatToDoWithoutJobs) {
  json::object document = json::parse(kDocument).as_object();
  document["jobs"].as_array().clear();
  EXPECT_THAT(web_page(document), HasSubstr("mkdir"));
}

TEST(WebPage, NothingInItIsInline) {
  const std::string html = web_page(json::parse(kDocument).as_object());
  EXPECT_THAT(html, AllOf(Not(HasSubstr("style=")), Not(ContainsRegex(" on[a-z]+=")),
                          Not(HasSubstr("http:")), Not(HasSubstr("https:"))));
}

}  // namespace
}  // namespace ptc
