// What `ptc doctor` makes of facts, made up here: machines that are well, and each thing that may
// be wrong with them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "tools/ptc/doctor_checks.h"

namespace ptc::cli {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

constexpr uint64_t kGib = uint64_t{1} << 30;
constexpr int64_t kNow = 1'800'000'000, kOneDay = 86400;
constexpr uint64_t kAllCapabilities = (uint64_t{1} << 41) - 1;
constexpr uint64_t kSysAdmin = uint64_t{1} << 21;

/// A machine on which nothing is wrong, and its only daemon.
Facts good_facts() {
  Facts facts{.now = kNow, .own_version = "1.2.3"};
  facts.machine = {.kernel = "6.18.2-amd64",
                   .enable_uring = "N",
                   .is_root = true,
                   .has_fusermount = true,
                   .capabilities = kAllCapabilities,
                   .memory_total = 64 * kGib,
                   .memory_available = 60 * kGib,
                   .shmem_enabled = "never",
                   .open_files_limit = 1 << 20,
                   .mappings_limit = 65530,
                   .clock_synchronised = true};
  facts.planned_memory = 32 * kGib;
  return facts;
}

Facts with_daemon() {
  Facts facts = good_facts();
  facts.daemon = DaemonFacts{.mount_point = "/mnt/ptc",
                             .version = "1.2.3",
                             .node = "w1",
                             .store = "/run/ptcfs/mnt-ptc",
                             .pid = 77,
                             .in_memory = true,
                             .store_total = 32 * kGib,
                             .store_used = 8 * kGib,
                             .passthrough = true,
                             .expires_names = true,
                             .capabilities = kAllCapabilities,
                             .open_files = 100,
                             .open_files_limit = 1 << 20,
                             .mappings = 300};
  return facts;
}

NodeFacts node(const std::string& name, const std::string& version = "1.2.3") {
  return {.name = name,
          .state = "up",
          .version = version,
          .heard_seconds_ago = 0.5,
          .clock_ahead = 0.002,
          .clock_within = 0.001};
}

Facts in_a_cluster() {
  Facts facts = with_daemon();
  facts.in_cluster = true;
  facts.nodes = {node("w1"), node("w2"), node("w3")};
  facts.nodes[0].is_self = true;
  facts.nodes[0].clock_ahead.reset();
  facts.etcd = {{.endpoint = "http://e:2379",
                 .latency_ms = 2,
                 .version = "3.6.1",
                 .size = kGib / 2,
                 .in_use = kGib / 4,
                 .quota = 8 * kGib}};
  facts.certificates = {{.option = "--tls-cert",
                         .path = "/etc/ptcfs/w1.pem",
                         .spans = {{kNow - 100 * kOneDay, kNow + 200 * kOneDay}}}};
  return facts;
}

void expect(const Finding& finding, Level level, const std::string& found,
            const std::string& advice = "") {
  EXPECT_EQ(finding.level, level) << finding.name << ": " << finding.found;
  EXPECT_THAT(finding.found, HasSubstr(found));
  EXPECT_THAT(finding.advice, HasSubstr(advice));
  EXPECT_THAT(finding.found, Not(IsEmpty()));
  if (level != Level::kOk) {
    EXPECT_THAT(finding.advice, Not(IsEmpty())) << finding.found;
  }
}

TEST(Doctor, SaysNothingWhereAllIsWell) {
  for (const Facts& facts : {good_facts(), with_daemon(), in_a_cluster()}) {
    std::set<std::string> names;
    for (const Finding& finding : check_all(facts)) {
      expect(finding, Level::kOk, "");
      EXPECT_TRUE(names.insert(finding.name).second) << finding.name;
    }
    EXPECT_GE(names.size(), 17);
  }
}

TEST(Doctor, Kernel) {
  Facts facts = good_facts();
  expect(check_kernel(facts), Level::kOk, "has all that is made use of");
  facts.machine.kernel = "6.17.0";
  expect(check_kernel(facts), Level::kOk, "at once from 6.18 on");
  facts.machine.kernel = "6.12.48+deb13-amd64";
  expect(check_kernel(facts), Level::kOk, "kept from 6.16 on");
  facts.machine.kernel = "6.1.0-18-amd64";
  expect(check_kernel(facts), Level::kWarn, "passthrough: 6.9", "6.9 or later");
  expect(check_passthrough(facts), Level::kWarn, "cannot be had", "Linux 6.9");
  facts.machine.kernel = "10.0";
  expect(check_kernel(facts), Level::kOk, "has all");
  facts.machine.kernel = "mainline";
  expect(check_kernel(facts), Level::kOk, "says nothing");
}

TEST(Doctor, DeviceAndRights) {
  Facts facts = good_facts();
  facts.machine.fuse_error = ENOENT;
  expect(check_fuse_device(facts), Level::kFail, "No such file", "modprobe fuse");
  facts.machine.fuse_error = EACCES;
  expect(check_fuse_device(facts), Level::kFail, "Permission denied", "chmod 666");

  facts.machine.capabilities &= ~kSysAdmin;
  expect(check_rights(facts), Level::kWarn, "CAP_SYS_ADMIN", "container");
  expect(check_passthrough(facts), Level::kWarn, "cannot be had", "CAP_SYS_ADMIN");
  facts = with_daemon();
  facts.machine.capabilities = 0;  // who asks does not matter
  expect(check_rights(facts), Level::kOk, "all capabilities");
  facts.daemon->capabilities = kSysAdmin;
  const Finding few = check_rights(facts);
  expect(few, Level::kWarn, "CAP_DAC_READ_SEARCH");
  EXPECT_THAT(few.found, Not(HasSubstr("CAP_SYS_ADMIN")));

  facts = good_facts();
  facts.machine.is_root = false;
  facts.machine.capabilities = 0;
  expect(check_rights(facts), Level::kWarn, "not root", "user_allow_other");
  facts.machine.user_allow_other = true;
  expect(check_rights(facts), Level::kOk, "may be let in");
  facts.machine.has_fusermount = false;
  expect(check_rights(facts), Level::kFail, "fusermount3", "fuse3");
  facts = with_daemon();
  facts.daemon->user = 1000;
  expect(check_rights(facts), Level::kOk, "may not be let in");
}

TEST(Doctor, PassthroughAndRings) {
  Facts facts = with_daemon();
  facts.daemon->passthrough = false;
  expect(check_passthrough(facts), Level::kWarn, "off", "overlayfs");
  facts.daemon->capabilities &= ~kSysAdmin;
  expect(check_passthrough(facts), Level::kWarn, "off", "CAP_SYS_ADMIN");
  facts.machine.kernel = "6.1";
  expect(check_passthrough(facts), Level::kWarn, "off", "Linux 6.9");

  facts = with_daemon();
  expect(check_io_uring(facts), Level::kOk, "not asked for");
  facts.daemon->wants_uring = true;
  expect(check_io_uring(facts), Level::kWarn, "--io-uring asks", "enable_uring");
  facts.machine.enable_uring = "Y";
  expect(check_io_uring(facts), Level::kOk, "offered");
  facts.machine.enable_uring = "";
  facts.machine.kernel = "6.12";
  expect(check_io_uring(facts), Level::kWarn, "not offered", "Linux 6.14");
}

TEST(Doctor, Memory) {
  Facts facts = good_facts();
  facts.planned_memory = 100 * kGib;
  expect(check_memory(facts), Level::kWarn, "more than there is", "smaller --memory");
  facts.planned_memory = 62 * kGib;
  expect(check_memory(facts), Level::kWarn, "2.0 GiB more than is available");
  facts.planned_memory = 0;
  facts.machine.memory_available = 0;
  expect(check_memory(facts), Level::kOk, "0 B available");
  facts = with_daemon();
  facts.machine.memory_available = 25 * kGib;  // 24 are to come
  expect(check_memory(facts), Level::kOk, "the store may have 32.0 GiB");
  facts.machine.memory_available = 20 * kGib;
  expect(check_memory(facts), Level::kWarn, "4.0 GiB more than is available");
  facts.daemon->in_memory = false;
  expect(check_memory(facts), Level::kOk, "20.0 GiB available");

  facts = with_daemon();
  expect(check_group_memory(facts), Level::kOk, "no limit");
  facts.machine.groups.memory = GroupLimit{kGib, 0, "/sys/fs/cgroup/of-the-shell"};
  expect(check_group_memory(facts), Level::kOk, "no limit");  // the daemon is in another
  facts.daemon->groups.memory = GroupLimit{16 * kGib, 0, "/sys/fs/cgroup/a"};
  expect(check_group_memory(facts), Level::kFail, "16.0 GiB (/sys/fs/cgroup/a)", "MemoryMax");
  facts.daemon->groups.memory = GroupLimit{40 * kGib, 39 * kGib, "/sys/fs/cgroup/a"};
  expect(check_group_memory(facts), Level::kWarn, "98 % is taken", "MemoryMax");
  facts.daemon->groups.memory->used = kGib;
  expect(check_group_memory(facts), Level::kOk, "40.0 GiB");
}

TEST(Doctor, SwapOvercommitAndHugePages) {
  Facts facts = with_daemon();
  facts.machine.swap_total = 8 * kGib;
  expect(check_swap(facts), Level::kOk, "0 B of 8.0 GiB");
  facts.machine.swap_used = kGib;
  expect(check_swap(facts), Level::kWarn, "speed of a disk", "swappiness");
  facts.daemon->in_memory = false;
  expect(check_swap(facts), Level::kOk, "1.0 GiB of");
  facts.machine.overcommit = 1;
  expect(check_overcommit(facts), Level::kOk, "is 1");
  facts.machine.overcommit = 2;
  facts.machine.commit_limit = 3 * kGib;
  expect(check_overcommit(facts), Level::kWarn, "3.0 GiB", "overcommit_memory=0");
  for (const char* mode : {"always", "within_size", "advise", "never", "force"}) {
    facts.machine.shmem_enabled = mode;
    expect(check_huge_pages(facts), Level::kOk, "may have them");
  }
  facts.machine.shmem_enabled = "deny";
  expect(check_huge_pages(facts), Level::kWarn, "denied", "shmem_enabled");
  facts.machine.shmem_enabled = "";
  expect(check_huge_pages(facts), Level::kWarn, "has none", "CONFIG_TRANSPARENT_HUGEPAGE");
}

TEST(Doctor, Limits) {
  Facts facts = with_daemon();
  facts.machine.open_files_limit = 256;  // of who asks
  expect(check_open_files(facts), Level::kOk, "at most 1048576");
  facts.daemon->open_files_limit = 4096;
  expect(check_open_files(facts), Level::kWarn, "at most 4096", "LimitNOFILE");
  facts.daemon->open_files_limit = 256;
  expect(check_open_files(facts), Level::kFail, "at most 256", "LimitNOFILE");
  facts.daemon->open_files_limit = 100'000;
  facts.daemon->open_files = 90'000;
  expect(check_open_files(facts), Level::kWarn, "90000 are open");
  facts.daemon.reset();
  expect(check_open_files(facts), Level::kFail, "at most 256");

  facts = with_daemon();
  facts.daemon->groups.threads = GroupLimit{4915, 60, "/sys/fs/cgroup/a"};
  expect(check_threads(facts), Level::kOk, "may have 4915");
  facts.daemon->groups.threads->limit = 100;
  expect(check_threads(facts), Level::kWarn, "may have 100", "TasksMax");
  facts.daemon->groups.threads = GroupLimit{1000, 900, "/sys/fs/cgroup/a"};
  expect(check_threads(facts), Level::kWarn, "900 are there", "TasksMax");

  expect(check_mappings(facts), Level::kOk, "the daemon has 300");
  facts.daemon->mappings = 60'000;
  expect(check_mappings(facts), Level::kWarn, "has 60000", "vm.max_map_count=131060");
  facts.machine.mappings_limit = 1000;
  facts.daemon->mappings = 3;
  expect(check_mappings(facts), Level::kWarn, "is 1000", "vm.max_map_count=65530");
}

TEST(Doctor, Daemon) {
  Facts facts = good_facts();
  expect(check_daemon(facts), Level::kOk, "the machine alone");
  facts.mounts = {"/mnt/a b", "/mnt/c"};
  expect(check_daemon(facts), Level::kWarn, "2 mounts", "ptc doctor '/mnt/a b'");
  facts = with_daemon();
  expect(check_daemon(facts), Level::kOk, "process 77");
  using enum DaemonFacts::State;
  facts.daemon->trouble = "closed";
  const std::tuple<DaemonFacts::State, Level, const char*> states[] = {
      {kNotMounted, Level::kFail, "no ptcfs is mounted"},
      {kGone, Level::kFail, "is gone"},
      {kSilent, Level::kFail, "does not answer"},
      {kUnreadable, Level::kFail, "closed"},
      {kOld, Level::kWarn, "does not tell"}};
  for (const auto& [state, level, found] : states) {
    facts.daemon->state = state;
    expect(check_daemon(facts), level, found);
    for (const Finding& finding : check_all(facts))
      if (finding.name != "daemon") expect(finding, Level::kOk, "");  // nothing is made up
  }
}

TEST(Doctor, StoreAndLeftovers) {
  Facts facts = with_daemon();
  facts.daemon->store_used = 30 * kGib;
  expect(check_space(facts), Level::kWarn, "94 % full", "--memory");
  facts.daemon->in_memory = false;
  facts.daemon->store_used = 32 * kGib;
  expect(check_space(facts), Level::kFail, "100 % full", "that file system");
  facts.daemon->store_total = facts.daemon->store_used = 0;
  expect(check_space(facts), Level::kOk, "0 B of 0 B");

  facts.dead_mounts = {"/mnt/old one"};
  facts.unused_stores = {{"/run/ptcfs/mnt-x", "/mnt/x", 3 * kGib}};
  const Finding both = check_leftovers(facts);
  expect(both, Level::kWarn, "/mnt/old one is a dead mount", "umount -l '/mnt/old one'");
  expect(both, Level::kWarn, "/run/ptcfs/mnt-x holds 3.0 GiB", "ptcfs --discard /mnt/x");
}

TEST(Doctor, Clocks) {
  Facts facts = good_facts();
  facts.machine.clock_synchronised = false;
  expect(check_clock(facts), Level::kOk, "matters where");
  facts.in_cluster = true;
  expect(check_clock(facts), Level::kWarn, "not kept by NTP", "chrony");
  facts.machine.clock_synchronised.reset();
  expect(check_clock(facts), Level::kWarn, "not known");

  facts = in_a_cluster();
  expect(check_node_clocks(facts), Level::kOk, "2 of other nodes agree");
  facts.nodes[1].clock_ahead = 4;
  facts.nodes[1].clock_within = 3.5;
  expect(check_node_clocks(facts), Level::kOk, "agree");  // it may be half a second
  facts.nodes[1].clock_within = 0.1;
  expect(check_node_clocks(facts), Level::kWarn, "w2's clock is 4.0 s ahead of", "chrony");
  facts.nodes[2].clock_ahead = -100;
  expect(check_node_clocks(facts), Level::kFail, "w3's clock is 100.0 s behind");
  facts.nodes[2].state = "away";
  expect(check_node_clocks(facts), Level::kWarn, "w2");
  facts.nodes.resize(1);
  expect(check_node_clocks(facts), Level::kOk, "no other node");
}

TEST(Doctor, Nodes) {
  Facts facts = in_a_cluster();
  expect(check_nodes(facts), Level::kOk, "3 answer");
  facts.nodes[2].state = "away";
  expect(check_nodes(facts), Level::kWarn, "2 answer, w3 is away", "ptc drain");
  facts.nodes[1].heard_seconds_ago.reset();
  expect(check_nodes(facts), Level::kFail, "w2 is there and does not answer", "firewalls");
  facts.nodes[1].heard_seconds_ago = 11;
  expect(check_nodes(facts), Level::kFail, "w2 is there and does not answer");
  facts.nodes[0].state = "fenced";
  expect(check_nodes(facts), Level::kFail, "w1 is cut off", "etcd");

  facts = in_a_cluster();
  facts.nodes[1].version = "1.2.2";
  expect(check_versions(facts), Level::kFail, "1.2.2 on w2; 1.2.3 on w1, w3", "one version");
  facts.nodes[1].state = "away";
  expect(check_versions(facts), Level::kOk, "1.2.3");
  facts.own_version = "1.2.4";
  expect(check_versions(facts), Level::kWarn, "ptc 1.2.4, ptcfs 1.2.3", "mount again");

  facts.agreement = "node w1 does not reach etcd";
  expect(check_agreement(facts), Level::kFail, "does not reach", "ptc recover");
}

TEST(Doctor, Etcd) {
  Facts facts = in_a_cluster();
  const EtcdFacts good = facts.etcd[0];
  expect(check_etcd(good, facts), Level::kOk, "etcd 3.6.1 answers in 2.0 ms");
  EtcdFacts one = good;
  one.quota = 0;
  expect(check_etcd(one, facts), Level::kOk, "512.0 MiB of 2.0 GiB (etcd's default)");
  one.size = 19 * kGib / 10;
  expect(check_etcd(one, facts), Level::kWarn, "256.0 MiB is in use", "defrag");
  one.alarms = {"NOSPACE"};
  expect(check_etcd(one, facts), Level::kFail, "NOSPACE", "alarm disarm");
  one.alarms = {"CORRUPT"};
  expect(check_etcd(one, facts), Level::kFail, "CORRUPT", "damaged");
  one = good;
  one.latency_ms = 200;
  expect(check_etcd(one, facts), Level::kWarn, "slow", "fsync");
  one.latency_ms = 2000;
  expect(check_etcd(one, facts), Level::kFail, "slow", "fsync");
  one = good;
  one.version = "3.3.10";
  expect(check_etcd(one, facts), Level::kWarn, "is old", "3.4");
  one.has_leader = false;
  expect(check_etcd(one, facts), Level::kFail, "no leader");

  one = {.endpoint = "http://f:2379", .trouble = "http://f:2379: Connection refused"};
  facts.etcd = {one};
  expect(check_etcd(one, facts), Level::kWarn, "refused", "another network");
  facts.agreement = "away";
  expect(check_etcd(one, facts), Level::kFail, "refused", "start etcd");
  facts.etcd.push_back(good);
  expect(check_etcd(one, facts), Level::kWarn, "refused", "the others serve");
  facts.etcd.pop_back();
  facts.daemon.reset();
  facts.agreement.clear();
  expect(check_etcd(one, facts), Level::kFail, "refused", "start etcd");
}

TEST(Doctor, Certificates) {
  using Days = std::vector<std::pair<int64_t, int64_t>>;
  const auto checked = [](const Days& spans, bool is_authority = false) {
    CertificateFacts facts{.option = "--tls-cert", .path = "/c.pem", .is_authority = is_authority};
    for (const auto& [since, until] : spans)
      facts.spans.push_back({kNow + since * kOneDay, kNow + until * kOneDay});
    return check_certificate(facts, kNow);
  };
  expect(checked({{-335, 30}}), Level::kOk, "/c.pem is good until 2027-02-14 (30 days)");
  expect(checked({{-335, 29}}), Level::kWarn, "29 days", "made anew");
  expect(checked({{-335, 6}}), Level::kFail, "6 days", "made anew");
  expect(checked({{-335, -1}}), Level::kFail, "has expired on 2027-01-14", "made anew");
  expect(checked({{1, 365}}), Level::kFail, "good from 2027-01-16", "clock");
  // Of a chain the first to end; of authorities one.
  expect(checked({{-335, 300}, {-335, -3}}), Level::kFail, "has expired");
  expect(checked({{-335, -3}, {-335, 300}}, true), Level::kOk, "300 days");
  expect(checked({{-335, -3}, {2, 300}}, true), Level::kFail, "good from");
  // Made for a day or two: when little of that is left.
  expect(checked({{-1, 1}}), Level::kOk, "24 hours");
  expect(checked({{-3, 1}}), Level::kWarn, "24 hours");
  expect(checked({{-12, 1}}), Level::kFail, "24 hours");

  expect(checked({}), Level::kFail, "holds no certificate", "PEM");
  expect(check_certificate({.option = "--etcd-ca", .path = "/x", .trouble = "/x: closed"}, kNow),
         Level::kWarn, "closed", "as root");
  expect(check_certificate(
             {.option = "https://e:2379", .spans = {{kNow - 400 * kOneDay, kNow - kOneDay}}}, kNow),
         Level::kFail, "the certificate it shows has expired");
}

}  // namespace
}  // namespace ptc::cli
