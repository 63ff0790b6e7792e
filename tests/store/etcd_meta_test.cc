// MetaClient over one real etcd.
#include "store/meta/etcd_meta.h"

#include "etcd_server.h"
#include "meta_conformance.h"
#include "store/meta/etcd_json.h"

namespace ptc {
namespace {

INSTANTIATE_TEST_SUITE_P(
    Etcd, MetaConformance,
    testing::Values(MetaBackend{
        "etcd",
        []() -> std::unique_ptr<MetaClient> {
          if (shared_etcd() == nullptr) return nullptr;
          return open_etcd_meta(etcd_options(shared_etcd()->endpoints())).value();
        }}),
    [](const auto& backend) { return backend.param.name; });

class EtcdMeta : public testing::Test {
 protected:
  void SetUp() override {
    if (shared_etcd() == nullptr) GTEST_SKIP() << "etcd is not installed";
    options_ = etcd_options(shared_etcd()->endpoints());
  }
  std::unique_ptr<MetaClient> open() { return open_etcd_meta(options_).value(); }

  EtcdOptions options_;
};

TEST_F(EtcdMeta, ClientsOfOneClusterAgreeAndSeeNothingOfOthers) {
  auto one = open();
  auto two = open();
  EtcdOptions others = etcd_options(shared_etcd()->endpoints());
  auto stranger = open_etcd_meta(others).value();
  EventLog log;
  auto handle = two->watch("", log.collect()).value();
  ASSERT_TRUE(is_ok(stranger->commit({.puts = {{"a", "not mine"}}})));
  int64_t revision = one->commit({.puts = {{"a", "1"}}}).value();
  EXPECT_EQ(log.wait_for(1), std::vector<std::string>{fmt::format("a=1@{}", revision)});
  EXPECT_EQ(two->get("a").value()->value, "1");
  EXPECT_EQ(two->list("").value().size(), 1u);
  EXPECT_TRUE(is_ok(two->commit({.compares = {{"a", revision}}, .puts = {{"a", "2"}}})));
  EXPECT_TRUE(has_error(one->commit({.compares = {{"a", revision}}, .puts = {{"a", "3"}}}),
                        Code::kConflict, "'a' is at revision"));
}

TEST_F(EtcdMeta, ListsMoreThanOnePage) {
  auto meta = open();
  for (int i = 0; i < 120; ++i)
    ASSERT_TRUE(
        is_ok(meta->commit({.puts = {{fmt::format("k{:03}", i), std::string(40000, 'v')}}})));
  std::vector<MetaEntry> entries = meta->list("k").value();
  ASSERT_EQ(entries.size(), 120u);
  for (int i = 0; i < 120; ++i) {
    EXPECT_EQ(entries[i].key, fmt::format("k{:03}", i));
    EXPECT_EQ(entries[i].value.size(), 40000u);
  }
}

TEST_F(EtcdMeta, LeavesNothingBehindButItsKeys) {
  auto meta = open();
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(is_ok(meta->commit({.puts = {{"a", "1"}}})));
  auto markers = [&] {
    json::object range = range_of(fmt::format("/{}/txn/", options_.cluster));
    return array_field(shared_etcd()->post("kv/range", range).value(), "kvs").size();
  };
  EXPECT_EQ(markers(), 1u);
  meta.reset();
  EXPECT_EQ(markers(), 0u);
}

TEST_F(EtcdMeta, SaysWhatIsWrongWithItsOptions) {
  auto refused = [&](const EtcdOptions& options, Code code, std::string_view part) {
    return has_error(open_etcd_meta(options), code, part);
  };
  options_.patience = std::chrono::milliseconds(300);
  EtcdOptions wrong = options_;
  wrong.endpoints = {};
  EXPECT_TRUE(refused(wrong, Code::kInvalidArgument, "no endpoint of etcd is given"));
  for (const char* address : {"127.0.0.1:2379", "http://", "http://:2379", "http://a:b",
                              "http://[::1", "http://a:", "ftp://a", "http://a:123456"}) {
    wrong.endpoints = {address};
    EXPECT_TRUE(refused(wrong, Code::kInvalidArgument, "is no address of etcd")) << address;
  }
  wrong.endpoints = {options_.endpoints[0], "https://127.0.0.1:1"};
  EXPECT_TRUE(refused(wrong, Code::kInvalidArgument, "all endpoints"));
  wrong = options_;
  wrong.ca_file = "ca.pem";
  EXPECT_TRUE(refused(wrong, Code::kInvalidArgument, "TLS files are given"));
  wrong = options_;
  wrong.cluster = "a/b";
  EXPECT_TRUE(refused(wrong, Code::kInvalidArgument, "'a/b'"));
  wrong = options_;
  wrong.endpoints = {"http://127.0.0.1:1", "http://127.0.0.1:2"};
  EXPECT_TRUE(refused(wrong, Code::kUnavailable,
                      "http://127.0.0.1:1: connecting to 127.0.0.1:1: Connection refused; "
                      "http://127.0.0.1:2: connecting to 127.0.0.1:2: Connection refused"));
  wrong.endpoints = {shared_etcd()->peer_endpoint()};
  EXPECT_TRUE(
      refused(wrong, Code::kUnavailable, "answers HTTP 404, but not as etcd's JSON gateway"));
  wrong.endpoints.push_back(options_.endpoints[0] + "/");
  EXPECT_TRUE(is_ok(open_etcd_meta(wrong)));
}

TEST_F(EtcdMeta, SaysWhenEtcdIsFull) {
  EtcdServers small(1, "http", {"--quota-backend-bytes", "16777216"});
  auto meta = open_etcd_meta(etcd_options(small.endpoints())).value();
  Result<int64_t> put = 0;
  for (int i = 0; i < 40 && put; ++i)
    put = meta->commit({.puts = {{"a", std::string(1 << 20, 'x')}}});
  EXPECT_TRUE(has_error(put, Code::kNoSpace, "database space exceeded"));
  EXPECT_TRUE(is_ok(meta->settle()));
  EXPECT_TRUE(is_ok(meta->get("a")));
}

}  // namespace
}  // namespace ptc
